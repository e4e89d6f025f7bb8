"""A hub whose server is another environment: what the page shows there, and the way out."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import nbformat
import pytest
from browser_timing import key_to_pixels, watch_drawing
from hub import make_hub, register_kernel
from playwright.sync_api import Browser, Locator, Page
from test_browser import Lab, browser, changes, explorer, run_all, shoot, watched

from bigunet.labextensions import MANAGER, PLOTS
from bigunet.views.figures import fix_command

__all__ = ["browser"]  # a fixture

pytestmark = pytest.mark.alone

CELLS = ("from bigunet.views import HaloExplorer, setup\nsetup()", "HaloExplorer()")
TITLE = "Receptive field, halo and tile"


def start(folder: Path, python: str) -> Lab:
    """The hub's JupyterLab on one notebook for the kernel `bigunet`."""
    server = Lab(folder, python=python)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    notebook.metadata["kernelspec"] = {"name": "bigunet", "display_name": "bigunet"}
    nbformat.write(notebook, folder / "notebooks" / "hub.ipynb")
    return server


def doctor(server: Lab) -> set[str]:
    """Run the command that the page shows, as it stands; the extensions it lent."""
    command = [*shlex.split(fix_command()), "--json"]
    environment = {
        **os.environ,
        "PATH": "/usr/bin:/bin",
        "JUPYTER_DATA_DIR": str(server.folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(server.folder / "runtime"),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    folder = server.folder / "data" / "labextensions"
    return {str(Path(p).relative_to(folder)) for p in json.loads(done.stdout)["linked"]}


def restarted(server: Lab, python: str) -> Lab:
    server.stop()
    return start(server.folder, python)


def alive(page: Page, server: Lab) -> None:
    """The whole plot: a canvas that follows the keyboard, and no hint."""
    run_all(page, server, "hub")
    found = explorer(page, TITLE)
    found.locator(".noUi-handle").first.focus()
    assert changes(page, found, lambda: page.keyboard.press("ArrowRight"))
    assert page.locator(".bigunet-no-widgets:visible").count() == 0


def fallback(page: Page, server: Lab) -> Locator:
    run_all(page, server, "hub")
    found = page.locator(".bigunet-explorer").filter(has_text=TITLE).last
    found.locator(".bigunet-notice").wait_for(timeout=20_000)
    found.locator("svg").first.wait_for(timeout=20_000)
    return found


def test_without_the_plots_extension_pictures_follow_and_the_hint_helps(
    browser: Browser, tmp_path: Path
) -> None:
    python = make_hub(tmp_path / "hub", ["jupyterlab", "jupyterlab_widgets"])
    register_kernel(tmp_path / "lab" / "data")
    server = start(tmp_path / "lab", python)
    try:
        # What the widget manager writes where it cannot make a plot's view.
        lacking = ("Error: No version of module @bokeh/jupyter_bokeh",)
        with watched(browser, server, known=lacking) as page:
            watch_drawing(page)
            found = fallback(page, server)
            assert fix_command() in found.locator(".bigunet-notice").inner_text()
            handle = found.locator(".noUi-handle").first
            before = found.screenshot()
            times = key_to_pixels(page, found, handle, ["ArrowRight", "ArrowLeft"] * 10)
            page.keyboard.press("ArrowRight")
            found.get_by_text("halo 190 pixels").first.wait_for(timeout=10_000)
            assert found.screenshot() != before, "the pixels follow"
            shoot(page, "bare-fallback")
        print(f"\nfallback on a hub, key to pixels: {times}")
        # 250 ms on a quiet machine.
        assert times.median_last < 1.5 * 250
        assert doctor(server) == {PLOTS}
        server = restarted(server, python)
        with watched(browser, server) as page:
            alive(page, server)
            shoot(page, "bare-lent")
    finally:
        server.stop()


def test_without_any_extension_a_picture_and_the_hint_remain(
    browser: Browser, tmp_path: Path
) -> None:
    python = make_hub(tmp_path / "hub", ["jupyterlab"])
    register_kernel(tmp_path / "lab" / "data")
    server = start(tmp_path / "lab", python)
    try:
        # What JupyterLab writes where a kernel speaks of widgets that it does not know.
        with watched(browser, server, known=("Exception opening new comm",)) as page:
            run_all(page, server, "hub")
            hint = page.locator(".bigunet-no-widgets")
            hint.wait_for(timeout=10_000)
            assert fix_command() in hint.inner_text()
            picture = page.locator(".jp-OutputArea-output img").first
            picture.wait_for(timeout=10_000)
            assert (picture.bounding_box() or {"width": 0})["width"] > 200
            assert page.locator(".bigunet-explorer").count() == 0
            shoot(page, "bare-nothing")
        assert doctor(server) == {MANAGER, PLOTS}
        server = restarted(server, python)
        with watched(browser, server) as page:
            alive(page, server)
    finally:
        server.stop()
