"""A person's words in, an Action out: ``rollback 100``, ``lr 0.5``, ``skip 10``, ``clip 0.5``, ``swap web``."""

from collections.abc import Callable, Sequence

from sealegs.errors import ConfigError
from sealegs.recovery.actions import Action, Halt, LowerLR, Rollback, SkipBatches, SwapSource, Tighten

FORMS: dict[str, tuple[str, Callable[[str], Action]]] = {
    "rollback": ("[STEPS]", lambda steps: Rollback(back=int(steps or 0), skip=0)),
    "lr": ("FACTOR", lambda factor: LowerLR(factor=float(factor))),
    "skip": ("BATCHES", lambda count: SkipBatches(count=int(count))),
    "clip": ("NORM", lambda norm: Tighten(clip=float(norm))),
    "swap": ("SOURCE", lambda source: SwapSource(source=source)),
    "halt": ("", lambda _: Halt(advice="asked for by a person")),
}
"""What can be asked for: what comes after the word, and what it means."""


def parse(words: Sequence[str]) -> Action:
    """The action that is asked for.

    >>> print(parse(["lr", "0.5"]))
    learning rate x 0.5, warmed up again over 50 steps
    """
    name, values = (words[0], words[1:]) if words else ("", ())
    if name not in FORMS:
        raise ConfigError(f"{name or 'nothing'!r}: not something that can be asked for; one of {', '.join(FORMS)}")
    form, make = FORMS[name]
    fewest, most = (form != "" and not form.startswith("["), form != "")
    if not fewest <= len(values) <= most:
        raise ConfigError(f"{' '.join(words)}: say `{f'{name} {form}'.strip()}`")
    try:
        return make(values[0] if values else "")
    except ValueError:
        raise ConfigError(f"{' '.join(words)}: {values[0]!r} is no number; say `{name} {form}`") from None
