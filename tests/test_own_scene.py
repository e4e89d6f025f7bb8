"""The example's files and the picture, read back by other programs' eyes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from PIL import Image

from bigunet.errors import OutputError
from bigunet.own_scene import example_files, write_picture
from bigunet.scenes import ClassTable, earth, open_labels, open_scene

WINDOW = (500, 564, 2800, 2896)


def test_the_example_is_a_part_of_the_earth_and_is_written_once(tmp_path: Path) -> None:
    image, labels = example_files(tmp_path / "deep" / "example", WINDOW)
    part = earth().crop(*WINDOW)
    opened = open_scene(image)
    assert (opened.values == part.image.values).all()
    assert opened.attrs["crs"] == "EPSG:4326"
    np.testing.assert_allclose(opened.y.values, part.image.y.values)
    assert (open_labels(labels).values == part.labels.values).all()
    before = image.stat().st_mtime_ns
    assert example_files(tmp_path / "deep" / "example", WINDOW) == (image, labels)
    assert image.stat().st_mtime_ns == before
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["example"]


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError):
        example_files(tmp_path / "file" / "example", WINDOW)


def test_the_picture_has_the_ids_and_the_colours(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 3, (40, 50)).astype(np.uint8)
    ids[0] = 255
    classes = ClassTable(("a", "b", "c"), ("#010203", "#aabbcc", "#ff0000"))
    path = write_picture(xr.DataArray(ids, dims=("y", "x")), tmp_path / "new" / "m.png", classes)
    picture = Image.open(path)
    assert picture.mode == "P"
    assert (np.asarray(picture) == ids).all()
    rgba = np.asarray(picture.convert("RGBA"))
    assert (rgba[1:, :, :3] == classes.rgb[ids[1:]]).all()
    assert (rgba[1:, :, 3] == 255).all()
    assert (rgba[0, :, 3] == 0).all()


def test_a_wrong_name_or_size_is_refused(tmp_path: Path) -> None:
    classes = ClassTable(("a",))
    labels = xr.DataArray(np.zeros((4, 4), np.uint8), dims=("y", "x"))
    with pytest.raises(OutputError, match=r"\.png"):
        write_picture(labels, tmp_path / "m.jpg", classes)
    huge = xr.DataArray(np.broadcast_to(np.uint8(0), (2**15, 2**14)), dims=("y", "x"))
    with pytest.raises(OutputError, match="GeoTIFF"):
        write_picture(huge, tmp_path / "m.png", classes)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="can be written"):
        write_picture(labels, tmp_path / "file" / "m.png", classes)
