"""segment(): exactness against the whole image, outputs, bad input, overlap of its three parts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import torch
import xarray as xr
import zarr

from bigunet import UNetSpec
from bigunet.errors import (
    BigUNetError,
    ExactnessError,
    MemoryBudgetError,
    OutputError,
    SceneError,
    ShapeError,
    SpecError,
)
from bigunet.model import UNet
from bigunet.mosaic import IGNORE, InexactWarning, open_mosaic, pyramid, segment
from bigunet.scenes import ClassTable, Normalise, class_table, open_labels, open_scene

NORMALISE = Normalise((120.0, 110.0, 100.0), (60.0, 50.0, 70.0))
CLASSES = ClassTable(("water", "forest", "crop", "town"))
QUIET: dict[str, Any] = {"progress": False}


def network(**changes: Any) -> UNet:
    """Random weights, batch statistics of real input, logits of mean 0 and deviation 1.

    fp32 rounds relative to the largest logits, which random weights would make some thirty.
    """
    torch.manual_seed(0)
    net = UNet(UNetSpec(**{"levels": 3, "channels": 8, "classes": 4, "norm": "batch", **changes}))
    x = torch.from_numpy(NORMALISE.apply(pixels(128, 128)))[None]
    with torch.no_grad():
        for _ in range(20):
            net(x)
        net.eval()
        head = net.layers["head"]
        head.weight /= net(x).std()
        if head.bias is not None:
            head.bias -= net(x).mean((0, 2, 3))
    return net


def pixels(height: int = 150, width: int = 211, bands: int = 3, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (bands, height, width), dtype=np.uint8)


def whole(net: UNet, scene: np.ndarray, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """Probabilities of the whole image by the plain network."""
    x = torch.from_numpy(NORMALISE.apply(scene))[None].to(dtype)
    with torch.inference_mode():
        return torch.softmax(net.to(dtype)(x), 1)[0].numpy()


# Exactness ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "tile"),
    [
        ({}, 32),
        ({"norm": "none", "up": "bilinear", "padding_mode": "reflect", "dropout": 0.2}, 48),
        ({"up": "nearest", "activation": "leaky_relu", "padding_mode": "replicate"}, (40, 64)),
        ({"kernel": 5, "convs": 1, "activation": "gelu", "bias": False, "head_bias": False}, 32),
        ({"levels": 4, "activation": "silu", "affine": False, "narrowing": "block"}, 64),
        ({"levels": 1}, 64),
    ],
)
def test_fp32_probabilities_equal_the_whole_images(changes: dict[str, Any], tile: Any) -> None:
    net, scene = network(**changes), pixels()
    found = segment(
        net,
        scene,
        tile=tile,
        precision="fp32",
        normalise=NORMALISE,
        probabilities="float32",
        **QUIET,
    )
    expected = whole(net, scene)
    np.testing.assert_allclose(found["probabilities"].values, expected, rtol=0, atol=1e-5)
    # Labels may differ only where the two best classes are that close.
    best = np.sort(expected, axis=0)
    clear = best[-1] - best[-2] > 2e-5
    assert clear.mean() > 0.99
    np.testing.assert_array_equal(found["labels"].values[clear], expected.argmax(0)[clear])


def test_float64_equals_the_whole_image_to_rounding() -> None:
    net, scene = network().double(), pixels()
    found = segment(net, scene, tile=32, normalise=NORMALISE, probabilities="float32", **QUIET)
    assert np.bincount(found["labels"].values.ravel(), minlength=4).min() > 500  # every class
    assert found.attrs["precision"] == "fp64"
    expected = whole(net, scene, torch.float64)
    np.testing.assert_array_equal(found["probabilities"].values, expected.astype(np.float32))
    np.testing.assert_array_equal(found["labels"].values, expected.argmax(0))


def test_the_model_is_left_as_it_was() -> None:
    net = network().train()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    segment(net, pixels(), tile=64, normalise=NORMALISE, **QUIET)
    assert net.training
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


@pytest.mark.parametrize("batch", [1, 3])
def test_batches_of_equal_tiles_give_the_same_labels(batch: int) -> None:
    net, scene = network(), pixels()
    one = segment(net, scene, tile=32, normalise=NORMALISE, precision="fp32", **QUIET)
    many = segment(net, scene, tile=32, normalise=NORMALISE, precision="fp32", batch=batch, **QUIET)
    assert (one["labels"].values == many["labels"].values).mean() > 0.9999


def test_bf16_stays_close_to_fp32() -> None:
    net, scene = network(), pixels()
    kwargs: dict[str, Any] = {"normalise": NORMALISE, "probabilities": "float32", "tile": 64}
    coarse = segment(net, scene, precision="bf16", **kwargs, **QUIET)["probabilities"].values
    fine = segment(net, scene, precision="fp32", **kwargs, **QUIET)["probabilities"].values
    # bf16 keeps 8 bits: some 20 layers of random weights spread that to a few percent.
    assert np.abs(coarse - fine).mean() < 0.02
    assert np.abs(coarse - fine).max() > 1e-5


def test_one_output_means_two_labels() -> None:
    net, scene = network(classes=1), pixels()
    found = segment(net, scene, tile=64, normalise=NORMALISE, precision="fp32", **QUIET)
    with torch.inference_mode():
        logits = net(torch.from_numpy(NORMALISE.apply(scene))[None])[0, 0].numpy()
    clear = np.abs(logits) > 1e-4
    np.testing.assert_array_equal(found["labels"].values[clear], (logits > 0)[clear])


def test_a_smaller_halo_says_by_how_much_it_differs() -> None:
    net, scene = network(), pixels()
    with pytest.warns(InexactWarning, match="smaller than the exact 24") as seen:
        found = segment(net, scene, tile=32, halo=8, precision="fp32", normalise=NORMALISE, **QUIET)
    assert len(seen) == 1
    attrs = found.attrs
    assert attrs["halo"] == 8
    assert attrs["exact"] is False
    assert attrs["probed_tiles"] == 4
    exact = segment(net, scene, tile=32, precision="fp32", normalise=NORMALISE, **QUIET)
    assert exact.attrs["exact"] is True
    assert "label_disagreement" not in exact.attrs
    truth = float((exact["labels"].values != found["labels"].values).mean())
    assert truth > 0
    assert 0.3 * truth < attrs["label_disagreement"] < 3 * truth
    assert attrs["max_logit_difference"] > 1e-3
    larger = segment(net, scene, tile=32, halo=40, precision="fp32", normalise=NORMALISE, **QUIET)
    np.testing.assert_array_equal(larger["labels"].values, exact["labels"].values)


# Pixels without data -----------------------------------------------------------------------------


def test_pixels_without_data_are_ignored_and_do_not_spread() -> None:
    net = network()
    scene = pixels().astype(np.float32)
    scene[1, 20:30, 40:60] = np.nan
    scene[0, 100, 7] = np.inf
    found = segment(
        net, scene, tile=32, precision="fp32", normalise=NORMALISE, probabilities=True, **QUIET
    )
    gaps = ~np.isfinite(scene).all(axis=0)
    np.testing.assert_array_equal(found["labels"].values == IGNORE, gaps)
    assert found.attrs["ignored_pixels"] == gaps.sum() == 201
    assert np.isnan(found["probabilities"].values).all(axis=0)[gaps].all()
    assert np.isfinite(found["probabilities"].values[:, ~gaps]).all()
    filled = np.where(gaps, np.array(NORMALISE.mean, np.float32)[:, None, None], scene)
    expected = whole(net, filled).argmax(0)
    assert (found["labels"].values == expected)[~gaps].mean() > 0.9999


def test_nodata_of_the_scene_counts() -> None:
    scene = xr.DataArray(pixels(), dims=("band", "y", "x"), attrs={"nodata": 0.0})
    scene[:, 5:9, 5:9] = 0
    found = segment(network(), scene, tile=64, normalise=NORMALISE, **QUIET)
    assert (found["labels"].values[5:9, 5:9] == IGNORE).all()
    assert found.attrs["ignored_pixels"] == 16


@pytest.mark.parametrize("dtype", ["uint16", "int16", "float32", "float64"])
def test_wide_dtypes_give_the_same_labels(dtype: str) -> None:
    net, scene = network(), pixels()
    one = segment(net, scene, tile=64, precision="fp32", normalise=NORMALISE, **QUIET)
    other = segment(
        net, scene.astype(dtype), tile=64, precision="fp32", normalise=NORMALISE, **QUIET
    )
    np.testing.assert_array_equal(one["labels"].values, other["labels"].values)


# Outputs -----------------------------------------------------------------------------------------


@pytest.fixture
def georeferenced() -> xr.DataArray:
    data = pixels(600, 703)
    a, c, e, f = 10.0, 400_000.0, -10.0, 5_000_000.0
    return xr.DataArray(
        data,
        dims=("band", "y", "x"),
        coords={"y": f + e * (np.arange(600) + 0.5), "x": c + a * (np.arange(703) + 0.5)},
        attrs={"crs": "EPSG:32633", "transform": (a, 0.0, c, 0.0, e, f)},
    )


@pytest.mark.parametrize("suffix", [".zarr", ".tif"])
def test_outputs_hold_labels_place_and_provenance(
    suffix: str, georeferenced: xr.DataArray, tmp_path: Path
) -> None:
    net, out = network(), tmp_path / f"mosaic{suffix}"
    kwargs: dict[str, Any] = {
        "tile": 128,
        "precision": "fp32",
        "normalise": NORMALISE,
        "classes": CLASSES,
        "probabilities": "float32",
    }
    memory = segment(net, georeferenced, **kwargs, **QUIET)
    disk = segment(net, georeferenced, out=out, **kwargs, **QUIET)
    np.testing.assert_array_equal(disk["labels"].values, memory["labels"].values)
    np.testing.assert_array_equal(disk["probabilities"].values, memory["probabilities"].values)
    assert list(disk["class"].values) == list(CLASSES.names)
    np.testing.assert_allclose(disk["x"].values, georeferenced["x"].values)
    np.testing.assert_allclose(disk["y"].values, georeferenced["y"].values)
    assert disk.attrs == memory.attrs == open_mosaic(out).attrs
    assert disk.attrs["spec"] == net.spec.to_dict()
    assert len(disk.attrs["weights"]) == 64
    assert not list(tmp_path.glob("*.partial"))
    again = open_labels(out)
    np.testing.assert_array_equal(again.values, memory["labels"].values)
    assert again.attrs["crs"] == "EPSG:32633"
    assert tuple(again.attrs["transform"]) == georeferenced.attrs["transform"]
    found = class_table(disk["labels"])
    assert found is not None
    assert found.names == CLASSES.names
    levels = pyramid(disk)
    assert [level.shape for level in levels] == [(600, 703), (300, 352)]
    assert levels[1].x.values[0] == 400_010.0
    assert levels[1].y.values[0] == 4_999_990.0


def test_uint8_probabilities_are_within_half_a_step(tmp_path: Path) -> None:
    net, scene = network(), pixels()
    kwargs: dict[str, Any] = {"tile": 64, "precision": "fp32", "normalise": NORMALISE}
    small = segment(net, scene, probabilities="uint8", out=tmp_path / "a.zarr", **kwargs, **QUIET)
    exact = segment(net, scene, probabilities="float32", **kwargs, **QUIET)
    difference = small["probabilities"].values / 255 - exact["probabilities"].values
    assert np.abs(difference).max() <= 0.5 / 255 + 1e-6


def test_a_finished_output_is_opened_and_another_runs_is_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net, scene, out = network(), pixels(), tmp_path / "mosaic.zarr"
    first = segment(net, scene, out=out, tile=64, normalise=NORMALISE, **QUIET)
    stamp = (out / "zarr.json").stat().st_mtime_ns
    segment(net, scene, out=out, normalise=NORMALISE)
    assert "complete already" in capsys.readouterr().out
    assert (out / "zarr.json").stat().st_mtime_ns == stamp
    with pytest.raises(OutputError, match=r"differs in tile\. Pass overwrite=True"):
        segment(net, scene, out=out, tile=32, normalise=NORMALISE, **QUIET)
    with pytest.raises(OutputError, match="differs in normalise"):
        segment(net, scene, out=out, **QUIET)
    with pytest.raises(OutputError, match="differs in scene"):
        segment(net, pixels(seed=2), out=out, normalise=NORMALISE, **QUIET)
    with torch.no_grad():
        next(net.parameters()).add_(0.5)
    with pytest.raises(OutputError, match="differs in weights"):
        segment(net, scene, out=out, normalise=NORMALISE, **QUIET)
    np.testing.assert_array_equal(open_mosaic(out)["labels"], first["labels"])
    second = segment(net, scene, out=out, normalise=NORMALISE, overwrite=True, **QUIET)
    assert second.attrs["weights"] != first.attrs["weights"]
    assert [p.name for p in tmp_path.iterdir()] == ["mosaic.zarr"]


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"tile": 30}, ShapeError, "multiples of the stride 4.*got 30.*Use 32"),
        ({"tile": 512}, ShapeError, "no larger than the image.*got 512 x 512.*Use a tile of"),
        ({"tile": 0}, ShapeError, "positive multiples"),
        ({"halo": -1}, ShapeError, "a halo is 0 or more"),
        ({"batch": 0}, ShapeError, "a batch is 1 or more"),
        ({"precision": "fp16"}, SpecError, "'auto', 'fp32', 'bf16' or 'fp64'"),
        ({"probabilities": "int8"}, OutputError, "float16"),
        ({"classes": ClassTable(("a", "b"))}, SpecError, "4 classes.*got 2 classes"),
        ({"normalise": Normalise((0.0,), (1.0,))}, SpecError, "3 bands.*got 1 bands"),
        ({"out": "mosaic.png"}, OutputError, r"\.zarr, \.tif"),
        ({"memory_bytes": 100}, MemoryBudgetError, "a tile of 4 x 4 needs"),
    ],
)
def test_bad_arguments_are_refused(
    kwargs: dict[str, Any], error: type[BigUNetError], text: str
) -> None:
    with pytest.raises(error, match=text):
        segment(network(), pixels(), **kwargs, **QUIET)


@pytest.mark.parametrize("bands", [1, 13])
def test_other_bands_are_refused(bands: int) -> None:
    with pytest.raises(SceneError, match=f"takes 3 bands.*got {bands} bands.*Choose bands"):
        segment(network(), pixels(bands=bands), **QUIET)


def test_bad_scenes_and_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match="at least the network's stride, 4 pixels; got 3 x 50"):
        segment(network(), pixels(3, 50), **QUIET)
    with pytest.raises(SceneError, match="must exist"):
        segment(network(), tmp_path / "none.tif", **QUIET)
    with pytest.raises(SceneError, match=r"\(band, y, x\)"):
        segment(network(), pixels()[0], **QUIET)
    with pytest.raises(SpecError, match="the model is a UNet"):
        segment(torch.nn.Identity(), pixels(), **QUIET)
    with pytest.raises(ExactnessError, match=r"norm 'instance'.*exact=False"):
        segment(network(norm="instance"), pixels(), **QUIET)
    loose = segment(network(norm="instance"), pixels(), exact=False, tile=64, **QUIET)
    assert loose.attrs["exact"] is False


def test_an_image_smaller_than_a_tile_is_one_tile() -> None:
    found = segment(network(), pixels(9, 14), normalise=NORMALISE, precision="fp32", **QUIET)
    expected = whole(network(), pixels(9, 14)).argmax(0)
    np.testing.assert_array_equal(found["labels"].values, expected)
    assert found.attrs["tile"] == [12, 16]


def test_unwritable_places_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file" / "a.zarr", Path("/proc/a.zarr")):
        with pytest.raises(OutputError, match="can be written"):
            segment(network(), pixels(), out=out, **QUIET)
    with pytest.raises(ShapeError):
        segment(network(), pixels(), out=tmp_path / "b.zarr", tile=30, **QUIET)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    other = tmp_path / "precious.zarr"
    other.mkdir()
    (other / "data").write_text("x")
    with pytest.raises(OutputError, match="exists and is no mosaic"):
        segment(network(), pixels(), out=other, **QUIET)
    with pytest.raises(OutputError, match="overwrite replaces mosaics only"):
        segment(network(), pixels(), out=other, overwrite=True, **QUIET)
    assert (other / "data").read_text() == "x"
    with pytest.raises(OutputError, match="which is none"):
        open_mosaic(tmp_path / "nothing.zarr")


def test_a_result_too_large_is_refused_before_work(tmp_path: Path) -> None:
    out = tmp_path / "mosaic.zarr"
    huge = xr.DataArray(
        da.zeros((3, 400_000, 400_000), chunks=(3, 4096, 4096), dtype="uint8"),
        dims=("band", "y", "x"),
    )
    with pytest.raises(MemoryBudgetError, match=r"Pass out='mosaic\.zarr'"):
        segment(network(), huge, tile=2048, **QUIET)
    with pytest.raises(OutputError, match=r"may need .* MiB on its disk; got .* MiB free"):
        segment(network(classes=250), huge, tile=2048, probabilities=True, out=out, **QUIET)
    assert not list(tmp_path.iterdir())


# Flow --------------------------------------------------------------------------------------------


def test_an_unreadable_window_names_its_tile(tmp_path: Path) -> None:
    path = tmp_path / "scene.zarr"
    array = zarr.create_array(
        str(path),
        shape=(3, 256, 256),
        chunks=(3, 16, 16),
        dtype="uint8",
        dimension_names=("band", "y", "x"),
    )
    array[:] = pixels(256, 256)
    out = tmp_path / "mosaic.zarr"
    scene = open_scene(path)
    chunk = path / "c" / "0" / "6" / "9"  # no sample of the scene's identity lies there
    good = chunk.read_bytes()
    chunk.write_bytes(good[:100])
    with pytest.raises(SceneError, match="every window of a scene must be readable") as caught:
        segment(network(), scene, tile=64, out=out, normalise=NORMALISE, **QUIET)
    assert any("tile rows" in note for note in caught.value.__notes__)
    assert not [t for t in threading.enumerate() if t.name.startswith("mosaic-")]
    assert not out.exists()
    with pytest.raises(OutputError, match="not finished"):
        open_mosaic(out)


def test_a_scene_whose_disk_fails_is_not_taken_for_the_output(tmp_path: Path) -> None:
    def broken(block: np.ndarray) -> np.ndarray:
        raise OSError("connection lost")

    blocks = da.zeros((3, 128, 128), chunks=(3, 128, 128), dtype="uint8")
    bad = blocks.map_blocks(broken, dtype="uint8", meta=np.empty((0, 0, 0), np.uint8))
    scene = xr.DataArray(da.concatenate([da.zeros((3, 400, 128), dtype="uint8"), bad], axis=1),
                         dims=("band", "y", "x"))  # fmt: skip
    with pytest.raises(SceneError, match=r"must be readable; got rows .* connection lost"):
        segment(network(), scene, tile=64, out=tmp_path / "a.zarr", **QUIET)
    assert not list(tmp_path.iterdir())


def test_the_number_of_threads_is_restored() -> None:
    before = torch.get_num_threads()
    segment(network(), pixels(), tile=32, normalise=NORMALISE, **QUIET)
    assert torch.get_num_threads() == before
