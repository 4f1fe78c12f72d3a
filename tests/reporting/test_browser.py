"""The page in a real browser: it draws, sorts, filters, links, and is usable by everybody.

``make test-report`` installs what is needed: playwright, axe-core, and a Chromium.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from massive import MASSIVE
from report_content import EVIL, content, error_of

from calipers.reporting.page import page

playwright = pytest.importorskip("playwright.sync_api", reason="make test-report installs it")
CHROMIUM = os.environ.get("CALIPERS_CHROMIUM") or shutil.which("chromium") or ""
if not CHROMIUM:
    pytest.skip("there is no Chromium; make test-report installs it", allow_module_level=True)

AXE = Path(__file__).parents[2] / "build" / "report" / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
LAYERS = 32
WORST = "model.layers.1.self_attn.v_proj"
COLUMN = "[...document.querySelectorAll('#table tbody tr')].map(r => r.cells[{0}].innerText)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(page(content(LAYERS)), encoding="utf-8")
    return path


@pytest.fixture
def view(browser: Any, file: Path) -> Iterator[Any]:
    yield from opened(browser, file)


def opened(browser: Any, file: Path) -> Iterator[Any]:
    """The page, opened; whatever it complains of fails the test."""
    shown = browser.new_page(viewport={"width": 1400, "height": 900}, color_scheme="light")
    problems: list[str] = []
    shown.on("console", lambda told: problems.append(told.text))
    shown.on("pageerror", lambda error: problems.append(str(error)))
    shown.on("dialog", lambda dialog: (problems.append(dialog.message), dialog.dismiss()))
    shown.on("request", lambda asked: problems.append(asked.url) if asked.url[:4] == "http" else 0)
    shown.goto(file.as_uri())
    shown.wait_for_selector("html[data-ready=yes]")
    yield shown
    shown.close()
    assert not problems


def open_layer(view: Any, name: str) -> None:
    view.evaluate("name => { location.hash = '#layer=' + encodeURIComponent(name) }", name)
    shown = "name => document.querySelector('#shown h3').textContent.startsWith(name)"
    view.wait_for_function(shown, arg=name)


def test_plots_are_drawn_when_they_are_seen(view: Any, record_property: Any) -> None:
    loaded = view.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    record_property("milliseconds to load", loaded)
    print(f"\n{LAYERS} layers: loaded in {loaded:.0f} ms")
    assert view.locator("#channels svg").count() == 0
    for name in ("heat", "worst", "layers", "input", "weight", "channels"):
        plot = view.locator(f"#{name}")
        plot.scroll_into_view_if_needed()
        view.wait_for_selector(f"#{name} .main-svg")
        assert len(plot.get_attribute("aria-label")) > 40
    values = view.evaluate("document.querySelector('#heat').data[0].z")
    assert len(values) == LAYERS
    assert values[1][2] == pytest.approx(-6.02, abs=0.01)
    bars = view.evaluate("document.querySelector('#worst').data[0].x")
    assert bars[0] == 50
    assert len(bars) == 20


def test_a_click_on_a_bar_opens_the_module(view: Any) -> None:
    view.locator("#worst").scroll_into_view_if_needed()
    view.wait_for_selector("#worst .main-svg")
    view.locator("#worst .point path").first.click(force=True)
    view.wait_for_function("location.hash.startsWith('#layer=')")
    assert view.evaluate("decodeURIComponent(location.hash)") == f"#layer={WORST}"
    assert view.locator("#shown h3").inner_text().startswith(WORST)


@pytest.fixture
def ruined_view(browser: Any, ruined: Path) -> Iterator[Any]:
    yield from opened(browser, ruined)


def test_massive_activations_are_named_on_the_first_screen(ruined_view: Any) -> None:
    link = ruined_view.locator(".headline a.module")
    assert link.inner_text() == MASSIVE
    place = link.bounding_box()
    assert place["y"] + place["height"] < 300
    link.click()
    ruined_view.wait_for_selector("#input .main-svg")
    assert ruined_view.locator("#shown h3").inner_text().startswith(MASSIVE)


def test_sorting_by_keyboard(view: Any) -> None:
    shown = view.evaluate(COLUMN.format(0))
    assert shown[0] == WORST
    head = view.locator("#table th[data-key=name] button")
    head.focus()
    view.keyboard.press("Enter")
    assert view.locator("#table th[data-key=name]").get_attribute("aria-sort") == "ascending"
    by_name = view.evaluate(COLUMN.format(0))
    layers = [int(name.split(".")[2]) for name in by_name if name.startswith("model.layers")]
    assert layers == sorted(layers)
    view.keyboard.press("Enter")
    assert view.locator("#table th[data-key=name]").get_attribute("aria-sort") == "descending"
    assert view.evaluate(COLUMN.format(0)) == by_name[::-1]
    view.locator("#table th[data-key=output] button").click()
    errors = [float(cell.split()[0]) for cell in view.evaluate(COLUMN.format(5))]
    assert errors == sorted(errors, reverse=True)


def test_filters_and_checkpoints(view: Any) -> None:
    view.fill("#filter", "LAYERS.3.mlp")
    assert view.locator("#table tbody tr").count() == 3
    assert view.locator("#count").inner_text().startswith("3 of ")
    view.fill("#filter", "")
    view.select_option("#verdict", "hurts")
    assert view.evaluate(COLUMN.format(0)) == [WORST]
    view.select_option("#of", "1")
    assert WORST not in view.evaluate(COLUMN.format(0))
    assert view.locator("#checkpoints input").nth(1).is_checked()
    view.select_option("#verdict", "")
    view.fill("#filter", WORST)
    assert view.evaluate(COLUMN.format(5)) == [f"{100 * error_of(9, 1):.2f} %"]


def test_links_lead_to_a_layer(view: Any, file: Path) -> None:
    name = "model.layers.17.mlp.down_proj"
    view.goto(f"{file.as_uri()}#layer={quote(name)}")
    view.reload()
    view.wait_for_selector("html[data-ready=yes]")
    view.wait_for_selector("#input .main-svg")
    assert view.locator("#shown h3").inner_text().startswith(name)
    view.wait_for_function("scrollY > 1000")
    assert view.locator("#ranges tbody tr").count() == 4
    view.goto(f"{file.as_uri()}#layer=nothing%ZZ")
    view.goto(f"{file.as_uri()}#layer=nothing")
    assert "There is no module nothing" in view.locator("#shown").inner_text()


@pytest.mark.parametrize("name", EVIL)
def test_what_looks_like_markup_is_shown_as_text(view: Any, name: str) -> None:
    open_layer(view, name)
    assert view.locator("#shown h3").evaluate("h => h.firstChild.data") == f"{name} "
    assert view.locator("#shown h3 *").count() == 1
    view.fill("#filter", name)
    assert view.locator("#table tbody a").first.evaluate("a => a.textContent").endswith(name)
    assert view.evaluate("document.images.length") == 0
    view.locator("#heat").scroll_into_view_if_needed()
    view.wait_for_selector("#heat .main-svg")
    labels = view.locator("#heat .xtick text").all_text_contents()
    assert any(EVIL[0] in label for label in labels), labels
    assert view.locator("#heat tspan[style*=bold]").count() == 0


def test_the_theme(view: Any) -> None:
    color = "getComputedStyle(document.body).backgroundColor"
    light = view.evaluate(color)
    view.locator("#theme").click()
    dark = view.evaluate(color)
    assert dark != light
    assert view.locator("#theme").get_attribute("aria-pressed") == "true"
    view.locator("#theme").click()
    assert view.evaluate(color) == light
    view.emulate_media(color_scheme="dark")
    assert view.evaluate(color) == light  # what was chosen stays
    view.reload()
    assert view.evaluate(color) == dark


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_everybody_can_use_it(view: Any, theme: str, width: int) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not there; make test-report installs it")
    view.emulate_media(color_scheme=theme, reduced_motion="reduce")
    view.set_viewport_size({"width": width, "height": 900})
    for name in ("heat", "input", "channels"):
        view.locator(f"#{name}").scroll_into_view_if_needed()
        view.wait_for_selector(f"#{name} .main-svg")
    assert view.evaluate("document.documentElement.scrollWidth") <= width
    # A script that is added by hand is not one of the page's own; this goes past its policy.
    view.evaluate(AXE.read_text(encoding="utf-8"))
    found = view.evaluate("axe.run().then(told => told.violations)")
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    told = [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in serious]
    assert not told
