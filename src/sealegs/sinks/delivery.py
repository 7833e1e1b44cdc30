"""Delivers messages to a webhook or a command. Its address is a secret that nothing shows."""

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException, HTTPMessage
from typing import IO, Protocol
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from sealegs.errors import ConfigError
from sealegs.sinks.chat_text import escaped_for_slack
from sealegs.sinks.http_deadline import deadline_handlers
from sealegs.sinks.messages import Message

TIMEOUT_S = 10.0
"""Seconds for one attempt, from its beginning to the answer."""
WAITS_S = (1.0, 4.0)
"""Seconds between one attempt and the next."""
_PROGRAM = re.compile(r"[\w+-]+(\.\w{1,3})?|(/|\./|\.\./|~/)[\w+.-][\w+./-]*")
"""A text that can only be the name or the path of a program."""


class Undelivered(Exception):
    """A message did not arrive: the reason without any secret, and whether another attempt could help."""

    def __init__(self, reason: str, *, may_pass: bool) -> None:
        super().__init__(reason)
        self.may_pass = may_pass


class Delivery(Protocol):
    """A way to reach a person."""

    shown: str
    """The destination in a form that may be shown."""

    def send(self, message: Message, text: str) -> None:
        """Deliver the message, or raise ``Undelivered``."""


def delivered(delivery: Delivery, message: Message, text: str, *, waits_s: Sequence[float] = WAITS_S) -> None:
    """Deliver a message. After each of the waits there is another attempt, if that could help."""
    for wait_s in (*waits_s, None):
        try:
            delivery.send(message, text)
        except Undelivered as failure:
            if wait_s is None or not failure.may_pass:
                raise
            time.sleep(wait_s)
        else:
            return


def opened(where: str | Sequence[str], *, timeout_s: float = TIMEOUT_S) -> Delivery:
    """The delivery to a webhook's address, a command, or ``$NAME`` of a variable with either, as the user gave it."""
    if isinstance(where, str) and where.startswith("$"):
        name = where[1:].strip("{}")
        if not (where := os.environ.get(name, "")):
            raise ConfigError(f"notify=${name}: there is no such environment variable; export {name}, or leave it out")
    if not isinstance(where, str):
        return Command(where, timeout_s)
    address = where.strip(" \t\n'\"")  # some readers of env files leave quotes
    scheme, separator, _ = address.partition("://")
    if not separator or not scheme.isalpha():
        try:
            words = shlex.split(where)
        except ValueError:
            raise ConfigError("notify=...: a quote in it has no end; give a command, or an https:// address") from None
        return Command(words, timeout_s)
    if scheme.lower() not in ("http", "https"):
        raise ConfigError(f"notify={scheme}://...: give the https:// address of a webhook, or a command")
    return Webhook(address, timeout_s)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a message is for the place that the user named."""

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> None:
        return None


class Webhook:
    """An address that takes ``{"text": ...}``: Slack's incoming webhooks, Mattermost, your own.

    A user and a password in the address become a header: elsewhere they would be taken for a part of the host's name.
    """

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or not all(character.isprintable() and not character.isspace() for character in url):
            raise ConfigError("notify=http...: no host, or a blank in it; give the whole address of the webhook")
        if "@" in parts.path and "@" not in parts.netloc and "." not in host and host != "localhost":
            raise ConfigError("notify=http...: an @ after the host: write %2F for a / in a password")
        self.shown = f"the webhook at {host}{f':{port}' if port else ''}"
        self._url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment=""))
        self._headers = {"Content-Type": "application/json", "User-Agent": "sealegs", **_authorization(parts)}
        self._timeout_s = timeout_s
        self._opener = urllib.request.build_opener(_NoRedirects, *deadline_handlers())

    def send(self, message: Message, text: str) -> None:
        """Post it."""
        request = urllib.request.Request(  # noqa: S310 - http and https only, see `opened`
            self._url,
            data=json.dumps({"text": escaped_for_slack(text)}).encode(),
            headers=self._headers,
        )
        try:
            self._opener.open(request, timeout=self._timeout_s).close()  # what else it says, nobody reads
        except urllib.error.HTTPError as error:
            with error:
                moved = ", which would lead elsewhere" if 300 <= error.code < 400 else ""
                may_pass = error.code >= 500 or error.code in (408, 425, 429)
                raise Undelivered(f"it answers {error.code}{moved}", may_pass=may_pass) from None
        except (OSError, HTTPException, ValueError) as error:  # no such host, no route, a timeout, or not HTTP
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            is_late = isinstance(reason, TimeoutError)
            told = f"no answer within {self._timeout_s:g} s" if is_late else type(reason).__name__
            if isinstance(reason, OSError) and reason.strerror and not is_late:
                told = reason.strerror
            raise Undelivered(told, may_pass=True) from None


def _authorization(parts: SplitResult) -> dict[str, str]:
    """The header for the user and the password of an address."""
    if not parts.username and not parts.password:
        return {}
    told = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    return {"Authorization": f"Basic {base64.b64encode(told.encode()).decode()}"}


class Command:
    """A program that gets the text on its standard input, and its parts in ``SEALEGS_...`` variables."""

    def __init__(self, words: Sequence[str], timeout_s: float = TIMEOUT_S) -> None:
        if not words or not all(isinstance(word, str) for word in words):
            raise ConfigError("notify='': give the https:// address of a webhook, or a command")
        if shutil.which(words[0]) is None:
            shown = words[0] if _PROGRAM.fullmatch(words[0]) else ""  # otherwise it may be an address, or hold a secret
            raise ConfigError(f"notify={shown} ...: there is no such program; give a command, or an https:// address")
        self.shown = f"the command {os.path.basename(words[0])}"  # noqa: PTH119 - as the shell names it
        self._words = list(words)
        self._timeout_s = timeout_s

    def send(self, message: Message, text: str) -> None:
        """Run the program; an exit code of 0 means delivered."""
        told = {
            "SEALEGS_KIND": message.kind,
            "SEALEGS_RUN": message.run,
            "SEALEGS_STEP": str(message.step),
            "SEALEGS_TITLE": message.title,
            "SEALEGS_PAGE": message.page,
        }
        try:
            done = subprocess.run(  # noqa: S603 - the user's own command, without a shell
                self._words,
                input=f"{text}\n".encode(),
                env=os.environ | told,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # it may repeat its arguments, and a token in them
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise Undelivered(f"not done within {self._timeout_s:g} s", may_pass=True) from None
        except (OSError, ValueError) as error:  # no such program any more, or a message that it cannot be given
            reason = error.strerror if isinstance(error, OSError) else None
            raise Undelivered(reason or type(error).__name__, may_pass=False) from None
        if done.returncode != 0:
            raise Undelivered(f"its exit code is {done.returncode}", may_pass=True)
