"""Against servers on loopback that are slow on purpose, or want a password: how long it takes, and who learns what."""

import base64
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import sealegs
from sealegs.cli.main import main
from sealegs.errors import ConfigError
from sealegs.guard_options import Telemetry
from sealegs.lab.config import Listeners
from sealegs.sinks import delivery
from sealegs.sinks.delivery import Undelivered
from sealegs.sinks.messages import Message

TIMEOUT_S = 0.3
"""What a slow server has; on a busy machine the time may be over before it has heard anything."""
PATIENCE_S = 5.0
"""How long a slow server goes on if nobody stops it, and what others have."""
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
SECRET = "zq7secret"  # noqa: S105 - none


MESSAGE = Message(kind="test", run="a", step=0, title="", verdict="", first="", page="", key=())


def _request(connection: socket.socket) -> bytes:
    """A request with its body, or what there is of it."""
    got = connection.recv(65536)
    while b'"}' not in got and b"POST" in got and (more := connection.recv(65536)):
        got += more
    return got


class Peer:
    """A server that remembers what each connection said, and answers with some pieces, the last of them repeatedly."""

    def __init__(
        self, pieces: Sequence[bytes], repeated: bytes | None, at_last: bytes, tls: ssl.SSLContext | None
    ) -> None:
        self.heard: list[bytes] = []
        self._tls = tls
        self._pieces, self._repeated, self._at_last = pieces, repeated, at_last
        self._is_over = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/{SECRET}"
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        while not self._is_over.is_set():
            connection, _ = self._listening.accept()
            self._threads.append(threading.Thread(target=self._answer, args=[connection]))
            self._threads[-1].start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:  # TLS takes it over
            try:
                if self._tls is not None:
                    connection = self._tls.wrap_socket(connection, server_side=True)
                self.heard.append(_request(connection))
                for piece in self._pieces:
                    connection.sendall(piece)
                if self._repeated is not None:
                    for _ in range(int(PATIENCE_S / 0.02)):
                        if self._is_over.wait(0.02):
                            return
                        connection.sendall(self._repeated)
                connection.sendall(self._at_last)
            except OSError:  # the other side has gone
                pass
            finally:
                connection.close()

    def stop(self) -> None:
        self._is_over.set()
        with socket.socket() as last:  # `create_connection` would ask the resolver
            last.connect(("127.0.0.1", self.port))
        for thread in self._threads:
            thread.join()
        self._listening.close()


@contextmanager
def peer(
    *pieces: bytes, repeated: bytes | None = None, at_last: bytes = b"", tls: ssl.SSLContext | None = None
) -> Iterator[Peer]:
    made = Peer(pieces, repeated, at_last, tls)
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(autouse=True)
def no_proxy_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def send(url: str, timeout_s: float = PATIENCE_S) -> None:
    delivery.opened(url, timeout_s=timeout_s).send(MESSAGE, "text")


def is_too_late(url: str) -> bool:
    with pytest.raises(Undelivered, match=rf"^no answer within {TIMEOUT_S} s$") as late:
        send(url, TIMEOUT_S)
    return late.value.may_pass


SLOW: dict[str, tuple[list[bytes], bytes, bytes]] = {
    "nothing": ([], b"", OK),
    "a status line that trickles": ([], b"H", OK),
    "a header that trickles": ([b"HTTP/1.1 200 OK\r\nX: "], b"x", b"\r\n\r\n"),
    "headers without end": ([b"HTTP/1.1 200 OK\r\n"], b"X: y\r\n", b"\r\n"),
    "always about to answer": ([], b"HTTP/1.1 100 Continue\r\n\r\n", OK),
}


@pytest.mark.parametrize("how", SLOW)
def test_an_answer_that_comes_slowly_has_the_stated_time_in_all(how: str) -> None:
    pieces, repeated, at_last = SLOW[how]
    with peer(*pieces, repeated=repeated, at_last=at_last) as server:
        assert is_too_late(server.url)
        assert len(server.heard) <= 1, "no second attempt"


def test_a_message_has_arrived_when_the_server_says_so_however_slowly_it_goes_on() -> None:
    with peer(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", repeated=b"x") as server:
        began = time.monotonic()
        send(server.url, timeout_s=2 * PATIENCE_S)
        assert time.monotonic() - began < PATIENCE_S
        assert len(server.heard) == 1


HELLO = b"\x16\x03\x03\x40\x00"
"""The beginning of a long record of TLS."""


@pytest.mark.parametrize("pieces", [[], [HELLO]])
def test_a_handshake_that_does_not_end_has_the_stated_time_in_all(pieces: list[bytes]) -> None:
    with peer(*pieces, repeated=b"\x02" if pieces else b"") as server:
        assert is_too_late(server.url.replace("http", "https"))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of this machine and its key, in one file."""
    pytest.importorskip("cryptography", reason="it comes with MLflow, and makes the certificate")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    today = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, today - timedelta(1), today + timedelta(1))
    loopback = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    signed = made.add_extension(loopback, critical=False).sign(key, hashes.SHA256())
    secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path = tmp_path_factory.mktemp("tls") / "loopback.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, *secret) + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_a_message_arrives_over_tls_at_a_server_that_is_who_it_says(
    tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with peer(OK, tls=tls) as server:
        address = server.url.replace("http", "https")
        with pytest.raises(Undelivered, match="certificate verify failed") as refused:
            send(address)
        assert SECRET not in str(refused.value)
        assert server.heard == []
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        send(address)
        assert server.heard[0].startswith(f"POST /{SECRET} HTTP/1.1".encode())


def test_an_answer_that_comes_slowly_over_tls_has_the_stated_time_in_all(
    tls: ssl.SSLContext, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with peer(b"HTTP/1.1 200 OK\r\nX: ", repeated=b"x", at_last=b"\r\n\r\n", tls=tls) as server:
        assert is_too_late(server.url.replace("http", "https"))


@pytest.fixture
def full() -> Iterator[tuple[str, int]]:
    """A server that takes no connection: its queue is full, and the next one hears nothing at all."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening:
        place = listening.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(place)
        yield place
        for each in waiting:
            each.close()


def found(monkeypatch: pytest.MonkeyPatch, *places: tuple[str, int]) -> None:
    """Every name has these addresses."""
    known = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: known)


def test_a_server_that_takes_no_connection_has_the_stated_time_in_all(full: tuple[str, int]) -> None:
    assert is_too_late(f"http://127.0.0.1:{full[1]}/{SECRET}")


def test_the_addresses_of_a_name_share_the_stated_time(full: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, *[full] * 30)
    began = time.monotonic()
    assert is_too_late(f"http://many.example/{SECRET}")
    assert time.monotonic() - began < 30 * TIMEOUT_S / 2


def test_an_address_that_does_not_answer_leaves_time_for_the_next(
    full: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with peer(OK) as server:
        found(monkeypatch, full, ("127.0.0.1", server.port))
        send(f"http://two.example/{SECRET}", timeout_s=2.0)
        assert len(server.heard) == 1


def test_a_name_that_is_looked_up_slowly_has_the_stated_time_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def resolve(*_: Any, **__: Any) -> list[Any]:
        is_over.wait(PATIENCE_S)
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert is_too_late(f"http://slow.example/{SECRET}")
    is_over.set()


def test_a_name_that_is_not_known_is_said_in_the_resolver_s_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(Undelivered, match=r"^Name or service not known$"):
        send(f"http://nowhere.example/{SECRET}")


def test_a_slow_proxy_has_the_stated_time_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with peer(b"HTTP/1.1 200 OK\r\nX: ", repeated=b"x") as proxy:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        assert is_too_late(f"https://hooks.example/{SECRET}")
        assert all(heard.startswith(b"CONNECT hooks.example:443 HTTP/1.") for heard in proxy.heard)
        assert SECRET.encode() not in b"".join(proxy.heard)


def test_a_command_that_does_not_end_has_the_stated_time() -> None:
    with pytest.raises(Undelivered, match=rf"^not done within {TIMEOUT_S} s$"):
        send(f"sleep {PATIENCE_S}", TIMEOUT_S)


def test_a_message_that_a_command_cannot_be_given_does_not_end_the_others() -> None:
    way = delivery.opened("cat")
    with pytest.raises(Undelivered, match=r"^UnicodeEncodeError$") as failed:
        way.send(MESSAGE, "\ud800")
    assert not failed.value.may_pass


# Who learns what.


@pytest.fixture
def resolved(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names that the resolver was asked for."""
    asked: list[str] = []
    resolve: Callable[..., Any] = socket.getaddrinfo

    def spy(host: str, *args: Any, **options: Any) -> Any:
        asked.append(str(host))
        return resolve(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", spy)
    return asked


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("me:zq7pass", "me:zq7pass"),
        ("me:p%40ss%2Fzq7%3A%0d%0a", "me:p@ss/zq7:\r\n"),
        ("me:p@zq7", "me:p@zq7"),
        ("me", "me:"),
        (":zq7pass", ":zq7pass"),
        ("m%C3%A9:zq7", "mé:zq7"),
    ],
)
def test_a_user_and_a_password_are_sent_to_the_server_and_to_nobody_else(
    written: str, meant: str, resolved: list[str]
) -> None:
    with peer(OK) as server:
        send(server.url.replace("//", f"//{written}@"))
        (heard,) = server.heard
    head = heard.decode().split("\r\n")
    assert f"Authorization: Basic {base64.b64encode(meant.encode()).decode()}" in head
    assert f"Host: 127.0.0.1:{server.port}" in head
    assert head[0] == f"POST /{SECRET} HTTP/1.1"
    assert resolved == ["127.0.0.1"]


def test_without_a_user_there_is_no_authorization() -> None:
    with peer(OK) as server:
        send(server.url.replace("//", "//@"))
        assert b"Authorization" not in server.heard[0]


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_to_another_host_carries_nothing_there(code: int) -> None:
    with peer(OK) as other:
        moved = f"HTTP/1.1 {code} Moved\r\nLocation: {other.url}\r\nContent-Length: 0\r\n\r\n".encode()
        with (
            peer(moved) as server,
            pytest.raises(Undelivered, match=rf"^it answers {code}, which would lead elsewhere$"),
        ):
            send(server.url.replace("//", "//me:zq7pass@"))
        assert other.heard == []


ANSWERS = {
    "refused": [b"HTTP/1.1 401 zq7secret\r\nContent-Length: 8\r\n\r\nzq7secret"],
    "no HTTP": [b"zq7secret zq7pass\r\n\r\n"],
    "hung up": [],
    "moved": [b"HTTP/1.1 302 zq7\r\nLocation: ftp://me:zq7pass@host/zq7secret\r\n\r\n"],
}


@pytest.mark.parametrize("how", ANSWERS)
def test_no_failure_shows_a_secret_anywhere(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, caplog: Any
) -> None:
    monkeypatch.setattr(delivery, "WAITS_S", ())
    with peer(*ANSWERS[how]) as server:
        url = f"{server.url}?token=zq7query".replace("//", "//me:zq7pass@")
        with sealegs.Watch(tmp_path / "a", notify=url) as watch:
            watch.see(0, loss=1.0)
            watch.note("alarm", step=0, text="step 0  ALARM", incident=1)
        assert main(["notify", url]) == 1
    (failure,) = [event for event in sealegs.open_run(tmp_path / "a").events if event.kind == "sink-failed"]
    assert f"did not arrive at the webhook at 127.0.0.1:{server.port}: " in failure.detail["reason"]
    said = capsys.readouterr()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"zq7" not in written
    assert "zq7" not in said.out + said.err + caplog.text + repr(watch)


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("https://me:123/zq7@host/hook", r"an @ after the host: write %2F for a / in a password"),
        ("https://me:zq7/pass@host/hook", r"no host, or a blank in it"),
        ("https://me:zq7pass@/hook", r"no host, or a blank in it"),
        ("https://me:zq7pass@host:zq7/hook", r"no host, or a blank in it"),
        ("https://me:zq7pass@host/\x01", r"no host, or a blank in it"),
        ("file:///etc/zq7", r"notify=file://\.\.\.: give the https:// address"),
        ("mail 'zq7", r"a quote in it has no end"),
    ],
)
def test_a_place_that_cannot_be_is_refused_without_its_secrets(where: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as told:
        delivery.opened(where)
    assert "zq7" not in str(told.value)
    assert "123" not in str(told.value)


def test_no_value_shows_the_place_that_it_holds() -> None:
    url = f"https://me:zq7pass@host/{SECRET}"
    assert "zq7" not in repr(Telemetry(notify=url)) + repr(Listeners(notify=url)) + repr(sealegs.Notify(url))
    assert "zq7" not in repr(delivery.opened(url)) + delivery.opened(url).shown


AT_THE_END = """
import threading
from sealegs.sinks.notify import Notifier
start = threading.Thread.start
notifier = Notifier("$HOOK")
notifier.start({"folder": "a"})
def refuse(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")
threading.Thread.start = refuse  # as some versions of Python do from here on
"""


def test_a_process_that_ends_and_starts_no_thread_any_more_still_says_so() -> None:
    with peer(OK) as server:
        environment = os.environ | {"HOOK": server.url.replace("127.0.0.1", "localhost")}
        subprocess.run([sys.executable, "-c", AT_THE_END], env=environment, check=True, timeout=60)
        assert b"ended without being closed" in server.heard[0]
