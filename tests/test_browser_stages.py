"""StageExplorer in a real browser: cuts by key and by mouse, at the size of a published network."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import nbformat
import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Locator, Page
from test_browser import Lab, browser, changes, explorer, lab, page, run_all, shoot

from bigunet.checkpoint import load_weights
from bigunet.plan import Plan
from bigunet.scenes import earth, write_scene

__all__ = ["browser", "lab", "page"]  # fixtures

pytestmark = pytest.mark.alone

# torchgpipe's U-Net (6, 72): 285 layers.
CELLS = (
    "from bigunet.spec import UNetSpec\nfrom bigunet.views import StageExplorer, setup\nsetup()",
    "StageExplorer(UNetSpec.torchgpipe(6, 72), (32, 3, 192, 192), stages=4, micro_batches=8)",
)


# Tiles of 32 pixels of an image of 96 x 96, read from 80 x 80.
SMALL = (
    "from bigunet.spec import TrainSpec, UNetSpec\n"
    "from bigunet.views import StageExplorer, setup\nsetup()",
    "train = TrainSpec(tile=32, batch=4, steps=2)\n"
    "StageExplorer(UNetSpec(levels=3, channels=4, classes=8), (4, 3, 80, 80), train=train,\n"
    "              stages=2, micro_batches=4, scene_shape=(96, 96))",
)


def write(lab: Lab, name: str = "stages_285", cells: Sequence[str] = CELLS) -> str:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    # Without a kernel's name, JupyterLab would ask for one.
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, lab.folder / "notebooks" / f"{name}.ipynb")
    return name


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


def test_a_plan_made_by_mouse_runs_by_the_command_shown(
    page: Page, lab: Lab, tmp_path: Path
) -> None:
    run_all(page, lab, write(lab, "stages_small", SMALL))
    found = explorer(page, "Stages of a pipeline")
    before = int(found.locator(".widget-slider:visible .widget-readout").all_inner_texts()[1])
    figure = found.locator(".bk-Figure").first
    box = figure.bounding_box()
    assert box is not None
    (line,) = lines(figure.screenshot(), 1)
    page.mouse.move(box["x"] + line, box["y"] + 120)
    page.mouse.down()
    page.mouse.move(box["x"] + line - 30, box["y"] + 120, steps=5)
    page.mouse.move(box["x"] + line - 60, box["y"] + 120, steps=5)
    page.mouse.up()
    page.wait_for_timeout(1500)
    # The name is that of the image in the command; the rest lies where it is run.
    folder = tmp_path / "here"
    write_scene(earth().crop(400, 496, 2000, 2096), folder, format="geotiff")
    (folder / "image.tif").rename(folder / "scene.tif")
    with page.expect_download() as download:
        found.get_by_role("link", name="Save plan").press("Enter")
    download.value.save_as(folder / "plan.yaml")
    plan = Plan.load(folder / "plan.yaml")
    assert plan.cuts[1] < before
    command = found.locator("[aria-label='Launch command']").inner_text()
    assert command.startswith("torchrun --standalone --nproc-per-node=2 ")
    # As somebody would in a terminal with the environment active.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    weights = load_weights(folder / "run" / "weights.safetensors")
    assert weights.spec == plan.spec
    assert weights.card["steps"] == 2
