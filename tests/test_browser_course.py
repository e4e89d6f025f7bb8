"""Every notebook of the course, opened and run in real JupyterLab as a reader does it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page
from test_browser import CANVASES, Lab, browser, lab, page, run_all, shoot

__all__ = ["browser", "lab", "page"]  # fixtures

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[1]
# These are run, and looked at more closely, by the tests of their explorers.
OTHERS = "".join(
    (ROOT / "tests" / f"{name}.py").read_text(encoding="utf-8")
    for name in ("test_browser", "test_browser_scaling")
)
ELSEWHERE = set(re.findall(r'run_all\(page, lab, "(\w+)"\)', OTHERS))
NOTEBOOKS = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}


def test_each_notebook_is_run_in_the_browser_by_some_test() -> None:
    assert ELSEWHERE <= NOTEBOOKS
    assert "00_start" in ELSEWHERE


@pytest.mark.parametrize("name", sorted(NOTEBOOKS - ELSEWHERE))
def test_runs_in_the_page(page: Page, lab: Lab, name: str) -> None:
    """No error output, no console error, no request to elsewhere (the fixture looks)."""
    run_all(page, lab, name)
    for found in page.locator(".bigunet-explorer").all():
        found.scroll_into_view_if_needed()
        page.wait_for_timeout(1500)
        assert found.evaluate(CANVASES), "no picture"
        assert found.locator(".bigunet-notice").count() == 0, "the comm is silent"
    assert page.locator(".bigunet-no-widgets:visible").count() == 0
    shoot(page, name)
