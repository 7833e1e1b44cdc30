"""Text of any origin in, text that a chat program shows without calling anybody out. Standard library only."""

import re

_CALL = re.compile(r"@(?=(?:everyone|here|channel|all)\b)|(?<![\w.])@(?=\w)|<(?=[!@#]|[a-z]+:)", re.IGNORECASE)
_WIDE = {"@": "\N{FULLWIDTH COMMERCIAL AT}", "<": "\N{FULLWIDTH LESS-THAN SIGN}"}


def quiet(text: str) -> str:
    r"""The text without what calls people (`@everyone`, `<!channel>`) or shows another address than it leads to.

    The signs stay readable: they are replaced by their wide forms, and a Markdown link is taken apart by a blank.

    >>> print(ascii(quiet("<!channel> @everyone ana@login3 [free](http://evil)")))
    '\uff1c!channel> \uff20everyone ana@login3 [free] (http://evil)'
    """
    return _CALL.sub(lambda match: _WIDE[match[0]], text).replace("](", "] (")


def escaped_for_slack(text: str) -> str:
    """The text as Slack's webhooks take it: they read ``<``, ``>`` and ``&`` as markup unless they are escaped.

    >>> escaped_for_slack("loss < 3 & more")
    'loss &lt; 3 &amp; more'
    """
    return quiet(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
