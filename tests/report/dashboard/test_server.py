"""Who gets an answer from the live page, and how much of it anybody can take: with raw sockets."""

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bokeh.util.token import generate_jwt_token, generate_session_id, get_token_payload
from tests.report.dashboard.live_page import Answer, Client, ask, get, root, served
from tests.report.runs import row, write

from sealegs.errors import ConfigError
from sealegs.report.dashboard import live, server
from sealegs.report.dashboard.server import LiveServer

pytestmark = pytest.mark.xdist_group("live page")  # one server answers most

WEBSOCKET = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)
PLACES = (
    "",
    "ws",
    "autoload.js?bokeh-autoload-element=x",
    "metadata",
    "static/js/bokeh.min.js",
    "static/extensions/x/y.js",
    "runs/1/incidents/1/postmortem.html",
    "nothing",
)


@pytest.fixture(scope="module")
def night(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run with one panel and one post-mortem."""
    folder = write(
        tmp_path_factory.mktemp("runs") / "night",
        ({name: row(step)[name] for name in ("step", "loss")} for step in range(30)),
    )
    (folder / "incidents" / "1").mkdir(parents=True)
    (folder / "incidents" / "1" / "postmortem.html").write_text("<title>Post-mortem</title>")
    return folder


@pytest.fixture(scope="module")
def page(night: Path) -> Iterator[LiveServer]:
    with served(night) as page:
        yield page


def paths(page: LiveServer) -> list[str]:
    return [
        *(root(page) + place for place in PLACES),
        "/",
        "/favicon.ico",
        "/ws",
        "/static/js/bokeh.min.js",
        "/robots.txt",
    ]


def is_nothing(answer: Answer) -> bool:
    """Whether an answer has nothing of the page in it."""
    return answer.status in (0, 400, 403, 405) and len(answer.body) < 200


def test_the_link_leads_to_the_page_and_all_that_it_needs(page: LiveServer) -> None:
    shown = get(page, "")
    assert shown.status == 200
    needed = re.findall(rf'(?:src|href)="({root(page)}static/[^"]+)"', shown.body.decode())
    assert needed
    for path in needed:
        assert ask(page, f"GET {path} HTTP/1.1", f"Host: localhost:{page.port}").status == 200, path
    assert get(page, "runs/1/incidents/1/postmortem.html").body == b"<title>Post-mortem</title>"
    assert get(page, "nothing").status == 404


FOREIGN = (
    "evil.example:{port}",
    "evil.example",
    "127.0.0.1",
    "127.0.0.1:{other}",
    "127.0.0.1.:{port}",
    "localhost.:{port}",
    "user@127.0.0.1:{port}",
    "127.0.0.1:{port}@evil.example",
    "127.0.0.1:{port}.evil.example",
    "127.0.0.1:{port},evil.example",
    "127.0.0.1:0{port}",
    "127.1:{port}",
    "0x7f000001:{port}",
    "2130706433:{port}",
    "0.0.0.0:{port}",
    "[::1]:{port}",
    "[::ffff:127.0.0.1]:{port}",
    "",
)


def test_a_request_under_another_name_is_refused_by_every_handler_although_it_has_the_key(page: LiveServer) -> None:
    for path in paths(page):
        for name in FOREIGN:
            host = name.format(port=page.port, other=page.port + 1)
            answer = ask(page, f"GET {path} HTTP/1.1", f"Host: {host}", f"Origin: http://{host}", *WEBSOCKET)
            assert is_nothing(answer), (path, host)
            assert is_nothing(ask(page, f"GET {path} HTTP/1.1", f"Host: {host}")), (path, host)


@pytest.mark.parametrize(
    "lines",
    [
        ["GET {root} HTTP/1.1"],
        ["GET {root} HTTP/1.0"],
        ["GET {root} HTTP/1.1", "Host: {own}", "Host: evil.example"],
        ["GET {root} HTTP/1.1", "Host: evil.example", "Host: {own}"],
        ["GET {root} HTTP/1.1", "Host: {own}", "Host: {own}"],
        ["GET http://evil.example{root} HTTP/1.1", "Host: {own}"],
        ["GET http://{own}{root} HTTP/1.1", "Host: {own}"],
        ["GET http://{own}{root} HTTP/1.1", "Host: evil.example"],
        ["GET {root} HTTP/1.1", "Host : {own}"],
        ["GET {root} HTTP/1.1", "X: y", " Host: {own}"],
        ["GET {root} HTTP/1.1", "Host: evil.example", "X-Forwarded-Host: {own}", "Forwarded: host={own}"],
        ["CONNECT {own} HTTP/1.1", "Host: {own}"],
        ["OPTIONS * HTTP/1.1", "Host: {own}"],
    ],
)
def test_a_request_of_which_the_name_is_in_doubt_is_refused(page: LiveServer, lines: list[str]) -> None:
    own = f"127.0.0.1:{page.port}"
    assert is_nothing(ask(page, *(line.format(root=root(page), own=own) for line in lines)))


def test_without_the_key_nothing_is_there_not_even_a_missing_file(page: LiveServer) -> None:
    key = root(page).strip("/")
    wrong = ["0" * 32, key[:-1], f"{key}0", key.upper(), f"%{ord(key[0]):x}{key[1:]}", f"x/../{key}", f"./{key}"]
    wrong += [f"/{key}", f"?token={key}", f"static/../{key}", "\xe9", f"{key}%2f", f"{key}\\", f"{key};"]
    for each in wrong:
        for place in PLACES:
            answer = ask(page, f"GET /{each}/{place} HTTP/1.1", f"Host: 127.0.0.1:{page.port}")
            assert is_nothing(answer), (each, place)
    answer = ask(page, "GET / HTTP/1.1", f"Host: 127.0.0.1:{page.port}")
    assert answer.status == 403
    assert answer.body.startswith(b"Open the whole link that `sealegs dashboard --serve` has printed")


@pytest.fixture(scope="module")
def session(page: LiveServer) -> str:
    """The session of a page, by which its websocket is opened."""
    return session_of(page)


def session_of(page: LiveServer, *headers: str) -> str:
    found = re.search(r'"token":"([^"]+)"', get(page, "", *headers).body.decode())
    assert found is not None
    return found[1]


def upgrade(client: Client, page: LiveServer, session: str, *headers: str) -> Answer:
    client.say(f"GET {root(page)}ws HTTP/1.1", *headers, *WEBSOCKET, f"Sec-WebSocket-Protocol: bokeh, {session}", "")
    return client.answer()


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_the_websocket_is_opened_to_the_page_itself(page: LiveServer, session: str, name: str) -> None:
    own = f"{name}:{page.port}"
    with Client(page) as client:
        assert upgrade(client, page, session, f"Host: {own}", f"Origin: http://{own}").status == 101


@pytest.mark.parametrize(
    "origin",
    [
        ["http://evil.example"],
        ["http://evil.example:{port}"],
        ["http://127.0.0.1:{other}"],
        ["http://127.0.0.1"],
        ["http://localhost:{port}"],  # while the page was opened as 127.0.0.1
        ["https://127.0.0.1:{port}"],
        ["http://127.0.0.1:{port}.evil.example"],
        ["http://127.0.0.1:{port}@evil.example"],
        ["http://127.0.0.1:{port}/"],
        ["null"],
        [""],
        [],
        ["http://127.0.0.1:{port}", "http://evil.example"],
        ["http://127.0.0.1:{port}", "http://127.0.0.1:{port}"],
    ],
)
def test_the_websocket_is_closed_to_every_other_page(
    page: LiveServer, session: str, origin: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOKEH_ALLOW_WS_ORIGIN", "*")  # what somebody needed for another server
    headers = [f"Origin: {each.format(port=page.port, other=page.port + 1)}" for each in origin]
    with Client(page) as client:
        assert is_nothing(upgrade(client, page, session, f"Host: 127.0.0.1:{page.port}", *headers))


def test_settings_for_other_servers_of_bokeh_change_nothing(night: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOKEH_ALLOW_WS_ORIGIN", "example.org")
    monkeypatch.setenv("BOKEH_RESOURCES", "cdn")
    monkeypatch.setenv("BOKEH_SIGN_SESSIONS", "no")
    with served(night) as page, opened(page) as shown:
        assert answers_pings(shown)
        assert set(re.findall(r'src="([^"]{34})', get(page, "").body.decode())) == {root(page)}


def test_a_session_that_this_server_did_not_make_is_not_opened(page: LiveServer) -> None:
    forged = generate_jwt_token(generate_session_id())
    own = f"127.0.0.1:{page.port}"
    with Client(page) as client:
        upgrade(client, page, forged, f"Host: {own}", f"Origin: http://{own}")
        assert b"ACK" not in client.heard()
        assert client.heard() == b"", "closed"


def test_a_session_has_nothing_of_what_the_browser_says_about_its_user(page: LiveServer) -> None:
    told = get_token_payload(session_of(page, "Cookie: other=of-another-port", "User-Agent: of-the-user"))
    assert "session_expiry" in told
    assert not {"of-another-port", "of-the-user"} & set(re.findall(r"[\w-]+", str(told)))


def test_every_answer_keeps_other_sites_away(page: LiveServer) -> None:
    answers = {path: ask(page, f"GET {path} HTTP/1.1", f"Host: 127.0.0.1:{page.port}") for path in paths(page)}
    answers["foreign"] = ask(page, f"GET {root(page)} HTTP/1.1", "Host: evil.example", "Origin: http://evil.example")
    assert {answer.status for answer in answers.values()} == {200, 400, 403, 404}
    for path, answer in answers.items():
        assert answer.headers["X-Content-Type-Options"] == "nosniff", path
        assert answer.headers["Referrer-Policy"] == "no-referrer", path
        assert answer.headers["X-Frame-Options"] == "DENY", path
        assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin", path
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"], path
        assert not [name for name in answer.headers if name.startswith("Access-Control")], path
    policy = answers[root(page)].headers["Content-Security-Policy"]
    (scripts,) = [part for part in policy.split("; ") if part.startswith("script-src")]
    assert re.fullmatch(r"script-src 'nonce-[0-9a-f]{32}' 'unsafe-eval'", scripts)
    file = answers[f"{root(page)}runs/1/incidents/1/postmortem.html"].headers["Content-Security-Policy"]
    assert "script-src" not in file
    assert file.startswith("default-src 'none'")


@pytest.fixture
def strange(tmp_path: Path) -> Iterator[tuple[LiveServer, Path]]:
    """A run folder of a stranger, and its server."""
    folder = write(tmp_path / "strange", [{"step": 0, "loss": 1.0}])
    (folder / "incidents" / "1").mkdir(parents=True)
    with served(folder) as page:
        yield page, folder / "incidents"


def test_only_plain_files_of_the_incidents_are_shown(strange: tuple[LiveServer, Path], tmp_path: Path) -> None:
    page, incidents = strange
    (tmp_path / "secret.md").write_text("secret")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "secret.md").write_text("secret")
    (incidents / "1" / "link.md").symlink_to(tmp_path / "secret.md")
    (incidents / "2").symlink_to(tmp_path)
    (incidents / "3").mkdir()
    (incidents / "3" / "within").symlink_to(tmp_path / "7")
    os.mkfifo(incidents / "1" / "fifo.md")
    (incidents / "1" / "folder.md").mkdir()
    with (incidents / "1" / "huge.md").open("wb") as file:
        file.truncate(server.MOST_FILE_BYTES + 1)
    (incidents / "1" / "plain.md").write_text("plain")
    for path in (
        *("1/link.md", "2/secret.md", "3/within/secret.md", "1/fifo.md", "1/folder.md", "1/huge.md"),
        *("1/nothing.md", "1/../1/plain.md", "1/%2e%2e/1/plain.md", "../manifest.json", "%2e%2e/manifest.json"),
        *("1//plain.md", "1/./plain.md", "1/plain.md%00", "1/plain.md/", "/etc/passwd", "1/.hidden.md"),
    ):
        answer = get(page, f"runs/1/incidents/{path}")
        assert (answer.status, b"secret" in answer.body) == (404, False), path
    shown = get(page, "runs/1/incidents/1/plain.md")
    assert (shown.status, shown.headers["Content-Type"], shown.body) == (200, "text/plain; charset=utf-8", b"plain")


def test_a_folder_of_incidents_that_is_a_link_shows_nothing(strange: tuple[LiveServer, Path], tmp_path: Path) -> None:
    page, incidents = strange
    (tmp_path / "elsewhere" / "1").mkdir(parents=True)
    (tmp_path / "elsewhere" / "1" / "secret.md").write_text("secret")
    incidents.rename(tmp_path / "before")
    incidents.symlink_to(tmp_path / "elsewhere")
    assert get(page, "runs/1/incidents/1/secret.md").status == 404


def test_an_error_is_logged_without_the_key(
    strange: tuple[LiveServer, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("our own mistake")

    page, _ = strange
    monkeypatch.setattr(live, "draw", fail)
    assert get(page, "").status == 500
    assert "our own mistake" in caplog.text
    assert "GET /.../" in caplog.text
    assert root(page).strip("/") not in caplog.text


def test_without_a_free_port_it_says_so(night: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(server, "PORTS", range(port, port + 1))
        with pytest.raises(ConfigError, match=rf"^--serve: the ports {port} to {port} are all in use; end another"):
            live.server_of(live.LiveRuns([(str(night), "night")], lambda _: None))


# How much anybody can take.


@pytest.fixture
def narrow(night: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    """A server with little room, which cuts nobody off for the time that passes."""
    monkeypatch.setattr(server, "MOST_SOCKETS", 8)
    monkeypatch.setattr(server, "MOST_PAGES", 1)
    monkeypatch.setattr(server, "IDLE_S", 1000.0)
    monkeypatch.setattr(server, "MOST_MESSAGE_BYTES", 1000)
    with served(night) as page:
        yield page


@pytest.fixture
def impatient(night: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(server, "IDLE_S", 0.2)
    with served(night) as page:
        yield page


@pytest.mark.parametrize(
    "lines", [[], ["GET / HTTP/1.1"], ["POST / HTTP/1.1", "Host: {own}", "Content-Length: 9", "", ""]]
)
def test_who_says_nothing_or_does_not_come_to_an_end_is_cut_off(impatient: LiveServer, lines: list[str]) -> None:
    with Client(impatient) as client:
        client.say(*(line.format(own=f"127.0.0.1:{impatient.port}") for line in lines))
        assert client.answer().status == 0


def test_a_header_that_trickles_in_has_the_time_of_one_header(impatient: LiveServer) -> None:
    with Client(impatient) as client:
        client.say("GET / HTTP/1.1")
        client.socket.settimeout(0.05)
        for _ in range(1000):
            client.socket.sendall(b"X")
            try:
                assert client.socket.recv(100) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                pass
            return
    raise AssertionError("it is still listening")


@pytest.mark.parametrize(
    "lines",
    [
        [f"X: {'x' * (server.MOST_HEADER_BYTES + 1)}"],
        [*(f"X-{number}: x" for number in range(server.MOST_HEADER_BYTES // 5))],
        [f"Content-Length: {server.MOST_BODY_BYTES + 1}", "", "x" * (server.MOST_BODY_BYTES + 1)],
        ["Content-Length: 99999999999999999999"],
        ["Transfer-Encoding: chunked", "", f"{server.MOST_BODY_BYTES + 1:x}", "x" * (server.MOST_BODY_BYTES + 1), "0"],
    ],
)
def test_a_request_that_is_too_large_is_not_read(page: LiveServer, lines: list[str]) -> None:
    with Client(page) as client:
        try:
            client.say(f"POST {root(page)} HTTP/1.1", f"Host: 127.0.0.1:{page.port}", *lines, "")
        except ConnectionError:
            return  # it has hung up already
        assert client.answer().status in (0, 400)


def opened(page: LiveServer) -> Client:
    """The websocket of a page."""
    session, client, own = session_of(page), Client(page), f"127.0.0.1:{page.port}"
    assert upgrade(client, page, session, f"Host: {own}", f"Origin: http://{own}").status == 101
    return client


def frame(opcode: int, content: bytes) -> bytes:
    """A message of a browser, masked with zeros."""
    length = bytes([len(content)]) if len(content) < 126 else bytes([126]) + len(content).to_bytes(2, "big")
    return bytes([0x80 | opcode, 0x80 | length[0]]) + length[1:] + bytes(4) + content


def heard_until(client: Client, words: bytes) -> bytes:
    """What comes until these words, or until the end."""
    got = b""
    while words not in got and (more := client.heard()):
        got += more
    return got


def answers_pings(client: Client) -> bool:
    client.socket.sendall(frame(0x9, b"still there?"))
    return b"still there?" in heard_until(client, b"still there?")


def test_idle_strangers_make_room_for_each_other_and_never_take_that_of_a_page(narrow: LiveServer) -> None:
    with opened(narrow) as shown:
        strangers = [Client(narrow) for _ in range(40)]
        for stranger in strangers[:30]:
            assert stranger.heard() == b"", "cut off"
        assert get(narrow, "static/js/bokeh.min.js").status == 200
        assert answers_pings(shown)
        for stranger in strangers:
            stranger.socket.close()


def test_where_all_the_room_is_of_pages_one_more_is_turned_away(narrow: LiveServer) -> None:
    with opened(narrow) as shown:
        kept = [Client(narrow) for _ in range(7)]
        for each in kept:
            each.say(f"GET {root(narrow)}nothing HTTP/1.1", f"Host: 127.0.0.1:{narrow.port}", "")
            assert each.answer().status == 404
        with Client(narrow) as late:
            assert late.heard() == b""
        assert answers_pings(shown)
        for each in kept:
            each.socket.close()


def test_a_page_too_many_is_told_so(narrow: LiveServer) -> None:
    with opened(narrow) as shown:
        answer = get(narrow, "")
        assert (answer.status, answer.body) == (429, b"1 pages are open: close one, and load again in a minute.\n")
        assert answers_pings(shown)


def test_a_message_too_large_ends_its_websocket(narrow: LiveServer) -> None:
    with opened(narrow) as shown:
        shown.socket.sendall(frame(0x1, b"x" * 1001))
        assert b"message too big" in heard_until(shown, b"message too big")


def test_a_page_that_does_not_say_that_it_is_there_is_ended(night: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PING_S", 0.2)
    with served(night) as page, opened(page) as shown:
        assert b"ping timed out" in heard_until(shown, b"ping timed out")
