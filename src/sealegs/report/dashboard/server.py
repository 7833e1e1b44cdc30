"""The server of the live page: it answers whoever has the link, and gives strangers neither data nor room.

The key is the first part of every path, as Bokeh's ``prefix``: page, scripts, websocket and post-mortems carry it
without a cookie, which a browser would send to every port of this machine, also to the servers of other users. Bokeh's
``auth_provider`` would leave out its static files, our own handlers and every 404.
"""

import errno
import hmac
import logging
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

from bokeh.application import Application
from bokeh.server.server import BaseServer
from bokeh.server.tornado import BokehTornado
from bokeh.settings import settings
from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, HTTPMessageDelegate, HTTPServerRequest
from tornado.ioloop import IOLoop
from tornado.iostream import IOStream
from tornado.routing import Router
from tornado.web import HTTPError, OutputTransform, RequestHandler

from sealegs.errors import ConfigError, SourceError
from sealegs.record.reading import read_bytes
from sealegs.record.schema import INCIDENTS

HOST = "127.0.0.1"
PORTS = range(5006, 5026)

MOST_SOCKETS = 200
"""Connections at a time. One more closes the oldest of those that have not shown the key."""
MOST_PAGES = 50
"""Open pages at a time: each has its own copy of what it shows."""
MOST_HEADER_BYTES = 32 * 1024
MOST_BODY_BYTES = 4 * 1024
"""No request of the page has a body."""
MOST_MESSAGE_BYTES = 1024 * 1024
"""What a page tells the server over its websocket is how far somebody has zoomed in."""
MOST_FILE_BYTES = 64 * 1024 * 1024
IDLE_S = 15.0
"""Seconds for all headers of a request, for its body, and between two requests of a connection."""
PING_S = 30.0
"""Seconds within which an open page says that it is still there."""

LOGGERS = ("tornado.access", "tornado.application", "tornado.general", "bokeh.server.tornado")
"""Whoever writes paths of requests into a log."""
FILES = r"(\d+/(?:[\w-]+/)*[\w-]+\.(?:html|md|png|svg))"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".md": "text/plain; charset=utf-8",  # shown, not saved
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
UNUSED = ("/autoload.js", "/metadata")
"""Handlers of Bokeh for pages of other sites."""

CLOSED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
FILE_POLICY = f"{CLOSED}; img-src data:; style-src 'unsafe-inline'; sandbox"
"""A post-mortem has its pictures and its style inside, and no script."""
HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address has the key
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What a server and its own pages know, and nobody else."""

    path: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """The first part of every path, for whoever has the link."""
    script: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    """The mark of our own scripts: text of a run that turns out to be a script has none, and does not run."""


class LiveServer:
    """Bokeh's server of one application, on the first free port, for this machine alone."""

    def __init__(self, application: Application, incidents: Mapping[str, Path], keys: Keys) -> None:
        """``incidents`` has run folders by the path under which the files of their incidents are served."""
        self._keys = keys
        listening = _bound()
        listening.setblocking(False)
        self.port: int = listening.getsockname()[1]
        for name in LOGGERS:  # the client sees a 404, the terminal need not
            logging.getLogger(name).setLevel(logging.ERROR)
            logging.getLogger(name).addFilter(self._without_key)
        self._hosts = [f"{HOST}:{self.port}", f"localhost:{self.port}"]
        policy = _page_policy(self._hosts, keys)
        pages = BokehTornado(
            {"/": application},
            prefix=keys.path,
            extra_patterns=[(f"/{path}/{FILES}", IncidentFile, {"run": run}) for path, run in incidents.items()],
            extra_websocket_origins=self._hosts,
            sign_sessions=True,  # only the server makes sessions
            secret_key=secrets.token_bytes(32),
            include_headers=[],  # a session needs nothing of what a browser says about its user
            include_cookies=[],
            websocket_max_message_size_bytes=MOST_MESSAGE_BYTES,
            websocket_ping_interval=PING_S,
            websocket_ping_timeout=PING_S,
            transforms=[lambda _: SafeHeaders(policy)],
        )
        http = BoundedServer(
            LinkHolders(pages, keys, self._hosts),
            max_header_size=MOST_HEADER_BYTES,
            max_body_size=MOST_BODY_BYTES,
            idle_connection_timeout=IDLE_S,
            body_timeout=IDLE_S,
        )
        http.add_socket(listening)
        self._server = BaseServer(IOLoop.current(), pages, http)
        self.io_loop: IOLoop = self._server.io_loop

    @property
    def link(self) -> str:
        """The address of the page, with its key: for the person who started it, and for no log."""
        return f"http://{HOST}:{self.port}/{self._keys.path}/"

    def start(self) -> None:
        """Answer as soon as the loop runs."""
        settings.resources = "server"  # an environment for other servers of Bokeh leads neither this page elsewhere
        settings.allowed_ws_origin = self._hosts  # nor others here
        self._server.start()

    def stop(self) -> None:
        """End all pages, and release the port."""
        self._server.stop()
        del settings.resources, settings.allowed_ws_origin
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(self._without_key)

    def _without_key(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = record.getMessage().replace(self._keys.path, "..."), ()
        return True


def _bound() -> socket.socket:
    """A socket that listens on the first free port."""
    for port in PORTS:
        try:
            return socket.create_server((HOST, port), backlog=128)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ConfigError(f"--serve: the ports {PORTS[0]} to {PORTS[-1]} are all in use; end another dashboard")


def _page_policy(hosts: Sequence[str], keys: Keys) -> str:
    """What the page may do: nothing that needs another host.

    Bokeh makes a function of the text of a ``CustomJS``, hence 'unsafe-eval'. It sets the style of single elements,
    hence 'unsafe-inline' for styles.
    """
    return (
        f"{CLOSED}; script-src 'nonce-{keys.script}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
        f"img-src 'self' data: blob:; font-src 'self' data:; connect-src {' '.join(f'ws://{host}' for host in hosts)}"
    )


class LinkHolders(Router):
    """Passes on the requests of those who have the link. Every request comes here before a handler is chosen."""

    def __init__(self, pages: Any, keys: Keys, hosts: Sequence[str]) -> None:
        self._pages = pages
        self._keys = keys
        self._hosts = hosts
        self.known: WeakSet[IOStream] = WeakSet()
        """Connections that have shown the key."""

    def find_handler(self, request: HTTPServerRequest, **kwargs: Any) -> HTTPMessageDelegate | None:
        """The handler that answers a request."""
        delegate: HTTPMessageDelegate | None
        refused = self._refused(request)
        if refused is not None:
            delegate = self._pages.get_handler_delegate(request, Refusal, refused)
        else:
            self.known.add(request.connection.stream)  # type: ignore[union-attr]
            delegate = self._pages.find_handler(request, **kwargs)
        return delegate

    def _refused(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        """The status and the sentence for a request that is not passed on.

        Host and Origin are compared as a whole, because a value that is taken apart can be taken apart in two ways.
        """
        hosts, origins = request.headers.get_list("Host"), request.headers.get_list("Origin")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:  # a name of another site can be made to lead here
            return {"status": 403, "sentence": f"This server answers only as {' or '.join(self._hosts)}."}
        is_websocket = "Upgrade" in request.headers
        if (origins or is_websocket) and [origin.lower() for origin in origins] != [f"http://{hosts[0].lower()}"]:
            return {"status": 403, "sentence": "This server answers only its own pages."}
        key, _, rest = request.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(f"/{key}".encode(), f"/{self._keys.path}".encode()):
            told = (
                "Open the whole link that `sealegs dashboard --serve` has printed: it holds a key, new at each start."
            )
            return {"status": 403, "sentence": told}
        if f"/{rest}" in UNUSED:
            return {"status": 404, "sentence": "There is nothing here."}
        if not rest and len(self._pages.get_sessions("/")) >= MOST_PAGES:
            return {"status": 429, "sentence": f"{MOST_PAGES} pages are open: close one, and load again in a minute."}
        return None


class Refusal(RequestHandler):
    """Answers with one sentence."""

    def initialize(self, status: int, sentence: str) -> None:
        """Take what to answer."""
        self._sentence = sentence
        self.set_status(status)

    def prepare(self) -> None:
        """Answer, whatever the method."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(f"{self._sentence}\n")


class SafeHeaders(OutputTransform):
    """Puts the same headers on every answer."""

    def __init__(self, policy: str) -> None:
        self._policy = policy

    def transform_first_chunk(
        self, status_code: int, headers: HTTPHeaders, chunk: bytes, finishing: bool
    ) -> tuple[int, HTTPHeaders, bytes]:
        """Add them to those of the handler."""
        headers.update(HEADERS)
        headers.setdefault("Content-Security-Policy", self._policy)
        headers.setdefault("Cache-Control", "no-store")
        return status_code, headers, chunk


class BoundedServer(HTTPServer):
    """A server with a bounded number of connections, of which strangers cannot take the place of a page."""

    def initialize(self, request_callback: LinkHolders, **limits: Any) -> None:  # type: ignore[override]
        """As ``HTTPServer``, which is made this way."""
        super().initialize(request_callback, **limits)
        self._known = request_callback.known
        self._open: list[IOStream] = []

    def handle_stream(self, stream: IOStream, address: tuple[Any, ...]) -> None:
        """Take a connection, in place of a stranger's if there is no room."""
        self._open = [each for each in self._open if not each.closed()]
        if len(self._open) >= MOST_SOCKETS:
            stranger = next((each for each in self._open if each not in self._known), stream)
            stranger.close()
            if stranger is stream:
                return
        self._open.append(stream)
        super().handle_stream(stream, address)


class IncidentFile(RequestHandler):
    """Serves the post-mortems of one run, and nothing else."""

    def initialize(self, run: Path) -> None:
        """Take the run's folder."""
        self._run = run

    def get(self, name: str) -> None:
        """Answer with a file of the incidents' folder."""
        try:
            content = read_bytes(self._run / INCIDENTS / name, self._run, MOST_FILE_BYTES)
        except (OSError, SourceError):
            raise HTTPError(404) from None
        self.set_header("Content-Security-Policy", FILE_POLICY)
        self.set_header("Content-Type", TYPES[Path(name).suffix])
        self.finish(content)
