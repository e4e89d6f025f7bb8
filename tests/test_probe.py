"""The measured receptive field is the computed one; tiles are exact from it on, and not before."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from bigunet.errors import ExactnessError
from bigunet.model import UNet
from bigunet.probe import halo_sweep, receptive_field
from bigunet.spec import UNetSpec

SPECS = [
    UNetSpec(levels=levels, convs=convs, kernel=kernel, up=up, channels=4)
    for levels, convs, kernel, up in itertools.product(
        (1, 2, 3, 4), (1, 2, 3), (3, 5), ("transpose", "nearest", "bilinear")
    )
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.levels}-{s.convs}-{s.kernel}-{s.up}")
def test_the_gradient_reaches_as_far_as_the_halo_on_every_side(spec: UNetSpec) -> None:
    field = receptive_field(spec)
    assert {field.attrs[side] for side in ("left", "right", "top", "bottom")} == {spec.halo}
    assert field.attrs["reach"] == spec.halo
    seen = (field > 0).any("y").values
    x = field["x"].values[seen]
    assert (x[0], x[-1]) == (-spec.halo, spec.stride - 1 + spec.halo)
    assert float(field.max()) == 1.0


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm", ["none", "batch", "instance"])
def test_other_options_do_not_change_the_reach(norm: str, activation: str) -> None:
    spec = UNetSpec(levels=3, norm=norm, activation=activation, dropout=0.2, channels=8)
    assert receptive_field(spec).attrs["reach"] == spec.halo == 22
    wide = UNetSpec.torchgpipe(1, 8, depth=3)
    assert receptive_field(wide).attrs["reach"] == wide.halo


@pytest.mark.parametrize("up", ["transpose", "nearest", "bilinear"])
def test_a_nan_in_the_real_network_spreads_as_far_as_the_probe_says(up: str) -> None:
    """Real weights, ReLU and largest-of-four pooling: a NaN marks all that a pixel takes part in.

    Sources and targets change places: pixels of one stride cell reach the outputs whose fields
    they lie in.
    """
    spec = UNetSpec(levels=3, convs=1, channels=4, up=up)
    torch.manual_seed(1)
    model = UNet(spec).double().eval()
    margin = spec.halo_aligned + spec.stride
    side = spec.stride + 2 * margin
    reach = 0
    for y, x in itertools.product(range(spec.stride), repeat=2):
        image = torch.rand((1, 3, side, side), dtype=torch.float64)
        image[..., margin + y, margin + x] = torch.nan
        with torch.no_grad():
            hit = torch.isnan(model(image))[0, 0].numpy()
        # Whole cells of outputs: how far is the nearest pixel of a reached cell?
        rows = np.flatnonzero(hit.any(1)) // spec.stride * spec.stride
        for cell in set(rows.tolist()):
            gap = max(cell - (margin + y), margin + y - (cell + spec.stride - 1))
            reach = max(reach, gap)
    assert reach == receptive_field(spec).attrs["reach"] == spec.halo


def test_the_sweep_is_exact_from_the_halo_on_and_not_one_stride_before() -> None:
    spec = UNetSpec(levels=3, channels=4)
    swept = halo_sweep(spec, [0, 8, 16, 20, 24, 28], shape=(90, 100), core=32)
    below = swept.sel(halo=[0, 8, 16, 20])
    assert (below.output_error > 1e-6).all()
    assert (below.gradient_error > 1e-6).all()
    # The formula with -2 gives 20, a multiple of the stride: it is among the wrong ones.
    exact = swept.sel(halo=[24, 28])
    assert (exact.output_error <= 1e-12).all()
    assert (exact.gradient_error <= 1e-12).all()
    assert swept.attrs["exact_halo"] == 22


def test_the_sweep_refuses_a_norm_that_sees_its_extent() -> None:
    with pytest.raises(ExactnessError, match="instance"):
        halo_sweep(UNetSpec(levels=2, norm="instance"), [8])
