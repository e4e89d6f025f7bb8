"""Tiles: what to read, what to write, and what the decoder may drop at each level.

The image is thought of as padded at the bottom and right to a multiple of the stride, by
repeating its last row and column. Cores cover the padded image without overlap; a read box is a
core plus the halo, clipped to the padded image, so that the network's own padding acts at the
true border and, at an inner edge, pollutes the halo only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from bigunet.errors import ShapeError, fail
from bigunet.geometry import padded_size
from bigunet.spec import UNetSpec

__all__ = [
    "Box",
    "Crop",
    "Tile",
    "check_core",
    "check_image",
    "count_tiles",
    "crops_of",
    "tile_image",
    "whole_image",
]


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Half-open rectangle of pixels: rows y0 to y1, columns x0 to x1."""

    y0: int
    y1: int
    x0: int
    x1: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.y1 - self.y0, self.x1 - self.x0

    @property
    def area(self) -> int:
        return (self.y1 - self.y0) * (self.x1 - self.x0)

    @property
    def slices(self) -> tuple[slice, slice]:
        return slice(self.y0, self.y1), slice(self.x0, self.x1)

    def grow(self, margin: int) -> Box:
        return Box(self.y0 - margin, self.y1 + margin, self.x0 - margin, self.x1 + margin)

    def clip(self, other: Box) -> Box:
        return Box(
            max(self.y0, other.y0),
            min(self.y1, other.y1),
            max(self.x0, other.x0),
            min(self.x1, other.x1),
        )

    def halve(self) -> Box:
        """The smallest box one level down whose up-sampling by 2 covers this one."""
        return Box(self.y0 // 2, -(-self.y1 // 2), self.x0 // 2, -(-self.x1 // 2))

    def double(self) -> Box:
        return Box(2 * self.y0, 2 * self.y1, 2 * self.x0, 2 * self.x1)

    def within(self, origin: Box) -> Box:
        """The same pixels, counted from `origin`'s upper left corner."""
        return Box(
            self.y0 - origin.y0, self.y1 - origin.y0, self.x0 - origin.x0, self.x1 - origin.x0
        )


@dataclass(frozen=True, slots=True)
class Crop:
    """What the decoder keeps at one level, each box in the pixels of the map it is cut from.

    `below` is cut from the map of the level below before it is up-sampled, `upsampled` from the
    up-sampled map, `skip` from the encoder's skip; the last two have one shape.
    """

    below: Box
    upsampled: Box
    skip: Box


@dataclass(frozen=True, slots=True)
class Tile:
    """One tile. All boxes are in pixels of the image, padded to a multiple of the stride.

    `read` is what the network sees, `core` what it answers for, `write` the core's part inside
    the true image. `crops[l]` is the decoder's crop at level l; `out` cuts `write` out of the
    last map.
    """

    index: tuple[int, int]
    read: Box
    core: Box
    write: Box
    crops: tuple[Crop, ...]
    out: Box


def check_core(core: int | tuple[int, int], spec: UNetSpec) -> tuple[int, int]:
    """`core` as (height, width) in pixels.

    Raises
    ------
    ShapeError : where a side is not a positive multiple of the stride.
    """
    sides = (core, core) if isinstance(core, int) else tuple(core)
    if len(sides) != 2 or any(side < 1 or side % spec.stride for side in sides):
        near = max(spec.stride, round(max(sides[0], 1) / spec.stride) * spec.stride)
        fail(
            ShapeError,
            rule=f"a tile's sides are positive multiples of the stride {spec.stride}",
            got=core,
            remedy=f"Use {near}, say.",
        )
    return sides[0], sides[1]


def check_image(shape: tuple[int, int], spec: UNetSpec) -> None:
    """Whether the network can take an image of (height, width) pixels.

    Raises
    ------
    ShapeError : for a side below the stride, or too short for padding by reflection.
    """
    if min(shape) < spec.stride:
        fail(
            ShapeError,
            rule=f"each side of an image is at least the network's stride, {spec.stride} pixels",
            got=f"{shape[0]} x {shape[1]}",
            remedy=f"Use at most {max(1, min(shape)).bit_length()} levels, or a larger image.",
        )
    lowest = min(padded_size(side, spec.stride) for side in shape) // spec.stride
    if spec.padding_mode == "reflect" and lowest <= spec.kernel // 2:
        fail(
            ShapeError,
            rule=f"padding by reflection needs more than {spec.kernel // 2} pixels a side at the "
            f"lowest level, where one pixel is {spec.stride} of the image's",
            got=f"{shape[0]} x {shape[1]}",
            remedy="Use a larger image, fewer levels, or padding_mode zeros or replicate.",
        )


def _starts(size: int, core: int) -> range:
    return range(0, size, core)


def count_tiles(shape: tuple[int, int], core: int | tuple[int, int], spec: UNetSpec) -> int:
    """Number of tiles of `tile_image(shape, core, spec)`."""
    height, width = check_core(core, spec)
    return len(_starts(shape[0], height)) * len(_starts(shape[1], width))


def tile_image(
    shape: tuple[int, int],
    core: int | tuple[int, int],
    spec: UNetSpec,
    *,
    halo: int | None = None,
    cropped: bool = True,
) -> tuple[Tile, ...]:
    """Tiles in row-major order that write every pixel of an image of `shape` exactly once.

    Parameters
    ----------
    shape : (height, width) in pixels, any size from the stride up.
    core : side or (height, width) of the cores, multiples of the stride. The last row and column
        of tiles are smaller where the image does not divide.
    halo : pixels read around a core; the exact `spec.halo_aligned` by default. Rounded up to the
        stride. A smaller one makes the result inexact near the cores' edges.
    cropped : whether the decoder drops what no output pixel needs.

    Raises
    ------
    ShapeError : for an image smaller than the stride, a core off the stride or larger than the
        padded image, or a negative halo.
    """
    check_image(shape, spec)
    height, width = check_core(core, spec)
    stride = spec.stride
    padded = Box(0, padded_size(shape[0], stride), 0, padded_size(shape[1], stride))
    if height > padded.y1 or width > padded.x1:
        fail(
            ShapeError,
            rule="a tile is no larger than the image, padded to the stride: "
            f"{padded.y1} x {padded.x1}",
            got=f"{height} x {width}",
            remedy=f"Use a tile of {min(height, padded.y1)} x {min(width, padded.x1)}.",
        )
    if halo is not None and halo < 0:
        fail(ShapeError, rule="a halo is 0 or more pixels", got=halo, remedy="Leave it out.")
    margin = padded_size(spec.halo if halo is None else halo, stride)
    image = Box(0, shape[0], 0, shape[1])
    tiles = []
    for (i, y), (j, x) in product(
        enumerate(_starts(shape[0], height)), enumerate(_starts(shape[1], width))
    ):
        core_box = Box(y, y + height, x, x + width).clip(padded)
        tiles.append(_tile((i, j), core_box, margin, padded, image, spec, cropped))
    return tuple(tiles)


def inner_tile(
    core: int | tuple[int, int],
    spec: UNetSpec,
    *,
    halo: int | None = None,
    cropped: bool = True,
) -> Tile:
    """A tile of this core with its whole halo around it: the largest that any image has.

    Arguments and errors as `tile_image` has them.
    """
    height, width = check_core(core, spec)
    margin = padded_size(spec.halo if halo is None else halo, spec.stride)
    image = Box(0, height + 2 * margin, 0, width + 2 * margin)
    box = Box(margin, margin + height, margin, margin + width)
    return _tile((0, 0), box, margin, image, image, spec, cropped)


def whole_image(shape: tuple[int, int], spec: UNetSpec) -> Tile:
    """The image as one tile without a halo: the reference that tiles must equal."""
    check_image(shape, spec)
    padded = Box(0, padded_size(shape[0], spec.stride), 0, padded_size(shape[1], spec.stride))
    return _tile((0, 0), padded, 0, padded, Box(0, shape[0], 0, shape[1]), spec, cropped=False)


def place_tile(
    core: Box, padded: Box, image: Box, spec: UNetSpec, *, halo: int | None = None
) -> Tile:
    """One tile whose core may start on any multiple of the stride.

    `padded` is the image padded to the stride, `image` the true image inside it: in an image
    that was mirrored or turned, the padding need not lie at the bottom and right.

    Raises
    ------
    ShapeError : for a core or a padded image off the stride.
    """
    stride = spec.stride
    sides = (core.y0, core.y1, core.x0, core.x1, padded.y1, padded.x1)
    if any(side % stride for side in sides) or min(core.shape) < 1:
        fail(
            ShapeError,
            rule=f"cores and padded images lie on multiples of the stride {stride}",
            got=f"{core} in {padded}",
            remedy="Round them to the stride.",
        )
    margin = padded_size(spec.halo if halo is None else halo, stride)
    return _tile((0, 0), core.clip(padded), margin, padded, image, spec, cropped=True)


def _tile(
    index: tuple[int, int],
    core: Box,
    margin: int,
    padded: Box,
    image: Box,
    spec: UNetSpec,
    cropped: bool,
) -> Tile:
    read = core.grow(margin).clip(padded)
    write = core.clip(image)
    # Boxes at each level, in that level's pixels counted from the padded image's corner. Read
    # boxes and cores lie on the stride, so halving them is exact.
    reads, cores = [read], [core]
    for _ in range(spec.levels - 1):
        reads.append(reads[-1].halve())
        cores.append(cores[-1].halve())
    needs = spec.margins
    kept = [
        cores[level].grow(needs.decoder_in[level]).clip(reads[level]) if cropped else reads[level]
        for level in range(spec.levels - 1)
    ]
    crops = crops_of(kept, reads, spec)
    last = kept[0] if kept else reads[0]
    return Tile(index, read, core, write, crops, write.within(last))


def crops_of(kept: Sequence[Box], reads: Sequence[Box], spec: UNetSpec) -> tuple[Crop, ...]:
    """The decoder's crops at each level, where it keeps `kept` of the read boxes `reads`.

    All boxes are in their level's pixels, counted from the padded image's corner.
    """
    crops = []
    for level, keep in enumerate(kept):
        # The lowest block, under the last decoder level, works on the whole read box.
        available = kept[level + 1] if level + 1 < len(kept) else reads[level + 1]
        below = keep.halve()
        if spec.up == "bilinear":
            below = below.grow(1)
        below = below.clip(available)
        crops.append(
            Crop(
                below=below.within(available),
                upsampled=keep.within(below.double()),
                skip=keep.within(reads[level]),
            )
        )
    return tuple(crops)
