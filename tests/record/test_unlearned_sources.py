"""Holes in the data are found where skips have made them, and chance makes none."""

import numpy as np
import pytest

from sealegs.record.unlearned_sources import FEWEST, MOST_SOURCES, Division, shares_of


def division(steps: dict[str, int], skips: dict[str, int]) -> Division:
    of = Division()
    for value, count in steps.items():
        of.add(value, steps=count, skips=skips.get(value, 0))
    return of


def test_a_source_that_is_skipped_beyond_its_share_is_told_with_what_it_lost() -> None:
    found = division({"books=8": 450, "wiki=8": 50}, {"books=8": 2, "wiki=8": 7}).worst()
    assert found is not None
    assert str(found) == "7 of 9 skipped steps were of wiki, 10.0% of the data: 14% of it was never learned"
    assert found.is_much
    many = division({"books=8": 4500, "wiki=8": 500}, {"books=8": 2, "wiki=8": 7}).worst()
    assert many is not None
    assert not many.is_much


@pytest.mark.parametrize(
    "skips",
    [{}, {"books=8": 45, "wiki=8": 5}, {"books=8": 90}, {"books=8": 12, "wiki=8": 3}],
    ids=str,
)
def test_skips_that_chance_explains_are_no_hole(skips: dict[str, int]) -> None:
    assert division({"books=8": 450, "wiki=8": 50}, skips).worst() is None


def test_what_is_rare_may_be_skipped_once_or_twice() -> None:
    steps = {"books=8": 5000, "rare=8": 8}
    assert division(steps, {"rare=8": FEWEST - 1}).worst() is None
    assert division(steps, {"rare=8": FEWEST}).worst() is not None


def test_the_deepest_hole_is_told() -> None:
    steps = {"books=8": 4500, "wiki=8": 400, "code=8": 100}
    found = division(steps, {"wiki=8": 40, "code=8": 20}).worst()
    assert found is not None
    assert (found.source, found.lost) == ("code", 0.2)


def test_one_source_is_no_part_of_the_data() -> None:
    assert division({"books=8": 500}, {"books=8": 50}).worst() is None


def test_a_batch_of_two_sources_is_of_both() -> None:
    """All batches are mixed, so none of the sources has more than its share, though every skip is of both."""
    assert division({"books=6 wiki=2": 500}, {"books=6 wiki=2": 40}).worst() is None
    uneven = division({"books=7 wiki=1": 400, "books=1 wiki=7": 40}, {"books=1 wiki=7": 20})
    found = uneven.worst()
    assert found is not None
    assert (found.source, found.skipped, found.skips) == ("wiki", 18, 20)


@pytest.mark.parametrize("sources", ["", "junk", "a=b", "a=0", "=3", "a=inf", "a=\u00b2", "a=" + "9" * 400])
def test_what_cannot_be_read_is_no_source(sources: str) -> None:
    assert shares_of(sources) == {}


def test_chance_alone_is_hardly_ever_told() -> None:
    random = np.random.default_rng(0)
    told = 0
    for _ in range(500):
        of, sources = Division(), random.choice(["a=1", "b=1", "c=1", "d=1"], 1000, p=[0.6, 0.3, 0.08, 0.02])
        for source, is_skipped in zip(sources.tolist(), (random.random(1000) < 0.03).tolist(), strict=True):
            of.add(source, skips=is_skipped)
        told += of.worst() is not None
    assert told <= 2


def test_a_loop_that_names_every_document_does_not_fill_the_memory() -> None:
    found = division({"wiki=8": 50, **{f"document-{n}=1": 1 for n in range(MOST_SOURCES + 500)}}, {"wiki=8": 7})
    assert len(found.of) == MOST_SOURCES
    assert found.steps == 50 + MOST_SOURCES + 500
    worst = found.worst()
    assert worst is not None
    assert worst.source == "wiki"
