"""Draw the README's pictures: `python docs/make_pictures.py [mosaic] [stage_explorer]`.

The mosaic is drawn from the shipped scene and network. The explorer is photographed on its real
page, served without code as `bigunet lab --app` does; that needs Chromium.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from PIL import Image, ImageDraw, ImageFont, ImageOps
from playwright.sync_api import sync_playwright

from bigunet.checkpoint import demo_weights
from bigunet.mosaic import pyramid, segment
from bigunet.scenes import ClassTable, earth
from bigunet.views import MosaicViewer

HERE = Path(__file__).resolve().parent
#: Rows and columns: Europe, the Sahara and the Middle East.
WINDOW = (130, 910, 2400, 3750)
EXPLORER = """\
from bigunet.handover import Handover
from bigunet.views import StageExplorer, setup
setup()
StageExplorer(Handover().spec, (8, 3, 480, 480), stages=4, micro_batches=8, machine="summit")
"""


def mosaic() -> Path:
    """Image, labels, prediction and error, with a legend underneath."""
    scene = earth().crop(*WINDOW)
    network = demo_weights()
    labels = pyramid(segment(network, scene.image, tile=256, precision="fp32", progress=False))
    viewer = MosaicViewer(
        scene.image, scene.labels, labels, classes=scene.classes, spec=network.spec, tile=256
    )
    assert scene.classes is not None
    picture = with_legend(Image.open(io.BytesIO(viewer.png())).convert("RGB"), scene.classes)
    path = HERE / "mosaic.png"
    picture.quantize(128).save(path, optimize=True)
    return path


def with_legend(picture: Image.Image, classes: ClassTable) -> Image.Image:
    """The picture with a box and a name for each class below it, four in a row."""
    font = ImageFont.load_default(13)
    column, line = picture.width // 4, 22
    out = Image.new("RGB", (picture.width, picture.height + 2 * line + 8), "white")
    out.paste(picture)
    pen = ImageDraw.Draw(out)
    for i, (name, colour) in enumerate(zip(classes.names, classes.colours, strict=True)):
        x, y = 12 + i % 4 * column, picture.height + i // 4 * line
        pen.rectangle((x, y + 2, x + 14, y + 16), fill=colour, outline="black")
        pen.text((x + 20, y + 1), name, fill="black", font=font)
    return out


def stage_explorer() -> Path:
    """StageExplorer with the shipped network in four stages on a Summit node."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    token, path = secrets.token_hex(16), HERE / "stage_explorer.png"
    with tempfile.TemporaryDirectory() as folder:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(EXPLORER)])
        notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
        nbformat.write(notebook, Path(folder) / "stages.ipynb")
        command = [sys.executable, "-m", "bigunet", "lab", str(Path(folder) / "stages.ipynb")]
        server = subprocess.Popen(
            [*command, "--app", "--no-browser", "--port", str(port)],
            env={**os.environ, "JUPYTER_TOKEN": token},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(
                    executable_path=chromium, args=["--no-sandbox", "--disable-gpu"]
                )
                page = browser.new_page(viewport={"width": 1280, "height": 1400})
                for _ in range(120):
                    try:
                        page.goto(
                            f"http://127.0.0.1:{port}/voila/render/stages.ipynb?token={token}"
                        )
                        break
                    except Exception:
                        page.wait_for_timeout(500)
                found = page.locator(".bigunet-explorer").last
                found.wait_for(timeout=120_000)
                page.wait_for_timeout(6000)
                picture = Image.open(io.BytesIO(found.screenshot())).convert("RGB")
                browser.close()
        finally:
            server.terminate()
            server.wait(timeout=60)
    left, top, right, bottom = ImageOps.invert(picture.convert("L")).getbbox() or (0, 0, 1, 1)
    picture = picture.crop((left, top, right + 8, bottom))
    picture.quantize(128).save(path, optimize=True)
    return path


if __name__ == "__main__":
    for draw in (mosaic, stage_explorer):
        if len(sys.argv) == 1 or draw.__name__ in sys.argv:
            print(draw())
