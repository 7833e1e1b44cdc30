"""What is harmless changes what it says, and nothing else."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sealegs.drills import controls
from sealegs.lab.data import Batch, Stream
from sealegs.lab.settings import SIZES, DataSettings
from sealegs.lab.sources import open_data

AT = 5


@pytest.fixture(scope="module")
def streams(tokens_file: Path) -> tuple[Stream, Stream]:
    def stream(seed: int) -> Stream:
        settings = replace(SIZES["nano"], seed=seed, data=DataSettings(sources={str(tokens_file): 1.0}, batch=4))
        return open_data(settings).training

    return stream(0), stream(1)


def numbers_of_changed(streams: tuple[Stream, Stream], control: str) -> tuple[list[Batch], list[int]]:
    own, other = streams
    with controls.altered(control, AT, other)(None, None, own) as spoilt:
        batches = [spoilt.batch(number) for number in range(10)]
    plain = [own.batch(number) for number in range(10)]
    assert [batch.index for batch in batches] == list(range(10))
    return batches, [n for n in range(10) if not np.array_equal(batches[n].tokens, plain[n].tokens)]


def test_one_hard_batch_is_of_the_other_text(streams: tuple[Stream, Stream]) -> None:
    batches, changed = numbers_of_changed(streams, "hard-batch")
    assert changed == [AT]
    assert np.array_equal(batches[AT].tokens, streams[1].batch(AT).tokens)


def test_a_domain_switch_lasts(streams: tuple[Stream, Stream]) -> None:
    assert numbers_of_changed(streams, "domain-switch")[1] == list(range(AT, 10))


def test_a_ramp_doubles_batches_and_keeps_their_rows(streams: tuple[Stream, Stream]) -> None:
    batches, changed = numbers_of_changed(streams, "batch-size-ramp")
    assert changed == list(range(AT, 10))
    assert batches[AT].tokens.shape[0] == 2 * batches[AT - 1].tokens.shape[0] == len(batches[AT].spans)
    assert np.array_equal(batches[AT].tokens[:4], streams[0].batch(AT).tokens)
    assert not np.array_equal(batches[AT].tokens[4:], batches[AT].tokens[:4])


def test_a_pause_comes_once(streams: tuple[Stream, Stream], monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    assert numbers_of_changed(streams, "checkpoint-pause")[1] == []
    assert slept == [controls.PAUSE]
