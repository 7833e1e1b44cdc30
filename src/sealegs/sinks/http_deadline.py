"""HTTP requests whose timeout is for the whole exchange: name, connection, TLS, proxy and answer together.

The standard library's timeout is for each operation of a socket, so a server that sends a byte now and then holds a
request for as long as it likes. To look up a name there is none at all.
"""

import io
import socket
import time
import urllib.request
from collections.abc import Sequence
from functools import partial
from http.client import HTTPConnection, HTTPResponse, HTTPSConnection
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, Any

Addresses = list[tuple[Any, ...]]


def deadline_handlers() -> Sequence[urllib.request.BaseHandler]:
    """Handlers for ``urllib.request.build_opener``, in the place of its own for http and https."""
    return (_DeadlineHTTPHandler(), _DeadlineHTTPSHandler())


class _DeadlineHTTPHandler(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_DeadlineConnection, req)


class _DeadlineHTTPSHandler(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_DeadlineSecureConnection, req)


class _DeadlineConnection(HTTPConnection):
    """One request, which has to be over when the timeout has passed since the connection was made."""

    def __init__(
        self, host: str, port: int | None = None, timeout: float = 0.0, source_address: Any = None, **options: Any
    ) -> None:
        super().__init__(host, port, timeout, source_address, **options)
        self._deadline = time.monotonic() + timeout
        self._create_connection = self._connected
        self.response_class = partial(_response, deadline=self._deadline)  # type: ignore[assignment]

    def connect(self) -> None:
        """Connect; with a proxy and TLS, up to the end of their handshakes."""
        super().connect()
        self.sock.settimeout(_left(self._deadline))

    def _connected(self, place: tuple[str, int], *_: object) -> socket.socket:
        """A socket to the first address that takes a connection. Each has its share of the time that is left."""
        addresses = _resolved(place, self._deadline)
        failure = OSError("it has no address")
        for number, (*kind, _, address) in enumerate(addresses):
            made = None
            try:
                made = socket.socket(*kind)
                made.settimeout(_left(self._deadline) / (len(addresses) - number))
                made.connect(address)
            except OSError as error:
                failure = error
                if made is not None:
                    made.close()
            else:
                made.settimeout(_left(self._deadline))
                return made
        raise failure


class _DeadlineSecureConnection(HTTPSConnection, _DeadlineConnection):
    """The same over TLS, whose handshake is one operation with one timeout."""

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(_left(self._deadline))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _resolved(place: tuple[str, int], deadline: float) -> Addresses:
    """The addresses of a name. The resolver cannot be interrupted: where it takes too long it ends by itself."""
    answer: SimpleQueue[Addresses | Exception] = SimpleQueue()

    def resolve() -> None:
        try:
            answer.put(list(socket.getaddrinfo(*place, type=socket.SOCK_STREAM)))
        except (OSError, ValueError) as error:  # no such name, or no name at all
            answer.put(error)

    try:
        Thread(target=resolve, name="sealegs-resolver", daemon=True).start()
    except RuntimeError:  # Python is about to end and starts no thread any more; nobody waits long for this one
        resolve()
    try:
        found = answer.get(timeout=_left(deadline))
    except Empty:
        raise TimeoutError from None
    if isinstance(found, Exception):
        raise found
    return found


def _response(sock: socket.socket, debuglevel: int = 0, *, deadline: float, **options: Any) -> HTTPResponse:
    return HTTPResponse(_Readable(sock, deadline), debuglevel, **options)  # type: ignore[arg-type]


class _Readable:
    """The part of a socket that an ``HTTPResponse`` uses."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._socket = sock
        self._deadline = deadline

    def makefile(self, mode: str) -> IO[bytes]:
        assert mode == "rb"
        return io.BufferedReader(_DeadlineReader(self._socket, self._deadline))


class _DeadlineReader(io.RawIOBase):
    """What comes from a socket until the deadline."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        super().__init__()
        self._socket = sock
        self._raw = sock.makefile("rb", buffering=0)  # keeps the socket open, which its connection closes before us
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._socket.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()
