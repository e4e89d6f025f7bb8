"""Control to pixel, explorer by explorer, in real JupyterLab; and the pictures without a comm.

Asked are 150 ms (MemoryExplorer 100), all plots drawn; of MosaicViewer the first change, its
sharp pixels 500; of the fallback's pictures 250. Asserted are half as many more, since a machine
for tests is slower and never quite idle. The medians are printed (`pytest -s`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import nbformat
import pytest
from browser_timing import Latency, key_to_pixels, watch_drawing
from playwright.sync_api import Page
from test_browser import Lab, browser, explorer, lab, page, run_all, shoot

__all__ = ["browser", "lab", "page"]  # fixtures

pytestmark = pytest.mark.alone

ALLOWANCE = 1.5
FALLBACK_MS = 250.0


class Case(NamedTuple):
    """An explorer, a control of its by the order of its slider handles, and what is asked."""

    name: str
    title: str
    code: str
    handle: int
    first_ms: float
    last_ms: float


SCENE = "scene = synthetic((1536, 1536), seed=3)\nguess = scene.labels.roll(x=5)\n"
CASES = [
    Case(
        "HaloExplorer", "Receptive field, halo and tile",
        "HaloExplorer(UNetSpec(levels=3, channels=16), tile=256)", 0, 150, 150,
    ),
    Case(
        "MemoryExplorer", "Memory of one training step",
        "MemoryExplorer()", 2, 100, 100,
    ),
    Case(
        "MosaicViewer", "all labelled pixels agree",
        "MosaicViewer(scene.image, scene.labels, guess)", 0, 150, 500,
    ),
    # torchgpipe's U-Net (6, 72): 285 layers.
    Case(
        "StageExplorer", "Stages of a pipeline",
        "StageExplorer(UNetSpec.torchgpipe(6, 72), (32, 3, 192, 192), stages=4, micro_batches=8)",
        2, 150, 150,
    ),
    Case(
        "ScalingExplorer", "Scaling: what one more GPU buys",
        "ScalingExplorer()", 0, 150, 150,
    ),
]  # fmt: skip
IMPORTS = (
    "from bigunet.scenes import synthetic\nfrom bigunet.spec import UNetSpec\n"
    "from bigunet.views import *\nsetup()\n" + SCENE
)


def write(lab: Lab, name: str, cells: Sequence[str]) -> str:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    # Without a kernel's name, JupyterLab would ask for one.
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, lab.folder / "notebooks" / f"{name}.ipynb")
    return name


def measured(page: Page, case: Case, mode: str) -> Latency:
    found = explorer(page, case.title, live=mode == "live")
    control = found.locator(".noUi-handle:visible").nth(case.handle)
    keys = ["ArrowLeft", "ArrowRight"] * 10
    times = key_to_pixels(page, found, control, keys, wait_ms=max(500.0, 2 * case.last_ms))
    print(f"\n{case.name}, {mode}: {times}")
    shoot(page, f"latency-{mode}-{case.name}")
    return times


def test_pixels_follow_a_key_within_the_time_asked(page: Page, lab: Lab) -> None:
    watch_drawing(page)
    run_all(page, lab, write(lab, "live", [IMPORTS, *(case.code for case in CASES)]))
    for case in CASES:
        times = measured(page, case, "live")
        assert times.median_first <= ALLOWANCE * case.first_ms, case.name
        assert times.median_last <= ALLOWANCE * case.last_ms, case.name


def test_pictures_follow_a_key_where_the_comm_is_silent(page: Page, lab: Lab) -> None:
    watch_drawing(page)
    # What the handshake does when nothing was heard.
    cells = [f"shown = {case.code}\nshown._go_still()\nshown" for case in CASES]
    run_all(page, lab, write(lab, "still", [IMPORTS, *cells]))
    for case in CASES:
        times = measured(page, case, "still")
        assert times.median_last <= ALLOWANCE * FALLBACK_MS, case.name


def test_a_key_held_down_ends_at_the_last_value(page: Page, lab: Lab) -> None:
    """Values that a slow kernel does not get to are left out; the last one is shown."""
    slow = (
        "import time\nshown = MemoryExplorer()\nplain, seen = shown.tables, []\n"
        "def tables(state):\n    time.sleep(0.2)\n    seen.append(state)\n"
        "    return plain(state)\n"
        "shown.tables = tables\n"
        "shown.summary = lambda data: f'{len(seen)} seen, {shown.state.spec.channels} wide'\nshown"
    )
    run_all(page, lab, write(lab, "held", [IMPORTS, slow]))
    found = explorer(page, "Memory of one training step")
    found.locator(".noUi-handle:visible").nth(2).focus()
    for _ in range(20):
        page.keyboard.press("ArrowRight")
    text = found.get_by_text(re.compile(r"\d+ seen, 84 wide"))
    text.wait_for(timeout=10_000)
    assert 1 <= int(text.inner_text().split()[0]) < 15
