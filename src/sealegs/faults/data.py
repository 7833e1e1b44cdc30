"""Faults that strike the data, by the batch's number: what can be said about each; ``batches.py`` does it."""

from dataclasses import dataclass
from typing import ClassVar

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault, refuse_unless_count


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFault(Fault):
    """Batches are bad, in the same way whenever they come, after a rollback too: is given to ``batches.Spoiler``."""

    def is_at(self, number: int) -> bool:
        """Whether it strikes a batch."""
        return self.step <= number


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesFault(DataFault):
    """So many bad batches in a row."""

    batches: int = 1
    """How many."""

    def __post_init__(self) -> None:
        DataFault.__post_init__(self)
        refuse_unless_count(self, "batches", 1)

    def is_at(self, number: int) -> bool:
        """Whether it strikes a batch."""
        return self.step <= number < self.step + self.batches


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens(BatchesFault):
    """Every token of a batch is another."""

    seed: int = 0
    """Chooses the tokens, together with the batch's number."""

    def __post_init__(self) -> None:
        BatchesFault.__post_init__(self)
        refuse_unless_count(self, "seed", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShard(DrawnTokens):
    """Every token of a batch is drawn at random, each id as likely as another: a corrupt shard."""

    name: ClassVar[str] = "random-shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class RareTokens(DrawnTokens):
    """Every token of a batch is drawn from those that are rare in the data: what the model has hardly been taught."""

    name: ClassVar[str] = "rare-tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftedLabels(BatchesFault):
    """Labels are one place too far: each position is asked for what comes after its next token.

    As when both the loader and the model shift them. The first label of a row stands at its end.
    """

    name: ClassVar[str] = "shifted-labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateBatch(BatchesFault):
    """The first of the batches comes in the place of all of them: a loader that is stuck."""

    name: ClassVar[str] = "duplicate-batch"

    batches: int = 2
    """How many, the first included."""

    def __post_init__(self) -> None:
        BatchesFault.__post_init__(self)
        if self.batches == 1:
            raise ConfigError(f"{self.name}: batches=1: nothing comes twice; give at least 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonedSource(DataFault):
    """From a batch on, the rows that come from one source are random tokens."""

    name: ClassVar[str] = "poisoned-source"

    source: str
    """Its name, as the batches have it."""
    seed: int = 0
    """Chooses the tokens, together with the batch's number."""

    def __post_init__(self) -> None:
        DataFault.__post_init__(self)
        refuse_unless_count(self, "seed", 0)
        if not isinstance(self.source, str) or not self.source or "," in self.source:
            raise ConfigError(f"{self.name}: source={self.source!r}: the name of a source, without commas")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedNgram(DrawnTokens):
    """Each row of a batch says one thing again and again: a span of its own tokens, repeated to its end."""

    name: ClassVar[str] = "repeated-ngram"

    length: int = 3
    """Tokens of the span, 1 to 13; a row that has fewer repeats all that it has."""

    def __post_init__(self) -> None:
        DrawnTokens.__post_init__(self)
        refuse_unless_count(self, "length", 1)
        if self.length > 13:
            raise ConfigError(f"{self.name}: length={self.length}: a span is short; give 1 to 13 tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutedVocabulary(DrawnTokens):
    """Every token of a batch is the one that a permutation has in its place: text of another tokenizer.

    One permutation for all batches, chosen by the seed alone, that leaves no id as it is.
    """

    name: ClassVar[str] = "permuted-vocabulary"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingJunk(DrawnTokens):
    """Every token of a batch becomes two that are rare: text decoded with the wrong character set.

    The same two wherever it stands, chosen by the seed alone. Rows keep their length: the second half of them is lost.
    """

    name: ClassVar[str] = "encoding-junk"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedBatches(BatchesFault):
    """Batches come that came ``back`` before, as the loader gave them: it has gone back too far.

    Where there are more than ``back`` of them, it goes back again and again.
    """

    name: ClassVar[str] = "replayed-batches"

    batches: int = 50
    """How many."""
    back: int = 50
    """How many batches too early it begins again."""

    def __post_init__(self) -> None:
        BatchesFault.__post_init__(self)
        refuse_unless_count(self, "back", 1)
        if self.back > self.step:
            cure = "give a smaller back, or a later step"
            raise ConfigError(f"{self.name}: back={self.back}: only {self.step} come before batch {self.step}; {cure}")

    @property
    def replayed(self) -> range:
        """The batches that come again."""
        return range(self.step - self.back, self.step - self.back + min(self.back, self.batches))

    def original(self, number: int) -> int:
        """The batch that comes in the place of another."""
        return self.step - self.back + (number - self.step) % self.back
