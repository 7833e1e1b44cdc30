"""A live page in a thread of the test's own process, and a client that says exactly what it is told to."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sealegs.report.dashboard.live import LiveRuns, server_of
from sealegs.report.dashboard.server import LiveServer

PATIENCE_S = 20.0


@contextmanager
def served(folder: Path) -> Iterator[LiveServer]:
    """The live page of a run, until the end of the block."""
    made: list[LiveServer] = []
    ready = threading.Event()

    def serve() -> None:
        asyncio.set_event_loop(asyncio.new_event_loop())
        server = server_of(LiveRuns([(str(folder), folder.name)], lambda _: None))
        server.start()
        made.append(server)
        server.io_loop.add_callback(ready.set)
        server.io_loop.start()
        server.stop()
        server.io_loop.close(all_fds=True)

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield made[0]
    finally:
        made[0].io_loop.add_callback(made[0].io_loop.stop)
        thread.join()


@dataclass(frozen=True)
class Answer:
    """What came back; a status of 0 if the connection was closed without a word."""

    status: int
    headers: dict[str, str]
    body: bytes


class Client:
    """One connection to a live page."""

    def __init__(self, server: LiveServer) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)

    def say(self, *lines: str) -> None:
        """Send lines as they are."""
        self.socket.sendall("".join(f"{line}\r\n" for line in lines).encode())

    def answer(self) -> Answer:
        """All that comes back until the end of one answer."""
        got = b""
        while b"\r\n\r\n" not in got:
            if not (more := self.heard()):
                return Answer(0, {}, got)
            got += more
        head, _, body = got.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name: value for name, _, value in (line.partition(": ") for line in lines)}
        while len(body) < int(headers.get("Content-Length", 0)) and (more := self.heard()):
            body += more
        return Answer(int(first.split()[1]), headers, body)

    def heard(self) -> bytes:
        """Some bytes; none at the end of the connection, however it ends."""
        try:
            return self.socket.recv(1 << 20)
        except ConnectionError:
            return b""

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


def ask(server: LiveServer, *lines: str) -> Answer:
    """Send a request on a connection of its own."""
    with Client(server) as client:
        client.say(*lines, "Connection: close", "")
        return client.answer()


def get(server: LiveServer, path: str, *headers: str) -> Answer:
    """Ask for a path with the key, under the right name."""
    return ask(server, f"GET {root(server)}{path} HTTP/1.1", f"Host: 127.0.0.1:{server.port}", *headers)


def root(server: LiveServer) -> str:
    """The path of the page."""
    found = re.fullmatch(r"http://127\.0\.0\.1:\d+(/[0-9a-f]{32}/)", server.link)
    assert found is not None, server.link
    return found[1]
