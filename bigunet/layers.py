"""The layer table: every layer of a U-Net in the order it runs, with shapes, parameters and FLOPs.

The network in `bigunet.model` is built from this table, so that names, order and counts cannot
drift apart; memory, cost and planning read it without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from bigunet.errors import ShapeError, fail
from bigunet.geometry import padded_size
from bigunet.spec import UNetSpec
from bigunet.tiles import Tile

__all__ = ["Kind", "LayerRow", "Shape", "count_parameters", "layer_table"]

Shape = tuple[int, int, int, int]
Kind = Literal["conv", "dropout", "norm", "activation", "skip", "pool", "up", "concat", "head"]

# Floating-point operations per element of layers that are no convolution. Mean, variance,
# subtraction, scaling and shift for a normalisation; four lerps of three operations, one axis
# after the other, for a bilinear up-sampling; copies count nothing.
_NORM_FLOPS = 5
_BILINEAR_FLOPS = 9


class LayerRow(NamedTuple):
    """One layer. Shapes are (batch, channels, height, width); `flops` are of the forward pass.

    `block` groups layers as they are recomputed together ("enc0", "mid", "dec0", ...); `source`
    names the "skip" layer whose output a "concat" joins to its input. `parameters` counts
    weights that are trained, `buffers` numbers that are kept but not trained (running
    statistics).
    """

    name: str
    block: str
    level: int
    kind: Kind
    in_shape: Shape
    out_shape: Shape
    parameters: int
    buffers: int
    flops: int
    source: str | None = None


class _Cursor:
    """Walks through the network, remembering the shape that flows."""

    def __init__(self, spec: UNetSpec, shape: Shape) -> None:
        self.spec = spec
        self.shape = shape
        self.block, self.level = "", 0

    def row(
        self,
        name: str,
        kind: Kind,
        out: Shape,
        *,
        parameters: int = 0,
        buffers: int = 0,
        flops: int = 0,
        source: str | None = None,
    ) -> LayerRow:
        before, self.shape = self.shape, out
        return LayerRow(
            name, self.block, self.level, kind, before, out, parameters, buffers, flops, source
        )

    def conv(self, name: str, kind: Kind, width: int, kernel: int, bias: bool) -> LayerRow:
        batch, channels, height, columns = self.shape
        taps = kernel * kernel * channels
        outputs = batch * width * height * columns
        return self.row(
            name,
            kind,
            (batch, width, height, columns),
            parameters=width * (taps + bias),
            flops=outputs * (2 * taps + bias),
        )

    def units(self, block: str, level: int, hidden: int, out: int) -> Iterator[LayerRow]:
        """The block's units: convolution, dropout, normalisation, activation."""
        spec = self.spec
        self.block, self.level = block, level
        for i in range(spec.convs):
            width = out if i == spec.convs - 1 else hidden
            yield self.conv(f"{block}_conv{i}", "conv", width, spec.kernel, spec.bias)
            batch, _, height, columns = self.shape
            elements = batch * width * height * columns
            if spec.dropout:
                yield self.row(f"{block}_drop{i}", "dropout", self.shape, flops=elements)
            if spec.norm != "none":
                yield self.row(
                    f"{block}_norm{i}",
                    "norm",
                    self.shape,
                    parameters=2 * width * spec.affine,
                    # Running mean and variance, and the count of batches seen.
                    buffers=2 * width + 1 if spec.norm == "batch" else 0,
                    flops=_NORM_FLOPS * elements,
                )
            yield self.row(f"{block}_act{i}", "activation", self.shape, flops=elements)


def _rows(spec: UNetSpec, shape: Shape, tile: Tile | None) -> Iterator[LayerRow]:
    cursor = _Cursor(spec, shape)
    lowest = spec.levels - 1
    batch = shape[0]
    by_block = spec.narrowing == "block" and lowest > 0
    for level in range(lowest):
        yield from cursor.units(f"enc{level}", level, spec.width(level), spec.width(level))
        yield cursor.row(f"skip{level}", "skip", cursor.shape)
        _, width, height, columns = cursor.shape
        pooled = (batch, width, height // 2, columns // 2)
        yield cursor.row(f"pool{level}", "pool", pooled, flops=3 * _elements(pooled))
    hidden = spec.width(lowest)
    yield from cursor.units("mid", lowest, hidden, spec.width(lowest - 1) if by_block else hidden)
    skips = {level: spec.width(level) for level in range(lowest)}
    for level in reversed(range(lowest)):
        cursor.block, cursor.level = f"dec{level}", level
        yield _up(cursor, level, tile)
        _, width, height, columns = cursor.shape
        joined = (batch, skips[level] + width, height, columns)
        yield cursor.row(f"cat{level}", "concat", joined, source=f"skip{level}")
        width = spec.width(level - 1) if by_block else spec.width(level)
        yield from cursor.units(f"dec{level}", level, width, width)
    cursor.block, cursor.level = "head", 0
    yield cursor.conv("head", "head", spec.classes, 1, spec.head_bias)


def _up(cursor: _Cursor, level: int, tile: Tile | None) -> LayerRow:
    spec = cursor.spec
    batch, channels, height, columns = cursor.shape
    if tile is None:
        up_height, up_columns = 2 * height, 2 * columns
        out_height, out_columns = up_height, up_columns
    else:
        crop = tile.crops[level]
        height, columns = crop.below.shape
        up_height, up_columns = 2 * height, 2 * columns
        out_height, out_columns = crop.upsampled.shape
        cursor.shape = (batch, channels, height, columns)
    if spec.up == "transpose":
        width = spec.width(level)
        # Each output pixel of a 2 x 2 transposed convolution of stride 2 has one tap a channel.
        flops = batch * width * up_height * up_columns * (2 * channels + spec.bias)
        parameters = width * (4 * channels + spec.bias)
    else:
        width, parameters = channels, 0
        per_pixel = _BILINEAR_FLOPS if spec.up == "bilinear" else 0
        flops = per_pixel * batch * channels * up_height * up_columns
    return cursor.row(
        f"up{level}",
        "up",
        (batch, width, out_height, out_columns),
        parameters=parameters,
        flops=flops,
    )


def _elements(shape: Shape) -> int:
    batch, channels, height, columns = shape
    return batch * channels * height * columns


@lru_cache(maxsize=64)
def layer_table(
    spec: UNetSpec, shape_BCHW: Shape, *, tile: Tile | None = None
) -> tuple[LayerRow, ...]:
    """Every layer in the order it runs, for an input of `shape_BCHW`.

    Parameters
    ----------
    shape_BCHW : batch, bands, height and width of the image (padded to the stride as the network
        pads it) or, with `tile`, of the batch of tiles; then height and width must be those of
        `tile.read`, and the decoder is cropped as the tile says.

    Raises
    ------
    ShapeError : for sizes below 1, bands that are not the spec's, a side below the stride, or a
        shape that is not the tile's.
    """
    batch, channels, height, width = shape_BCHW
    if min(shape_BCHW) < 1 or channels != spec.in_channels or min(height, width) < spec.stride:
        fail(
            ShapeError,
            rule=f"an input is (batch >= 1, {spec.in_channels} bands, height and width >= the "
            f"stride {spec.stride})",
            got=shape_BCHW,
            remedy="Change the shape or the spec's in_channels and levels.",
        )
    if tile is not None and (height, width) != tile.read.shape:
        fail(
            ShapeError,
            rule=f"with a tile, height and width are its read box's, {tile.read.shape}",
            got=(height, width),
            remedy="Pass (batch, bands, *tile.read.shape).",
        )
    padded = (batch, channels, padded_size(height, spec.stride), padded_size(width, spec.stride))
    if _elements(padded) * max(spec.unit_widths) * 8 >= 2**63:
        fail(
            ShapeError,
            rule="a layer's bytes are counted in 64 bits",
            got=shape_BCHW,
            remedy="Use a smaller batch or image.",
        )
    return tuple(_rows(spec, padded, tile))


def count_parameters(spec: UNetSpec) -> int:
    """Trained weights of the network."""
    table = layer_table(spec, (1, spec.in_channels, spec.stride, spec.stride))
    return sum(row.parameters for row in table)
