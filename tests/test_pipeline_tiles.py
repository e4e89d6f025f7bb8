"""Tiles of one shape, and tiles times stages, against the whole image in one piece (float64)."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_ranks import SPECS, network, on_ranks, tiled_plan, tiled_step

from bigunet.model import UNet, pad_to_stride
from bigunet.pipeline import equal_tiles, read_shape
from bigunet.spec import UNetSpec

TOLERANCE = 1e-10


@pytest.mark.parametrize("up", ["transpose", "nearest", "bilinear"])
@pytest.mark.parametrize(
    ("levels", "convs", "kernel"), [(2, 1, 5), (3, 2, 3), (4, 1, 3), (1, 2, 3)]
)
def test_equal_tiles_write_the_whole_image(up: str, levels: int, convs: int, kernel: int) -> None:
    """Every output pixel from tiles of one shape, read, cropped and cut as they say."""
    spec = UNetSpec(levels=levels, convs=convs, kernel=kernel, channels=2, in_channels=1, up=up)
    torch.manual_seed(1)
    model = UNet(spec).double()
    side = max(8, spec.stride)
    for shape in ((61, 40), (33, 97), (side, side + 1)):
        image = torch.randn(1, 1, *shape, dtype=torch.float64)
        padded = pad_to_stride(image, spec.stride)
        tiles = equal_tiles(shape, side, spec)
        assert {t.read.shape for t in tiles} == {read_shape(shape, side, spec)}
        assert {t.out.shape for t in tiles} == {(side, side)}
        got = torch.full((1, 2, *shape), torch.nan, dtype=torch.float64)
        with torch.no_grad():
            for tile in tiles:
                assert got[(..., *tile.write.slices)].isnan().all(), "written twice"
                core = model.forward_tile(padded[(..., *tile.read.slices)], tile)
                got[(..., *tile.write.slices)] = core[(..., *tile.write.within(tile.core).slices)]
            want = model(image)
        assert float((got - want).abs().max() / want.abs().max()) <= TOLERANCE


@settings(max_examples=100)
@given(
    height=st.integers(16, 200),
    width=st.integers(16, 200),
    levels=st.integers(1, 5),
    convs=st.integers(1, 3),
    up=st.sampled_from(["transpose", "bilinear"]),
    halo=st.none() | st.integers(0, 40),
)
def test_crops_of_equal_tiles_fit_and_agree(
    height: int, width: int, levels: int, convs: int, up: str, halo: int | None
) -> None:
    spec = UNetSpec(levels=levels, convs=convs, channels=1, in_channels=1, up=up)
    tiles = equal_tiles((height, width), 16, spec, halo=halo)
    for level in range(levels - 1):
        crops = [t.crops[level] for t in tiles]
        assert len({c.skip.shape for c in crops} | {c.upsampled.shape for c in crops}) == 1
        for crop in crops:
            for box, size in (
                (crop.skip, [n >> level for n in tiles[0].read.shape]),
                (crop.upsampled, [2 * n for n in crop.below.shape]),
            ):
                assert 0 <= box.y0 < box.y1 <= size[0]
                assert 0 <= box.x0 < box.x1 <= size[1]
    count = np.zeros((height, width), int)
    for tile in tiles:
        count[tile.write.slices] += 1
        assert tile.write.clip(tile.core) == tile.write
    assert (count == 1).all()


@pytest.mark.parametrize(("batch", "micro"), [(3, 3), (4, 2)])
def test_one_process_runs_all_tiles(batch: int, micro: int) -> None:
    for name, shape in product(("plain", "bilinear"), ((77, 45), (57, 64))):
        plan = tiled_plan(name, (9,), batch=batch, micro_batches=micro, shape=shape)
        worst, passes, names = tiled_step(plan, name, "reference", shape)
        assert passes * batch >= -(-shape[0] // 16) * -(-shape[1] // 16)
        assert names == {n for n, _ in network(SPECS[name]).named_parameters()}
        assert worst <= TOLERANCE


def test_tiles_times_stages_equal_the_whole_image() -> None:
    """2 x 2, 4 x 1 and 1 x 4 ranks; with unequal numbers of passes; ignored pixels included."""
    results = on_ranks(4)["tiles"]
    assert len(results) == 24
    for case, worst, compared, passes in results:
        assert compared == len(dict(network(SPECS[case.split()[0]]).named_parameters())), case
        assert worst <= TOLERANCE, case
        assert sum(passes) > 0, case
    assert any(len(set(passes)) > 1 for *_, passes in results)
