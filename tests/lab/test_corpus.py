"""A seed, a path or this interpreter in, text documents out."""

import hashlib
import math
import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sealegs.errors import SourceError
from sealegs.lab import spelling
from sealegs.lab.corpus import grammar_sentences, stdlib_documents, text_documents, word_lists

pytestmark = pytest.mark.xdist_group("corpus")  # the sentences are made once

# Written down from a grammar book and not from words.txt, in the order of the alphabet.
IRREGULAR = """
beat beat beaten, become became become, begin began begun, bend bent bent, bet bet bet, bind bound bound,
bite bit bitten, bleed bled bled, blow blew blown, break broke broken, bring brought brought, build built built,
burn burnt burnt, burst burst burst, buy bought bought, catch caught caught, choose chose chosen, come came come,
cost cost cost, creep crept crept, cut cut cut, deal dealt dealt, dig dug dug, do did done, draw drew drawn,
dream dreamt dreamt, drink drank drunk, drive drove driven, eat ate eaten, fall fell fallen, feed fed fed,
feel felt felt, fight fought fought, find found found, fly flew flown, forbid forbade forbidden,
foresee foresaw foreseen, forget forgot forgotten, forgive forgave forgiven, freeze froze frozen, get got got,
give gave given, go went gone, grow grew grown, hang hung hung, have had had, hear heard heard, hide hid hidden,
hit hit hit, hold held held, hurt hurt hurt, keep kept kept, kneel knelt knelt, know knew known, lay laid laid,
lead led led, leap leapt leapt, learn learnt learnt, leave left left, lend lent lent, let let let, lie lay lain,
light lit lit, lose lost lost, make made made, mean meant meant, meet met met, mislay mislaid mislaid,
mow mowed mown, overhear overheard overheard, oversleep overslept overslept, pay paid paid, put put put,
read read read, rewrite rewrote rewritten, ride rode ridden, ring rang rung, rise rose risen, run ran run,
say said said, see saw seen, seek sought sought, sell sold sold, send sent sent, set set set, sew sewed sewn,
shake shook shaken, shine shone shone, shoot shot shot, show showed shown, shrink shrank shrunk, shut shut shut,
sing sang sung, sink sank sunk, sit sat sat, slay slew slain, sleep slept slept, slide slid slid, sow sowed sown,
speak spoke spoken, spell spelt spelt, spend spent spent, spill spilt spilt, spin spun spun,
spread spread spread, spring sprang sprung, stand stood stood, steal stole stolen, stick stuck stuck,
sting stung stung, strew strewed strewn, strike struck struck, strive strove striven, swear swore sworn,
sweep swept swept, swim swam swum, swing swung swung, take took taken, teach taught taught, tear tore torn,
tell told told, think thought thought, throw threw thrown, tread trod trodden,
understand understood understood, undertake undertook undertaken, undo undid undone, wake woke woken,
wear wore worn, weave wove woven, weep wept wept, win won won, withdraw withdrew withdrawn, wring wrung wrung,
write wrote written
"""
# Base, third person, -ing form and regular past, one for each way of spelling.
SPELLINGS = """
walk walks walking walked, play plays playing played, stop stops stopping stopped, plan plans planning planned,
try tries trying tried, carry carries carrying carried, study studies studying studied, obey obeys obeying obeyed,
dance dances dancing danced, love loves loving loved, tie ties tying tied, dye dyes dyeing dyed,
guarantee guarantees guaranteeing guaranteed, panic panics panicking panicked, mimic mimics mimicking mimicked,
watch watches watching watched, wash washes washing washed, cross crosses crossing crossed, mix mixes mixing mixed,
veto vetoes vetoing vetoed, travel travels travelling travelled, cancel cancels cancelling cancelled,
quarrel quarrels quarrelling quarrelled, visit visits visiting visited, open opens opening opened,
answer answers answering answered, deliver delivers delivering delivered, prefer prefers preferring preferred,
transfer transfers transferring transferred, admit admits admitting admitted, regret regrets regretting regretted,
borrow borrows borrowing borrowed, clean cleans cleaning cleaned, wait waits waiting waited,
help helps helping helped, fill fills filling filled, peel peels peeling peeled, knit knits knitting knitted,
sneeze sneezes sneezing sneezed, iron irons ironing ironed, whisper whispers whispering whispered
"""
A_BEFORE_A_VOWEL = {"unicorn", "uniform", "union", "university", "useful", "utensil", "ukulele", "euro", "ewe"}
AN_BEFORE_A_CONSONANT = {"hour", "hourglass", "heiress", "heirloom", "honest"}


def table(text: str) -> dict[str, list[str]]:
    rows = (entry.split() for entry in text.split(","))
    return {base: forms for base, *forms in rows}


def heads_of_verbs() -> list[list[str]]:
    return [
        re.sub("[!=]", "", re.split(" [:@>] ", line)[0]).split() for line in word_lists()["verbs"].strip().splitlines()
    ]


@pytest.fixture(scope="module")
def sentences() -> list[str]:
    return grammar_sentences(0, 100_000)


@pytest.fixture(scope="module")
def counts(sentences: list[str]) -> Counter[str]:
    return Counter(word for sentence in sentences[:20_000] for word in re.findall(r"[^\W\d_][\w'-]*", sentence))


def test_a_hundred_thousand_different_sentences(sentences: list[str]) -> None:
    assert len(set(sentences)) == len(sentences) == 100_000


@given(st.integers(), st.integers(0, 300), st.integers(0, 300))
def test_fewer_sentences_are_the_first_of_more(seed: int, some: int, others: int) -> None:
    fewer, more = sorted((some, others))
    assert grammar_sentences(seed, fewer) == grammar_sentences(seed, more)[:fewer]


def test_another_seed_gives_other_sentences(sentences: list[str]) -> None:
    shared = set(grammar_sentences(1, 1000)) & set(sentences[:1000])
    assert len(shared) < 100


def test_the_sentences_stay_what_they_are(sentences: list[str]) -> None:
    """Cached tokens and published numbers rest on them: who changes this digest raises the version in sources.py."""
    digest = hashlib.sha256("\n".join(sentences).encode()).hexdigest()
    assert digest[:16] == "3a34d2a3e4905146"


def test_neither_the_process_nor_its_hash_seed_matters(sentences: list[str]) -> None:
    program = "from sealegs.lab.corpus import grammar_sentences; print(*grammar_sentences(0, 500), sep='\\n')"
    environment = os.environ | {"PYTHONHASHSEED": "123", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == sentences[:500]


def test_sentences_look_like_sentences(sentences: list[str]) -> None:
    for sentence in sentences:
        assert re.match(r'"?[^\W\d_a-z]|"?\d', sentence), sentence
        assert sentence.rstrip('"').endswith((".", "?", "!")), sentence
        assert not re.search(r"[\^~*{}@\n]|  | [.,?!;:]", sentence), sentence


def test_words_fall_as_in_a_text(counts: Counter[str]) -> None:
    assert len(counts) > 3000
    once, twice = (sum(count == times for count in counts.values()) for times in (1, 2))
    assert 0.08 < once / len(counts) < 0.3
    assert twice > 200
    by_rank = [count for _, count in counts.most_common()]
    slope = (math.log(by_rank[999]) - math.log(by_rank[9])) / math.log(1000 / 10)
    assert -1.5 < slope < -0.8  # Zipf: -1


def test_written_is_there_and_rare(counts: Counter[str]) -> None:
    assert 20 < counts["written"] < 400


def test_rare_letters_are_there_and_rare(counts: Counter[str]) -> None:
    letters = Counter(letter for word, count in counts.items() for letter in word * count)
    assert {"é", "ç", "ø"} & set(letters)
    assert all(count < 300 for letter, count in letters.items() if not letter.isascii())


def test_irregular_verbs_are_those_of_the_grammar_book() -> None:
    book = table(IRREGULAR)
    irregular = {base: forms for base, *forms in heads_of_verbs() if forms}
    assert len(irregular) >= 100
    assert irregular == {base: book.get(base) for base in irregular}


def test_regular_verbs_are_regular() -> None:
    regular = [base for base, *forms in heads_of_verbs() if not forms]
    assert len(regular) >= 100
    assert not set(regular) & set(table(IRREGULAR))


def test_spelling() -> None:
    spellings = table(SPELLINGS)
    assert spellings == {
        base: [spelling.third_person(base), spelling.ing(base), spelling.regular_past(base)] for base in spellings
    }
    rules = {
        "walk": "just takes -ed",
        "play": "just takes -ed",
        "dance": "takes only a d",
        "try": "changes its y to i",
        "stop": "doubles its last letter",
        "travel": "doubles its last letter",
        "panic": "takes a k before -ed",
    }
    assert rules == {base: spelling.spelling_rule(base) for base in rules}
    odd = {
        "go": ("goes", "going"),
        "have": ("has", "having"),
        "lie": ("lies", "lying"),
        "begin": ("begins", "beginning"),
    }
    assert odd == {base: (spelling.third_person(base), spelling.ing(base)) for base in odd}


def test_degrees_adverbs_and_plurals() -> None:
    assert [spelling.degrees(word) for word in ("big", "wide", "happy", "clever", "careful", "good", "dry", "new")] == [
        ("bigger", "biggest"),
        ("wider", "widest"),
        ("happier", "happiest"),
        ("cleverer", "cleverest"),
        ("more careful", "most careful"),
        ("better", "best"),
        ("drier", "driest"),
        ("newer", "newest"),
    ]
    assert [spelling.adverb(word) for word in ("slow", "happy", "gentle", "frantic", "careful")] == [
        *("slowly", "happily", "gently", "frantically", "carefully")
    ]
    assert [spelling.plural(word) for word in ("cat", "box", "baby", "key", "church", "tomato")] == [
        *("cats", "boxes", "babies", "keys", "churches", "tomatoes")
    ]


def test_facts_about_verbs_are_right(sentences: list[str]) -> None:
    book, regular = table(IRREGULAR), table(SPELLINGS)
    facts = {fact.groups() for text in sentences if (fact := re.match(r'The past tense of "(.+?)" is "(.+?)"', text))}
    checked = [(base, past) for base, past in facts if base in book or base in regular]
    assert len(checked) > 100
    for base, past in checked:
        assert past == (book[base][0] if base in book else regular[base][2])


def test_a_and_an_follow_the_sound(sentences: list[str]) -> None:
    seen = set()
    for sentence in sentences:
        for article, word in re.findall(r"\b([Aa]n?) (\w+)", sentence):
            is_vowel = word[0].lower() in "aeiou" and word not in A_BEFORE_A_VOWEL
            assert (article.lower() == "an") == (is_vowel or word in AN_BEFORE_A_CONSONANT), sentence
            seen.add(word)
    assert len(seen & A_BEFORE_A_VOWEL) > 5
    assert len(seen & AN_BEFORE_A_CONSONANT) > 2


def test_verbs_agree_with_their_subjects(sentences: list[str]) -> None:
    agreeing = {
        "I": {"am", "was", "have", "do"},
        **{subject: {"is", "was", "has", "does"} for subject in ("he", "she")},
        **{subject: {"are", "were", "have", "do"} for subject in ("you", "we", "they")},
    }
    verbs = "am|is|are|was|were|has|have|does|do"
    bases = {base for base, *_ in heads_of_verbs()}
    thirds = set(map(spelling.third_person, bases))
    seen = Counter[str]()
    for sentence in sentences:
        told = sentence.split("Right: ")[-1]  # what is wrong is wrong on purpose
        for subject, verb in re.findall(rf"^(I|You|He|She|We|They) ({verbs})(?:n't)?\b", told):
            assert verb in agreeing[subject if subject == "I" else subject.lower()], sentence
            seen[subject] += 1
        for verb, subject in re.findall(rf"^({verbs}) (I|you|he|she|we|they)\b", told, re.IGNORECASE):
            assert verb.lower() in agreeing[subject], sentence
        if every_day := re.match(r"(He|She|They|We|I|You) (\w+) .+ every (?:day|week|morning)\.$", told):
            subject, verb = every_day.groups()
            if verb in bases | thirds:
                assert (verb in bases) == (subject not in ("He", "She")), sentence
                seen["simple present"] += 1
    assert len(seen) == 7
    assert min(seen.values()) > 100


# The standard library.


def test_stdlib_is_shuffled_the_same_way_each_time() -> None:
    names = [name for name, _ in stdlib_documents()]
    assert names == [name for name, _ in stdlib_documents()]
    assert len(set(names)) == len(names) > 300
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not any({"site-packages", "test", "tests", "idle_test"} & set(Path(name).parts) for name in names)
    rises = sum(one < other for one, other in pairwise(names))
    assert 0.4 < rises / len(names) < 0.6


def test_stdlib_leaves_out_what_is_not_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "good.py",
        "package/good.py",
        "site-packages/no.py",
        "test/no.py",
        "idlelib/idle_test/no.py",
        "no.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("pass  # naïve\n", encoding="utf-8")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "empty.py").write_text("\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert sorted(stdlib_documents()) == [(name, "pass  # naïve\n") for name in ("good.py", "package/good.py")]


def test_python_without_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(SourceError, match=re.escape(str(tmp_path)) + r": holds no source .*: train on a text file"):
        next(stdlib_documents())


# Text files.

line = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), min_size=1).filter(str.strip)


@given(
    st.lists(st.lists(line, min_size=1), min_size=1),
    st.sampled_from(["\n", "\r\n"]),
    st.sampled_from(["", "\n", " \t\n", "\n\n\n"]),
    st.booleans(),
)
def test_blank_lines_part_documents(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[str]], newline: str, gap: str, has_mark: bool
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    text = gap + "\n".join("\n".join(document) + "\n" + (gap or "\n") for document in documents)
    path.write_bytes(text.replace("\n", newline).encode("utf-8-sig" if has_mark else "utf-8"))
    if documents[0][0].startswith("\ufeff") and not has_mark and not gap:
        documents[0][0] = documents[0][0][1:]
        if not documents[0][0].strip():
            return  # the whole first line was a byte order mark
    assert list(text_documents(path)) == ["\n".join(document) for document in documents]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "cannot be read (No such file or directory): give the path of a UTF-8 text file"),
        ("folder", "cannot be read (Is a directory): give the path of a UTF-8 text file"),
        (b"", "has no text in it: give a file with documents that blank lines part"),
        (b" \n\t\r\n\n", "has no text in it: give a file with documents that blank lines part"),
        (b"fine\n\nna\xefve\n", "line 3 is not UTF-8 text: save the file as UTF-8"),
        ("written".encode("utf-16"), "line 1 is not UTF-8 text: save the file as UTF-8"),
    ],
)
def test_a_text_file_that_is_none(tmp_path: Path, content: bytes | str | None, problem: str) -> None:
    path = tmp_path / "a.txt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path.mkdir()
    with pytest.raises(SourceError) as raised:
        list(text_documents(path))
    assert str(raised.value) == f"{path}: {problem}"


def test_text_is_read_as_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\n\ntwo\n\n\xff")
    assert list(islice(text_documents(path), 2)) == ["one", "two"]
