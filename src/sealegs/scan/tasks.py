"""Counts a corpus in many tasks, on datatrove's executors: processes of this machine, a Slurm cluster, a Ray cluster.

A task is one step over ``bundles[rank::world]``. What is counted lies in the work folder, so that a task which is
killed loses one bundle, and the number of tasks may be another one when the scan goes on.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any, Literal, TypeAlias

from sealegs.errors import ConfigError, MissingExtra, SealegsError
from sealegs.scan.counts import merged
from sealegs.scan.files import is_address
from sealegs.scan.scan import scan_part
from sealegs.scan.work_folder import Progress, WorkFolder

Place: TypeAlias = Literal["local", "slurm", "ray"]
_LOOK_S = 2.0
_TO_STOP_S = 10.0
"""After which the pool does not end by itself. What has been counted lies whole in the work folder."""
_LOOKS_AT_THE_END = 5
"""With processes missing though all is counted, as where the pool ends. For one that was killed between its last count
and its word of it the pool would wait for ever."""
_KILLED = "a process of the scan was killed, most often for want of memory: give fewer --jobs; the same command goes on"
_PAUSE = 20
"""Times that a look takes, from one to the next: thousands of files in a store take long."""
COUNT = "count"
_JOB = "sealegs-scan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where tasks run, and with what."""

    on: Place
    tasks: int
    jobs: int
    """Tasks at a time."""
    partition: str | None = None
    limit: str = "24:00:00"
    """Of the time of each task, as Slurm has it."""
    memory: int = 4
    """GB for each task."""
    sbatch: Mapping[str, str] = field(default_factory=dict)
    """More options of sbatch."""


def count_bundles(place: str, rank: int, world: int) -> None:
    """A task: count its bundles that nobody has counted."""
    work = WorkFolder.opened(place)
    try:
        with in_base(work):
            for bundle in range(rank, len(work.plan.bundles), world):
                if not work.store.has(f"counts/{bundle:05d}.json"):
                    parts = work.plan.of_bundle(bundle)
                    work.keep(bundle, merged(scan_part(part, work.plan.ways) for part in parts))
    except SealegsError as error:
        work.tell_failure(rank, str(error))
        raise SealegsError(str(error)) from error  # some others cannot be sent from process to process
    except Exception as error:
        work.tell_failure(rank, f"{type(error).__name__}: {error}")
        raise
    work.tell_failure(rank, None)


@contextmanager
def in_base(work: WorkFolder) -> Iterator[None]:
    """Be where the paths of the corpus start from."""
    with chdir(work.plan.base) if Path(work.plan.base).is_dir() else nullcontext():
        yield


@dataclass(frozen=True)
class Stage:
    """A stage of a scan in so many tasks."""

    name: str
    steps: tuple[Any, ...]
    """datatrove's, or functions of documents, rank and number of tasks."""
    tasks: int


def counting(work: WorkFolder, tasks: int) -> Stage:
    """The stage that counts; more tasks than there are bundles would have nothing to do."""
    tasks = min(tasks, len(work.plan.bundles))
    return Stage(COUNT, (partial(_count, place=work.store.place),), tasks)


def _count(data: Any, rank: int, world: int, *, place: str) -> None:
    count_bundles(place, rank, world)


def run_here(
    work: WorkFolder, stage: Stage, cluster: Cluster, tell: Callable[[Progress], None] = lambda _: None
) -> None:
    """Run the tasks of a stage that are not done, and wait for them."""
    assert cluster.on != "slurm"
    made = executor(work, stage, cluster)
    forget_undone(work, stage)
    with _watched(work, stage, tell):
        if cluster.on == "ray":
            _join_ray()
        try:
            made.run()
        except SealegsError:
            raise
        except Exception as error:
            raise SealegsError(f"a task of the scan ended: {_why(work) or error}") from error
    if not is_done(work, stage):  # Ray tries some times, and goes on without
        raise SealegsError(f"tasks of the scan ended: {_why(work) or work.store.address(_folder(stage) + '/logs')}")


def _why(work: WorkFolder) -> str:
    failed = sorted(work.progress().failed.items())
    return "; ".join(f"task {task}: {why}" for task, why in failed[:3])


def is_done(work: WorkFolder, stage: Stage) -> bool:
    """Whether all tasks of a stage are."""
    if stage.name == COUNT:
        return len(work.counted()) == len(work.plan.bundles)
    return len(work.store.sizes(f"{_folder(stage)}/completions")) == stage.tasks


def submit(work: WorkFolder, stages: list[Stage], cluster: Cluster) -> list[Any]:
    """Hand the stages to Slurm, each of them after the one before; their executors, which know the jobs."""
    assert cluster.on == "slurm"
    if "SLURM_ARRAY_TASK_ID" in os.environ:
        raise ConfigError("--on slurm: this is a task of an array already; submit from the login node")
    made: list[Any] = []
    for stage in stages:
        forget_undone(work, stage)
        made.append(executor(work, stage, cluster, depends=made[-1] if made else None))
    try:
        made[-1].run()
    except FileNotFoundError as error:
        raise ConfigError("--on slurm: there is no sbatch on this machine; submit from a login node") from error
    except (OSError, CalledProcessError) as error:
        raise SealegsError(f"--on slurm: sbatch could not be run ({error})") from error
    return made


def script(work: WorkFolder, stage: Stage, cluster: Cluster) -> str:
    """The batch script that ``submit`` would hand over."""
    made = executor(work, stage, cluster)
    forget_undone(work, stage)
    said: str = made.get_launch_file_contents(
        made.get_sbatch_args(min(len(made.get_incomplete_ranks()), made.max_array_size)),
        f"srun  -l -n 1 launch_pickled_pipeline {made.logging_dir.resolve_paths('executor.pik')}",
    )
    return said


def executor(work: WorkFolder, stage: Stage, cluster: Cluster, depends: Any = None) -> Any:
    """datatrove's executor of a stage."""
    try:
        from sealegs.scan.local_executor import QuietLocalExecutor, keep_quiet
    except ImportError as error:
        raise MissingExtra(f"--on {cluster.on}", "datatrove", "cluster") from error
    keep_quiet()
    known: dict[str, Any] = {
        "pipeline": list(stage.steps),
        "tasks": stage.tasks,
        "logging_dir": work.store.address(_folder(stage)),
    }
    if cluster.on == "local":
        workers = min(cluster.jobs, stage.tasks)
        return QuietLocalExecutor(**known, workers=workers, start_method="spawn")
    if cluster.on == "ray":
        try:
            import ray  # noqa: F401
        except ImportError as error:
            raise MissingExtra("--on ray", "ray", "ray") from error
        from datatrove.executor.ray import RayPipelineExecutor

        return RayPipelineExecutor(**known, mem_per_cpu_gb=cluster.memory)
    if cluster.partition is None:
        raise ConfigError("--on slurm: give --partition, too: where its tasks run")
    from datatrove.executor.slurm import SlurmPipelineExecutor

    logs = f"{_JOB}-logs" if is_address(work.store.place) else work.store.address(f"{_folder(stage)}/slurm")
    return SlurmPipelineExecutor(
        **known,
        time=cluster.limit,
        partition=cluster.partition,
        mem_per_cpu_gb=cluster.memory,
        job_name=f"{_JOB}-{stage.name}",
        qos=None,
        sbatch_args=dict(cluster.sbatch),
        slurm_logs_folder=logs,
        depends=depends,
    )


def _folder(stage: Stage) -> str:
    return f"tasks/{stage.name}-{stage.tasks:05d}"


def forget_undone(work: WorkFolder, stage: Stage) -> None:
    """Take back datatrove's marks of tasks whose counts are not there, or are torn."""
    if stage.name != COUNT:
        return
    work.damaged()
    counted = work.counted()
    marks = work.store.sizes(f"{_folder(stage)}/completions")
    for rank in range(stage.tasks):
        mine = range(rank, len(work.plan.bundles), stage.tasks)
        if f"{rank:05d}" in marks and not counted.issuperset(mine):
            work.store.remove(f"{_folder(stage)}/completions/{rank:05d}")


@contextmanager
def _watched(work: WorkFolder, stage: Stage, tell: Callable[[Progress], None]) -> Iterator[None]:
    """Tell the progress now and then; and end the wait if a process was killed, whose task would be waited for."""
    import multiprocess

    over = threading.Event()
    killed: list[bool] = []
    main = threading.main_thread()

    def look() -> None:
        known: set[int] = set()
        missing = 0
        pause = _LOOK_S
        while not over.wait(pause):
            began = time.monotonic()
            with suppress(OSError, SealegsError):  # of a store that does not answer for once
                tell(work.progress())
            pause = max(_LOOK_S, _PAUSE * (time.monotonic() - began))
            here = {each.pid for each in multiprocess.active_children() if each.pid is not None}
            missing = missing + 1 if known - here else 0
            known |= here
            if missing > (_LOOKS_AT_THE_END if missing > 1 and is_done(work, stage) else 1) and not over.is_set():
                killed.append(True)
                for each in multiprocess.active_children():
                    each.kill()
                if main.ident is not None:  # a real signal: what is only noted does not end a wait for a lock
                    signal.pthread_kill(main.ident, signal.SIGINT)
                if not over.wait(_TO_STOP_S):  # one that was killed may have held the lock of the pool
                    sys.stderr.write(f"sealegs: {_KILLED}\n")
                    sys.stderr.flush()
                    os._exit(2)
                return

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield
    except (Exception, KeyboardInterrupt):
        if killed:
            raise SealegsError(_KILLED) from None
        raise
    finally:
        over.set()
        watcher.join()


def _join_ray() -> None:
    """Join the cluster that is there, or start one on this machine."""
    import ray

    if not ray.is_initialized():
        ray.init(ignore_reinit_error=True, logging_level="error", log_to_driver=False)
