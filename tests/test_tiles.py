import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigunet.errors import ShapeError
from bigunet.spec import UNetSpec
from bigunet.tiles import Box, count_tiles, tile_image, whole_image

sizes = st.integers(16, 150)


@settings(deadline=None, max_examples=60)
@given(
    shape=st.tuples(sizes, sizes),
    core=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    levels=st.integers(1, 5),
    up=st.sampled_from(["transpose", "bilinear"]),
    halo=st.none() | st.integers(0, 40),
)
def test_every_pixel_is_written_exactly_once(shape, core, levels, up, halo):
    spec = UNetSpec(levels=levels, up=up, convs=1)
    stride = spec.stride
    padded = [-(-n // stride) for n in shape]
    # Cores of at least 16 pixels, so that no case has thousands of tiles.
    core = tuple(min(c * (16 // stride), p) * stride for c, p in zip(core, padded, strict=True))
    tiles = tile_image(shape, core, spec, halo=halo)
    written = np.zeros(shape, int)
    for tile in tiles:
        written[tile.write.slices] += 1
        reach = spec.halo_aligned if halo is None else halo
        for low, high, need_low, need_high, size in (
            (tile.read.y0, tile.read.y1, tile.core.y0, tile.core.y1, padded[0] * stride),
            (tile.read.x0, tile.read.x1, tile.core.x0, tile.core.x1, padded[1] * stride),
        ):
            assert low % stride == high % stride == need_low % stride == need_high % stride == 0
            assert low <= max(0, need_low - reach)
            assert high >= min(size, need_high + reach)
        assert tile.out.shape == tile.write.shape
        for crop in tile.crops:
            assert crop.skip.shape == crop.upsampled.shape
            assert min(*crop.below.shape, *crop.skip.shape) > 0
    assert (written == 1).all()
    assert len(tiles) == count_tiles(shape, core, spec)
    assert [tile.index for tile in tiles] == sorted(tile.index for tile in tiles)


def test_decoder_keeps_just_the_margins_it_needs():
    spec = UNetSpec(levels=5)
    tile = tile_image((1024, 1024), 256, spec)[5]
    kept = [crop.skip.shape[0] - (256 >> level) for level, crop in enumerate(tile.crops)]
    assert kept == [2 * 2, 2 * 3, 2 * 4, 2 * 4]
    assert tile.read.shape == (256 + 2 * 96, 256 + 2 * 96)


def test_an_uncropped_tile_keeps_everything():
    tile = tile_image((1024, 1024), 256, UNetSpec(levels=5), cropped=False)[5]
    assert [crop.skip.shape[0] for crop in tile.crops] == [448, 224, 112, 56]


def test_the_whole_image_is_one_tile():
    tile = whole_image((100, 70), UNetSpec(levels=4))
    assert tile.read == tile.core == Box(0, 104, 0, 72)
    assert tile.write == Box(0, 100, 0, 70)


@pytest.mark.parametrize(
    ("shape", "core", "halo", "says"),
    [
        ((100, 100), 24, None, "stride 16"),
        ((100, 100), 0, None, "stride"),
        ((100, 100), -16, None, "stride"),
        ((100, 100), (32, 8), None, "stride"),
        ((100, 100), 128, None, "112 x 112"),
        ((15, 100), 16, None, "at least"),
        ((0, 100), 16, None, "at least"),
        ((100, 100), 32, -1, "halo"),
    ],
)
def test_bad_tiles_say_the_rule(shape, core, halo, says):
    with pytest.raises(ShapeError, match=says):
        tile_image(shape, core, UNetSpec(levels=5), halo=halo)


def test_reflection_needs_pixels_to_reflect():
    spec = UNetSpec(levels=4, padding_mode="reflect")
    with pytest.raises(ShapeError, match="reflection"):
        tile_image((8, 64), 8, spec)
    assert tile_image((9, 64), 8, spec)
