"""HaloExplorer as data: state in, tables out, elements and widgets as they should be."""

from __future__ import annotations

import holoviews as hv
import numpy as np
import pytest
import xarray as xr

from bigunet.errors import ShapeError, SpecError
from bigunet.layers import layer_table
from bigunet.spec import UNetSpec
from bigunet.tiles import tile_image
from bigunet.views import HaloExplorer, HaloState, tile_costs
from bigunet.views.halo import halo_tables


def fake_field(spec: UNetSpec) -> xr.DataArray:
    """Of the shape that `bigunet.probe.receptive_field` gives; 1 inside the halo."""
    side = spec.stride + 2 * (spec.halo + 2)
    coords = np.arange(side) - spec.halo - 2
    values = np.zeros((side, side))
    values[2:-2, 2:-2] = 1.0
    return xr.DataArray(
        values, dims=("y", "x"), coords={"y": coords, "x": coords}, attrs={"reach": spec.halo}
    )


def rectangles(plot: hv.Overlay, index: int) -> list[tuple[float, ...]]:
    found = [part for part in plot if isinstance(part, hv.Rectangles)][index]
    return [
        tuple(map(float, row))
        for row in np.transpose([found.dimension_values(i) for i in range(4)])
    ]


@pytest.mark.parametrize("up", ["transpose", "bilinear"])
def test_work_is_that_of_the_middle_tile_of_an_image(up: str) -> None:
    spec = UNetSpec(levels=3, channels=8, up=up)
    data = halo_tables(HaloState(spec, 64))
    tile = tile_image((320, 320), 64, spec)[12]
    shape = (1, 3, *tile.read.shape)
    assert data.attrs["read"] == tile.read.shape[0] == 64 + 2 * spec.halo_aligned
    cropped = sum(row.flops for row in layer_table(spec, shape, tile=tile))
    assert float(data.cropped_flops.sum()) == cropped
    assert float(data.full_flops.sum()) == sum(row.flops for row in layer_table(spec, shape))
    own = sum(row.flops for row in layer_table(spec, (1, 3, 64, 64)))
    assert data.attrs["cropped_redundancy"] == cropped / own
    assert data.attrs["full_redundancy"] == pytest.approx(data.attrs["area_redundancy"], rel=1e-12)
    assert (data.core_flops <= data.cropped_flops).all()
    assert (data.cropped_flops <= data.full_flops).all()


def test_the_published_case() -> None:
    data = halo_tables(HaloState(UNetSpec(), 512))
    assert (data.attrs["halo"], data.attrs["halo_aligned"], data.attrs["stride"]) == (94, 96, 16)
    assert data.attrs["closed_form"] == 94
    # design: output margins 0, 1, 2, 2, 2 from level 0 down
    decoder = data.margin.sel(block=["dec0", "dec1", "dec2", "dec3", "mid"])
    assert decoder.values.tolist() == [0, 1, 2, 2, 2]


def test_tables_are_a_pure_function_of_the_state() -> None:
    explorer = HaloExplorer(UNetSpec(levels=3), tile=128)
    state = HaloState(UNetSpec(levels=4), 256)
    before = explorer.state
    first = explorer.tables(state)
    assert explorer.tables(state).identical(first)
    assert explorer.state is before


def test_the_tile_is_drawn_to_scale() -> None:
    explorer = HaloExplorer(UNetSpec(levels=3), tile=128, measure=fake_field)
    plot = explorer.plots(explorer.data)["tile"]
    assert rectangles(plot, 0) == [(-24, -24, 152, 152)]
    assert rectangles(plot, 1) == [(0, 0, 128, 128)]
    assert rectangles(plot, 3) == []
    explorer.widgets["measure"].value = True
    plot = explorer.plots(explorer.data)["tile"]
    assert rectangles(plot, 3) == [(-22, -22, 4 + 22, 4 + 22)]
    assert "Measured reach: 22" in explorer.summary(explorer.data)


def test_controls_change_the_state_and_everything_that_follows() -> None:
    explorer = HaloExplorer(tile=512)
    assert list(explorer.widgets) == ["levels", "convs", "kernel", "tile", "up"]
    explorer.widgets["levels"].value = 4
    assert explorer.state.spec.levels == 4
    assert "halo 46 pixels" in explorer._summary.value
    explorer.widgets["up"].value = "bilinear"
    assert explorer.state.spec.up == "bilinear"
    header, *rows = explorer.rows(explorer.data)
    assert header[0] == "block"
    assert rows[-1][0] == "all"
    assert [row[0] for row in rows[:-1]] == list(explorer.data["block"].values)


def test_a_tile_off_the_stride_is_said_and_the_last_view_kept() -> None:
    explorer = HaloExplorer(UNetSpec(levels=5), tile=96)
    before = explorer.data
    explorer.widgets["levels"].value = 8
    assert "stride 128" in explorer.message
    assert 'role="alert"' in explorer._message.value
    assert explorer.data is before
    # Any way out will do: here the tile, not the levels.
    explorer.widgets["tile"].value = 256
    assert explorer.message == ""
    assert (explorer.state.spec.levels, explorer.state.tile) == (8, 256)


def test_what_is_too_wide_to_show_is_refused() -> None:
    with pytest.raises(SpecError, match="32768"):
        halo_tables(HaloState(UNetSpec(levels=13), 8192))
    with pytest.raises(ShapeError):
        halo_tables(HaloState(UNetSpec(), 100))


def test_costs_fall_with_the_tile() -> None:
    costs = tile_costs(UNetSpec(), [64, 256, 1024])
    assert costs.cropped_redundancy.diff("tile").max() < 0
    assert (costs.cropped_redundancy < costs.full_redundancy).all()
    assert float(costs.area_redundancy.sel(tile=64)) == 16.0
