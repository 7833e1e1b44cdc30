"""``sealegs scan --on``: the same scan in many tasks, on this machine or a cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import tyro

from sealegs.cli.output import say, show, tell
from sealegs.errors import ConfigError, MissingExtra
from sealegs.scan.blocks import Part, Ways
from sealegs.scan.counts import Clusters, Counts, Shared, merged
from sealegs.scan.spans import shared, sharing
from sealegs.scan.tasks import COUNT, Cluster, counting, is_done, run_here, script, submit
from sealegs.scan.work_folder import Progress, WorkFolder

if TYPE_CHECKING:
    from sealegs.scan.near import Alike
    from sealegs.scan.tasks import Stage

NOT_DONE = 3
"""Exit code: the tasks have been handed over, or are under way."""
_TOLD = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
    """What the command line can say about tasks."""

    on: Annotated[Literal["local", "slurm", "ray"] | None, tyro.conf.arg(metavar="local|slurm|ray")] = None
    """Count in tasks that go on after a kill, by datatrove. On slurm, the same command again shows what they found."""
    tasks: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """How many; the report is the same for any number. On this machine --jobs of them run at a time."""
    work: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None
    """A folder that every task sees, or an address (s3://...): what is counted so far. It goes on where it stopped."""
    status: bool = False
    """Say how far the tasks of --work are."""
    dry_run: bool = False
    """Print the batch script of --on slurm, and submit nothing."""
    near: bool = False
    """Find near-duplicates, too: datatrove's MinHash over shingles of words, in further tasks."""
    near_words: Annotated[int, tyro.conf.arg(metavar="N")] = 5
    """Words of a shingle; fewer find copies that were edited more, and more that are none."""
    near_buckets: Annotated[int, tyro.conf.arg(metavar="N")] = 14
    """Buckets of hashes: documents are alike if all hashes of one are equal."""
    near_hashes: Annotated[int, tyro.conf.arg(metavar="N")] = 8
    """Hashes of a bucket."""
    spans: bool = False
    """Find documents that share spans of 50 words or more with earlier ones, in further tasks."""
    partition: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Of Slurm."""
    time: Annotated[str, tyro.conf.arg(metavar="H:M:S")] = "24:00:00"
    """Of Slurm: the limit of each task."""
    memory: Annotated[int, tyro.conf.arg(metavar="GB")] = 4
    """Of Slurm and Ray: what each task may use."""
    sbatch: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[KEY=VALUE ...]")] = ()
    """More options of sbatch, such as account=mine."""


def refuse(options: TaskOptions, *, has_incident: bool) -> None:
    """Refuse what does not go together."""
    for name in ("near_words", "near_buckets", "near_hashes", "memory"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: at least 1")
    for name in ("near", "spans"):
        if getattr(options, name) and options.on is None:
            raise ConfigError(f"--{name}: give --on, too: it runs in tasks")
    if options.on is None:
        for name in ("tasks", "work", "partition"):
            if getattr(options, name) is not None and not (name == "work" and options.status):
                raise ConfigError(f"--{name} {getattr(options, name)}: give --on, too: local, slurm or ray")
    if options.status and options.work is None:
        raise ConfigError("--status: give --work, too: the folder of the tasks")
    if options.on is None or options.status:
        return
    if options.work is None:
        raise ConfigError(f"--on {options.on}: give --work, too: a folder that every task sees")
    if options.tasks is None or options.tasks < 1:
        told = "" if options.tasks is None else f" {options.tasks}"
        raise ConfigError(f"--tasks{told}: give at least 1 for --on {options.on}")
    if has_incident:
        raise ConfigError("--incident: the corpus is searched by this machine; leave --on out")
    if options.dry_run and options.on != "slurm":
        raise ConfigError(f"--dry-run: there is no batch script for --on {options.on}")
    for each in options.sbatch:
        if not each.partition("=")[2]:
            raise ConfigError(f"--sbatch {each}: give KEY=VALUE, such as account=mine")


def show_status(place: str) -> int:
    """Print how far the tasks are."""
    work = WorkFolder.opened(place)
    now = work.progress()
    say(f"{_far(now)} of {' '.join(work.plan.corpus)}")
    for task, why in sorted(now.failed.items())[:_TOLD]:
        say(f"task {task} ended: {why}")
    if len(now.failed) > _TOLD:
        say(f"and {len(now.failed) - _TOLD} more tasks")
    is_done = now.done == now.bundles
    for name in sorted(work.store.sizes("tasks")):
        stage, _, tasks = name.rpartition("-")
        done = len(work.store.sizes(f"tasks/{name}/completions"))
        if stage != COUNT:
            say(f"{done:,} of {int(tasks):,} tasks of {stage}")
            is_done &= done == int(tasks)
    return 0 if is_done else NOT_DONE


def _far(now: Progress) -> str:
    return (
        f"{now.bytes_done / max(now.bytes, 1):4.0%}  {now.bytes_done / 1e6:,.0f} of {now.bytes / 1e6:,.0f} MB, "
        f"{now.done:,} of {now.bundles:,} bundles"
    )


class ByTasks(NamedTuple):
    """What the tasks have found."""

    work: WorkFolder
    counts: Counts
    near: Clusters | None
    shared: Shared | None


def counted_by_tasks(
    options: TaskOptions, corpus: Sequence[str], parts: Sequence[Part], ways: Ways, jobs: int
) -> ByTasks | None:
    """The counts of the corpus; None if the tasks are not done, and the reader has been told."""
    assert options.on is not None
    assert options.work is not None
    assert options.tasks is not None
    cluster = Cluster(
        on=options.on,
        tasks=options.tasks,
        jobs=jobs,
        partition=options.partition,
        limit=options.time,
        memory=options.memory,
        sbatch=dict(each.split("=", 1) for each in options.sbatch),
    )
    work = WorkFolder.prepared(options.work, corpus, parts, ways)
    alike, stages = _stages(options, work)
    if options.dry_run:
        show("\n".join, "\n".join(script(work, stage, cluster) for stage in stages).splitlines())
        return None
    work.damaged()
    left = [stage for stage in stages if not is_done(work, stage)]
    if left and stages[0].tasks < options.tasks:
        tell(f"{stages[0].tasks:,} tasks: the corpus has no more bundles to share out")
    if left and options.on == "slurm":
        jobs_made = [made.job_id for made in submit(work, left, cluster)]
        told = f"job {jobs_made[0]}" if len(left) == 1 else f"jobs {', '.join(map(str, jobs_made))}"
        say(f"submitted as {told}; `sealegs scan --work {options.work} --status` says how far it is,")
        say("and this command again shows the report")
        return None
    for stage in left:
        if len(stages) > 1:
            tell(f"{stage.name}: {stage.tasks:,} tasks")
        run_here(work, stage, cluster, _teller())
    near = None
    if alike is not None:
        from sealegs.scan.near import clusters

        near = clusters(work, options.tasks, alike)
    return ByTasks(work, merged(work.kept()), near, shared(work) if options.spans else None)


def _stages(options: TaskOptions, work: WorkFolder) -> "tuple[Alike | None, list[Stage]]":
    assert options.tasks is not None
    stages = [counting(work, options.tasks)]
    if options.spans:
        stages.append(sharing(work, options.tasks))
    if not options.near:
        return None, stages
    try:
        from sealegs.scan.near import Alike
        from sealegs.scan.near import stages as near_stages
    except ImportError as error:
        raise MissingExtra("--near", "datatrove", "cluster") from error
    alike = Alike(options.near_words, options.near_buckets, options.near_hashes)
    return alike, [*stages, *near_stages(work, options.tasks, alike)]


def _teller() -> Callable[[Progress], None]:
    last = -1

    def told(now: Progress) -> None:
        nonlocal last
        if now.done != last:
            last = now.done
            tell(_far(now))

    return told
