"""The text that the lab's models train on: generated sentences, text files, and this interpreter's own source.

A sentence of the grammar corpus is a template (words.txt) whose slots are filled from left to right. ``{act.past}``
draws a clause (who, verb, what) under the name ``act`` and gives its verb's past. Every ``act`` in that sentence is the
same clause; ``act2`` is another one. ``^`` makes a capital letter.
"""

import hashlib
import os
import random
import re
import sysconfig
from bisect import bisect
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace as Forms
from typing import Any

from sealegs.errors import SourceError
from sealegs.lab import spelling

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


def grammar_sentences(seed: int, count: int) -> list[str]:
    """``count`` different sentences of a grammar tutor. A larger count starts with the sentences of a smaller one.

    They are the same on every platform and from Python 3.11 on: the random module promises to keep the sequence that
    ``random()`` gives for a seed, and does not promise that of ``choices()`` or ``shuffle()``.
    """
    draw = random.Random(seed).random  # noqa: S311 - sentences, not secrets
    sentences: dict[str, None] = {}  # a set that keeps the order
    while len(sentences) < count:
        template = _TEMPLATES[int(draw() * len(_TEMPLATES))]
        sentences[_capitalised(template.format_map(_Slots(draw)))] = None
    return list(sentences)


def stdlib_folder() -> Path:
    """The folder of this interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def stdlib_documents() -> Iterator[tuple[str, str]]:
    """Name and text of each module of this interpreter's standard library, in a fixed shuffled order.

    Shuffled, so that the last documents are as fair a sample as the first; by a digest of the name, so that an added or
    removed module leaves the others where they are.
    """
    library = stdlib_folder()
    names: list[str] = []
    for folder, subfolders, files in os.walk(library):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]  # os.walk enters those that are left
        names += ((Path(folder) / file).relative_to(library).as_posix() for file in files if file.endswith(".py"))
    if not names:
        raise SourceError(f"{library}: holds no source of Python's standard library: train on a text file instead")
    for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
        try:
            text = (library / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield name, text


def text_documents(path: Path) -> Iterator[str]:
    """The documents of a UTF-8 text file, divided by blank lines. An error is raised at the place where it occurs."""
    lines: list[str] = []
    number = found = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                if line.strip():
                    lines.append(line)
                elif lines:
                    found += 1
                    yield "\n".join(lines)
                    lines = []
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: line {number} is not UTF-8 text: save the file as UTF-8") from error
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror}): give the path of a UTF-8 text file") from error
    if lines:
        yield "\n".join(lines)
    elif not found:
        raise SourceError(f"{path}: has no text in it: give a file with documents that blank lines part")


# How a sentence is drawn


class _Ranked:
    """Items drawn as words occur in text (Zipf): the item of rank r, from 0, has a weight of 1 / (r + 1)."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = tuple(items)
        # not sum(), which adds up differently from Python 3.12 on
        self._bounds = tuple(accumulate(1 / (rank + 1) for rank in range(len(self.items))))

    def at(self, chance: float) -> Any:
        """The item on which a uniform draw from [0, 1) falls."""
        return self.items[bisect(self._bounds, chance * self._bounds[-1], 0, len(self.items) - 1)]


class _Slots(dict[str, Any]):
    """The people and things of one sentence, drawn at their first use; none comes twice."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self._draw = draw
        self._taken: set[int] = set()

    def __missing__(self, slot: str) -> Any:
        kind = slot.rstrip("2")
        if kind in _CLAUSES:
            subjects, verbs = _CLAUSES[kind]
            filled = self._clause(self._new(subjects), self._new(verbs))
        elif kind == "next":  # what the subject of the act did next
            filled = self._clause(_PERSONS[self["act"].mark], self._new(_CLAUSES["act"][1]))
        elif kind == "quality":
            adjective = self._new(_ADJECTIVES)
            filled = Forms(**vars(adjective), **vars(adjective.nouns.at(self._draw())))
        else:
            filled = self._new(_WORDS[kind])
        self[slot] = filled
        return filled

    def _new(self, ranked: _Ranked) -> Any:
        while id(item := ranked.at(self._draw())) in self._taken:
            pass
        self._taken.add(id(item))
        return item

    def _clause(self, subject: Forms, verb: Forms) -> Forms:
        """Somebody does something: all the forms that a template may use."""
        thing = verb.things.at(self._draw())
        forms = Forms(**vars(subject), **vars(verb), **vars(thing))
        forms.present, forms.mismatch = (verb.base, verb.third) if subject.do == "do" else (verb.third, verb.base)
        if "~" in thing.what:
            forms.what = forms.any_what = forms.the_what = thing.what.replace("~", subject.his)
            forms.your_what = forms.your_any_what = thing.what.replace("~", "your")
            forms.our_what, forms.my_what = thing.what.replace("~", "our"), thing.what.replace("~", "my")
            forms.reply_what = thing.what.replace("~", subject.reply_his)
        return forms


def _capitalised(sentence: str) -> str:
    return re.sub(r'(?:^|\^)("?.)', lambda start: start[1].upper(), sentence)


# How the word lists are read


def word_lists() -> dict[str, str]:
    """The lists of words.txt, by their names."""
    text = (resources.files("sealegs.lab") / "words.txt").read_text("utf-8")
    _, *parts = re.split(r"^\[(.+)\]\n", re.sub("^#.*\n", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _listed(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(";")]


def _lines(text: str) -> list[str]:
    return text.strip().splitlines()


def _subject(name: str, mark: str) -> Forms:
    """A person, with their pronouns, the verbs that agree, and who replies to a question."""
    person = dict(zip(("he", "him", "his", "be", "was", "have", "do"), _PRONOUNS[mark].split(), strict=True))
    reply, _, reply_his, reply_be, *_ = _PRONOUNS[{"i": "y", "y": "i"}.get(mark, mark)].split()
    by = person["him"] if name == person["he"] else name
    return Forms(who=name, by=by, mark=mark, **person, reply=reply, reply_his=reply_his, reply_be=reply_be)


def _verb(line: str) -> Forms:
    head, sign, things = re.split(" ([:@>]) ", line)
    marked, *irregular = head.split()
    base = marked.rstrip("!=")
    wrong = spelling.regular_past(base)
    past, done = irregular or (wrong, wrong)
    forms = {
        "base": base,
        "third": spelling.third_person(base),
        "past": past,
        "done": done,
        "doing": spelling.ing(base),
    }
    marks = sign + marked[len(base) :] + ("irregular" if irregular else "")
    things_said = _Ranked(map(_thing, _listed(things)))
    return Forms(**forms, wrong=wrong, rule=spelling.spelling_rule(base), marks=marks, things=things_said)


def _thing(entry: str) -> Forms:
    """An object, a place or a manner; the same for every subject, unless a ``~`` stands for its owner."""
    what = entry.rstrip("*")
    agreeing = ("them", "are", "were", "have") if entry.endswith("*") else ("it", "is", "was", "has")
    return Forms(
        **dict.fromkeys(("what", "your_what", "our_what", "my_what", "reply_what"), what),
        **dict.fromkeys(("any_what", "your_any_what"), re.sub("^some ", "any ", what)),
        **dict(zip(("it", "it_be", "it_was", "it_have"), agreeing, strict=True)),
        the_what=re.sub("^(a|an|some) ", "the ", what),
    )


def _noun(entry: str) -> Forms:
    one, _, irregular = entry.partition(" ")
    return Forms(a=spelling.article(one), one=one, many=irregular or spelling.plural(one))


def _adjective(line: str) -> Forms:
    """An adjective in its degrees, and the nouns that it fits; an ``@`` among them stands for people."""
    pair, _, nouns = line.partition(" : ")
    adjective, opposite = pair.split()
    more, most = spelling.degrees(adjective)
    said_of = _Ranked(
        Forms(noun=noun, a=spelling.article(f"{adjective} {noun}")) for noun in _listed(nouns) if noun != "@"
    )
    return Forms(adjective=adjective, opposite=opposite, more=more, most=most, nouns=said_of, of_people="@" in nouns)


def _manner(entry: str) -> Forms:
    adjective, _, irregular = entry.partition(" ")
    return Forms(adjective=adjective, adverb=irregular or spelling.adverb(adjective))


def _outcome(entry: str) -> Forms:
    who, _, how = entry.partition("/")
    return Forms(who=who, how=how)


def _for_passive(verb: Forms) -> Forms:
    """The verb with only those objects that may begin a sentence: the keys were lost, not "her keys"."""
    return Forms(**{**vars(verb), "things": _Ranked(thing for thing in verb.things.items if "~" not in thing.what)})


_PRONOUNS = {
    "i": "I me my am was have do",
    "y": "you you your are were have do",
    "m": "he him his is was has does",
    "f": "she her her is was has does",
    "w": "we us our are were have do",
    "p": "they them their are were have do",
}
_LISTS = word_lists()
_PERSONS = {mark: _subject(pronouns.split()[0], mark) for mark, pronouns in _PRONOUNS.items()}
_SUBJECTS = [_subject(*entry.rsplit(" ", 1)) for entry in _listed(_LISTS["subjects"])]
_NAMED = [subject for subject in _SUBJECTS if subject.who != subject.he]
_ALL_VERBS = [_verb(line) for line in _lines(_LISTS["verbs"])]
_VERBS = [verb for verb in _ALL_VERBS if "=" not in verb.marks]
_PASSIVES = [_for_passive(verb) for verb in _VERBS if ">" not in verb.marks]
_EITHER_FORM = frozenset(_LISTS["either form"].split())
_ADJECTIVES = _Ranked(map(_adjective, _lines(_LISTS["adjectives"])))
_TEMPLATES = _lines(_LISTS["templates"])

_ANYBODY = _Ranked(_SUBJECTS)
_CLAUSES = {
    "any": (_ANYBODY, _Ranked(_ALL_VERBS)),
    "act": (_ANYBODY, _Ranked(_VERBS)),
    "named": (_Ranked(_NAMED), _Ranked(_VERBS)),
    "single": (_Ranked(subject for subject in _NAMED if subject.mark != "p"), _Ranked(_VERBS)),
    "state": (_ANYBODY, _Ranked(verb for verb in _ALL_VERBS if "=" in verb.marks)),
    "lasting": (_ANYBODY, _Ranked(verb for verb in _VERBS if "!" not in verb.marks)),
    "changing": (_ANYBODY, _Ranked(verb for verb in _VERBS if verb.past != verb.base)),
    "thing": (_ANYBODY, _Ranked(verb for verb in _VERBS if ":" in verb.marks)),
    "whom": (_ANYBODY, _Ranked(verb for verb in _VERBS if "@" in verb.marks)),
    "made": (_ANYBODY, _Ranked(_PASSIVES)),
    "making": (_ANYBODY, _Ranked(verb for verb in _PASSIVES if "!" not in verb.marks)),
    "regular": (_ANYBODY, _Ranked(verb for verb in _VERBS if "irregular" not in verb.marks)),
    "irregular": (
        _ANYBODY,
        _Ranked(verb for verb in _ALL_VERBS if "irregular" in verb.marks and verb.base not in _EITHER_FORM),
    ),
}
_AS_THEY_STAND = {name[5:]: entries for name, entries in _LISTS.items() if name.startswith("slot ")}
_WORDS = {slot: _Ranked(_listed(entries)) for slot, entries in _AS_THEY_STAND.items()} | {
    "someone": _Ranked(_NAMED),
    "trait": _Ranked(adjective for adjective in _ADJECTIVES.items if adjective.of_people),
    "noun": _Ranked(map(_noun, _listed(_LISTS["nouns"]))),
    "odd_noun": _Ranked(map(_noun, _listed(_LISTS["odd nouns"]))),
    "manner": _Ranked(map(_manner, _listed(_LISTS["adverbs"]))),
    "odd_manner": _Ranked(map(_manner, _listed(_LISTS["odd adverbs"]))),
    "outcome": _Ranked(map(_outcome, _listed(_LISTS["outcomes"]))),
}
