"""The dashboard in a real browser. Screenshots go to $SPLITSERVE_SCREENSHOTS, if that is set, to be looked at."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import overviews
from browser import PROGRAM, Browser
from page_server import PageServer
from router_harness import RouterProcess, Workers, write_model_dir
from splitserve.protocol.request import Role
from splitserve.router.admin.overview.dashboard import MAX_BYTES, page

needs_browser = pytest.mark.skipif(not PROGRAM, reason="needs Chromium (Debian: apt-get install chromium)")
SENTENCE = "document.querySelector('#sentence').innerText"
READY = "!document.querySelector('#content').hidden && document.querySelector('#workers').children.length > 0"
KEY = "a-key-for-the-page"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture
def served(browser: Browser) -> Iterator[Callable[..., PageServer]]:
    """Open the page before an overview."""
    started: list[PageServer] = []

    def serve(view: overviews.Overview) -> PageServer:
        started.append(PageServer(view))
        browser.messages.clear()
        browser.resize(1360, 1000)
        browser.prefer("light")
        browser.open(started[-1].url)
        browser.until(READY)
        return started[-1]

    yield serve
    browser.open("about:blank")
    for server in started:
        server.close()


def keep(browser: Browser, name: str) -> None:
    folder = os.environ.get("SPLITSERVE_SCREENSHOTS")
    if folder:
        browser.screenshot(Path(folder) / f"{name}.png")


def test_the_page_is_small_and_loads_nothing_from_elsewhere() -> None:
    body, headers = page()
    assert len(body) <= MAX_BYTES
    text = body.decode()
    assert "/*STYLE*/" not in text and "/*SCRIPT*/" not in text
    urls = text.replace("http://www.w3.org/", "")  # names of SVG's namespace
    assert "http://" not in urls and "https://" not in urls
    assert "default-src 'none'" in headers["content-security-policy"]


@needs_browser
def test_a_loaded_cluster_is_shown(browser: Browser, served: Callable[..., PageServer]) -> None:
    served(overviews.PLANTED["prefill_short"](overviews.healthy(1)))
    assert "Prefill is the bottleneck" in browser.run(SENTENCE)
    assert "scale prefill" in browser.text("#findings")
    shown = browser.text()
    for part in ("40,000", "reserved, empty", "cuda_ipc", "cached on decode", "possible: ", "Time to first token"):
        assert part in shown, part
    assert browser.run("document.querySelectorAll('#workers tbody tr').length") == 4
    assert browser.run("document.querySelectorAll('#slow .lane > div > i').length") > 4
    assert not browser.messages, browser.messages
    keep(browser, "loaded")
    browser.prefer("dark")
    keep(browser, "loaded-dark")


@needs_browser
def test_an_idle_cluster_is_shown(browser: Browser, served: Callable[..., PageServer]) -> None:
    served(overviews.idle())
    assert browser.run(SENTENCE).startswith("Idle: no requests")
    assert "NaN" not in browser.text() and "undefined" not in browser.text()
    assert not browser.messages, browser.messages
    keep(browser, "idle")


@needs_browser
def test_64_workers_and_a_phone(browser: Browser, served: Callable[..., PageServer]) -> None:
    served(overviews.large())
    assert browser.run("document.querySelectorAll('#workers tbody tr').length") == 64
    keep(browser, "64-workers")
    browser.resize(390, 840, is_phone=True)
    wide = browser.run("document.documentElement.scrollWidth")
    assert wide <= 390, f"the page is {wide} pixels wide on a phone"
    keep(browser, "phone")


@needs_browser
def test_draining_and_broken_workers_are_shown(browser: Browser, served: Callable[..., PageServer]) -> None:
    served(overviews.broken())
    workers = browser.text("#workers")
    assert "draining" in workers and "open, 12 s" in workers and "lost, silent for 21.0 s" in workers
    assert "7 failed attempts" in workers and "is sick" in browser.run(SENTENCE)
    keep(browser, "broken")


@needs_browser
def test_what_a_worker_says_is_text(browser: Browser, served: Callable[..., PageServer]) -> None:
    view = overviews.healthy(2)
    served(overviews.with_worker(view, "prefill-0", engine_id="<img src=x onerror=alert(1)>", machine="<b>here</b>"))
    assert "<img src=x onerror=alert(1)>" in browser.text("#workers")
    assert browser.run("document.querySelectorAll('#content img, #workers b').length") == 0


@needs_browser
def test_new_figures_keep_the_focus_and_a_silent_router_is_said(
    browser: Browser, served: Callable[..., PageServer]
) -> None:
    server = served(overviews.healthy(3))
    browser.run("document.querySelector('#slow li:nth-child(3) button').focus()")
    browser.press("Enter", "\r")
    browser.until("document.querySelector('#slow li:nth-child(3) button').getAttribute('aria-current') === 'true'")
    server.view = overviews.PLANTED["decode_kv"](overviews.healthy(3))
    browser.until(f"{SENTENCE}.startsWith('Decode has no KV memory')")
    assert browser.run("document.activeElement.dataset.key") == "slow-request-2"
    assert "request-2" in browser.run("document.querySelector('#slow .lanes').getAttribute('aria-label')")
    server.view = None
    browser.until("!document.querySelector('#trouble').hidden")
    assert "No figures from the router" in browser.text("#trouble")


@needs_browser
def test_the_keyboard_reaches_everything_and_a_screen_reader_has_names(
    browser: Browser, served: Callable[..., PageServer]
) -> None:
    served(overviews.PLANTED["cold_prefix"](overviews.healthy(4)))
    browser.press("Tab")
    assert browser.text(":focus") == "Skip to the verdict"
    reached = set()
    for _ in range(40):
        browser.press("Tab")
        reached.add(browser.run("document.activeElement.id || document.activeElement.dataset.key || ''"))
    assert {"pause", "whole", "Workers", "slow-request-0", "spans-summary"} <= reached
    names = browser.names_by_role()
    headings = names["heading"]
    assert headings[0].startswith("Splitserve demo") and {"Bottleneck", "Prefill queue", "Workers"} <= set(headings)
    assert names["main"] and names["status"] and "Workers" in names["table"]
    assert all(names["button"]) and all(names["image"]), "buttons and figures without a name"
    assert any(name.startswith("Decode KV: used") for name in names["image"])


@needs_browser
@pytest.mark.parametrize(
    ("keys", "opening", "name"),
    [
        ({"api_key": KEY}, KEY, "API key"),
        ({"admin_key": KEY}, KEY, "admin key"),
        ({"api_key": "a-key-of-clients", "admin_key": KEY}, KEY, "admin key"),
    ],
    ids=["api", "admin", "both"],
)
def test_the_page_asks_for_the_key_that_opens_it(
    browser: Browser, tmp_path: Path, keys: dict[str, str], opening: str, name: str
) -> None:
    write_model_dir(tmp_path / "tiny")
    router = RouterProcess(tmp_path / "tiny", **keys)
    workers = Workers(router.membership)
    try:
        workers.start("prefill-0", Role.PREFILL)
        workers.start("decode-0", Role.DECODE)
        browser.messages.clear()
        browser.open(f"{router.url}/dashboard")
        browser.until("!document.querySelector('#key-form').hidden")
        assert browser.text("#key-name").lower() == name.lower()
        assert f"needs the cluster's {name}" in browser.text("#key-why") and "decode-0" not in browser.text()
        keep(browser, f"asks-for-{name.replace(' ', '-')}")
        for wrong in ("wrong", *(key for key in keys.values() if key != opening)):
            browser.type(wrong)
            browser.press("Enter", "\r")
            browser.until("!sessionStorage.length && document.querySelector('#key-why').innerText.includes('refuses')")
            assert f"is not the cluster's {name}" in browser.text("#key-why")
            keep(browser, f"refuses-{name.replace(' ', '-')}")
        browser.type(opening)
        browser.press("Enter", "\r")
        browser.until(READY)
        assert "decode-0" in browser.text("#workers") and browser.run("document.querySelector('#key-form').hidden")
        assert all("401" in message or "403" in message for message in browser.messages), browser.messages
        assert KEY not in browser.run("document.cookie + JSON.stringify(localStorage)")
    finally:
        browser.open("about:blank")
        workers.close()
        router.stop()
