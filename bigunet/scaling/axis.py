"""The tiles of an image by kind: each kind once, with how many there are.

A tile is the product of an interval of rows and one of columns, and along one axis only those near
the border differ. So the thousands of tiles of a large image are a few kinds, and what a tile
costs follows from the lengths of its maps along both axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bigunet.geometry import padded_size
from bigunet.layers import layer_table
from bigunet.spec import UNetSpec
from bigunet.tiles import Tile, check_core, check_image, tile_image

__all__ = ["Axis", "TileKinds", "axis_of", "skeleton", "tile_kinds"]

Ints = NDArray[np.int64]


@lru_cache(maxsize=256)
def skeleton(spec: UNetSpec) -> UNetSpec:
    """The narrowest network with the same layers: all that the sizes of maps depend on."""
    return UNetSpec(
        levels=spec.levels,
        convs=spec.convs,
        channels=1,
        kernel=spec.kernel,
        in_channels=1,
        classes=1,
        growth=1.0,
        norm="none" if spec.norm == "none" else "instance",
        up=spec.up,
        narrowing=spec.narrowing,
        dropout=0.1 if spec.dropout else 0.0,
    )


@dataclass(frozen=True, eq=False)
class Axis:
    """The kinds of intervals along one axis, in pixels.

    `order` holds the kind of each tile along the axis; `read`, `inside` (the part of it in the
    true image), `core` and `write` one length for each kind. `entering` and `leaving` (kind,
    layer) are the lengths of each layer's input and output, `lengths` both as a key; `bare_*`
    are those of the core without a halo. Kinds with one number in `stacks` can be run as one batch.
    """

    order: tuple[int, ...]
    read: Ints
    inside: Ints
    core: Ints
    write: Ints
    entering: Ints
    leaving: Ints
    bare_entering: Ints
    bare_leaving: Ints
    lengths: tuple[tuple[int, ...], ...]
    stacks: tuple[int, ...]


def _layer_lengths(bare: UNetSpec, read: int, tile: Tile | None) -> tuple[list[int], list[int]]:
    rows = layer_table(bare, (1, 1, read, bare.stride), tile=tile)
    return [row.in_shape[2] for row in rows], [row.out_shape[2] for row in rows]


@lru_cache(maxsize=4096)
def axis_of(bare: UNetSpec, size: int, core: int, halo: int, cropped: bool) -> Axis:
    """The kinds along an axis of `size` pixels with cores of `core`; `bare` is a `skeleton`.

    The tiles are those of `bigunet.tiles.tile_image` for an image as wide as the stride. Tiles
    that lie more than a halo from both ends are alike, so all but one of them are left out of it.
    """
    stride = bare.stride
    margin = padded_size(halo, stride)
    near = -(-margin // core) + 1
    num = -(-size // core)
    left_out = max(0, num - 2 * near - 1)
    short = size - left_out * core
    tiles = tile_image((short, stride), (core, stride), bare, halo=halo, cropped=cropped)
    found: dict[object, int] = {}
    stacks: dict[object, int] = {}
    kinds: list[int] = []
    stack_of: list[int] = []
    columns: list[tuple[int, int, int, int]] = []
    layers: list[tuple[list[int], list[int], list[int], list[int]]] = []
    for tile in tiles:
        y0 = tile.read.y0
        write = tile.write.y0 - y0, tile.write.y1 - y0
        boxes = [box for c in tile.crops for box in (c.below, c.upsampled, c.skip)]
        crops = tuple((box.y0, box.y1) for box in boxes)
        inside = min(tile.read.y1, short) - y0
        stack = stacks.setdefault((tile.read.shape, crops, write), len(stacks))
        key = stack, inside
        if key not in found:
            found[key] = len(found)
            stack_of.append(stack)
            read, whole = tile.read.shape[0], tile.core.shape[0]
            columns.append((read, inside, whole, tile.write.shape[0]))
            layers.append((*_layer_lengths(bare, read, tile), *_layer_lengths(bare, whole, None)))
        kinds.append(found[key])
    if left_out:
        kinds[near:near] = [kinds[near]] * left_out
    table = np.array(columns, dtype=np.int64)
    entering, leaving, bare_in, bare_out = (
        np.array(part, dtype=np.int64) for part in zip(*layers, strict=True)
    )
    lengths = tuple(
        (int(table[i, 2]), *entering[i].tolist(), *leaving[i].tolist()) for i in range(len(table))
    )
    return Axis(
        tuple(kinds), table[:, 0], table[:, 1], table[:, 2], table[:, 3],
        entering, leaving, bare_in, bare_out, lengths, tuple(stack_of),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class TileKinds:
    """The kinds of tiles of one image, each with its number and its pixels.

    `grid` (row, column) is the kind of each tile. `entering` and `leaving` (layer, kind) are the
    pixels of each layer's input and output, `bare_*` those without a halo.
    """

    y: Axis
    x: Axis
    pairs: tuple[tuple[int, int], ...]
    kind_of: Ints
    count: Ints
    read_pixels: Ints
    inside_pixels: Ints
    write_pixels: Ints
    entering: Ints
    leaving: Ints
    bare_entering: Ints
    bare_leaving: Ints

    @property
    def num_tiles(self) -> int:
        return len(self.y.order) * len(self.x.order)

    @property
    def grid(self) -> Ints:
        kinds: Ints = self.kind_of[np.ix_(np.array(self.y.order), np.array(self.x.order))]
        return kinds


def tile_kinds(
    spec: UNetSpec,
    shape: tuple[int, int],
    core: int | tuple[int, int],
    *,
    halo: int | None = None,
    cropped: bool = True,
    stackable: bool = False,
) -> TileKinds:
    """The kinds of the tiles of `tile_image(shape, core, spec, halo=halo, cropped=cropped)`.

    Kinds with equal maps, or maps with height and width exchanged, are one; `stackable` keeps all
    apart that cannot be run as one batch.

    Raises
    ------
    ShapeError : as `bigunet.tiles.tile_image` does.
    """
    check_image(shape, spec)
    height, width = check_core(core, spec)
    if height > padded_size(shape[0], spec.stride) or width > padded_size(shape[1], spec.stride):
        tile_image(shape, (height, width), spec)  # raises, with the sizes
    reach = spec.halo if halo is None else halo
    return _tile_kinds(skeleton(spec), shape, (height, width), reach, cropped, stackable)


@lru_cache(maxsize=4096)
def _tile_kinds(
    bare: UNetSpec,
    shape: tuple[int, int],
    core: tuple[int, int],
    halo: int,
    cropped: bool,
    stackable: bool,
) -> TileKinds:
    y = axis_of(bare, shape[0], core[0], halo, cropped)
    x = axis_of(bare, shape[1], core[1], halo, cropped)
    per_y = np.bincount(y.order, minlength=len(y.read))
    per_x = np.bincount(x.order, minlength=len(x.read))
    # One form for a pair and its mirror image.
    found: dict[object, int] = {}
    kind_of = np.empty((len(y.read), len(x.read)), dtype=np.int64)
    pairs: list[tuple[int, int]] = []
    for i, a in enumerate(y.lengths):
        for j, b in enumerate(x.lengths):
            key: object = (a, b) if a <= b else (b, a)
            if stackable:
                key = y.stacks[i], x.stacks[j]
            number = found.setdefault(key, len(pairs))
            if number == len(pairs):
                pairs.append((i, j))
            kind_of[i, j] = number
    rows, columns = (np.array(side) for side in zip(*pairs, strict=True))
    count = np.zeros(len(pairs), dtype=np.int64)
    written = np.zeros(len(pairs), dtype=np.int64)
    inside = np.zeros(len(pairs), dtype=np.int64)
    both = np.outer(per_y, per_x)
    np.add.at(count, kind_of, both)
    # Kinds that are one for the network may differ in what they write: the mean of them.
    np.add.at(written, kind_of, np.outer(per_y * y.write, per_x * x.write))
    np.add.at(inside, kind_of, np.outer(per_y * y.inside, per_x * x.inside))
    return TileKinds(
        y, x, tuple(pairs), kind_of, count,
        y.read[rows] * x.read[columns],
        inside, written,
        (y.entering[rows] * x.entering[columns]).T,
        (y.leaving[rows] * x.leaving[columns]).T,
        (y.bare_entering[rows] * x.bare_entering[columns]).T,
        (y.bare_leaving[rows] * x.bare_leaving[columns]).T,
    )  # fmt: skip
