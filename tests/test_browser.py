"""The notebooks in real JupyterLab and a real browser: pixels follow the controls, offline.

Screenshots go to artefacts/browser. How fast the pixels follow: test_browser_latency.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[1]
SHOTS = ROOT / "artefacts" / "browser"
TOKEN = "token-of-the-browser-tests"
SETTINGS = {
    # All cells stay in the page, also those out of sight.
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}

# Every canvas of an explorer, through Bokeh's shadow roots, as one string of its pixels.
CANVASES = """
(explorer) => {
  const found = [];
  const walk = node => {
    if (node.tagName === 'CANVAS') found.push(node);
    if (node.shadowRoot) walk(node.shadowRoot);
    for (const child of node.children || []) walk(child);
  };
  walk(explorer);
  return found.filter(c => c.width && c.height).map(c => c.toDataURL()).join('|');
}
"""
QUEUED = """
() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]
  .some(p => /\\[[\\d*]+\\]/.test(p.textContent))
"""


class Lab:
    """A JupyterLab server on copies of the notebooks, or (`app`) of Voila on all explorers.

    `python` is the server's interpreter, `variables` come to its environment's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        extra: tuple[str, ...] = (),
        app: bool = False,
        python: str = sys.executable,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.folder, self.url = folder, f"http://127.0.0.1:{port}"
        shutil.copytree(
            ROOT / "notebooks",
            folder / "notebooks",
            ignore=shutil.ignore_patterns("work"),
            dirs_exist_ok=True,
        )
        for name, values in SETTINGS.items():
            path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "JUPYTER_TOKEN": TOKEN,
            "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
            "JUPYTER_CONFIG_DIR": str(folder / "config"),
            "JUPYTER_DATA_DIR": str(folder / "data"),
            "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
            **(variables or {}),
        }
        start = None if app else str(folder / "notebooks" / "00_start.ipynb")
        code = (
            "import sys; from bigunet.lab import lab; "
            f"sys.exit(lab({start!r}, app={app}, browser=False, port={port}, options={extra!r}))"
        )
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [python, "-c", code],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait()

    def _wait(self) -> None:
        for _ in range(300):
            assert self.process.poll() is None, self.log()
            try:
                self.api("status")
            except OSError:
                time.sleep(0.2)
            else:
                return
        pytest.fail(f"JupyterLab did not start:\n{self.log()}")

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def api(self, path: str, method: str = "GET") -> Any:
        request = urllib.request.Request(
            f"{self.url}/api/{path}", method=method, headers={"Authorization": f"token {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def stop_kernels(self) -> None:
        for kernel in self.api("kernels"):
            self.api(f"kernels/{kernel['id']}", "DELETE")

    def stop(self) -> None:
        self.stop_kernels()
        os.killpg(self.process.pid, 15)
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    server = Lab(tmp_path_factory.mktemp("lab"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield started
        started.close()


@contextlib.contextmanager
def watched(browser: Browser, lab: Lab, *, known: tuple[str, ...] = ()) -> Iterator[Page]:
    """A page of which every console error and every request to elsewhere fails the test.

    `known` are errors that JupyterLab itself writes in this setting, by how they begin.
    """
    context = browser.new_context(viewport={"width": 1500, "height": 1150}, accept_downloads=True)
    made = context.new_page()
    errors: list[str] = []
    outside: list[str] = []
    own = (lab.url, lab.url.replace("http", "ws"), "data:", "blob:")
    made.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
    made.on("pageerror", lambda e: errors.append(str(e)))
    made.on("request", lambda r: None if r.url.startswith(own) else outside.append(r.url))
    # Noted above and then refused: the page has no network but its own server.
    made.route(lambda url: not url.startswith(own), lambda route: route.abort())
    yield made
    context.close()
    lab.stop_kernels()
    assert not outside
    assert not [text for text in errors if not text.startswith(known)]


@pytest.fixture
def page(browser: Browser, lab: Lab) -> Iterator[Page]:
    with watched(browser, lab) as made:
        yield made


def run_all(page: Page, lab: Lab, name: str) -> None:
    """Open a notebook, run all its cells, wait for the last, and see that none failed."""
    page.goto(f"{lab.url}/lab/tree/{name}.ipynb?token={TOKEN}&reset")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
    # Before the page has its kernel, running a cell would open a dialog that asks for one.
    for _ in range(300):
        kernels = [s["kernel"] for s in lab.api("sessions") if s["path"] == f"{name}.ipynb"]
        if any(kernel["connections"] for kernel in kernels):
            break
        page.wait_for_timeout(200)
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=60_000)
    # On a busy machine the kernel says that it is idle before the page hears its answers: then
    # nothing is queued, and the prompts stay empty.
    for attempt in range(4):
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        try:
            page.wait_for_function(QUEUED, timeout=10_000)
        except PlaywrightTimeoutError:
            assert attempt < 3, "no cell was queued"
        else:
            break
    page.wait_for_function(
        """() => {
          const prompts = [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')];
          const failed = document.querySelector("[data-mime-type='application/vnd.jupyter.error']");
          const ran = prompts.length && prompts.every(p => /\\[\\d+\\]/.test(p.textContent));
          return failed || ran;
        }""",
        timeout=180_000,
    )
    failed = page.locator("[data-mime-type='application/vnd.jupyter.error']")
    assert failed.count() == 0, failed.first.inner_text()


def explorer(page: Page, title: str, *, live: bool = True) -> Locator:
    """The last explorer of that title, in sight, its figures alive; or, not `live`, pictures."""
    found = page.locator(".bigunet-explorer").filter(has_text=title).last
    found.wait_for(timeout=30_000)
    found.scroll_into_view_if_needed()
    for _ in range(200):
        if found.evaluate(CANVASES) or not live:
            break
        page.wait_for_timeout(100)
    page.wait_for_timeout(1500)
    assert (found.locator(".bigunet-notice").count() == 0) == live, "the comm is silent"
    return found


def changes(page: Page, found: Locator, act: Any, seconds: float = 15) -> bool:
    """Whether the explorer's pixels change after `act()`."""
    before = found.evaluate(CANVASES)
    act()
    for _ in range(int(seconds * 10)):
        page.wait_for_timeout(100)
        if found.evaluate(CANVASES) != before:
            return True
    return False


def shoot(page: Page, name: str) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png")


def test_halo_explorer_follows_the_keyboard(page: Page, lab: Lab) -> None:
    run_all(page, lab, "01_receptive_field_and_halo")
    found = explorer(page, "Receptive field, halo and tile")
    assert "halo 46 pixels" in found.inner_text()
    shoot(page, "halo")
    found.locator(".noUi-handle").first.focus()
    for key in ["ArrowRight", "ArrowLeft"]:
        assert changes(page, found, partial(page.keyboard.press, key))
    handle = found.locator(".noUi-handle").first
    handle.focus()
    page.keyboard.press("ArrowRight")
    found.get_by_text("halo 94 pixels").wait_for(timeout=10_000)
    # The probe's overlay, by the space bar.
    box = found.get_by_label("Measure by a gradient probe")
    box.focus()
    assert changes(page, found, lambda: page.keyboard.press("Space"))
    found.get_by_text("Measured reach: 94 pixels").wait_for(timeout=10_000)
    shoot(page, "halo-measured")
    # Undo, as a button reached by keyboard: the overlay goes, then the fifth level.
    found.get_by_role("button", name="Undo").press("Enter")
    found.get_by_text("Measured reach").wait_for(state="detached", timeout=10_000)
    # The export, downloaded, loaded again after a reset.
    with page.expect_download() as download:
        found.get_by_role("link", name="Save YAML").press("Enter")
    path = lab.folder / "export.yaml"
    download.value.save_as(path)
    assert "levels: 5" in path.read_text()
    found.get_by_role("button", name="Reset").press("Enter")
    found.get_by_text("halo 46 pixels").wait_for(timeout=10_000)
    with page.expect_file_chooser() as chooser:
        found.get_by_role("button", name="Load YAML").press("Enter")
    chooser.value.set_files(path)
    found.get_by_text("halo 94 pixels").wait_for(timeout=10_000)


def test_a_wrong_combination_is_said_beside_the_controls(page: Page, lab: Lab) -> None:
    run_all(page, lab, "01_receptive_field_and_halo")
    found = explorer(page, "Receptive field, halo and tile")
    before = found.evaluate(CANVASES)
    # The explorer's tile is 64: with 8 levels the stride is 128.
    handle = found.locator(".noUi-handle").first
    handle.focus()
    page.keyboard.press("End")
    found.get_by_role("alert").wait_for(timeout=10_000)
    assert "stride 128" in found.get_by_role("alert").inner_text()
    assert found.evaluate(CANVASES) == before, "the last good view is kept"
    shoot(page, "halo-wrong")


def test_memory_explorer_follows_the_keyboard(page: Page, lab: Lab) -> None:
    run_all(page, lab, "02_memory")
    found = explorer(page, "Memory of one training step")
    assert "OVER BUDGET" in found.inner_text()
    shoot(page, "memory")
    found.locator(".noUi-handle").first.focus()
    for key in ["ArrowLeft", "ArrowRight"]:
        assert changes(page, found, partial(page.keyboard.press, key))
    # From the whole image to the smallest tile that the slider has: it fits, and says so.
    tile = found.locator(".noUi-handle").nth(4)
    tile.focus()
    assert changes(page, found, lambda: page.keyboard.press("ArrowRight"))
    found.get_by_text(re.compile("fits, .* left")).wait_for(timeout=10_000)
    menu = found.get_by_label("Recompute")
    assert changes(page, found, lambda: menu.select_option("each block"))
    # What is done already is no remedy any more.
    found.get_by_text("each block again").wait_for(state="detached", timeout=10_000)
    shoot(page, "memory-tile")
    with page.expect_download() as download:
        found.get_by_role("link", name="Save CSV").press("Enter")
    path = lab.folder / "memory.csv"
    download.value.save_as(path)
    assert path.read_text().startswith("layer,block,parameters_bytes")


def test_mosaic_viewer_follows_keys_and_mouse(page: Page, lab: Lab) -> None:
    run_all(page, lab, "00_start")
    found = explorer(page, "of all labelled pixels agree")
    shoot(page, "mosaic")
    found.locator(".noUi-handle").first.focus()
    for key in ["ArrowLeft", "ArrowRight"]:
        assert changes(page, found, partial(page.keyboard.press, key))
    for name in ("Tile grid", "Halo of the central tile"):
        box = found.get_by_label(name)
        box.focus()
        assert changes(page, found, lambda: page.keyboard.press("Space")), name
    shoot(page, "mosaic-grid")
    assert "full resolution" in found.inner_text()
    zoom = found.get_by_role("button", name="Zoom in")
    assert changes(page, found, lambda: zoom.press("Enter"))
    text = found.locator(".bigunet-summary").inner_text()
    # The wheel over the first pane moves the view, and the kernel hears of it.
    found.locator(".bk-Figure").first.scroll_into_view_if_needed()
    pane = found.locator(".bk-Figure").first.bounding_box()
    assert pane is not None
    page.mouse.move(pane["x"] + 200, pane["y"] + 120)
    page.mouse.wheel(0, -400)
    page.wait_for_function(
        "([e, t]) => e.querySelector('.bigunet-summary').innerText !== t",
        arg=[found.element_handle(), text],
        timeout=15_000,
    )
    shoot(page, "mosaic-zoomed")


def test_sample_parallel_runs_in_the_browser(page: Page, lab: Lab) -> None:
    run_all(page, lab, "03_sample_parallel")
    shoot(page, "sample-parallel")
    assert "largest relative difference" in page.locator(".jp-Notebook").inner_text()
