"""The receptive field and the error of tiling, measured on the network itself."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from bigunet.errors import ExactnessError, fail
from bigunet.model import UNet, pad_to_stride
from bigunet.spec import UNetSpec
from bigunet.tiles import tile_image

__all__ = ["halo_sweep", "receptive_field"]

# The reach does not depend on the width, so that the probe may be narrow.
_CHANNELS = 2


def _linear(spec: UNetSpec) -> UNet:
    """The spec's network with nothing that could hide a dependence.

    Weights are positive and activations left out, so that no two paths cancel and none is shut;
    poolings average instead of taking the largest, since any of the four pixels might be it;
    normalisations, which see the whole map, are left out. The reach of each layer is unchanged.
    """
    narrow = spec.replace(
        channels=_CHANNELS, growth=1.0, max_channels=None, in_channels=1, classes=1,
        norm="none", dropout=0.0, inplace=False,
    )  # fmt: skip
    model = UNet(narrow).double().eval()
    for name, module in model.layers.items():
        if isinstance(module, nn.MaxPool2d):
            model.layers[name] = nn.AvgPool2d(2)
        elif name.split("_")[-1].startswith("act"):
            model.layers[name] = nn.Identity()
        for parameter in module.parameters():
            # Each layer's outputs sum to about its inputs': no under- or overflow at any depth.
            nn.init.constant_(parameter, 1.0 / max(1, parameter[0].numel()))
    return model


def receptive_field(spec: UNetSpec) -> xr.DataArray:
    """What one output cell (stride x stride pixels, on the lattice) sees of the image.

    Returns
    -------
    DataArray of dims (y, x), in pixels from the cell's upper left corner: the gradient of the
    cell's sum with respect to each image pixel, 1 at its largest, 0 where nothing is seen. Its
    attrs hold how far the field reaches beyond the cell (`left`, `right`, `top`, `bottom`, and
    the largest of them, `reach`), in pixels.

    The gradient is that of the spec's own layers, made linear as `_linear` says, in float64.
    """
    stride = spec.stride
    margin = spec.halo_aligned + stride
    side = stride + 2 * margin
    model = _linear(spec)
    x_BCHW = torch.ones((1, 1, side, side), dtype=torch.float64, requires_grad=True)
    cell = slice(margin, margin + stride)
    model(x_BCHW)[..., cell, cell].sum().backward()
    assert x_BCHW.grad is not None
    values = x_BCHW.grad[0, 0].abs().numpy()
    rows, columns = np.flatnonzero(values.any(1)), np.flatnonzero(values.any(0))
    edges = {
        "top": margin - rows[0],
        "bottom": rows[-1] - (margin + stride - 1),
        "left": margin - columns[0],
        "right": columns[-1] - (margin + stride - 1),
    }
    reach = {name: int(value) for name, value in edges.items()}
    coords = np.arange(side) - margin
    return xr.DataArray(
        values / values.max(),
        dims=("y", "x"),
        coords={"y": coords, "x": coords},
        name="gradient",
        attrs={"units": "1", **reach, "reach": max(reach.values())},
    )


def halo_sweep(
    spec: UNetSpec,
    halos: Iterable[int],
    *,
    shape: tuple[int, int] = (192, 192),
    core: int = 64,
    seed: int = 0,
) -> xr.Dataset:
    """How far tiles of each halo are from the whole image, in float64 on random weights.

    Parameters
    ----------
    halos : pixels read around each core; rounded up to the stride, as everywhere.
    shape, core : the image, filled with noise, and the side of the tiles, in pixels.

    Returns
    -------
    Dataset of dim `halo` with `output_error`, the largest difference of an output, and
    `gradient_error`, the difference of the weights' gradient (of the mean of the outputs'
    squares), as a norm relative to the whole image's.

    Raises
    ------
    ExactnessError : for a norm that depends on the extent it sees.
    """
    if not spec.tile_exact:
        fail(
            ExactnessError,
            rule=f"norm {spec.norm} depends on the extent it sees",
            got=spec.norm,
            remedy='Use norm "none", or "batch" with frozen statistics.',
        )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = UNet(spec).double().eval()
    x_BCHW = torch.randn((1, spec.in_channels, *shape), generator=generator, dtype=torch.float64)
    whole, whole_gradient = _whole(model, x_BCHW)
    scale = float(whole_gradient.norm())
    padded = pad_to_stride(x_BCHW, spec.stride)
    wanted = sorted(set(halos))
    errors: list[tuple[float, float]] = []
    for halo in wanted:
        model.zero_grad(set_to_none=True)
        worst = 0.0
        for tile in tile_image(shape, core, spec, halo=halo):
            y = model.forward_tile(padded[(..., *tile.read.slices)], tile)
            (y.square().sum() / whole.numel()).backward()
            worst = max(worst, float((y.detach() - whole[(..., *tile.write.slices)]).abs().max()))
        errors.append((worst, float((_gradient(model) - whole_gradient).norm()) / scale))
    return xr.Dataset(
        {
            "output_error": ("halo", [e[0] for e in errors], {"units": "1"}),
            "gradient_error": ("halo", [e[1] for e in errors], {"units": "1"}),
        },
        coords={"halo": ("halo", wanted, {"units": "pixels"})},
        attrs={"exact_halo": spec.halo, "stride": spec.stride},
    )


def _gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def _whole(model: UNet, x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    y = model(x_BCHW)
    y.square().mean().backward()
    return y.detach(), _gradient(model)
