"""The page of the patched server in a real browser: it changes while tokens are decoded, fits any width, works by keyboard."""

import re
import threading

import pytest

import paths
from browser import CHROMIUM, open_page
from patched import needs_build
from patched_server import KEY, N_LAYERS, SLOTS, complete, serve_with_cache
from processes import wait_for
from server import Server

pytestmark = [needs_build, pytest.mark.skipif(not CHROMIUM, reason="chromium is missing: apt-get install chromium")]
SCREENSHOTS = paths.REPOSITORY / "build/tests/page"
SIZES = {400: 900, 1600: 1000}
N_POINTS = 4
# WCAG's least contrast of text.
LEAST_CONTRAST = 4.5
CONTRAST = """(() => {
  const luminance = (color) => {
    const [r, g, b] = color.match(/[\\d.]+/g).map((n) => n / 255).map((n) => n <= 0.03928 ? n / 12.92 : ((n + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const back = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!color.startsWith("rgba(0, 0, 0, 0")) return color;
    }
  };
  const all = [...document.querySelectorAll("h1, h2, p, dt, dd, th, td, button, select, label")].filter((e) => e.innerText);
  return Math.min(...all.map((e) => {
    const [a, b] = [luminance(getComputedStyle(e).color), luminance(back(e))].sort((x, y) => x - y);
    return (b + 0.05) / (a + 0.05);
  }));
})()"""


def number(text: str) -> int:
    return int(re.sub(r"\D", "", text) or 0)


def wait_until_shown(page) -> None:
    wait_for("the page shows layers", lambda: page.evaluate("document.querySelectorAll('#layers tr').length") == N_LAYERS)


def in_background(server: Server, n: int) -> threading.Thread:
    thread = threading.Thread(target=complete, args=(server, n))
    thread.start()
    return thread


def test_the_page_follows_what_is_decoded(tmp_path, own_profile):
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    with serve_with_cache(tmp_path, own_profile) as server, open_page(tmp_path) as page:
        complete(server, 40)
        page.open(f"{server.url}/moe")
        wait_until_shown(page)
        before, map_before = number(page.text("#requests")), page.evaluate("document.querySelector('#map').toDataURL()")
        decoding = in_background(server, 1800)
        wait_for("more requests", lambda: number(page.text("#requests")) > before)
        wait_for("a hit rate of now", lambda: "%" in page.text("#now"))
        wait_for("another map", lambda: page.evaluate("document.querySelector('#map').toDataURL()") != map_before)
        assert page.text("#rate").endswith(" %") and page.text("#state").startswith("On FAKE0")
        assert page.text("#resident") == f"{N_LAYERS * SLOTS} of {N_LAYERS * SLOTS}"
        assert str(own_profile) in page.text("#settings")
        wait_for("some history", lambda: page.evaluate("state.history.length") >= N_POINTS)
        for width, height in SIZES.items():
            for scheme in ("light", "dark"):
                page.look(width, height, scheme)
                assert page.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out"
                assert page.evaluate(CONTRAST) >= LEAST_CONTRAST, scheme
                page.screenshot(SCREENSHOTS / f"{width}-{scheme}.png")
        decoding.join()
        assert {url.split("/moe")[0] for url in page.requested} == {server.url}, "no outside requests"
        server.stop()


def test_the_page_works_by_keyboard(tmp_path, own_profile):
    with serve_with_cache(tmp_path, own_profile) as server, open_page(tmp_path) as page:
        complete(server, 40)
        page.look(1600, 1000, "light")
        page.open(f"{server.url}/moe")
        wait_until_shown(page)
        reached = []
        for _ in range(7):
            page.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", reached
            if reached[-1] == "map":
                break
        assert reached[:3] == ["mode", "reset", "pause"] and reached[-1] == "map", reached
        page.press("ArrowDown")
        page.press("ArrowRight")
        assert page.text("#told").startswith("Layer 1, expert 1: ")
        page.press("End")
        assert page.text("#told").startswith("Layer 1, expert 31: ")
        page.evaluate("document.querySelector('#reset').focus()")
        page.press("Enter")
        page.evaluate("document.querySelector('#reset').click()")
        wait_for("counting begins anew", lambda: number(page.text("#requests")) == 0)
        server.stop()


def test_the_page_asks_for_the_key_and_says_what_is_wrong(tmp_path, own_profile):
    with serve_with_cache(tmp_path, own_profile, "--api-key", KEY) as server, open_page(tmp_path) as page:
        page.open(f"{server.url}/moe")
        wait_for("it asks", lambda: page.evaluate("getComputedStyle(document.querySelector('#key')).display") == "flex")
        assert page.text("#problem") == "Invalid API Key"
        page.evaluate(f"document.querySelector('#secret').value = {KEY!r}; document.querySelector('#key button').click()")
        wait_until_shown(page)
        assert page.text("#problem") == ""
        server.stop()
        wait_for("it says so", lambda: page.text("#problem") == "The server does not answer.")
