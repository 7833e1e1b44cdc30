"""A batch of any loop in, its tokens and labels out; and others back, in a copy."""

from collections import UserDict, namedtuple
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sealegs.errors import ConfigError
from sealegs.faults.text import number_of, sources_of, text_of
from sealegs.lab.data import Batch, Source, Span

IDS = torch.arange(12).reshape(2, 6)
NEXT = IDS + 1
FLOATS = torch.ones(2, 6)
MASK = torch.ones(2, 6, dtype=torch.long)
SOURCES = [Source(name, IDS.numpy().ravel(), np.zeros(1, np.int64)) for name in ("web", "books")]
LAB = Batch(7, IDS.numpy(), NEXT.numpy(), tuple(Span(source, 0, 7) for source in SOURCES))
Pair = namedtuple("Pair", ["ids", "wanted"])


@dataclass(frozen=True)
class Own:
    inputs: Tensor
    targets: Tensor
    note: str


CASES: dict[str, tuple[Any, bool]] = {
    "tensor": (IDS, False),
    "array": (IDS.numpy(), False),
    "pair": ((IDS, NEXT), True),
    "list": ([IDS, NEXT], True),
    "named tuple": (Pair(IDS, NEXT), True),
    "one of a tuple": ((FLOATS, IDS), False),
    "with a mask between": ((IDS, MASK, NEXT), True),
    "dict": ({"attention_mask": MASK, "labels": NEXT, "input_ids": IDS}, True),
    "dict of arrays": ({"tokens": IDS.numpy(), "targets": NEXT.numpy()}, True),
    "dict without labels": ({"input_ids": IDS, "attention_mask": MASK}, False),
    "user dict": (UserDict({"input_ids": IDS, "labels": NEXT}), True),
    "the lab's": (LAB, True),
    "dataclass": (Own(IDS, NEXT, "kept"), True),
    "small whole numbers": ((IDS.to(torch.int16), NEXT.to(torch.uint8)), True),
}


def parts(batch: Any) -> list[Any]:
    """All that is in a batch, in its order."""
    if isinstance(batch, Tensor | np.ndarray):
        return [batch]
    if isinstance(batch, list | tuple):
        return list(batch)
    return list(batch.values()) if hasattr(batch, "values") else [getattr(batch, n) for n in batch.__dataclass_fields__]


def plain(part: Any) -> Any:
    return (type(part), str(part.dtype), part.tolist()) if isinstance(part, Tensor | np.ndarray) else part


@pytest.mark.parametrize(("batch", "has_labels"), CASES.values(), ids=CASES)
def test_tokens_and_labels_are_found_and_others_put_in_their_place(batch: Any, has_labels: bool) -> None:
    before = list(map(plain, parts(batch)))
    text = text_of(batch)
    assert np.array_equal(text.tokens, IDS.numpy())
    assert (text.labels is not None) == has_labels
    if text.labels is not None:
        assert np.array_equal(text.labels, NEXT.numpy())
    tokens, labels = text.tokens.astype(np.int64) + 50, None
    if text.labels is not None:
        labels = text.labels.astype(np.int64) + 70
    changed = text.put(tokens, labels)
    assert type(changed) is type(batch)
    for old, new in zip(parts(batch), parts(changed), strict=True):
        is_text = any(np.array_equal(old, ids) for ids in ((IDS, NEXT) if has_labels else (IDS,)))
        added = 0 if not is_text else 50 if np.array_equal(old, IDS) else 70
        assert plain(new) == plain(old + added if is_text else old)
    assert list(map(plain, parts(batch))) == before  # the loader's own is left alone


def test_a_copy_shares_no_memory() -> None:
    for batch, _ in CASES.values():
        text = text_of(batch)
        copied = text_of(text.put(text.tokens, text.labels))
        assert not np.shares_memory(copied.tokens, text.tokens)
        if text.labels is not None and copied.labels is not None:
            assert not np.shares_memory(copied.labels, text.labels)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (FLOATS, ["Tensor", "unknown parts", "input_ids, tokens"]),
        ({"pixels": FLOATS, "attention_mask": MASK}, ["dict of pixels, attention_mask"]),
        ((FLOATS, True), ["tuple of 0, 1"]),
        (torch.tensor(3), ["Tensor"]),
        (torch.ones(2, 2, dtype=torch.bool), ["Tensor"]),
        (object(), ["object of unknown parts"]),
        ({"labels": NEXT}, ["dict of labels"]),
    ],
)
def test_a_batch_without_tokens_is_refused_in_a_sentence(batch: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        text_of(batch)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_batch_may_say_its_rows_sources_and_its_number() -> None:
    assert sources_of(LAB) == ["web", "books"]
    assert sources_of({"tokens": IDS, "source": ["a", "b"]}) == ["a", "b"]
    assert [sources_of(batch) for batch in (IDS, (IDS, NEXT), {"tokens": IDS})] == [None] * 3
    assert (number_of(LAB), number_of(replace(LAB, index=0))) == (7, 0)
    assert [number_of(batch) for batch in (IDS, (IDS, NEXT), [IDS], {"index": 3})] == [None] * 4
