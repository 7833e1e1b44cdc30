"""Throws bytes at the live page: requests, and what follows them on a websocket. It must go on answering.

The server runs in a thread of the job, on a run folder of its own. In a sample ``{key}``, ``{host}`` and ``{token}``
stand for what somebody has who was given the link; ``frames`` has a line for each message that is sent once the server
has agreed to a websocket.
"""

import asyncio
import json
import logging
import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from bench.fuzzing.damage import BYTES, SECRET, Chance, json_value
from bench.fuzzing.sample import Sample

ANSWER_S = 0.15
"""How long an answer is waited for: most requests are damaged, and get none."""
ALIVE_S = 120.0
"""How long the page may take to answer on a busy machine."""
_ENDED = b"\r\n\r\n"
_UPGRADE = (
    b"GET /{key}/ws HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Protocol: bokeh, {token}\r\n\r\n"
)


def is_there() -> bool:
    """Whether the library of the page is installed."""
    return find_spec("bokeh") is not None


def seeds() -> list[Sample]:
    """Requests for everything that the server has, with the key and without; and what a page says on its websocket."""

    def get(path: bytes, *more: bytes, verb: bytes = b"GET") -> bytes:
        return b"\r\n".join([verb + b" " + path + b" HTTP/1.1", b"Host: {host}", *more]) + _ENDED

    requests = {
        "page": get(b"/{key}/"),
        "no-key": get(b"/"),
        "static": get(b"/{key}/static/js/bokeh.min.js"),
        "postmortem": get(b"/{key}/runs/1/incidents/1/postmortem.html"),
        "outside": get(b"/{key}/runs/1/incidents/1/..%2f..%2f..%2foutside/secret"),
        "post": get(b"/{key}/", b"Content-Length: 5", verb=b"POST") + b"hello",
        "chunked": get(b"/{key}/", b"Transfer-Encoding: chunked", verb=b"POST") + b"5\r\nhello\r\n0\r\n\r\n",
        "pipelined": get(b"/{key}/favicon.ico") * 3,
        "autoload": get(b"/{key}/autoload.js?bokeh-autoload-element=x"),
        "ws": get(b"/{key}/ws"),
    }
    found = [Sample(name, {"head": head, "frames": b""}) for name, head in requests.items()]
    said = [
        {"msgid": "1", "msgtype": "PULL-DOC-REQ"},
        {},
        {},
        {"msgid": "2", "msgtype": "PATCH-DOC"},
        {},
        {"events": [{"kind": "ModelChanged", "model": {"id": "p1001"}, "attr": "start", "new": 5}]},
        {"msgid": "3", "msgtype": "SERVER-INFO-REQ"},
        {},
        {},
    ]
    frames = b"".join(json.dumps(each).encode() + b"\n" for each in said)
    return [*found, Sample("websocket", {"head": _UPGRADE, "frames": frames})]


def damaged(chance: Chance, sample: Sample, other: Sample) -> Sample:
    """Another head, other messages, or both."""
    files = dict(sample.files)
    for _ in range(chance.choice((1, 1, 2, 3))):
        name = "frames" if files["frames"] and chance.random() < 0.8 else "head"
        content = files[name]
        assert isinstance(content, bytes)
        is_tree = name == "frames" and chance.random() < 0.7
        files[name] = (json_value if is_tree else chance.choice(BYTES))(chance, content)[: 128 << 10]
    return Sample(sample.seed, files)


class _Failures(logging.Handler):
    """Keeps what is logged about an exception in our own code; of bad requests Bokeh and Tornado complain by design."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        trace = error.__traceback__ if error is not None else None
        while trace is not None:
            if "/sealegs/" in trace.tb_frame.f_code.co_filename and error is not None:
                self.errors.append(error)
                return
            trace = trace.tb_next


class Page:
    """A server that runs, and what a person has who was given its link."""

    def __init__(self) -> None:
        from bench.fuzzing.targets import run_folders

        self._folder = Path(mkdtemp()) / "run"
        run_folders()[0].write(self._folder, self._folder.parent)
        (self._folder.parent / "secret").write_text(SECRET)
        self.failures = _Failures()
        ready = threading.Event()
        self.link = ""
        threading.Thread(target=self._serve, args=(ready,), daemon=True).start()
        assert ready.wait(60), "the server does not start"
        found = re.fullmatch(r"http://([\d.]+):(\d+)/(\w*)/?", self.link)
        assert found, self.link
        self.address = found[1], int(found[2])
        self._known = {b"{host}": f"{found[1]}:{found[2]}".encode(), b"{key}": found[3].encode(), b"{token}": b""}
        self._known[b"{token}"] = self._token()

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(asyncio.new_event_loop())
        from sealegs.report.dashboard.live import LiveRuns, server_of

        server: Any = server_of(LiveRuns([(str(self._folder), "run")], lambda text: None))
        server.start()
        self.link, self._loop = server.link, server.io_loop
        ready.set()
        server.io_loop.start()

    def _token(self) -> bytes:
        """The token of a session: each page has one in it."""
        found = re.search(rb'"token":"([^"]+)"', self.body())
        return found[1] if found else b"none"

    def body(self) -> bytes:
        """The page, as a person sees it."""
        with urllib.request.urlopen(self.link, timeout=ALIVE_S) as answer:  # noqa: S310 - our own
            content: bytes = answer.read()
        return content

    def is_there(self) -> bool:
        """Whether the page comes, or the sentence that too many are open."""
        try:
            return b"<html" in self.body()
        except urllib.error.HTTPError as error:
            return error.code == 429

    def settle(self) -> None:
        """Wait until the server has done what was asked: else the next case would be timed for it."""
        done = threading.Event()
        self._loop.add_callback(done.set)
        assert done.wait(ALIVE_S), "the server is stuck"

    def send(self, head: bytes, frames: bytes) -> bytes:
        """Send a request, and messages where the server agrees to a websocket; gives what came back."""
        for name, value in self._known.items():
            head = head.replace(name, value)
        with socket.create_connection(self.address, timeout=5) as client:
            client.settimeout(ANSWER_S)
            answer = b""
            with suppress(OSError):
                client.sendall(head)
                answer = client.recv(1 << 20)
                if b" 101 " in answer[:20]:
                    for line in frames.splitlines():
                        client.sendall(framed(line))
                    while len(answer) < 4 << 20 and (more := client.recv(1 << 20)):
                        answer += more
        return answer


def framed(payload: bytes) -> bytes:
    """A message of a client: text, masked."""
    length = len(payload)
    if length < 126:
        head = bytes([0x81, 0x80 | length])
    elif length < 1 << 16:
        head = b"\x81\xfe" + struct.pack(">H", length)
    else:
        head = b"\x81\xff" + struct.pack(">Q", length)
    return head + b"\0\0\0\0" + payload


@cache
def _page() -> Page:
    return Page()


_since_looked = [0]


def throw(path: Path) -> int:
    """Send what the sample has; now and then, see whether the page is still there."""
    page = _page()
    for name in ("", "bokeh"):  # nobody prints what is said about bad requests
        logging.getLogger(name).handlers[:] = [page.failures]
    answer = page.send((path / "head").read_bytes(), (path / "frames").read_bytes())
    assert SECRET.encode() not in answer, "a file beside the run was shown"
    page.settle()
    _since_looked[0] += 1
    if _since_looked[0] % 20 == 0:
        began = time.monotonic()
        assert page.is_there(), "the page is gone"
        assert time.monotonic() - began < ALIVE_S
    if failed := page.failures.errors.copy():
        page.failures.errors.clear()
        raise failed[0]
    return 0 if answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 101")) else 2
