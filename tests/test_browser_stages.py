"""StageExplorer in a real browser: cuts by key and by mouse, at the size of a published network."""

from __future__ import annotations

import io
import re
from functools import partial

import nbformat
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Locator, Page
from test_browser import Lab, browser, changes, explorer, lab, page, run_all, shoot

__all__ = ["browser", "lab", "page"]  # fixtures

pytestmark = pytest.mark.alone

# torchgpipe's U-Net (6, 72): 285 layers.
CELLS = (
    "from bigunet.spec import UNetSpec\nfrom bigunet.views import StageExplorer, setup\nsetup()",
    "StageExplorer(UNetSpec.torchgpipe(6, 72), (32, 3, 192, 192), stages=4, micro_batches=8)",
)


def write(lab: Lab) -> str:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    # Without a kernel's name, JupyterLab would ask for one.
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, lab.folder / "notebooks" / "stages_285.ipynb")
    return "stages_285"


def cuts(found: Locator) -> list[int]:
    """The values beside the sliders that are seen: stages, then the cuts."""
    shown = found.locator(".widget-slider:visible .widget-readout").all_inner_texts()
    return [int(text) for text in shown[1:4]]


def lines(png: bytes, count: int) -> list[float]:
    """Columns of so many upright lines, seen in a row of the picture that nothing else crosses."""
    grey = np.asarray(Image.open(io.BytesIO(png)).convert("L"))
    for row in grey[15:80]:
        dark = np.flatnonzero(row < 180)
        groups = np.split(dark, np.flatnonzero(np.diff(dark) > 1) + 1)
        broad = [float(g.mean()) for g in groups if 3 <= len(g) <= 6]
        if len(broad) == count and len(groups) <= count + 1:  # and the axis
            return broad
    raise AssertionError("no such row")


def test_cuts_follow_keys_and_mouse(page: Page, lab: Lab) -> None:
    run_all(page, lab, write(lab))
    found = explorer(page, "Stages of a pipeline")
    before = cuts(found)
    shoot(page, "stages")
    handles = found.locator(".noUi-handle:visible")
    handles.nth(2).focus()
    for key in ("ArrowRight", "ArrowLeft"):
        assert changes(page, found, partial(page.keyboard.press, key))
    assert cuts(found) == before
    # The second line, dragged by the mouse beyond the third one, stops before it.
    figure = found.locator(".bk-Figure").first
    box = figure.bounding_box()
    assert box is not None
    x = [box["x"] + at for at in lines(figure.screenshot(), len(before))]
    y = box["y"] + 120
    page.mouse.move(x[1], y)
    page.mouse.down()
    page.mouse.move(x[1] + 15, y, steps=5)
    page.mouse.move(x[1] + 30, y, steps=5)
    page.wait_for_timeout(2500)
    moved = cuts(found)
    assert moved[0] == before[0]
    assert before[1] < moved[1] < before[2] == moved[2]
    shoot(page, "stages-dragged")
    page.mouse.move(x[2] + 60, y, steps=10)
    page.mouse.up()
    stopped = [before[0], before[2] - 1, before[2]]
    for _ in range(100):
        if cuts(found) == stopped:
            break
        page.wait_for_timeout(100)
    shoot(page, "stages-stopped")
    assert cuts(found) == stopped
    # Buttons, a way to cut and the plan's file.
    best = found.get_by_role("button", name="Best", exact=True)
    assert changes(page, found, lambda: best.press("Enter"))
    found.get_by_role("button", name="Folded", exact=True).press("Enter")
    found.get_by_text("Skips over links: 0.0 MB").wait_for(timeout=15_000)
    shoot(page, "stages-folded")
    with page.expect_download() as download:
        found.get_by_role("link", name="Save plan").press("Enter")
    path = lab.folder / "plan.yaml"
    download.value.save_as(path)
    assert re.search(r"^devices: \[0, 1, 2, 3, 3, 2, 1, 0\]$", path.read_text(), re.M)
