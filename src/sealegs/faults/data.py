"""The faults that strike the data, by number of the batch: their options. ``batches.py`` applies them."""

from dataclasses import dataclass
from typing import ClassVar

from sealegs.errors import ConfigError
from sealegs.faults.contract import Fault, refuse_unless_count


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFault(Fault):
    """Batches are bad, in the same way each time they come, also after a rollback. For ``batches.Spoiler``."""

    def is_at(self, number: int) -> bool:
        """Whether it strikes a batch."""
        return self.step <= number


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesFault(DataFault):
    """Several bad batches in a row."""

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
    """Replaces every token of a batch."""

    seed: int = 0
    """Chooses the tokens, together with the batch's number."""

    def __post_init__(self) -> None:
        BatchesFault.__post_init__(self)
        refuse_unless_count(self, "seed", 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShard(DrawnTokens):
    """Every token of a batch is drawn at random, each id equally likely: a corrupt shard."""

    name: ClassVar[str] = "random-shard"


@dataclass(frozen=True, slots=True, kw_only=True)
class RareTokens(DrawnTokens):
    """Every token of a batch is drawn from the rare ones, which the model has hardly seen."""

    name: ClassVar[str] = "rare-tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftedLabels(BatchesFault):
    """Labels are shifted one position too far: each position must predict the token after its next one.

    This is what happens when both the loader and the model shift them. The first label of a row moves to its end.
    """

    name: ClassVar[str] = "shifted-labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLabels(BatchesFault):
    """Every label is -100, which losses ignore: a wrong template, or a cut that leaves only the prompt."""

    name: ClassVar[str] = "masked-labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicateBatch(BatchesFault):
    """The first of the batches takes the place of all of them: a loader that is stuck."""

    name: ClassVar[str] = "duplicate-batch"

    batches: int = 2
    """How many, the first included."""

    def __post_init__(self) -> None:
        BatchesFault.__post_init__(self)
        if self.batches == 1:
            raise ConfigError(f"{self.name}: batches=1: nothing comes twice; give at least 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoisonedSource(DataFault):
    """From a batch on, the rows of one source are random tokens."""

    name: ClassVar[str] = "poisoned-source"

    source: str
    """Its name, as batches spell it."""
    seed: int = 0
    """Chooses the tokens, together with the batch's number."""

    def __post_init__(self) -> None:
        DataFault.__post_init__(self)
        refuse_unless_count(self, "seed", 0)
        if not isinstance(self.source, str) or not self.source or "," in self.source:
            raise ConfigError(f"{self.name}: source={self.source!r}: the name of a source, without commas")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedNgram(DrawnTokens):
    """Each row of a batch repeats a span of its own tokens to its end."""

    name: ClassVar[str] = "repeated-ngram"

    length: int = 3
    """Tokens of the span, 1 to 13; a shorter row repeats all of its tokens."""

    def __post_init__(self) -> None:
        DrawnTokens.__post_init__(self)
        refuse_unless_count(self, "length", 1)
        if self.length > 13:
            raise ConfigError(f"{self.name}: length={self.length}: a span is short; give 1 to 13 tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class PermutedVocabulary(DrawnTokens):
    """A permutation replaces every token of a batch: text of another tokenizer.

    The seed alone chooses one permutation for all batches, which leaves no id as it is.
    """

    name: ClassVar[str] = "permuted-vocabulary"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingJunk(DrawnTokens):
    """Every token of a batch becomes two rare ones: text decoded with the wrong character set.

    A token becomes the same two everywhere; the seed alone chooses them. Rows keep their length, so that the second
    half of their text is lost.
    """

    name: ClassVar[str] = "encoding-junk"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedBatches(BatchesFault):
    """Batches come again that came ``back`` batches before, as the loader gave them: it went back too far.

    If there are more than ``back`` of them, it goes back again and again.
    """

    name: ClassVar[str] = "replayed-batches"

    batches: int = 50
    """How many."""
    back: int = 50
    """How many batches too early it starts again."""

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
        """The batch that takes the place of another."""
        return self.step - self.back + (number - self.step) % self.back
