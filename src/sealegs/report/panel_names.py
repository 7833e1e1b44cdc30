"""Evidence in, the same with the names of the panels that it cites out: a number alone says nothing to a reader."""

import re

from sealegs.report.dashboard.subjects import OF_A_KIND, SUBJECTS

TITLES = {each.number: each.title[:1].lower() + each.title[1:] for each in (*SUBJECTS, *OF_A_KIND)}
_CITED = re.compile(r"\bpanels? (\d{1,2}(?:, \d{1,2}){0,11})(?![\d.])")


def with_panel_names(text: str) -> str:
    """A sentence whose panels have names.

    >>> with_panel_names("panel 2: LR smooth")
    'learning rate (panel 2): LR smooth'
    >>> with_panel_names("panels 1, 9: up")
    'loss, loss scale (panels 1, 9): up'
    """
    return _CITED.sub(_named, text)


def _named(cited: re.Match[str]) -> str:
    titles = [TITLES.get(int(number), "") for number in cited[1].split(", ")]
    known = ", ".join(filter(None, titles))
    return f"{known} ({cited[0]})" if known else cited[0]
