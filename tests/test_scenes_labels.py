"""Labels, class tables and pairs: ids, colours, tables beside the file, checks with positions."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import rasterio
import yaml
import zarr
from PIL import Image
from rasterio.transform import Affine

from bigunet.errors import SceneError
from bigunet.scenes import (
    OKABE_ITO,
    ClassTable,
    check_classes,
    class_table,
    default_colours,
    ignore_id,
    open_deepglobe,
    open_labels,
    open_scene,
    pair,
    read_block,
    read_labels,
)

TABLE = ClassTable(("a", "b", "c"), ("#ff0000", "#00ff00", "#0000ff"), 255, ("#000000",))
pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")


def ids(shape=(40, 50)):
    out = np.random.default_rng(3).integers(0, 3, shape).astype(np.uint8)
    out[4, 5] = 255
    return out


def write_tif(path, array, crs="EPSG:32632", transform=(2, 0, 500, 0, -2, 900), **options):
    array = array[None] if array.ndim == 2 else array
    with rasterio.open(
        path, "w", driver="GTiff", count=len(array), height=array.shape[1], width=array.shape[2],
        dtype=array.dtype, crs=crs, transform=Affine(*transform), **options,
    ) as out:  # fmt: skip
        out.write(array)
    return path


def colours_of(labels):
    rgb = np.zeros((*labels.shape, 3), np.uint8)
    for i in range(3):
        rgb[labels == i] = TABLE.rgb[i]
    return rgb


def test_table_round_trips_and_defaults():
    assert ClassTable.from_dict(json.loads(json.dumps(TABLE.to_dict()))) == TABLE
    plain = ClassTable(("x", "y"))
    assert plain.colours == OKABE_ITO[:2]
    assert ClassTable.from_dict(plain.to_dict()) == plain
    assert len(set(default_colours(24))) == 24
    np.testing.assert_array_equal(TABLE.rgb, 255 * np.eye(3, dtype=np.uint8))


@pytest.mark.parametrize("suffix", ["yaml", "json", "csv"])
def test_tables_beside_the_labels(tmp_path, suffix):
    np.save(tmp_path / "a.npy", ids())
    path = tmp_path / f"a.classes.{suffix}"
    if suffix == "csv":
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["name", "r", "g", "b"])
            rows.writerows([n, *c] for n, c in zip(TABLE.names, TABLE.rgb.tolist(), strict=True))
            rows.writerow(["Unknown", 0, 0, 0])
    else:
        path.write_text((yaml.safe_dump if suffix == "yaml" else json.dumps)(TABLE.to_dict()))
    labels = open_labels(tmp_path / "a.npy")
    assert class_table(labels) == TABLE
    np.testing.assert_array_equal(labels.values, ids())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("names: [a, a]", "own name"),
        ("names: [a, b]\ncolours: ['#ff0000']", "as many colours"),
        ("names: [a]\ncolours: [red]", "#rrggbb"),
        ("names: [a, b]\nignore: 1", "outside the class ids"),
        ("labels: [a, b]", "'names'"),
        ("names: [a", "readable YAML"),
        ("just text", "'names'"),
    ],
)
def test_bad_tables(tmp_path, text, message):
    (tmp_path / "classes.yaml").write_text(text)
    with pytest.raises(SceneError, match=message):
        ClassTable.from_file(tmp_path / "classes.yaml")


@pytest.mark.parametrize("suffix", [".npy", ".png", ".tif", ".zarr"])
def test_ids_in_each_format(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".npy":
        np.save(path, ids())
    elif suffix == ".png":
        image = Image.fromarray(ids()).convert("P")
        image.putdata(ids().ravel().tolist())
        image.save(path)
    elif suffix == ".tif":
        write_tif(path, ids())
    else:
        zarr.save_array(str(path), ids())
    labels = open_labels(path, chunk=16)
    assert labels.dims == ("y", "x")
    assert labels.chunks is not None
    assert ignore_id(labels) == 255
    assert class_table(labels) is None
    np.testing.assert_array_equal(labels.values, ids())
    np.testing.assert_array_equal(read_labels(labels, 2, 30, 1, 20), ids()[2:30, 1:20])


@pytest.mark.parametrize("suffix", [".png", ".tif", ".npy"])
def test_colours_become_ids(tmp_path, suffix):
    rgb, path = colours_of(ids()), tmp_path / f"a{suffix}"
    if suffix == ".png":
        Image.fromarray(rgb).save(path)
    elif suffix == ".tif":
        write_tif(path, rgb.transpose(2, 0, 1))
    else:
        np.save(path, rgb)
    labels = open_labels(path, classes=TABLE)
    assert labels.dtype == np.uint8
    np.testing.assert_array_equal(labels.values, ids())
    with pytest.raises(SceneError, match="need a class table"):
        open_labels(path)


def test_a_colour_outside_the_table_is_named(tmp_path):
    rgb = colours_of(ids())
    rgb[20, 30] = (1, 2, 3)
    Image.fromarray(rgb).save(tmp_path / "a.png")
    labels = open_labels(tmp_path / "a.png", classes=TABLE)
    with pytest.raises(SceneError, match="#010203 at row 20, column 30"):
        read_labels(labels, 15, 40, 25, 50)
    read_labels(labels, 0, 20, 0, 50)


def test_nodata_becomes_ignored_and_the_dtype_holds_it(tmp_path):
    array = ids().astype(np.int8)
    array[4, 5] = -1
    labels = open_labels(write_tif(tmp_path / "a.tif", array, nodata=-1))
    assert int(labels[4, 5]) == 255
    np.testing.assert_array_equal(labels.values, ids())
    np.save(tmp_path / "b.npy", ids())
    minus = open_labels(tmp_path / "b.npy", ignore=-1)
    assert ignore_id(minus) == -1
    assert minus.dtype == np.int16


def test_float_labels_and_other_band_counts_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", ids().astype(np.float32))
    with pytest.raises(SceneError, match="must be integers"):
        open_labels(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.zeros((2, 40, 50), np.uint8))
    with pytest.raises(SceneError, match="one band of ids"):
        open_labels(tmp_path / "b.npy")
    np.save(tmp_path / "c.npy", ids())
    with pytest.raises(SceneError, match="ignores id 255"):
        open_labels(tmp_path / "c.npy", classes=TABLE, ignore=7)


def test_a_pair_and_what_breaks_it(tmp_path):
    image = open_scene(write_tif(tmp_path / "i.tif", np.zeros((3, 40, 50), np.uint8)))
    labels = open_labels(write_tif(tmp_path / "l.tif", ids()), classes=TABLE)
    good = pair(image, labels)
    assert good.classes == TABLE
    assert good.shape == (40, 50)
    assert set(good.to_dataset()) == {"image", "labels"}

    small = open_labels(write_tif(tmp_path / "s.tif", ids((40, 49))), classes=TABLE)
    with pytest.raises(SceneError, match=r"image 40 x 50, labels 40 x 49.*[Cc]rop"):
        pair(image, small)
    crs = open_labels(write_tif(tmp_path / "c.tif", ids(), crs="EPSG:4326"), classes=TABLE)
    with pytest.raises(SceneError, match=r"image EPSG:32632, labels EPSG:4326.*Reproject"):
        pair(image, crs)
    moved = write_tif(tmp_path / "m.tif", ids(), transform=(2, 0, 501, 0, -2, 900))
    with pytest.raises(SceneError, match="same transform"):
        pair(image, open_labels(moved, classes=TABLE))
    with pytest.raises(SceneError, match="dims"):
        pair(labels, image)
    with pytest.raises(SceneError, match="ignore the same id"):
        pair(image, labels, classes=ClassTable(("a", "b", "c"), ignore=9))


def test_same_crs_written_in_two_ways(tmp_path):
    image = open_scene(write_tif(tmp_path / "i.tif", np.zeros((3, 40, 50), np.uint8)))
    labels = open_labels(write_tif(tmp_path / "l.tif", ids()), classes=TABLE)
    labels.attrs["crs"] = rasterio.crs.CRS.from_epsg(32632).to_wkt()
    pair(image, labels)


@pytest.mark.parametrize("value", [3, 200])
def test_a_label_outside_the_table_is_named(tmp_path, value):
    array = np.zeros((2100, 2100), np.uint8)
    array[2070, 2080] = array[2075, 2079] = value
    np.save(tmp_path / "l.npy", array)
    labels = open_labels(tmp_path / "l.npy", classes=TABLE)
    with pytest.raises(SceneError, match=f"0 to 2.*got {value} at row 2070, column 2080"):
        check_classes(labels, 3)
    np.save(tmp_path / "i.npy", np.zeros((2100, 2100), np.uint8))
    with pytest.raises(SceneError, match=f"{value} at row 2070"):
        pair(open_scene(tmp_path / "i.npy"), labels)
    check_classes(labels, value + 1)


def test_negative_label(tmp_path):
    array = ids().astype(np.int16)
    array[7, 8] = -3
    np.save(tmp_path / "l.npy", array)
    with pytest.raises(SceneError, match="-3 at row 7, column 8"):
        check_classes(open_labels(tmp_path / "l.npy"), None)


@pytest.fixture
def deepglobe(tmp_path):
    rng, truth = np.random.default_rng(0), {}
    with (tmp_path / "class_dict.csv").open("w") as file:
        file.write("name,r,g,b\nurban_land,0,255,255\nagriculture_land,255,255,0\n")
        file.write("rangeland,255,0,255\nforest_land,0,255,0\nwater,0,0,255\n")
        file.write("barren_land,255,255,255\nunknown,0,0,0\n")
    palette = np.array([[0, 255, 255], [255, 255, 0], [255, 0, 255], [0, 255, 0], [0, 0, 255],
                        [255, 255, 255], [0, 0, 0]])  # fmt: skip
    for name in ("119", "855", "21"):
        labels = rng.integers(0, 7, (24, 32))
        # Not quite 0 and 255, as in the data set: up to 127 off, both ways.
        noise = rng.integers(0, 128, (24, 32, 3))
        mask = np.where(palette[labels] == 255, 255 - noise, noise).astype(np.uint8)
        Image.fromarray(mask).save(tmp_path / f"{name}_mask.png")
        Image.fromarray(rng.integers(0, 255, (24, 32, 3), np.uint8)).save(
            tmp_path / f"{name}_sat.jpg"
        )
        truth[name] = np.where(labels == 6, 255, labels)
    return tmp_path, truth


def test_deepglobe_folder(deepglobe):
    folder, truth = deepglobe
    data = open_deepglobe(folder)
    assert len(data) == 3
    assert data.ids == ("119", "21", "855")
    for name, scene in zip(data.ids, data, strict=True):
        np.testing.assert_array_equal(scene.labels.values, truth[name])
        check_classes(scene.labels, 6)
        with Image.open(folder / f"{name}_sat.jpg") as image:
            want = np.asarray(image).transpose(2, 0, 1)
        np.testing.assert_array_equal(read_block(scene.image, 0, 24, 0, 32), want)
    assert data[-1].classes.names[3] == "forest_land"
    assert data[1:].ids == ("21", "855")
    (folder / "class_dict.csv").unlink()
    assert open_deepglobe(folder).classes == data.classes


def test_deepglobe_lone_files(deepglobe, tmp_path):
    folder, _ = deepglobe
    (folder / "21_mask.png").unlink()
    (folder / "855_sat.jpg").unlink()
    with pytest.raises(SceneError, match=r"21_mask\.png, 855_sat\.jpg"):
        open_deepglobe(folder)
    with pytest.raises(SceneError, match="no folder"):
        open_deepglobe(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SceneError, match="none in"):
        open_deepglobe(tmp_path / "empty")
