"""Steps, tokens and seconds in, what trouble has cost out, as an event tells it."""

from dataclasses import asdict, dataclass
from typing import Any

from sealegs.record.writer import RunWriter


@dataclass(frozen=True, slots=True)
class Cost:
    """What trouble has cost."""

    steps: int = 0
    """Skipped, or done once more."""
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.steps + other.steps, self.tokens + other.tokens, self.seconds + other.seconds)

    def told(self, record: RunWriter | None) -> dict[str, Any]:
        """For an event of a run: in money too, where an hour of it has a price."""
        price = None if record is None else record.manifest.price_per_hour
        money = None if price is None else round(self.seconds / 3600 * price, 2)
        return {**asdict(self), "seconds": round(self.seconds, 1), "money": money}
