"""Files that are missing, cut off, damaged or of the wrong kind: refused, early, with a remedy."""

from __future__ import annotations

import numpy as np
import pytest
import rasterio
import zarr
from PIL import Image

from bigunet.errors import OutputError, SceneError
from bigunet.scenes import (
    ScenePair,
    iter_blocks,
    open_labels,
    open_scene,
    read_block,
    synthetic,
    write_scene,
)

pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")
ARRAY = np.random.default_rng(1).integers(0, 256, (3, 300, 400), np.uint8)
SUFFIXES = [".png", ".jpg", ".tif", ".npy", ".zarr"]


def save(path):
    if path.suffix == ".tif":
        with rasterio.open(
            path, "w", driver="GTiff", count=3, height=300, width=400, dtype="uint8",
            tiled=True, blockxsize=128, blockysize=128, compress="deflate",
        ) as out:  # fmt: skip
            out.write(ARRAY)
    elif path.suffix == ".npy":
        np.save(path, ARRAY)
    elif path.suffix == ".zarr":
        store = zarr.create_array(str(path), shape=ARRAY.shape, chunks=(3, 128, 128), dtype="u1")
        store[:] = ARRAY
    else:
        Image.fromarray(ARRAY.transpose(1, 2, 0)).save(path)
    return path


def complete(error: SceneError, *words: str) -> None:
    assert error.rule
    assert error.got
    assert error.remedy
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize("opener", [open_scene, open_labels])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing(tmp_path, suffix, opener):
    with pytest.raises(SceneError, match="must exist") as caught:
        opener(tmp_path / f"none{suffix}")
    complete(caught.value, f"none{suffix}")


@pytest.mark.parametrize("name", ["a.docx", "a", "a.nc"])
def test_unknown_suffix(tmp_path, name):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(SceneError, match=r"\.tif.*\.npy") as caught:
        open_scene(tmp_path / name)
    complete(caught.value, name)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif", ".npy"])
def test_cut_off_is_seen_at_opening(tmp_path, suffix, part):
    path = save(tmp_path / f"a{suffix}")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(SceneError) as caught:
        open_scene(path)
    complete(caught.value, path.name)


@pytest.mark.parametrize("compress", [None, "deflate"])
@pytest.mark.parametrize("interleave", ["band", "pixel"])
@pytest.mark.parametrize("tiled", [True, False])
def test_tiff_cut_by_a_few_bytes(tmp_path, compress, interleave, tiled):
    path = tmp_path / "a.tif"
    with rasterio.open(
        path, "w", driver="GTiff", count=3, height=256, width=256, dtype="uint8", tiled=tiled,
        compress=compress, interleave=interleave,
    ) as out:  # fmt: skip
        out.write(ARRAY[:, :256, :256])
    open_scene(path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(SceneError, match="complete and readable"):
        open_scene(path)


@pytest.mark.parametrize("suffix", SUFFIXES[:3])
def test_another_format_under_the_suffix(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"this is no image at all" * 100)
    with pytest.raises(SceneError, match="complete and readable"):
        open_scene(path)


def test_damaged_tile_of_a_tiff_names_the_window(tmp_path):
    path = save(tmp_path / "a.tif")
    with rasterio.open(path) as data:
        offset = int(data.get_tag_item("BLOCK_OFFSET_1_1", "TIFF", bidx=1))
    raw = bytearray(path.read_bytes())
    raw[offset : offset + 4000] = b"\xff" * 4000
    path.write_bytes(bytes(raw))
    scene = open_scene(path)
    np.testing.assert_array_equal(read_block(scene, 0, 128, 0, 128), ARRAY[:, :128, :128])
    with pytest.raises(SceneError, match="rows 130:140, columns 140:150") as caught:
        read_block(scene, 130, 140, 140, 150)
    complete(caught.value, "a.tif")
    with pytest.raises(SceneError, match="readable"):
        scene.values  # noqa: B018  (dask takes the same way)


def test_unreadable_band_is_named_and_the_others_serve(tmp_path):
    path = tmp_path / "a.tif"
    with rasterio.open(
        path, "w", driver="GTiff", count=3, height=64, width=64, dtype="uint8",
        interleave="band", compress="deflate",
    ) as out:  # fmt: skip
        out.write(ARRAY[:, :64, :64])
    with rasterio.open(path) as data:
        offset = int(data.get_tag_item("BLOCK_OFFSET_0_0", "TIFF", bidx=2))
    raw = bytearray(path.read_bytes())
    raw[offset : offset + 500] = b"\xff" * 500
    path.write_bytes(bytes(raw))
    with pytest.raises(SceneError, match=r"bands \[1\]"):
        read_block(open_scene(path, bands=[1]), 0, 9, 0, 9)
    good = open_scene(path, bands=[0, 2])
    np.testing.assert_array_equal(read_block(good, 0, 9, 0, 9), ARRAY[[0, 2], :9, :9])


def test_damaged_png_names_the_file(tmp_path):
    path = save(tmp_path / "a.png")
    raw = bytearray(path.read_bytes())
    raw[5000:9000] = b"\x00" * 4000
    path.write_bytes(bytes(raw))
    with pytest.raises(SceneError, match=r"a\.png"):
        read_block(open_scene(path), 0, 300, 0, 400)


@pytest.mark.parametrize("where", ["c/0/1/1", "c/0/2/3"])
@pytest.mark.parametrize("keep", [0, 50])
def test_damaged_zarr_chunk(tmp_path, where, keep):
    path = save(tmp_path / "a.zarr")
    (path / where).write_bytes((path / where).read_bytes()[:keep])
    if where == "c/0/2/3":  # the last chunk is tried at opening
        with pytest.raises(SceneError, match="readable"):
            open_scene(path)
    else:
        with pytest.raises(SceneError, match="rows 128:256, columns 128:256"):
            read_block(open_scene(path), 128, 256, 128, 256)


def test_zarr_without_its_metadata_or_choice(tmp_path):
    path = save(tmp_path / "a.zarr")
    (path / "zarr.json").write_text("{")
    with pytest.raises(SceneError, match="complete and readable"):
        open_scene(path)
    group = zarr.open_group(str(tmp_path / "g.zarr"), mode="w")
    for name in ("red", "green"):
        group.create_array(name, shape=(8, 9), dtype="u1")[:] = 1
    with pytest.raises(SceneError, match=r"\['green', 'red'\].*g\.zarr/green"):
        open_scene(tmp_path / "g.zarr")
    assert open_scene(tmp_path / "g.zarr/green").shape == (1, 8, 9)
    with pytest.raises(SceneError, match="must exist"):
        open_scene(tmp_path / "g.zarr/blue")


def test_interrupted_write_is_not_opened(tmp_path):
    """The image cannot be read to its end, so the copy breaks off half-way."""
    source = save(tmp_path / "source.zarr")
    chunk = source / "c/0/1/1"
    chunk.write_bytes(chunk.read_bytes()[:50])
    scene = ScenePair(open_scene(source), synthetic((300, 400)).labels)
    with pytest.raises(SceneError, match=r"rows 128:256, columns 128:256.*source\.zarr"):
        write_scene(scene, tmp_path / "a.zarr", block=128)
    assert (tmp_path / "a.zarr/image/c/0/0/0").exists()
    with pytest.raises(SceneError, match="interrupted"):
        open_scene(tmp_path / "a.zarr")
    with pytest.raises(SceneError, match="rows"):
        write_scene(scene, tmp_path / "g", format="geotiff", block=128)
    with pytest.raises(SceneError, match="must exist"):
        open_scene(tmp_path / "g/image.tif")


def test_wrong_kinds(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((20, 20), np.complex64))
    with pytest.raises(SceneError, match="complex64"):
        open_scene(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.array([[None, 1]]), allow_pickle=True)
    with pytest.raises(SceneError, match=r"b\.npy"):
        open_scene(tmp_path / "b.npy")
    np.save(tmp_path / "c.npy", np.zeros((0, 20), np.uint8))
    with pytest.raises(SceneError, match="at least one"):
        open_scene(tmp_path / "c.npy")
    np.save(tmp_path / "d.npy", np.zeros(20, np.uint8))
    with pytest.raises(SceneError, match="axes"):
        open_scene(tmp_path / "d.npy")


@pytest.mark.parametrize("bands", [[3], [-1], []])
def test_bands_that_are_not_there(tmp_path, bands):
    with pytest.raises(SceneError, match="bands 0 to 2"):
        open_scene(save(tmp_path / "a.npy"), bands=bands)


@pytest.mark.parametrize(
    "window", [(-1, 5, 0, 5), (0, 301, 0, 5), (5, 5, 0, 5), (0, 5, 395, 401), (9, 3, 0, 5)]
)
def test_window_outside(tmp_path, window):
    scene = open_scene(save(tmp_path / "a.npy"))
    with pytest.raises(SceneError, match="300 x 400"):
        read_block(scene, *window)
    with pytest.raises(SceneError, match="dims"):
        read_block(scene[0], 0, 5, 0, 5)


def test_chunk_and_outputs(tmp_path):
    with pytest.raises(SceneError, match="chunk"):
        open_scene(save(tmp_path / "a.npy"), chunk=0)
    scene = synthetic((64, 64))
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="writable"):
        write_scene(scene, tmp_path / "file" / "s.zarr")
    with pytest.raises(OutputError, match=r"ends in \.zarr"):
        write_scene(scene, tmp_path / "s")
    with pytest.raises(OutputError, match="'zarr' or 'geotiff'"):
        write_scene(scene, tmp_path / "s.zarr", format="png")


def test_blocks_cover_once():
    seen = np.zeros((70, 45), int)
    for y0, y1, x0, x1 in iter_blocks((3, 70, 45), 32):
        seen[y0:y1, x0:x1] += 1
    assert (seen == 1).all()
