"""`moe-hot report`: one file that opens in any browser, in windows narrow and wide."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from commands import SHIPPED, as_json, command, environment, prepare
from processes import run, stock_environment


@pytest.fixture
def here(tmp_path) -> Path:
    return prepare(tmp_path)


class Page(HTMLParser):
    """What a page asks for, and what it has."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.asked = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.asked += [value for name, value in attributes if name in ("src", "href", "srcset", "data", "xlink:href")]


@pytest.fixture
def report(here) -> Path:
    command(here, "report", "experts.json", "--trace", "routing.trace", "-o", "report.html")
    return here / "report.html"


def test_a_report_is_one_file_that_asks_for_nothing(here, report):
    text = report.read_text()
    page = Page(text)
    assert page.asked == [] and not re.search(r"https?:|url\(|@import|<script|<link", text)
    assert page.tags.count("figure") == 3 == page.tags.count("table") and page.tags.count("svg") == 3
    assert "prefers-color-scheme: dark" in text and 'name="viewport"' in text
    numbers = as_json(here, "report", "experts.json", "--trace", "routing.trace", "-o", "again.html")
    assert (here / "again.html").read_text() == text
    rates = {rates["name"]: [point["hit_rate"] for point in rates["points"]] for rates in numbers["hit_rates"]}
    assert all(values[-1] >= values[0] for values in rates.values()) and rates["moe-hot"][-1] == 1
    assert len(numbers["layers"]) == SHIPPED["layers"]


def test_a_heat_map_has_a_cell_for_every_expert_of_every_layer(report):
    paths = re.findall(r'<path class="s(\d)" d="([^"]*)"', report.read_text())
    cells = [
        (x, y)
        for _, path in paths
        for x, y, width in re.findall(r"M(\d+) (\d+)h(\d+)v1", path)
        for x in range(int(x), int(x) + int(width))
    ]
    assert len(cells) == len(set(cells)) == SHIPPED["layers"] * SHIPPED["n_expert"]


def test_names_in_a_report_are_text(here):
    shutil.copy(here / "experts.json", here / "<img src=x>.json")
    command(here, "report", "<img src=x>.json", "-o", "report.html")
    assert "img" not in Page((here / "report.html").read_text()).tags


@pytest.mark.skipif(not shutil.which("chromium"), reason="chromium is not installed")
@pytest.mark.parametrize("width", [400, 1600])
def test_a_report_fits_narrow_and_wide_windows(here, report, width):
    """Loaded in a frame of that width: nothing sticks out, and every plot is drawn as wide as it can be read."""
    frame = here / "frame.html"
    srcdoc = report.read_text().replace("&", "&amp;").replace('"', "&quot;")
    frame.write_text(f"""<iframe id="f" style="width:{width}px;height:3000px" srcdoc="{srcdoc}"></iframe><script>
    f.onload = () => {{
        const page = f.contentDocument, svgs = [...page.querySelectorAll("svg")];
        const letters = [...page.querySelectorAll(".plot text")].map(text => text.getBoundingClientRect().height);
        document.body.dataset.seen = JSON.stringify({{
            scroll: page.documentElement.scrollWidth, client: page.documentElement.clientWidth,
            widths: svgs.map(svg => svg.getBoundingClientRect().width), letters: Math.min(...letters)}});
    }}</script>""")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1700,3200",
        "--virtual-time-budget=5000",
        "--dump-dom",
    ]
    command = ["chromium", *flags, f"--user-data-dir={here}/chromium", frame.as_uri()]
    dom = run(command, here / "chromium.log", stock_environment(**environment(here)))
    seen = json.loads(re.search(r'data-seen="([^"]*)"', dom)[1].replace("&quot;", '"'))
    assert seen["scroll"] <= seen["client"] <= width, seen
    assert min(seen["widths"]) > 250 and max(seen["widths"]) <= width and seen["letters"] >= 9, seen
