"""The last steps with a scene of one's own: an example to start from, and a picture to show."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import xarray as xr
from PIL import Image

from bigunet.errors import OutputError, fail
from bigunet.scenes import ClassTable, earth, iter_blocks, read_labels, write_scene

__all__ = ["example_files", "write_picture"]

# A PNG is written in one piece: above this, use a GeoTIFF.
_MOST_PIXELS = 2**28


def example_files(
    folder: str | Path, window: tuple[int, int, int, int] = (330, 714, 2610, 3122)
) -> tuple[Path, Path]:
    """A part of the built-in scene as GeoTIFFs, image and labels, with the classes beside them.

    Stands for files of one's own. Written once; by default the western Mediterranean and the
    Sahara.

    Raises
    ------
    OutputError : where the folder cannot be written to.
    """
    folder = Path(folder)
    if not (folder / "labels.tif").exists():
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder.parent) as name:
                made = write_scene(earth().crop(*window), Path(name) / "new", format="geotiff")
                shutil.rmtree(folder, ignore_errors=True)
                made.rename(folder)
        except OSError as error:
            fail(OutputError, rule="the example can be written", got=error, remedy="Choose a "
                 "folder that you may write to.")  # fmt: skip
    return folder / "image.tif", folder / "labels.tif"


def write_picture(labels: xr.DataArray, path: str | Path, classes: ClassTable) -> Path:
    """Labels (y, x) as a PNG in the classes' colours; pixels of no class are transparent.

    The PNG is paletted: its values are the class ids themselves, so it can be read as labels too.

    Raises
    ------
    OutputError : for a path that cannot be written or is no .png, or more than 2^28 pixels.
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        fail(OutputError, rule="a picture's name ends in .png", got=path, remedy="Rename it.")
    height, width = labels.shape
    if height * width > _MOST_PIXELS:
        fail(
            OutputError,
            rule=f"a picture has at most {_MOST_PIXELS} pixels",
            got=f"{height} x {width}",
            remedy="Write a GeoTIFF: segment(..., out='labels.tif').",
        )
    ids = np.empty((height, width), np.uint8)
    for y0, y1, x0, x1 in iter_blocks((height, width)):
        ids[y0:y1, x0:x1] = read_labels(labels, y0, y1, x0, x1)
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(classes)] = classes.rgb
    picture = Image.fromarray(ids)
    picture.putpalette(palette.tobytes())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path, transparency=bytes([255] * len(classes) + [0] * (256 - len(classes))))
    except OSError as error:
        fail(OutputError, rule="a picture can be written", got=error, remedy="Choose another path.")
    return path
