"""The page in a browser, served by a gateway: what it shows, what it asks for, and what it never tells."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from servers import respond, serving
from starlette.applications import Starlette
from starlette.responses import HTMLResponse
from starlette.routing import Route
from test_page_timeline import ACCEPTED, ENDED, Teller

import browser
import page_picture
from toolgap.gateway.app import application
from toolgap.gateway.config import Config
from toolgap.gateway.page import Timeline, routes
from toolgap.gateway.page.routes import HEADERS
from toolgap.gateway.sessions import Sessions

pytestmark = pytest.mark.slow

CLIENT = "alice-at-example"
PROMPT = "the secret of the prompt"


@pytest.fixture(scope="module")
def chromium() -> str:
    found = browser.find()
    if found is None:
        missing = "Chromium is missing; on Debian: apt-get install chromium"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)
    return found


async def upstream(scope: Any, receive: Any, send: Any) -> None:
    await respond(send, b"the upstream's")


@pytest.fixture(scope="module")
def upstream_url() -> Iterator[str]:
    with serving(upstream) as (url, _):
        yield url


class Asked:
    """A gateway that shows a timeline, and tells what of the page was asked for, and when."""

    def __init__(self, timeline: Timeline, upstream_url: str) -> None:
        self.app = application(Config(upstreams=(upstream_url,), restore=False, page=False))
        self.app.router.routes.extend(routes(timeline))
        self.paths: list[str] = []
        self.then: list[Any] = []
        """Called when an answer with a state is ready, one for each, before it is sent."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_then(message: Any) -> None:
            if message["type"] == "http.response.start" and scope["path"] == "/toolgap/state" and self.then:
                self.then.pop(0)()
            await send(message)

        if scope["type"] == "http":
            self.paths.append(scope["path"] + "?" + scope["query_string"].decode())
        await self.app(scope, receive, send_then)


def text(dom: str, identifier: str) -> str:
    found = re.search(rf'id="{identifier}"[^>]*>([^<]*)<', dom)
    assert found, f"no {identifier}"
    return found[1]


def test_a_run(chromium: str, upstream_url: str) -> None:
    """Rows, bars and sums are those of the timeline's state."""
    timeline = page_picture.made_up()
    app = Asked(timeline, upstream_url)
    with serving(app) as (url, _):
        page = httpx.get(f"{url}/toolgap/state").json()
        seen = browser.look(chromium, f"{url}/toolgap#range=300&open={page_picture.OPEN}")
    assert seen.console == []
    dom, sums = seen.dom, page["figures"]
    assert re.findall(r'data-key="([^"]+)"', dom) == page["keys"]
    gaps = [gap for one in page["conversations"] for gap in one["gaps"]]
    assert len(re.findall(r'class="gap ', dom)) == len(gaps) == sums["gaps"]
    assert len(re.findall(r'class="gap open"', dom)) == 2
    assert len(re.findall(r'class="gap unreturned"', dom)) == 1
    assert len(re.findall(r'class="start ', dom)) == sums["restores"]
    assert len(re.findall(r'class="refusal"', dom)) == sums["refused"] == 2
    fates = re.findall(r'data-fate="([^"]+)"', dom)
    assert len(fates) == sums["restores"]
    assert {fate: fates.count(fate) for fate in fates} == {
        "used": 14,
        "joined": 2,
        "wasted": 2,
        "undecided": 2,
        "nothing": 1,
    }
    assert text(dom, "landed") == f"{sums['landed_tokens']:,}"
    assert text(dom, "used") == f"{sums['used_tokens'] - sums['joined_tokens']:,}"
    assert text(dom, "joined") == f"{sums['joined_tokens']:,}"
    assert text(dom, "wasted") == f"{sums['wasted_tokens']:,}"
    assert text(dom, "undecided") == f"{sums['undecided_tokens']:,}"
    assert text(dom, "saved") == f"≈ {sums['saved_s']:.1f} s"
    assert "too_many_operations" in dom
    # The one that is opened, in full: a line for each restore and refusal.
    details = re.search(r"<tbody>(?:(?!</tbody>).)*web_fetch.*?</tbody>", dom)
    assert details
    assert details[0].count("<tr>") == 5
    # Nothing but its own files is asked for, and the favicon is not left to the upstream.
    names = {path.partition("?")[0] for path in app.paths}
    files = {f"/toolgap/{name}" for name in ("page.css", "page.js", "icon.svg", "state")}
    assert names - {"/toolgap/icon.svg"} == {"/toolgap", *files} - {"/toolgap/icon.svg"}


def test_it_is_live(chromium: str, upstream_url: str) -> None:
    """What happens while somebody looks is shown, and only that is sent."""
    tell = Teller(timeline := Timeline())
    at_s = 1_000_000.0

    def begin() -> None:
        tell.paused(at_s, "bash")
        tell.submitted(at_s + 1)

    def end() -> None:
        tell.known(at_s + 3.6)
        tell.returned(at_s + 10)
        tell.known(at_s + 10.5, replace(ENDED, used_tokens=800, used_after_s=9.1), final=True)

    app = Asked(timeline, upstream_url)
    app.then = [begin, end]
    with serving(app) as (url, _):
        seen = browser.look(chromium, f"{url}/toolgap", after_s=6.0)
    assert seen.console == []
    assert text(seen.dom, "used") == "800"
    assert text(seen.dom, "saved") == "≈ 2.0 s"
    asked = [path for path in app.paths if path.startswith("/toolgap/state")]
    assert asked[0] == "/toolgap/state?"
    assert re.fullmatch(r"/toolgap/state\?since=0&epoch=\w+", asked[1])
    assert re.fullmatch(r"/toolgap/state\?since=2&epoch=\w+", asked[2])


def test_nothing_yet(chromium: str, upstream_url: str) -> None:
    """Without a gap it says what to do."""
    with serving(Asked(Timeline(), upstream_url)) as (url, _):
        seen = browser.look(chromium, f"{url}/toolgap")
        assert seen.console == []
        assert re.search(r'<section id="empty" class="empty">', seen.dom)
        assert re.search(r'<section id="sums"[^>]* hidden', seen.dom)
        assert text(seen.dom, "openai-url") == f"export OPENAI_BASE_URL={url}/v1"


def test_names_and_prompts_are_not_shown(chromium: str, upstream_url: str) -> None:
    headers = {"x-session-id": CLIENT, "authorization": f"Bearer {CLIENT}"}
    request = {"messages": [{"role": "user", "content": PROMPT}], "user": CLIENT}
    key = Sessions().of("/v1/chat/completions", headers, request).key
    tell = Teller(timeline := Timeline(), key)
    tell.paused(0.0, '<img src="http://example.invalid/x" onerror="console.error(1)">')
    tell.submitted(0.0, replace(ACCEPTED, operation_id="</script><script>console.error(2)</script>"))
    tell.refused(0.0, "<b>code</b>")
    with serving(Asked(timeline, upstream_url)) as (url, _):
        seen = browser.look(chromium, f"{url}/toolgap#open={key}")
        state = httpx.get(f"{url}/toolgap/state").text
    # Texts are shown as they are, and run nothing.
    assert seen.console == []
    assert '&lt;img src="http://example.invalid/x"' in seen.dom
    assert "<img" not in seen.dom
    assert "&lt;b&gt;code" in seen.dom
    for secret in (CLIENT, PROMPT):
        assert secret not in seen.dom
        assert secret not in state


def test_a_picture_is_taken(chromium: str, tmp_path: Path) -> None:
    with page_picture.served(page_picture.made_up()) as url:
        browser.look(chromium, url, picture=tmp_path / "page.png", dark=True)
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_the_browser_tells_what_goes_wrong(chromium: str) -> None:
    """Or the checks above would pass whatever a page did."""
    wrong = "<script>console.error('wrong')</script><script>no()</script>"
    foreign = "<img src='http://example.invalid/x.png'><p style='color: red'>"
    pages = [
        Route("/wrong", lambda request: HTMLResponse(wrong)),
        Route("/foreign", lambda request: HTMLResponse(foreign + wrong, headers=HEADERS)),
    ]
    with serving(Starlette(routes=pages)) as (url, _):
        said = browser.look(chromium, f"{url}/wrong").console
        assert [line for line in said if "wrong" in line or "ReferenceError" in line] == said
        assert len(said) == 2
        # What the page's own headers forbid is said too: another host's files, styles and scripts within.
        said = browser.look(chromium, f"{url}/foreign").console
        assert len([line for line in said if "Content Security Policy" in line]) == len(said) == 4


# ---- its routes ----


def test_what_is_served(upstream_url: str) -> None:
    with serving(Asked(Timeline(), upstream_url)) as (url, _), httpx.Client(base_url=url) as client:
        for path in (
            "/toolgap",
            "/toolgap/state",
            "/toolgap/page.js",
            "/toolgap/page.css",
            "/toolgap/icon.svg",
        ):
            answer = client.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert client.post(path).status_code == 405
        for since in ("-1", "x", "9" * 40, "²", "1"):
            assert client.get("/toolgap/state", params={"since": since}).json()["version"] == 0
        # What is none of them is the upstream's.
        assert client.get("/toolgap/other").text == client.get("/v1/models").text == "the upstream's"
