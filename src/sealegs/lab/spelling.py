"""English spelling rules: the forms of a word."""

import re

_ONE_SHORT_SYLLABLE = re.compile("(?:qu|[^aeiou])*[aeiou][^aeiouwxy]")
_BRITISH_DOUBLE = re.compile(".+[^aeiou][aeo]l")
_STRESSED_AT_THE_END = frozenset(
    {"admit", "begin", "commit", "forbid", "forget", "permit", "prefer", "regret", "transfer"}
)
_AN_DESPITE_SPELLING = ("hour", "honest", "heir", "honour")
_A_DESPITE_SPELLING = ("uni", "use", "usu", "euro", "one", "once", "ukulele", "utensil", "ewe")


def article(phrase: str) -> str:
    """The phrase with its ``a`` or ``an``, which follows the sound and not the letter: an hour, a uniform."""
    vowel = phrase[0].lower() in "aeiou" and not phrase.lower().startswith(_A_DESPITE_SPELLING)
    return f"{'an' if vowel or phrase.startswith(_AN_DESPITE_SPELLING) else 'a'} {phrase}"


def doubles(base: str) -> bool:
    """Whether the last letter doubles before -ed and -ing: stopped, admitted; travelled, as in British spelling."""
    short = _ONE_SHORT_SYLLABLE.fullmatch(base) or _BRITISH_DOUBLE.fullmatch(base)
    return short is not None or base in _STRESSED_AT_THE_END


def third_person(base: str) -> str:
    """The third person singular of the present: goes, tries, watches, has."""
    return "has" if base == "have" else plural(base)


def plural(word: str) -> str:
    """A regular noun's plural, which is spelt as a verb's third person is."""
    if word.endswith("y") and word[-2] not in "aeiou":
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith(("s", "x", "z", "ch", "sh", "o")) else f"{word}s"


def ing(base: str) -> str:
    """The -ing form: running, making, tying, panicking."""
    if base.endswith("ie"):
        return f"{base[:-2]}ying"
    if base.endswith("e") and not base.endswith(("ee", "oe", "ye")):
        return f"{base[:-1]}ing"
    return f"{_before_ending(base)}ing"


def regular_past(base: str) -> str:
    """The regular past, which a learner also gives an irregular verb by mistake: goed, writed."""
    if base.endswith("e"):
        return f"{base}d"
    if base.endswith("y") and base[-2] not in "aeiou":
        return f"{base[:-1]}ied"
    return f"{_before_ending(base)}ed"


def spelling_rule(base: str) -> str:
    """The rule for a regular verb's past, in a tutor's words."""
    if base.endswith("e"):
        return "takes only a d"
    if base.endswith("c"):
        return "takes a k before -ed"
    if regular_past(base).endswith("ied"):
        return "changes its y to i"
    return "doubles its last letter" if doubles(base) else "just takes -ed"


def _before_ending(base: str) -> str:
    if base.endswith("c"):
        return f"{base}k"
    return base + base[-1] if doubles(base) else base


def adverb(adjective: str) -> str:
    """The adverb of a regular adjective: slowly, happily, gently, enthusiastically."""
    if adjective.endswith("y"):
        return f"{adjective[:-1]}ily"
    if adjective.endswith("le"):
        return f"{adjective[:-1]}y"
    return f"{adjective}ally" if adjective.endswith("ic") else f"{adjective}ly"


def degrees(adjective: str) -> tuple[str, str]:
    """Comparative and superlative: bigger, biggest; happier, happiest; more careful, most careful."""
    if adjective in _IRREGULAR_DEGREES:
        return _IRREGULAR_DEGREES[adjective]
    vowels = len(re.findall("[aeiou]+", adjective.removesuffix("e")))
    if adjective.endswith("y") and vowels <= 2:
        return f"{adjective[:-1]}ier", f"{adjective[:-1]}iest"
    if vowels > 1 and adjective not in ("clever", "narrow", "quiet", "shallow", "simple", "gentle", "noble", "humble"):
        return f"more {adjective}", f"most {adjective}"
    stem = adjective.removesuffix("e")
    stem += stem[-1] if stem == adjective and _ONE_SHORT_SYLLABLE.fullmatch(adjective) else ""
    return f"{stem}er", f"{stem}est"


_IRREGULAR_DEGREES = {"good": ("better", "best"), "bad": ("worse", "worst"), "far": ("further", "furthest")}
