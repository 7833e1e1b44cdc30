"""The incidents of the gallery: their names lead somewhere, and mistakes in the file are one sentence."""

import tomllib
from importlib import resources

import pytest

from sealegs.errors import ConfigError
from sealegs.gallery.definitions import incidents, named, parsed

ONE = """
[[incident]]
name = "one"
title = "It breaks"
kind = "pretraining"
happened = "Somewhere."
sources = ["somebody"]
rebuilt = "It is broken."
differs = "Nothing."
faults = ["nan-gradient"]
truth = "It is broken."
cards = ["corrupt-gradient"]
found = "found"
guard = "skips"
seconds = 1
"""


def test_the_gallery_has_what_it_promises() -> None:
    every = incidents().values()
    assert len(every) >= 20
    assert len({each.kind for each in every}) >= 8
    assert sum(each.found == "not found" for each in every) >= 2, "what is not found is shown, too"
    assert sum(any("arXiv" in source or "http" in source for source in each.sources) for each in every) >= 15
    assert max(each.seconds for each in every) < 120


def test_a_title_stands_once() -> None:
    titles = [each.title for each in incidents().values()]
    assert len(set(titles)) == len(titles)


def test_the_file_is_sorted_into_whole_tables() -> None:
    text = (resources.files("sealegs.gallery") / "incidents.toml").read_text("utf-8")
    assert [each["name"] for each in tomllib.loads(text)["incident"]] == list(incidents())


def test_a_fault_without_a_step_strikes_where_the_incident_says() -> None:
    each = parsed(ONE)["one"]
    assert [str(fault) for fault in each.practice.struck(each.at)] == ["nan-gradient@180"]
    assert each.practice.causes == ("corrupt-gradient",)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (('cards = ["corrupt-gradient"]', 'cards = ["gremlins"]'), "one names gremlins; causes.toml has no such card"),
        (('title = "It breaks"', 'symptom = "sadness"\ntitle = "It"'), "symptoms.toml has no such symptom"),
        (('faults = ["nan-gradient"]', 'drill = "nan-gradints"'), "name one of the catalogue, and no fault"),
        (('faults = ["nan-gradient"]', 'faults = ["nan-gradints"]'), "nan-gradints"),
        (('faults = ["nan-gradient"]', 'runs = "program"'), "a program has `program` and `healthy`"),
        (("seconds = 1", "seconds = 1\nlast = 100"), "one has last=100; let it end later than at=180"),
        (('found = "found"', 'found = "perhaps"'), "perhaps"),
        (("seconds = 1", "seconds = 1\ncolour = 3"), "colour"),
        (("seconds = 1", "seconds = "), "incidents.toml: "),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(change: tuple[str, str], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(ONE.replace(*change))
    assert told in str(caught.value)


def test_the_healthy_twin_has_the_settings_that_are_not_what_is_wrong() -> None:
    twin = incidents()["zero-variance-norm"].healthy_twin
    assert twin is not None
    assert (twin.faults, twin.settings) == ((), ("model.norm_eps=0",))
    assert incidents()["lr-too-high"].healthy_twin is None
    assert incidents()["nan-gradient"].healthy_twin is None


def test_a_name_stands_once() -> None:
    with pytest.raises(ConfigError, match="two incidents are called one"):
        parsed(ONE + ONE)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean nan-gradient"):
        named("nan-gradints")
    with pytest.raises(ConfigError, match="see `sealegs gallery list`"):
        named("xyzzy")
