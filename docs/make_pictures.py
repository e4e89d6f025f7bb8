"""Draw the README's pictures from the shipped scene and network: `python docs/make_pictures.py`."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from bigunet.checkpoint import demo_weights
from bigunet.mosaic import pyramid, segment
from bigunet.scenes import ClassTable, earth
from bigunet.views import MosaicViewer

HERE = Path(__file__).resolve().parent
#: Rows and columns: Europe, the Sahara and the Middle East.
WINDOW = (130, 910, 2400, 3750)


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


if __name__ == "__main__":
    print(mosaic())
