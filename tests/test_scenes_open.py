"""Opening imagery: each format against the array that was written, window by window."""

from __future__ import annotations

import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import rasterio
import xarray as xr
import zarr
from PIL import Image
from rasterio.transform import Affine

from bigunet.errors import SceneError
from bigunet.scenes import (
    Normalise,
    check_bands,
    crop,
    earth,
    geotransform,
    normalisation,
    open_scene,
    read_block,
    valid_block,
    valid_mask,
)

UTM = Affine(2.0, 0.0, 500_000.0, 0.0, -2.0, 5_600_000.0)
pytestmark = pytest.mark.filterwarnings("ignore::rasterio.errors.NotGeoreferencedWarning")


def pixels(dtype: str, bands: int = 3, shape: tuple[int, int] = (70, 90)) -> np.ndarray:
    rng = np.random.default_rng(7)
    if np.dtype(dtype).kind == "f":
        return rng.normal(size=(bands, *shape)).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, (bands, *shape), dtype, endpoint=True)


def save(path, array, **options):
    """The array (band, y, x) in the format of the suffix."""
    suffix = path.suffix
    if suffix == ".tif":
        options = {"crs": "EPSG:32632", "transform": UTM, **options}
        with rasterio.open(
            path, "w", driver="GTiff", count=len(array), height=array.shape[1],
            width=array.shape[2], dtype=array.dtype, **options,
        ) as out:  # fmt: skip
            out.write(array)
    elif suffix == ".npy":
        np.save(path, array)
    elif suffix == ".zarr":
        zarr.save_array(str(path), array)
    else:
        Image.fromarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0)).save(path)
    return path


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
@pytest.mark.parametrize("suffix", [".tif", ".npy", ".zarr"])
def test_dtypes_and_windows(tmp_path, suffix, dtype):
    array = pixels(dtype)
    scene = open_scene(save(tmp_path / f"a{suffix}", array), chunk=32)
    assert scene.dims == ("band", "y", "x")
    assert scene.dtype == scene.attrs["dtype"] == dtype
    assert scene.chunks is not None
    np.testing.assert_array_equal(scene.values, array)
    for window in [(0, 70, 0, 90), (31, 33, 31, 65), (69, 70, 89, 90)]:
        y0, y1, x0, x1 = window
        block = read_block(scene, *window)
        np.testing.assert_array_equal(block, array[:, y0:y1, x0:x1])
        assert block.flags.c_contiguous
        assert block.flags.writeable
    np.testing.assert_array_equal(scene[:, 5:40:3, ::-1].values, array[:, 5:40:3, ::-1])
    part = scene.isel(y=slice(10, 60))
    np.testing.assert_array_equal(read_block(part, 1, 9, 2, 8), array[:, 11:19, 2:8])
    again = pickle.loads(pickle.dumps(scene))
    np.testing.assert_array_equal(read_block(again, 3, 9, 2, 8), array[:, 3:9, 2:8])


@pytest.mark.parametrize(
    ("mode", "bands", "dtype"),
    [("L", 1, "uint8"), ("RGB", 3, "uint8"), ("RGBA", 4, "uint8"), ("I;16", 1, "uint16")],
)
def test_png(tmp_path, mode, bands, dtype):
    array = pixels(dtype, bands)
    scene = open_scene(save(tmp_path / "a.png", array), chunk=32)
    np.testing.assert_array_equal(scene.values, array)
    np.testing.assert_array_equal(read_block(scene, 3, 9, 2, 8), array[:, 3:9, 2:8])
    assert float(scene.y[0]) == 0.5
    assert "crs" not in scene.attrs


def test_png_of_16_bit_colour_keeps_its_bits(tmp_path):
    array = pixels("uint16")
    with rasterio.open(
        tmp_path / "a.png", "w", driver="PNG", count=3, height=70, width=90, dtype="uint16"
    ) as out:
        out.write(array)
    np.testing.assert_array_equal(open_scene(tmp_path / "a.png").values, array)


def test_jpeg_is_what_pillow_decodes(tmp_path):
    path = save(tmp_path / "a.jpg", pixels("uint8"))
    with Image.open(path) as image:
        np.testing.assert_array_equal(open_scene(path).values, np.asarray(image).transpose(2, 0, 1))


def test_geotiff_georeference_and_nodata(tmp_path):
    array = pixels("int16")
    scene = open_scene(save(tmp_path / "a.tif", array, nodata=-9999, tiled=True))
    assert scene.attrs["crs"] == "EPSG:32632"
    assert scene.attrs["transform"] == tuple(UTM)[:6]
    assert scene.attrs["nodata"] == -9999
    assert "-9999" in scene.attrs["ignored"]
    with rasterio.open(tmp_path / "a.tif") as data:
        assert (float(scene.x[4]), float(scene.y[7])) == data.xy(7, 4)
    assert open_scene(tmp_path / "a.tif", nodata=0).attrs["nodata"] == 0


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_group_with_names(tmp_path, version):
    array = pixels("uint16", 2)
    data = xr.Dataset({"image": (("y", "band", "x"), array.transpose(1, 0, 2))})
    data.to_zarr(tmp_path / "g.zarr", zarr_format=version, consolidated=False)
    np.testing.assert_array_equal(open_scene(tmp_path / "g.zarr").values, array)
    scene = open_scene(tmp_path / "g.zarr" / "image", bands=[1])
    np.testing.assert_array_equal(read_block(scene, 3, 9, 2, 8), array[1:, 3:9, 2:8])


def test_zarr_written_by_rioxarray_keeps_its_crs(tmp_path):
    data = xr.DataArray(pixels("uint8"), dims=("band", "y", "x"), name="image")
    data = data.rio.write_crs("EPSG:32632").rio.write_transform(UTM)
    data.to_dataset().to_zarr(tmp_path / "r.zarr", consolidated=False)
    scene = open_scene(tmp_path / "r.zarr")
    assert scene.attrs["crs"] == "EPSG:32632"
    assert scene.attrs["transform"] == tuple(UTM)[:6]


@pytest.mark.parametrize(
    ("shape", "layout", "want"),
    [
        ((70, 90), None, (1, 70, 90)),
        ((70, 90, 4), None, (4, 70, 90)),
        ((13, 70, 90), None, (13, 70, 90)),
        ((5, 90, 4), "BHW", (5, 90, 4)),
        ((60, 70, 90), "HWB", (90, 60, 70)),
    ],
)
def test_npy_layouts(tmp_path, shape, layout, want):
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    np.save(tmp_path / "a.npy", array)
    scene = open_scene(tmp_path / "a.npy", layout=layout)
    assert scene.shape == want
    moved = array[None] if len(shape) == 2 else array
    if want[0] == shape[-1]:
        moved = array.transpose(2, 0, 1)
    np.testing.assert_array_equal(scene.values, moved)


@pytest.mark.parametrize("shape", [(5, 90, 4), (60, 70, 90)])
def test_npy_of_unclear_layout(tmp_path, shape):
    np.save(tmp_path / "a.npy", np.zeros(shape, np.uint8))
    with pytest.raises(SceneError, match="layout='BHW'"):
        open_scene(tmp_path / "a.npy")


@pytest.mark.parametrize("suffix", [".tif", ".npy", ".zarr", ".png"])
@pytest.mark.parametrize("bands", [[2, 0], [1, 1, 1]])
def test_bands_in_any_order(tmp_path, suffix, bands):
    array = pixels("uint8")
    scene = open_scene(save(tmp_path / f"a{suffix}", array), bands=bands)
    np.testing.assert_array_equal(read_block(scene, 3, 9, 2, 8), array[bands, 3:9, 2:8])
    np.testing.assert_array_equal(scene.values, array[bands])


@pytest.mark.parametrize("suffix", [".tif", ".npy", ".zarr", ".png"])
def test_many_threads_read_one_scene(tmp_path, suffix):
    array = pixels("uint8", 3, (300, 400))
    scene = open_scene(save(tmp_path / f"a{suffix}", array))

    def check(i: int) -> bool:
        y, x = (i * 37) % 250, (i * 61) % 350
        return bool(
            (read_block(scene, y, y + 50, x, x + 50) == array[:, y : y + 50, x : x + 50]).all()
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(200)))


CHILD = """
import resource, sys
import numpy as np
from bigunet.scenes import open_scene, read_block
scene = open_scene(sys.argv[1])
read_block(scene, 0, 256, 0, 256)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
total = 0
for y in range(0, 6144, 512):
    for x in range(0, 6144, 512):
        total += int(read_block(scene, y, y + 512, x, x + 512).sum())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, total)
"""


@pytest.mark.parametrize("suffix", [".tif", ".npy", ".zarr"])
def test_memory_is_that_of_windows(tmp_path, suffix):
    """108 MiB of pixels pass through with less than 40 MiB more than the first window took."""
    if suffix == ".zarr":
        array = zarr.create_array(
            str(tmp_path / "a.zarr"), shape=(3, 6144, 6144), chunks=(3, 512, 512), dtype="u1"
        )
        for y in range(0, 6144, 512):
            array[:, y : y + 512] = np.full((3, 512, 6144), y // 512 + 1, np.uint8)
    else:
        whole = np.repeat(np.arange(6144, dtype=np.uint16) // 512 + 1, 6144).astype(np.uint8)
        whole = np.broadcast_to(whole.reshape(6144, 6144), (3, 6144, 6144))
        save(tmp_path / f"a{suffix}", whole, tiled=True) if suffix == ".tif" else np.save(
            tmp_path / "a.npy", whole
        )
    out = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / f"a{suffix}")],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    kib, total = (int(v) for v in out.stdout.split())
    assert total == 3 * 6144 * 512 * sum(range(1, 13))
    limit = 90 if suffix == ".tif" else 40  # GDAL keeps up to 64 MiB of decoded blocks
    assert kib < limit * 1024, f"{kib / 1024:.0f} MiB"


def test_valid_pixels():
    block = np.zeros((2, 2, 3), np.float32)
    block[0, 0, 0], block[1, 0, 1], block[1, 1, 2] = np.nan, -np.inf, -9999
    np.testing.assert_array_equal(valid_block(block), [[0, 0, 1], [1, 1, 1]])
    np.testing.assert_array_equal(valid_block(block, -9999), [[0, 0, 1], [1, 1, 0]])
    np.testing.assert_array_equal(valid_block(block, float("nan")), [[0, 0, 1], [1, 1, 1]])
    colour = np.zeros((3, 1, 2), np.uint8)
    colour[0, 0, 1] = 255  # pure red is a colour, black is nodata
    np.testing.assert_array_equal(valid_block(colour, 0), [[0, 1]])


def test_valid_mask_is_lazy_and_equal(tmp_path):
    array = pixels("float32")
    array[1, 5, 6], array[0, 60, 80] = np.nan, np.inf
    scene = open_scene(save(tmp_path / "a.tif", array, nodata=float(array[2, 9, 9])), chunk=32)
    mask = valid_mask(scene)
    assert mask.dims == ("y", "x")
    assert mask.dtype == bool
    assert mask.chunks is not None
    want = np.isfinite(array).all(0) & (array != array[2, 9, 9]).all(0)
    assert want.sum() == want.size - 3
    np.testing.assert_array_equal(mask.values, want)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "float32"])
def test_normalisation_of_whole_scene_is_numpys(tmp_path, dtype):
    array = pixels(dtype)
    if dtype == "float32":
        array[0, 3, 3], array[1, 4, 4] = np.nan, np.inf
    scene = open_scene(save(tmp_path / "a.tif", array, nodata=7))
    valid = valid_block(array, 7)
    got = normalisation(scene, block=32)
    values = array[:, valid].astype(np.float64)
    np.testing.assert_allclose(got.mean, values.mean(1), rtol=1e-10)
    np.testing.assert_allclose(got.std, values.std(1), rtol=1e-10)
    out = got.apply(array)
    assert out.dtype == np.float32
    assert (out[:, ~valid] == 0).all()
    want = (values - values.mean(1)[:, None]) / values.std(1)[:, None]
    np.testing.assert_allclose(out[:, valid], want, atol=2e-6)
    assert Normalise.from_dict(got.to_dict()) == got
    few = normalisation(scene, block=16, max_blocks=12)
    assert few == normalisation(scene, block=16, max_blocks=12)
    assert few != got
    np.testing.assert_allclose(few.std, got.std, rtol=0.1)


def test_normalisation_does_not_depend_on_tiles(tmp_path):
    array = pixels("uint16")
    scale = normalisation(open_scene(save(tmp_path / "a.npy", array)))
    np.testing.assert_array_equal(
        scale.apply(array)[:, 7:31, 3:50], scale.apply(array[:, 7:31, 3:50])
    )


@pytest.mark.parametrize("bands", [1, 13])
def test_other_bands_than_the_network(tmp_path, bands):
    scene = open_scene(save(tmp_path / "a.npy", pixels("uint16", bands)))
    with pytest.raises(SceneError, match=r"3 input channels.*bands=\[") as caught:
        check_bands(scene, 3)
    assert f"in_channels={bands}" in caught.value.remedy
    chosen = eval(caught.value.remedy.split("bands=")[1].split(")")[0])
    check_bands(open_scene(tmp_path / "a.npy", bands=chosen), 3)
    with pytest.raises(SceneError, match="for 3 bands"):
        Normalise((0, 0, 0), (1, 1, 1)).apply(scene.values)


def test_constant_and_empty_scenes(tmp_path):
    np.save(tmp_path / "a.npy", np.full((20, 20), 5, np.uint8))
    assert normalisation(open_scene(tmp_path / "a.npy")) == Normalise((5.0,), (1.0,))
    with pytest.raises(SceneError, match="neither nodata"):
        normalisation(open_scene(tmp_path / "a.npy", nodata=5))
    with pytest.raises(SceneError, match="positive std"):
        Normalise((1.0,), (0.0,))


@pytest.mark.parametrize("suffix", [".tif", ".zarr"])
def test_crop_and_slices_keep_their_place(tmp_path, suffix):
    array = pixels("uint8")
    scene = open_scene(save(tmp_path / f"a{suffix}", array), chunk=32)
    part = crop(scene, 10, 60, 20, 80)
    np.testing.assert_array_equal(part.values, array[:, 10:60, 20:80])
    np.testing.assert_array_equal(read_block(part, 1, 9, 2, 8), array[:, 11:19, 22:28])
    again = crop(part, 5, 6, 7, 8)
    np.testing.assert_array_equal(again.values, array[:, 15:16, 27:28])
    whole = Affine(*scene.attrs["transform"])
    for got, row, column in [(part, 10, 20), (again, 15, 27), (scene[:, 10:60, 20:80], 10, 20)]:
        want = whole @ Affine.translation(column, row)
        np.testing.assert_allclose(geotransform(got), tuple(want)[:6], rtol=0, atol=1e-6)
    np.testing.assert_allclose(geotransform(scene[:, ::2, ::4])[::4], [4 * whole.a, 2 * whole.e])
    with pytest.raises(SceneError, match="70 x 90"):
        crop(scene, 0, 71, 0, 5)


def test_crop_of_a_pair():
    scene = earth()
    part = scene.crop(500, 700, 2600, 2900)
    assert part.image.y.attrs["units"] == "degrees_north"
    assert part.classes == scene.classes
    np.testing.assert_array_equal(part.labels.values, scene.labels.values[500:700, 2600:2900])
    np.testing.assert_array_equal(part.image.x, scene.image.x[2600:2900])
    assert part.labels.attrs["transform"] == part.image.attrs["transform"]
