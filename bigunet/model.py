"""UNetSpec -> the network: one ordered list of named layers, run whole or tile by tile.

The layers and their names are those of `bigunet.layers.layer_table`. `run_layers` is the one
loop over them; the plain forward, tiles and pipeline stages all call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping

import torch
from torch import Tensor, nn

from bigunet.errors import ShapeError, fail
from bigunet.geometry import padded_size
from bigunet.layers import LayerRow, layer_table
from bigunet.spec import UNetSpec
from bigunet.tiles import Tile, check_image

__all__ = ["UNet", "build_layer", "pad_to_stride", "run_layers"]

_ACTIVATIONS = {
    "relu": lambda inplace: nn.ReLU(inplace=inplace),
    "leaky_relu": lambda inplace: nn.LeakyReLU(0.01, inplace=inplace),
    "gelu": lambda inplace: nn.GELU(),
    "silu": lambda inplace: nn.SiLU(),
}


def build_layer(spec: UNetSpec, row: LayerRow) -> nn.Module:
    """The module of one row of the layer table."""
    before, after = row.in_shape[1], row.out_shape[1]
    match row.kind:
        case "conv":
            return nn.Conv2d(
                before,
                after,
                spec.kernel,
                padding=spec.kernel // 2,
                padding_mode=spec.padding_mode,
                bias=spec.bias,
            )
        case "head":
            return nn.Conv2d(before, after, 1, bias=spec.head_bias)
        case "dropout":
            return nn.Dropout2d(spec.dropout)
        case "norm" if spec.norm == "batch":
            return nn.BatchNorm2d(after, affine=spec.affine)
        case "norm" if spec.norm == "group":
            return nn.GroupNorm(spec.groups, after, affine=spec.affine)
        case "norm":
            return nn.InstanceNorm2d(after, affine=spec.affine)
        case "activation":
            return _ACTIVATIONS[spec.activation](spec.inplace)
        case "pool":
            return nn.MaxPool2d(2)
        case "up" if spec.up == "transpose":
            return nn.ConvTranspose2d(before, after, 2, stride=2, bias=spec.bias)
        case "up" if spec.up == "bilinear":
            return nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        case "up":
            return nn.Upsample(scale_factor=2, mode="nearest")
        case _:
            # "skip" keeps its input for later, "concat" joins: the loop does both.
            return nn.Identity()


def run_layers(
    rows: Iterable[LayerRow],
    modules: Mapping[str, nn.Module] | nn.ModuleDict,
    x_BCHW: Tensor,
    skips: MutableMapping[str, Tensor],
    tile: Tile | None = None,
) -> Tensor:
    """Run consecutive layers. `skips` holds the open skips by the name of their layer.

    A "skip" layer adds to `skips`, a "concat" takes from it, so that after a stage it holds just
    what must travel on. With `tile`, the decoder's maps are cropped as the tile says.
    """
    x = x_BCHW
    for row in rows:
        match row.kind:
            case "skip":
                skips[row.name] = x
            case "up" if tile is not None:
                crop = tile.crops[row.level]
                x = modules[row.name](x[(..., *crop.below.slices)])
                x = x[(..., *crop.upsampled.slices)]
            case "concat":
                assert row.source is not None
                skip = skips.pop(row.source)
                if tile is not None:
                    skip = skip[(..., *tile.crops[row.level].skip.slices)]
                x = torch.cat((skip, x), dim=1)
                del skip  # or it would live on until the next concatenation
            case _:
                x = modules[row.name](x)
    return x


def pad_to_stride(x_BCHW: Tensor, stride: int) -> Tensor:
    """The image continued at the bottom and right by its last row and column."""
    height, width = x_BCHW.shape[-2:]
    bottom, right = padded_size(height, stride) - height, padded_size(width, stride) - width
    if not bottom and not right:
        return x_BCHW
    return nn.functional.pad(x_BCHW, (0, right, 0, bottom), mode="replicate")


class UNet(nn.Module):
    """The network of a spec. Input (batch, bands, height, width), output logits of equal size.

    Weights start from He's normal distribution for the activation's slope (doi
    10.1109/ICCV.2015.123), from torch's global random state.
    """

    def __init__(self, spec: UNetSpec) -> None:
        super().__init__()
        self.spec = spec
        self.rows = layer_table(spec, (1, spec.in_channels, spec.stride, spec.stride))
        self.layers = nn.ModuleDict({row.name: build_layer(spec, row) for row in self.rows})
        for module in self.layers.values():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                _initialise(module)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Logits (batch, classes, height, width) of whole images of any size from the stride up."""
        height, width = x_BCHW.shape[-2:]
        check_image((height, width), self.spec)
        if x_BCHW.shape[1] != self.spec.in_channels:
            fail(
                ShapeError,
                rule=f"an input has the spec's {self.spec.in_channels} bands",
                got=x_BCHW.shape[1],
                remedy="Choose bands, or a spec with in_channels to match.",
            )
        x = pad_to_stride(x_BCHW, self.spec.stride)
        return run_layers(self.rows, self.layers, x, {})[..., :height, :width]

    def forward_tile(self, x_BCHW: Tensor, tile: Tile) -> Tensor:
        """Logits of `tile.write` from the pixels of `tile.read` , padded by `pad_to_stride`."""
        if tuple(x_BCHW.shape[-2:]) != tile.read.shape:
            fail(
                ShapeError,
                rule=f"a tile's pixels are those of its read box, {tile.read.shape}",
                got=tuple(x_BCHW.shape[-2:]),
                remedy="Read tile.read, and pad what lies outside the image.",
            )
        x = run_layers(self.rows, self.layers, x_BCHW, {}, tile)
        return x[(..., *tile.out.slices)]


def _initialise(module: nn.Conv2d | nn.ConvTranspose2d) -> None:
    # Each output of the 2 x 2 up-convolution has one tap a channel, which torch's own fan counts
    # for transposed weights do not see.
    taps = 1 if isinstance(module, nn.ConvTranspose2d) else module.kernel_size[0] ** 2
    nn.init.normal_(module.weight, std=(2.0 / (taps * module.in_channels)) ** 0.5)
    if module.bias is not None:
        nn.init.zeros_(module.bias)
