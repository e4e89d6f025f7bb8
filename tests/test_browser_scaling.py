"""Notebook 05 and its explorers in real JupyterLab: keys, the phase map, the plan's file."""

from __future__ import annotations

import re
from functools import partial

import pytest
from playwright.sync_api import Page
from test_browser import Lab, browser, changes, explorer, lab, page, run_all, shoot

from bigunet.plan import Plan

__all__ = ["browser", "lab", "page"]  # fixtures

pytestmark = pytest.mark.alone


def test_scaling_explorer_follows_the_keyboard(page: Page, lab: Lab) -> None:
    run_all(page, lab, "05_scaling")
    # Two explorers: the first has the steps that were measured a moment ago.
    first = page.locator(".bigunet-explorer").first
    first.get_by_text(re.compile("Measured points are of this setting")).wait_for(timeout=30_000)
    first.scroll_into_view_if_needed()
    page.wait_for_timeout(1500)
    shoot(page, "scaling-measured")
    found = explorer(page, "Scaling: what one more GPU buys")
    assert "sample-parallel on 1,536 GPUs" in found.inner_text()
    shoot(page, "scaling")
    # A locator of its own for each press: another machine's slider is another element.
    found.locator(".noUi-handle").first.focus()
    for key in ["ArrowLeft", "ArrowRight"]:
        assert changes(page, found, partial(page.keyboard.press, key))
    found.locator(".noUi-handle").first.focus()
    page.keyboard.press("ArrowLeft")
    found.get_by_text("sample-parallel on 1,024 GPUs").wait_for(timeout=10_000)
    machine = found.get_by_label("Machine")
    assert changes(page, found, lambda: machine.select_option("p40"))
    found.get_by_text("sample-parallel on 8 GPUs").wait_for(timeout=10_000)
    button = found.get_by_role("button", name="Phase map")
    assert changes(page, found, lambda: button.press("Enter"))
    # A tile that the network cannot have is said beside the controls: 8 levels, stride 128.
    levels = found.locator(".noUi-handle").nth(3)
    levels.focus()
    before = found.locator(".bigunet-summary").inner_text()
    tile = found.locator(".noUi-handle").nth(1)
    tile.focus()
    page.keyboard.press("ArrowRight")
    found.get_by_text("in tiles of 544").wait_for(timeout=10_000)
    levels.focus()
    page.keyboard.press("End")
    found.get_by_role("alert").wait_for(timeout=10_000)
    assert "stride 128" in found.get_by_role("alert").inner_text()
    found.get_by_role("button", name="Undo").press("Enter")
    found.get_by_role("alert").wait_for(state="detached", timeout=10_000)
    found.get_by_role("button", name="Undo").press("Enter")
    page.wait_for_function(
        "([e, t]) => e.querySelector('.bigunet-summary').innerText === t",
        arg=[found.element_handle(), before],
        timeout=10_000,
    )
    # The plan, downloaded, is one.
    with page.expect_download() as download:
        found.get_by_role("link", name="Save plan").press("Enter")
    path = lab.folder / "plan.yaml"
    download.value.save_as(path)
    assert Plan.load(path).machine == "p40"
    assert "bigunet launch plan.yaml" in found.inner_text()
    shoot(page, "scaling-p40")
    found.locator(".bk-Figure").last.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    shoot(page, "scaling-map")
