"""A plan and a seed in, runs out that all go on from one beginning: a plain loop for every rule, and Sealegs' guard.

Needs torch, numpy and the standard library alone.
"""

import hashlib
import json
import math
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from bench.rescue.cases import CASES, CLEAN, Case, Feed, Plan, share
from bench.rescue.rules import CLIP, EVERY, PLAIN, RESTARTS, RULES, SEALEGS, Restart, Rule
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from sealegs import Guard, Playbook
from sealegs.errors import RunHalted
from sealegs.faults.data import DataFault
from sealegs.faults.injector import Injector, inject
from sealegs.guard_options import Checkpointing
from sealegs.lab.data import Batch
from sealegs.lab.model import Losses, Transformer
from sealegs.lab.settings import Settings
from sealegs.lab.sources import TokenSources, open_data
from sealegs.lab.train import backward, build_optimizer, evaluate
from sealegs.record.schema import EVENTS

GIVEN_UP = 50
"""After so many losses in a row that are not finite a run is ended: no rule is still about to do something."""
KEPT = 4
"""Checkpoints of the plain loop."""


class Subject(nn.Module):
    """The model, with a place outside of what is compiled for the hooks of faults."""

    def __init__(self, settings: Settings, *, compiled: bool) -> None:
        super().__init__()
        self.model = Transformer(settings.model).to(settings.device)
        self.losses: Callable[[Tensor, Tensor], Losses] = self.model.losses
        if compiled:
            self.losses = torch.compile(self.model.losses)

    def forward(self, tokens: Tensor, targets: Tensor) -> Losses:
        """As the model's."""
        return self.losses(tokens, targets)


@dataclass
class Run:
    """One branch, and what has been seen of it."""

    plan: Plan
    settings: Settings
    data: TokenSources
    subject: Subject
    case: Case
    seed: int
    step: int = 0
    attempts: int = 0
    """Backward passes since the fork."""
    skips: int = 0
    softened: int = 0
    """Gradients that a rule made smaller than plain clipping does."""
    restarts: int = 0
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    marks: dict[int, float] = field(default_factory=dict)
    """Evaluation losses by step: of the line that the run has ended with."""

    def __post_init__(self) -> None:
        self.optimizers = optimizers_of(self.plan, self.settings, self.subject.model)
        self.feed = Feed(self.data.training, self.case, self.plan, self.seed, self.settings.model.vocabulary)
        self._scaler = GradScaler(self.settings.device, enabled=False)

    def backward(self, batch: Batch) -> Tensor:
        """Gradients of a batch, and its loss."""
        return backward(self._scaler, self.subject, batch, self.settings)[0]

    def mark(self) -> None:
        """Evaluate, where that is wanted."""
        if self.step in (self.plan.at + 100, self.plan.at + 1000, self.case.last(self.plan)):
            self.marks[self.step] = self.evaluation()

    def evaluation(self) -> float:
        """The loss on held-out text, the same every time."""
        return float(evaluate(self.subject.losses, self.data.held_out, self.settings))

    @contextmanager
    def faulty(self, clock: Callable[[], int]) -> Iterator[Injector]:
        """While the fault can strike."""
        live = [self.feed.fault] if self.feed.fault and not isinstance(self.feed.fault, DataFault) else []
        with inject(live, self.subject, optimizers=self.optimizers, clock=clock) as injector:
            yield injector
        assert not live or injector.strikes, "the fault has struck"
        assert live or not self.feed.fault or self.feed.spoiler.strikes, "bad batches have come"

    def updates(self) -> int:
        """How many updates are in the weights, as the optimizer counts them; it goes back when they do."""
        return int(next(iter(self.optimizers[-1].state.values()))["step"])


def optimizers_of(plan: Plan, settings: Settings, model: Transformer) -> tuple[Optimizer, ...]:
    """AdamW as the lab has it; or Muon on the matrices of the blocks, at steps as long as AdamW's, beside it."""
    adamw = build_optimizer(model, settings.optimizer)
    if plan.optimizer == "adamw":
        return (adamw,)
    hidden = [p for p in model.blocks.parameters() if p.ndim == 2]
    for group in adamw.param_groups:
        group["params"] = [p for p in group["params"] if all(p is not each for each in hidden)]
    chosen = settings.optimizer
    muon = Muon(hidden, lr=chosen.lr, weight_decay=chosen.weight_decay, adjust_lr_fn="match_rms_adamw")
    return (muon, adamw)


@lru_cache(1)
def subject_of(plan: Plan) -> Subject:
    """One model in a process, whatever is loaded into it: it is compiled once, and before hooks are there."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")
    settings = plan.settings(0)
    subject = Subject(settings, compiled=plan.compile)
    if plan.compile:
        data = data_of(plan, 0)
        backward(GradScaler(enabled=False), subject, data.training.batch(0), settings)
        evaluate(subject.losses, data.held_out, settings)
        subject.zero_grad()
    return subject


@lru_cache(4)
def data_of(plan: Plan, seed: int) -> TokenSources:
    """The data of a seed."""
    return open_data(plan.settings(seed))


def guarded(run: Run, folder: Path, *, resume: bool, act: bool) -> Guard:
    """The guard of any loop that wants to be helped. Capsules are evidence for people, and cost disk."""
    return Guard(
        run.subject.model,
        run.optimizers,
        run=folder,
        scheduler=[LambdaLR(each, partial(share, run.settings, run.case, run.plan.at)) for each in run.optimizers],
        clip=CLIP,
        act=act,
        resume=resume,
        playbook=Playbook.standard(),
        checkpoint_every=Checkpointing(
            every=run.plan.guard_checkpoints, snapshot_every=EVERY, snapshot_memory=8 * 2**30, capsule_bytes=0
        ),
    )


def begin(plan: Plan, seed: int, place: Path) -> Path:
    """The beginning that all branches of a seed share: a guard looks on and does nothing, clipping is all there is.

    It is trained once and stays in the folder: on a GPU a second training would end elsewhere.
    """
    folder = place / plan.beginning(seed)
    if folder.exists():
        return folder
    aside = folder.with_suffix(".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    subject = subject_of(plan)
    torch.manual_seed(seed)
    subject.model.load_state_dict(Transformer(plan.settings(seed).model).state_dict())
    run = Run(plan, plan.settings(seed), data_of(plan, seed), subject, CLEAN, seed)
    seen: list[Tensor] = []
    states = {}
    with guarded(run, aside / "guard", resume=False, act=False) as guard:
        for batch in guard.batches(run.feed):
            loss = run.backward(batch)
            seen.append(torch.stack([loss.detach(), norm_of(subject)]))
            guard.step(loss, tokens=batch.target_count)
            if guard.number % EVERY == 0 and guard.number + 3 * EVERY > plan.fork:
                states[guard.number] = state_of(run)
            if guard.number == plan.fork:
                break
        guard.checkpoint(wait=True)
    torch.save(states, aside / "states.pt")
    seen_of = {"seen": torch.stack(seen).tolist(), "evaluation": run.evaluation()}
    (aside / "seen.json").write_text(json.dumps(seen_of))
    aside.rename(folder)
    return folder


def digest_of(beginning: Path) -> str:
    """Equal for beginnings that are the same step by step, to the last bit."""
    return hashlib.sha256((beginning / "seen.json").read_bytes()).hexdigest()[:12]


def state_of(run: Run) -> dict[str, Any]:
    """A copy of weights and moments."""
    optimizers = [each.state_dict() for each in run.optimizers]
    return deepcopy({"model": run.subject.model.state_dict(), "optimizers": optimizers})


def norm_of(subject: Subject) -> Tensor:
    """Of the whole gradient."""
    return get_total_norm([p.grad for p in subject.parameters() if p.grad is not None])


def branch(plan: Plan, seed: int, case_name: str, rule: str, place: Path) -> dict[str, Any]:
    """What became of a run under a rule."""
    began = time.process_time()
    case = CASES[case_name]
    beginning = begin(plan, seed, place)
    run = Run(plan, plan.settings(seed), data_of(plan, seed), subject_of(plan), case, seed)
    run.subject.zero_grad()
    before = json.loads((beginning / "seen.json").read_text())
    events: list[str] = []
    if rule == SEALEGS:
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            here = Path(scratch) / "run"
            shutil.copytree(beginning / "guard", here)
            ended_early = under_guard(run, here)
            run.restarts, events = told(here)
    else:
        ended_early = under_rule(run, RULES[rule](), beginning, before["seen"])
    machine = torch.cuda.get_device_name() if plan.device == "cuda" else f"{platform.machine()}, one thread a run"
    last = case.last(plan)
    final = run.marks.get(last, math.nan)
    return {
        "plan": plan.key(),
        "seed": seed,
        "case": case_name,
        "rule": rule,
        "beginning": digest_of(beginning),
        "losses": {str(step - plan.at): loss for step, loss in sorted(run.marks.items())},
        "final": final,
        "ended_early": ended_early,
        "lost": ended_early or not (case.is_benign or final <= before["evaluation"]),
        "wasted": run.attempts - (run.updates() - plan.fork),
        "attempts": run.attempts,
        "skips": run.skips,
        "softened": run.softened,
        "rollbacks": run.restarts,
        "events": events,
        "seconds": round(time.process_time() - began, 2),
        "machine": f"{machine}, Python {platform.python_version()}, torch {torch.__version__}",
    } | (columns(run, before["seen"]) if rule == PLAIN and not case.is_benign else {})


def columns(run: Run, seen: list[tuple[float, float]]) -> dict[str, list[float]]:
    """What a detector would see of an unguarded run, from its first step on."""
    losses, norms = zip(*seen, strict=True)
    return {"loss": [*losses, *run.losses], "grad_norm": [*norms, *run.norms]}


def under_guard(run: Run, folder: Path) -> bool:
    """The loop of someone who uses Sealegs; whether it was halted."""
    last = run.case.last(run.plan)
    with guarded(run, folder, resume=True, act=True) as guard, run.faulty(lambda: guard.number):
        run.step, before = guard.number, guard.watch.skips
        try:
            for batch in guard.batches(run.feed):
                if run.case.is_announced and run.step == run.plan.at:
                    guard.announce(run.case.name)
                loss = run.backward(batch)
                guard.step(loss, tokens=batch.target_count)
                run.attempts += 1
                if guard.number != run.step:
                    run.step = guard.number
                    with guard.paused():
                        run.mark()
                if run.step >= last:
                    break
        except RunHalted:
            return True
        finally:
            guard.loop.finish()
            run.skips = guard.watch.skips - before
    return False


def under_rule(run: Run, rule: Rule, beginning: Path, seen: list[tuple[float, float]]) -> bool:
    """The plain loop; whether it was given up."""
    plan, last = run.plan, run.case.last(run.plan)
    states = states_in(beginning, run.settings.device)
    kept = {step: (state, step) for step, state in states.items()}
    for loss, norm in seen:
        rule.seen(loss, norm)
    put_back(run, states[plan.fork])
    run.step = number = plan.fork
    left_out: set[int] = set()
    broken = 0
    with run.faulty(lambda: run.step) as injector:
        while run.step < last:
            if number in left_out:
                number += 1
                continue
            strikes = len(injector.strikes) + len(run.feed.spoiler.strikes)
            loss, norm = train_on(run, rule, run.feed.batch(number))
            if len(injector.strikes) + len(run.feed.spoiler.strikes) > strikes:
                rule.struck(run.step)
            restart = rule.after(run.step, number, loss)
            run.step, number = run.step + 1, number + 1
            broken = 0 if math.isfinite(loss) else broken + 1
            if broken == GIVEN_UP:
                return True
            if restart is not None:
                run.restarts += 1
                if run.restarts > RESTARTS:
                    return True
                number = went_back(run, restart, kept, left_out)
            elif run.step % EVERY == 0:
                kept[run.step] = state_of(run), number
                for old in sorted(kept)[:-KEPT]:
                    del kept[old]
            run.mark()
    return False


@lru_cache(1)
def states_in(beginning: Path, device: str) -> dict[int, Any]:
    """The checkpoints of the beginning, by step."""
    states: dict[int, Any] = torch.load(beginning / "states.pt", map_location=device)
    return states


def went_back(run: Run, restart: Restart, kept: dict[int, Any], left_out: set[int]) -> int:
    """Load the checkpoint that a restart asks for, and forget later ones; the number of the next batch."""
    run.step = max(step for step in kept if step <= restart.before)
    for later in [step for step in kept if step > run.step]:
        del kept[later]
    state, number = kept[run.step]
    put_back(run, state)
    left_out.update(restart.without)
    assert isinstance(number, int)
    return number + restart.skip


def put_back(run: Run, state: Mapping[str, Any]) -> None:
    """Weights and moments as they were."""
    run.subject.model.load_state_dict(state["model"])
    for optimizer, kept in zip(run.optimizers, deepcopy(state["optimizers"]), strict=True):
        optimizer.load_state_dict(kept)
        optimizer.zero_grad()


def train_on(run: Run, rule: Rule, batch: Batch) -> tuple[float, float]:
    """One step as a rule wants it; loss, and norm of the gradient before clipping."""
    for group in (group for each in run.optimizers for group in each.param_groups):
        group["lr"] = run.settings.optimizer.lr * share(run.settings, run.case, run.plan.at, run.step)
    loss = run.backward(batch)
    total = norm_of(run.subject)
    loss_now, norm = torch.stack([loss.detach(), total]).tolist()
    limit = rule.limit(loss_now, norm)
    run.attempts += 1
    run.skips += limit is None
    if limit is None:
        if rule.poisons and not math.isfinite(norm):
            poison(run, total)
    else:
        run.softened += limit < min(CLIP, norm)
        if limit < math.inf:
            clip_grads_with_norm_(run.subject.parameters(), limit, total)
        for optimizer in run.optimizers:
            optimizer.step()
    run.subject.zero_grad()
    run.losses.append(loss_now)
    run.norms.append(norm)
    return loss_now, norm


@torch.no_grad()
def poison(run: Run, total: Tensor) -> None:
    """An update that was multiplied by 0, after clipping: it brings NaN into weights and moments all the same."""
    clip_grads_with_norm_(run.subject.parameters(), CLIP, total)
    for optimizer in run.optimizers:
        for parameter, state in optimizer.state.items():
            if parameter.grad is not None:
                moments = (state[name] for name in ("exp_avg", "exp_avg_sq", "momentum_buffer") if name in state)
                for tensor in (parameter, *moments):
                    tensor.add_(parameter.grad * 0)


def told(folder: Path) -> tuple[int, list[str]]:
    """What the guard did since the fork: rollbacks, and its own words."""
    events = [json.loads(line) for line in (folder / EVENTS).read_text().splitlines()]
    resumed = max(i for i, event in enumerate(events) if event["kind"] == "guard")
    rollbacks = 0
    words = []
    for event in events[resumed:]:
        kind, text = event["kind"], event.get("text", "")
        if kind == "intervention":
            rollbacks += "went back" in event.get("changed", "")
            words.append(f"{event['trigger']} since step {event['onset']}: {event.get('changed') or text}")
        elif kind in ("counted-back", "no-probe", "rung-passed-over", "incident-closed", "outcome"):
            words.append(f"{kind}: {text or event.get('reason')}")
    return rollbacks, words
