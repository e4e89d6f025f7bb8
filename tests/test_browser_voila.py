"""All explorers on one page without code: alive in Voila, offline, and usable by everyone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser_timing import key_to_pixels, watch_drawing
from playwright.sync_api import Browser, Page
from test_browser import SHOTS, TOKEN, Lab, browser, changes, explorer, watched

__all__ = ["browser"]  # a fixture

pytestmark = pytest.mark.alone

# Tab, title of its explorer, and where its first slider goes and comes back from.
TABS = [
    ("Halo", "Receptive field, halo and tile", ["ArrowRight", "ArrowLeft"]),
    ("Memory", "Memory of one training step", ["ArrowLeft", "ArrowRight"]),
    ("Stages", "Stages of a pipeline", ["ArrowLeft", "ArrowRight"]),
    ("Scaling", "what one more GPU buys", ["ArrowLeft", "ArrowRight"]),
    ("Mosaic", "Drag to move", ["ArrowLeft", "ArrowRight"]),
]
# Violations whose cause is not in this project, by rule: part of the element, and the reason.
NOT_OURS: dict[str, tuple[str, str]] = {}


@pytest.fixture(scope="module")
def voila(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = Lab(tmp_path_factory.mktemp("voila"), app=True)
    yield server
    server.stop()


@pytest.fixture
def page(browser: Browser, voila: Lab) -> Iterator[Page]:
    with watched(browser, voila) as made:
        watch_drawing(made)
        began = time.monotonic()
        made.goto(f"{voila.url}/voila/render/app.ipynb?token={TOKEN}")
        made.locator(".bigunet-explorer").first.wait_for(timeout=60_000)
        print(f"\nVoila, from the address to the first explorer: {time.monotonic() - began:.1f} s")
        yield made


def grave(page: Page) -> list[str]:
    """Serious and critical violations of this page as it stands, those of others left out."""
    found = []
    report: dict[str, Any] = Axe().run(page).response
    assert len(report["passes"]) > 10, "axe looked at nothing"
    for violation in report["violations"]:
        part, reason = NOT_OURS.get(violation["id"], ("", ""))
        for node in violation["nodes"]:
            text = f"{violation['id']}: {node['target']} {node['html'][:200]}"
            if violation["impact"] not in ("serious", "critical"):
                continue
            if reason and part in str(node["target"]) + node["html"]:
                print(f"not ours ({reason}): {text}")
            else:
                found.append(text)
    return found


def test_every_explorer_is_alive_and_accessible(page: Page) -> None:
    assert page.locator(".jp-CodeMirrorEditor, .cm-editor, .highlight").count() == 0, "no code"
    violations = {}
    for name, title, keys in TABS:
        page.get_by_role("tab", name=name).click()
        found = explorer(page, title)
        times = key_to_pixels(page, found, found.locator(".noUi-handle").first, keys * 3)
        print(f"Voila, {name}, key to pixels: {times}")
        assert times.median_last < 2000, name
        handles = found.locator(".noUi-handle")
        names = {h.get_attribute("aria-label") for h in handles.all()}
        assert None not in names
        assert len(names) == handles.count(), "each slider has a name of its own"
        violations[name] = grave(page)
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / f"voila-{name.lower()}.png", full_page=True)
    assert not any(violations.values()), violations


def test_tabs_work_by_keyboard_and_the_network_segments(page: Page) -> None:
    explorer(page, "Receptive field")
    page.get_by_role("tab", name="Halo").focus()
    for _ in range(len(TABS) - 1):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    found = explorer(page, "Drag to move")
    before = page.locator(".bk-Figure").count()
    page.get_by_role("button", name="Segment by the demo network").press("Enter")
    # Meanwhile the controls answer: the work is not in the kernel's main thread.
    box = found.get_by_label("Tile grid")
    assert changes(page, found, lambda: box.press("Space"))
    page.get_by_text("of all labelled pixels agree").wait_for(timeout=90_000)
    explorer(page, "of all labelled pixels agree")
    assert page.locator(".bk-Figure").count() > before
    page.screenshot(path=SHOTS / "voila-segmented.png", full_page=True)


def test_the_page_asks_for_the_token(browser: Browser, voila: Lab) -> None:
    context = browser.new_context()
    stranger = context.new_page()
    stranger.goto(f"{voila.url}/voila/render/app.ipynb")
    assert "/login" in stranger.url
    assert stranger.locator(".bigunet-explorer").count() == 0
    context.close()
