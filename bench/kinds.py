"""What `sealegs check` says of mixtures of experts, low precision and policy gradients, healthy and broken.

    python bench/kinds.py [--seeds 20] [--first 1300] [--jobs 2] [--keep FOLDER] [--json FILE] [NAME ...]

For each seed it trains the lab's smallest models once broken in each way, its severity and step drawn from the seed,
and once healthy for each of them, with settings drawn from the seed. The broken runs are unguarded in deed (shadow
mode): nothing is skipped. It prints Markdown: verdicts, how often the cause named first is the one that was put in, how
often another one was named and called established or supported (confident and wrong), and the alarms in healthy runs,
each share with its 95 % bounds. A run takes 10 to 20 s of one CPU core.

A fault of a policy can be too mild to break anything. So each broken policy has a twin, with the same settings and
seed and no fault, and the last column counts the runs that came to no harm: their held-out reward in the end is at
least 95 % of the twin's, and their entropy at least half of it. They count as broken all the same.
"""

import argparse
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from sealegs.cli.check import check
from sealegs.faults.practice import disturbed, disturbed_policy
from sealegs.faults.spec import parse
from sealegs.lab.policy_gradient import PolicySettings, train_policy
from sealegs.lab.settings import SIZES, CadenceSettings, Settings
from sealegs.lab.sources import open_data
from sealegs.lab.train import resolved, train
from sealegs.record.run import open_run

LAST = 240
"""Steps of a run."""
UNHARMED, KEPT_ENTROPY = 0.95, 0.5
"""Shares of the twin's held-out reward and entropy, in the end, from which on nothing was broken."""
Draw = Callable[[random.Random], str]
"""The fault of a seed, as text."""


@dataclass(frozen=True, slots=True)
class Case:
    """A way to train, and a way to break it."""

    loop: str
    """``experts``, ``float8``, ``dense`` or ``policy``."""
    causes: tuple[str, ...]
    """The causes that are right."""
    fault: Draw


def _between(low: float, high: float) -> Callable[[random.Random], float]:
    """A severity, evenly by its logarithm."""
    return lambda chance: math.exp(chance.uniform(math.log(low), math.log(high)))


def _fault(text: str, low: float, high: float) -> Draw:
    """A fault whose severity, ``{}`` in the text, lies between two; ``{at}`` is its step."""
    severity = _between(low, high)
    return lambda chance: text.format(f"{severity(chance):.3g}", at=chance.randrange(LAST // 4, LAST // 2))


def _dead(chance: random.Random) -> str:
    amount = -_between(8, 60)(chance)
    return f"router-bias:expert={chance.randrange(4)},amount={amount:.3g},steps={LAST}@{chance.randrange(60, 120)}"


def _masked(chance: random.Random) -> str:
    return f"masked-labels:batches={chance.choice((3, 10, 40, LAST))}@{chance.randrange(60, 120)}"


def _hacked(chance: random.Random) -> str:
    pays = chance.choice(("length", "repetition"))
    return f"hacked-reward:weight={_between(1.5, 6)(chance):.3g},pays={pays}@{chance.randrange(60, 120)}"


CASES = {
    "entropy collapse": Case("policy", ("entropy-collapse",), _fault("entropy-penalty:weight={}@{at}", 5, 20)),
    "hacked reward": Case("policy", ("reward-hacking",), _hacked),
    "zero spread": Case("policy", ("zero-reward-spread",), _fault("constant-reward:value={}@{at}", 0.1, 1)),
    "perturbed sampler": Case("policy", ("sampler-trainer-mismatch",), _fault("noisy-sampler:noise={}@{at}", 0.1, 0.6)),
    "router collapse": Case(
        "experts",
        ("router-collapse",),
        _fault(f"router-bias:experts=2,amount={{}},steps={LAST}@{{at}}", 3, 20),
    ),
    "dead expert": Case("experts", ("dead-experts", "router-collapse"), _dead),
    "saturated scale": Case(
        "float8", ("low-precision-saturation",), _fault(f"stuck-scale:factor={{}},steps={LAST}@{{at}}", 4, 256)
    ),
    "masked labels": Case("dense", ("masked-labels",), _masked),
}
"""The eight ways; cards of the same root, where several are right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What was said of a run."""

    case: str
    seed: int
    fault: str
    """Empty for a healthy run."""
    verdict: str
    kind: str
    alarms: int
    """Alarms of the live guard from the fault on, or from the first step."""
    cause: str | None
    """The one named first."""
    grade: str | None
    is_right: bool | None
    reward_share: float | None = None
    """Its held-out reward in the end, as a share of its twin's."""
    entropy_share: float | None = None
    """The same of its entropy."""

    @property
    def is_unharmed(self) -> bool:
        """Whether a fault did nothing to a policy that its twin did not come to by itself."""
        if self.reward_share is None or self.entropy_share is None:
            return False
        return self.reward_share >= UNHARMED and self.entropy_share >= KEPT_ENTROPY

    @property
    def is_confidently_wrong(self) -> bool:
        """Whether a cause is called established or supported that is not there."""
        return self.cause is not None and self.grade in ("established", "supported") and not self.is_right


def answer(name: str, seed: int, is_broken: bool, place: Path) -> Answer:
    """Train one run, and ask what it shows."""
    torch.set_num_threads(1)
    case, chance = CASES[name], random.Random(f"{name} {seed} {is_broken}")  # noqa: S311
    fault = case.fault(chance) if is_broken else ""
    folder = place / f"{name.replace(' ', '-')}-{seed}-{'broken' if is_broken else 'healthy'}"
    shares: tuple[float | None, float | None] = (None, None)
    if case.loop == "policy":
        settings = _policy_settings(seed, chance)
        _policy(settings, folder, fault)
        if fault:
            twin = folder.with_name(f"{folder.name}-twin")
            _policy(settings, twin, "")
            shares = (_share(folder, twin, "eval_reward", 2), _share(folder, twin, "policy_entropy", 20))
    else:
        _lab(case.loop, folder, seed, fault, chance)
    diagnosis = check(str(folder), metrics={}, pattern=None, rules="calibrated")
    first = next(iter(diagnosis.hypotheses), None)
    since = parse(fault).step if fault else 0
    alarms = [event for event in open_run(folder).events if event.kind in ("alarm", "skip", "halt")]
    return Answer(
        case=name,
        seed=seed,
        fault=fault,
        verdict=diagnosis.findings.verdict,
        kind=str(diagnosis.findings.kind),
        alarms=sum(event.step is not None and event.step >= since for event in alarms),
        cause=None if first is None else first.cause,
        grade=None if first is None else first.grade,
        is_right=None if first is None else is_broken and first.cause in case.causes,
        reward_share=shares[0],
        entropy_share=shares[1],
    )


def _share(folder: Path, twin: Path, signal: str, last: int) -> float:
    """The mean of the last values of a signal, as a share of the twin's."""
    ours, theirs = (float(open_run(each).series(signal)[1][-last:].mean()) for each in (folder, twin))
    return ours / max(theirs, 1e-9)


def _policy_settings(seed: int, chance: random.Random) -> PolicySettings:
    """Learning rate, temperature and the weight of the divergence are drawn."""
    return PolicySettings(
        steps=LAST,
        seed=seed,
        lr=_between(4e-4, 1.2e-3)(chance),
        temperature=chance.choice((0.9, 1.0, 1.1)),
        kl_weight=chance.choice((0.0, 0.01, 0.05)),
    )


def _policy(settings: PolicySettings, folder: Path, fault: str) -> None:
    """A policy-gradient run."""
    train_policy(settings, folder, disturb=partial(disturbed_policy, [parse(fault)] if fault else []), act=False)


def _lab(loop: str, folder: Path, seed: int, fault: str, chance: random.Random) -> None:
    """A run of the lab; learning rate and the way to balance are drawn."""
    settings = _settings(loop, seed, chance, is_balanced=not fault)
    faults = [parse(fault)] if fault else []
    disturb = partial(disturbed, faults, settings.model.vocabulary)
    train(settings, open_data(settings, say=lambda text: None), folder, disturb=disturb)


def _settings(loop: str, seed: int, chance: random.Random, *, is_balanced: bool) -> Settings:
    """Routers that are struck are not balanced: a bias of the choice would mend them within a hundred steps."""
    base = SIZES["nano"]
    models: dict[str, dict[str, Any]] = {
        "dense": {},
        "float8": {"float8": True},
        "experts": {
            "experts": chance.choice((4, 8)),
            "balance": chance.choice(("aux", "bias")) if is_balanced else "none",
            "router": chance.choice(("softmax", "sigmoid")),
            "balance_rate": 1e-2,
        },
    }
    return resolved(
        replace(
            base,
            steps=LAST,
            seed=seed,
            device="cpu",
            dtype="fp32",
            threads=1,
            shadow=True,
            model=replace(base.model, **models[loop]),
            optimizer=replace(base.optimizer, lr=base.optimizer.lr * _between(0.5, 2)(chance)),
            cadence=CadenceSettings(evaluate_steps=40, evaluate_batches=4, checkpoint_steps=0),
        )
    )


def bounds(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % bounds of a share (Wilson).

    >>> [round(bound, 3) for bound in bounds(0, 160)]
    [0.0, 0.023]
    """
    if not total:
        return 0.0, 1.0
    share, spread = count / total, z * z / total
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    return max(0.0, middle - half), min(1.0, middle + half)


def shown(count: int, total: int) -> str:
    """A share with its bounds, as text."""
    low, high = bounds(count, total)
    return f"{count} of {total} ({100 * low:.1f}-{100 * high:.1f} %)"


def table(answers: Sequence[Answer]) -> Iterable[str]:
    """The answers as Markdown."""
    yield "| broken | verdicts | cause right | confident and wrong | an alarm | came to no harm |"
    yield "|---|---|---|---|---|---|"
    broken = [each for each in answers if each.fault]
    rows = [(name, [each for each in broken if each.case == name]) for name in CASES]
    for name, found in (*rows, ("all", broken)):
        if found:
            unharmed = [each for each in found if each.is_unharmed]
            named = sum(each.is_right is True for each in unharmed)
            harm = f"{len(unharmed)}, of which {named} have the cause" if unharmed else "0"
            yield f"| {name} | {_verdicts(found)} | {_counted(found)} | {harm} |"
    yield ""
    yield "| healthy | verdicts | said to act | confident and wrong | an alarm |"
    yield "|---|---|---|---|---|"
    healthy = [each for each in answers if not each.fault]
    rows = [(loop, [each for each in healthy if CASES[each.case].loop == loop]) for loop in _loops()]
    for name, found in (*rows, ("all", healthy)):
        if found:
            yield f"| {name} | {_verdicts(found)} | {_counted(found, is_healthy=True)} |"


def _loops() -> list[str]:
    return list(dict.fromkeys(case.loop for case in CASES.values()))


def _verdicts(found: Sequence[Answer]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(each.verdict for each in found).most_common())


def _counted(found: Sequence[Answer], *, is_healthy: bool = False) -> str:
    first = sum(each.verdict == "act" if is_healthy else each.is_right is True for each in found)
    wrong = sum(each.is_confidently_wrong for each in found)
    alarmed = sum(each.alarms > 0 for each in found)
    return " | ".join(shown(count, len(found)) for count in (first, wrong, alarmed))


def main() -> None:
    """Train, ask, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; all without any")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1300, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=None, help="keep the runs here")
    parser.add_argument("--json", type=Path, default=None, help="write the answers here, too")
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"{unknown[0]!r}: one of {', '.join(CASES)}")
    seeds = range(options.first, options.first + options.seeds)
    wanted = [
        (name, seed, is_broken) for seed in seeds for name in options.cases or CASES for is_broken in (True, False)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        place.mkdir(parents=True, exist_ok=True)
        answers: list[Answer] = []
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            pending = [pool.submit(answer, *each, place) for each in wanted]
            for future in as_completed(pending):
                answers.append(future.result())
                each = answers[-1]
                told = f"{each.fault or 'healthy'}: {each.verdict}, {each.cause} ({each.grade}), {each.alarms} alarms"
                print(f"{len(answers)}/{len(wanted)}  {each.case}, seed {each.seed}  {told}", file=sys.stderr)
                if options.json is not None:  # after each, so that what was done is not lost
                    options.json.write_text(json.dumps([asdict(each) for each in answers], indent=1))
    print("\n".join(table(sorted(answers, key=lambda each: (each.case, each.seed)))))


if __name__ == "__main__":
    main()
