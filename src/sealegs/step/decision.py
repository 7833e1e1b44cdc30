"""Decides whether a step's update is applied: on the device where possible, otherwise on the host."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sealegs.detectors.spike import WIDENED_STEPS, Spike, clip_of
from sealegs.signals.meter import StepSignals
from sealegs.step.gate import ROW, SCALARS, Gate, HostFacts
from sealegs.step.skip_way import SkipWay, Way
from sealegs.step.update import Update
from sealegs.watch import Watch

LAG = 2
"""Steps after which several ranks look at what their devices decided."""


class UpdateDecision:
    """Applies updates or skips them. In shadow mode it applies all of them, and only writes the decisions down."""

    def __init__(self, update: Update, watch: Watch, *, act: bool, world: int, skip_way: SkipWay | None = None) -> None:
        self._update = update
        self._watch = watch
        self._act = act
        self._world = world
        self._skip_way = skip_way or SkipWay("host")
        """For optimizers that do not read the gate's answer."""
        self._told_way: Way | None = None
        self._are_rules_known = [spike.signal for spike, _ in self._spikes()] == ["loss", "grad_norm"]
        self._gate: Gate | None = None
        self._saved_gate: Any = None
        self._coarse_left = 0

    def prepare_update(
        self, number: int, seen: StepSignals, known: dict[str, Any], clip: float | None
    ) -> Callable[[], None]:
        """Judge step ``number``. Gives the rest of the step as a function: clip the gradients, and apply the update
        unless rejected."""
        if not self._can_gate_decide(seen):
            return self._prepare_on_host(number, seen, known, clip)
        if not self._act or self._update.reads_found_inf():  # in shadow mode nobody has to read the gate's answer
            return self._prepare_on_device(number, seen, known, clip)
        if self._update.is_taken_back():
            return self._prepare_to_take_back(number, seen, known, clip)
        return self._prepare_on_host(number, seen, known, clip)

    def _prepare_to_take_back(
        self, number: int, seen: StepSignals, known: dict[str, Any], clip: float | None
    ) -> Callable[[], None]:
        """The device can take the step back, or the host can decide: whichever is cheaper, where both are possible."""
        way = self._skip_way.next(is_possible=self._update.can_be_taken_back())
        prepare = self._prepare_on_device if way == "device" else self._prepare_on_host
        apply_or_skip = prepare(number, seen, known, clip)

        def update() -> None:
            apply_or_skip()
            self._skip_way.stepped()
            self._tell_the_way(number)

        return update

    def _tell_the_way(self, number: int) -> None:
        """Which way updates are skipped, once it is chosen: what either costs, or why there was no choice.

        Again where it is another one: an optimizer may show only in its first step that it counts on the host.
        """
        if self._skip_way.way in (self._told_way, None):
            return
        self._told_way = self._skip_way.way
        told: dict[str, Any] = {f"{way}_ms": time for way, time in self._skip_way.measured.items()}
        if self._skip_way.way == "device":
            told["copied_bytes"] = self._update.copied_bytes()
        elif reason := self._update.why_not_taken_back():
            told["reason"] = reason
        self._watch.note("skip-way", step=number, way=self._skip_way.way, **told)
        if self._skip_way.way == "host":
            self._update.keep_no_copies()

    def forget(self) -> None:
        """Drop the gate, to be made again from the host's state: the run is not where it was."""
        self._gate = self._saved_gate = None

    def state_dict(self) -> dict[str, Any]:
        """What the next decisions on the device depend on, as JSON values."""
        gate = (self._gate.state.tolist(), self._gate.row.tolist()) if self._gate else self._saved_gate
        return {"gate": gate, "scalars": list(SCALARS), "coarse_left": self._coarse_left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. A gate whose state is made of other numbers, as an older one's may be, begins
        from the host's."""
        is_known = state.get("scalars") == list(SCALARS)
        self._gate, self._saved_gate = None, state["gate"] if is_known else None
        self._coarse_left = state["coarse_left"]

    def _spikes(self) -> list[tuple[Spike, Any]]:
        """The detectors that the gate stands for, each with its state; the user's own come after them, and alarm."""
        return self._watch.states_of(Spike)[:2]

    def _can_gate_decide(self, seen: StepSignals) -> bool:
        """Whether there is a device to decide on. The gate knows the calibrated rules only."""
        return seen.loss.is_cuda and self._are_rules_known

    def _prepare_on_device(
        self, number: int, seen: StepSignals, known: dict[str, Any], clip: float | None
    ) -> Callable[[], None]:
        gate = self._gate or self._make_gate(seen.loss.device, clip)
        gate.clip_at(clip)
        announced = self._watch.announced is not None
        if announced:
            self._coarse_left = WIDENED_STEPS
        tally = self._watch.judging.tally
        told = HostFacts(
            announced, self._coarse_left > 0, tally.is_held, tally.is_restrained, clip_of(known, "grad_norm")
        )
        row = gate.decide(seen.loss, seen.norms, seen.worst, told)
        self._coarse_left = max(self._coarse_left - 1, 0)
        lag = LAG if self._world > 1 else None  # all ranks must learn of a halt at the same step
        names = _names_of(seen)
        self._watch.submit(number, known, ((partial(_gate_row, names), row), *seen.blocks), lag)
        return partial(self._apply_on_device, gate, seen, clip)

    def _apply_on_device(self, gate: Gate, seen: StepSignals, clip: float | None) -> None:
        if self._act and clip is not None and self._can_be_clipped_on_the_way(seen):
            self._update.apply_unless(gate.found_inf, gate.grad_scale)
            return
        _clip_all(seen, clip, gate.grad_norm)
        if self._act:
            self._update.apply_unless(gate.found_inf)
        else:
            self._update.apply_as_ever()

    def _prepare_on_host(
        self, number: int, seen: StepSignals, known: dict[str, Any], clip: float | None
    ) -> Callable[[], None]:
        """Let the host judge before the update: at once on the CPU, waiting for the device elsewhere."""
        self.forget()  # the device may decide a later step
        grad_norm = seen.grad_norm()
        known = {"loss": seen.loss, "grad_norm": grad_norm} | known
        blocks = seen.blocks
        if seen.gradients is not None:
            worst = seen.gradients.worst() if seen.worst is None else seen.worst
            blocks = ((partial(_worst_tensor, _names_of(seen)), worst), *blocks)
        late = self._watch.submit(number, known, blocks)
        # Before the wait, so that a device has it to do meanwhile: the gradients of a rejected step go away unread.
        _clip_all(seen, clip, grad_norm)
        return partial(self._apply_on_host, not self._act or late.go)

    def _apply_on_host(self, go: bool) -> None:
        if self._act:
            self._update.apply(go)
        else:
            self._update.apply_as_ever()

    def _can_be_clipped_on_the_way(self, seen: StepSignals) -> bool:
        """Whether fused optimizers can divide gradients as they read them, which saves a pass over all of them.

        They write the divided gradients back, so not where a gradient is read twice or a hook looks at it before.
        """
        if seen.gradients is None:
            return False
        return seen.gradients.are_used_once and not self._update.has_step_hooks() and self._update.reads_found_inf()

    def _make_gate(self, device: torch.device, clip: float | None) -> Gate:
        spikes = self._spikes()
        self._gate = Gate(device, [detector for detector, _ in spikes], clip)
        if self._gate.without_kernel:
            self._watch.note("gate-without-kernel", reason=self._gate.without_kernel)
        if self._saved_gate is not None:
            self._gate.load(*self._saved_gate)
            self._saved_gate = None
        else:
            self._gate.begin_from([state for _, state in spikes], self._watch.skipped_before)
            self._coarse_left = spikes[0][1].coarse_left
        return self._gate


def _clip_all(seen: StepSignals, clip: float | None, grad_norm: Tensor) -> None:
    if clip is not None and seen.gradients is not None:
        seen.gradients.clip(clip, grad_norm, seen.are_replicated())


def _names_of(seen: StepSignals) -> tuple[str, ...]:
    """The tensors of which one is the worst."""
    if seen.gradients is None:
        return ()
    return seen.gradients.names if seen.worst is None else seen.names


def _gate_row(names: tuple[str, ...], numbers: list[float]) -> dict[str, Any]:
    """The gate's row by name, with the name of the worst tensor of that step."""
    return dict(zip(ROW, numbers, strict=True)) | _worst_tensor(names, numbers[-1:])


def _worst_tensor(names: tuple[str, ...], place: list[float]) -> dict[str, Any]:
    return {"worst_tensor": names[int(place[0])] if 0 <= place[0] < len(names) else ""}
