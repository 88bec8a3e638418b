"""The console in a real browser: by keyboard, on a narrow screen, and without a complaint."""

from collections.abc import Iterator

import pytest

from tests.console import chromium
from tests.console.chromium import Chromium
from tests.console.conftest import Client
from tests.console.test_pages import give_up
from tests.world import World, envelope

PROGRAM = chromium.program()
PATHS = (
    *("/", "/failures", "/failures/1", "/failures/2", "/kinds", "/notifications", "/privacy"),
    *("/confirm/requeue?id=1", "/confirm/resolve?topic=orders/create", "/failures?topic=none"),
)
LONG = "w" * 300

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="Chromium is missing: apt-get install chromium"
)


@pytest.fixture
def browser(world: World, client: Client) -> Iterator[Chromium]:
    """A browser that came in by the link, and failed events to look at."""
    assert PROGRAM
    give_up(world, 1)
    made = envelope(topic=LONG, shop_domain=LONG + ".myshopify.com")
    world.core.failures.record(made, RuntimeError(LONG), LONG)
    world.core.incidents.pause(LONG, actor="jane", reason=LONG)
    with Chromium(PROGRAM) as browser:
        browser.go(client.links[-1])
        yield browser


def at(browser: Chromium, client: Client, path: str) -> None:
    browser.go(f"http://127.0.0.1:{client.port}{path}")


def tab_to(browser: Chromium, text: str) -> None:
    """Presses Tab until what has the focus says that."""
    for _ in range(60):
        browser.press("Tab")
        if browser.value("document.activeElement.innerText") == text:
            return
    pytest.fail(f"Tab does not lead to {text}")


def test_an_event_is_requeued_with_the_keyboard_alone(world, client, browser):
    at(browser, client, "/failures?status=failed")
    for text in ("1", "Requeue…"):
        tab_to(browser, text)
        browser.press("Enter")
        browser.settle()
    assert browser.value("document.activeElement.id") == "reason"
    browser.write("the column is back")
    browser.press("Enter")
    browser.settle()
    assert browser.value("document.querySelector('[role=status]').innerText") == (
        "1 failed event requeued"
    )
    assert world.failed_events()[0]["status"] == "pending"
    (_, action) = world.app("select action, reason from subscriber_operatoraction order by id")
    assert action == {"action": "requeue", "reason": "the column is back"}


def test_the_first_tab_skips_the_navigation(client, browser):
    at(browser, client, "/")
    tab_to(browser, "Skip to the content")
    browser.press("Enter")
    assert browser.value("document.activeElement.id") == "main"


def test_what_has_the_focus_is_seen(client, browser):
    at(browser, client, "/failures")
    outline = "getComputedStyle(document.activeElement).outline"
    seen = 0
    browser.press("Tab")
    while browser.value("document.activeElement !== document.body"):
        assert "solid 3px" in browser.value(outline)
        seen += 1
        browser.press("Tab")
    assert seen > 20


@pytest.mark.parametrize("width", [360, 700, 1280])
def test_no_page_scrolls_sideways(client, browser, width):
    browser.look(width=width)
    for path in PATHS:
        at(browser, client, path)
        over = browser.value("document.documentElement.scrollWidth - window.innerWidth")
        assert over <= 0, path


def test_the_browser_has_nothing_to_complain_of(client, browser):
    for path in PATHS:
        at(browser, client, path)
    assert browser.complaints == []


def test_every_field_has_a_label_and_every_table_headers(client, browser):
    for path in PATHS:
        at(browser, client, path)
        nameless = "[...document.querySelectorAll('input:not([type=hidden]), select')]"
        assert browser.value(f"{nameless}.filter(each => !each.labels.length).length") == 0
        assert browser.value("document.querySelectorAll('th:not([scope])').length") == 0
        assert browser.value("document.querySelectorAll('h1').length") == 1


CONTRAST = """
(() => {
  const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = colour => { probe.clearRect(0, 0, 1, 1); probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1); return [...probe.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 :
    ((v + 0.055) / 1.055) ** 2.4).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const under = node => { for (; node; node = node.parentElement) {
    const back = rgb(getComputedStyle(node).backgroundColor); if (back[3]) return back; }
    return [255, 255, 255]; };
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), poor = [];
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !node.getClientRects().length) continue;
    const [a, b] = [light(rgb(getComputedStyle(node).color)), light(under(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${walk.currentNode.data.trim()}`);
  }
  return poor;
})()"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_all_text_stands_out_from_what_is_under_it(client, browser, dark):
    browser.look(width=1280, dark=dark)
    for path in PATHS:
        at(browser, client, path)
        assert browser.value(CONTRAST) == [], path
