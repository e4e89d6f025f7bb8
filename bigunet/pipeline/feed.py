"""What one pass of a pipeline is fed: equal micro-batches of images, or of tiles of a scene.

A pass has `plan.micro_batches` micro-batches of one shape. Whole images are padded to the stride
as the network pads them. Tiles get equal read boxes: a box that would reach past the border is
shifted inward until it ends there, so that the network's own padding still acts at the true
border; it then reads more than the halo on its inner side, which changes nothing. The same holds
for what the decoder keeps at each level. Pixels of a core that another tile answers for, or that
lie outside the image, are labelled "ignore". So every pixel counts once and the result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import numpy as np
import torch
from torch import Tensor

from bigunet.augment import turned_shape
from bigunet.errors import PlanError, ShapeError, SpecError, fail
from bigunet.geometry import padded_size
from bigunet.model import pad_to_stride
from bigunet.plan import Plan
from bigunet.spec import UNetSpec
from bigunet.tile_reader import Sample, TileReader
from bigunet.tiles import Box, Tile, check_core, crops_of, tile_image

__all__ = [
    "Feed",
    "Images",
    "Tiles",
    "check_plan",
    "deal",
    "equal_tile",
    "equal_tiles",
    "read_shape",
]


class Feed(Protocol):
    """One pass: pixels for the first stage, labels for the last, and the tiles' geometry."""

    @property
    def tiles(self) -> tuple[Tile, ...] | None: ...

    def check(self, plan: Plan, dtype: torch.dtype, *, first: bool, last: bool) -> None:
        """Raise `PlanError` where it is not what the plan runs.

        `first`, `last` : whether this rank has the stage that takes pixels, or labels.
        """

    def pixels(self, dtype: torch.dtype) -> Tensor: ...

    def labels(self) -> Tensor: ...


@dataclass(frozen=True, eq=False)
class Images:
    """Images (batch, bands, height, width) and class ids (batch, height, width), int64.

    A rank without the first stage may leave out the images, one without the last the labels.
    """

    x_BCHW: Tensor | None  # noqa: N815
    labels_BHW: Tensor | None  # noqa: N815
    stride: int
    ignore: int = 255
    tiles: None = None

    def check(self, plan: Plan, dtype: torch.dtype, *, first: bool, last: bool) -> None:
        if first and self.x_BCHW is None:
            _missing("images", "first")
        if last and self.labels_BHW is None:
            _missing("labels", "last")
        batch, _, *size = plan.shape_BCHW
        for tensor, shape, wanted, what in (
            (self.x_BCHW, plan.shape_BCHW, dtype, "images"),
            (self.labels_BHW, (batch, *size), torch.int64, "labels"),
        ):
            if tensor is None:
                continue
            if tuple(tensor.shape) != tuple(shape):
                fail(
                    PlanError,
                    rule=f"the {what} of a step have the plan's shape, {tuple(shape)}"
                    f" ({plan.micro_batches} micro-batches of {plan.micro_batch})",
                    got=tuple(tensor.shape),
                    remedy="Give as many images of this size, or plan for another batch.",
                )
            if tensor.dtype != wanted:
                fail(
                    PlanError,
                    rule=f"the {what} have the type {wanted}"
                    + (" of the weights" if what == "images" else ""),
                    got=tensor.dtype,
                    remedy=f"Convert them with .to({wanted}), or the network.",
                )

    def pixels(self, dtype: torch.dtype) -> Tensor:
        if self.x_BCHW is None:
            _missing("images", "first")
        return pad_to_stride(self.x_BCHW, self.stride)

    def labels(self) -> Tensor:
        labels = self.labels_BHW
        if labels is None:
            _missing("labels", "last")
        height, width = labels.shape[-2:]
        below, right = (padded_size(n, self.stride) - n for n in (height, width))
        return torch.nn.functional.pad(labels, (0, right, 0, below), value=self.ignore)


def _missing(what: str, stage: str) -> NoReturn:
    fail(
        PlanError,
        rule=f"a rank with the {stage} stage is given the {what}",
        got=None,
        remedy=f"Pass the {what} there.",
    )


# Tiles of one shape -----------------------------------------------------------------------------


def _sides(
    core: int | tuple[int, int], padded: Box, spec: UNetSpec, halo: int | None
) -> tuple[tuple[int, int], tuple[int, int], int]:
    sides = check_core(core, spec)
    if sides[0] > padded.y1 or sides[1] > padded.x1:
        fail(
            ShapeError,
            rule=f"a tile is no larger than the image padded to the stride, "
            f"{padded.y1} x {padded.x1}",
            got=f"{sides[0]} x {sides[1]}",
            remedy="Use a smaller tile.",
        )
    margin = padded_size(spec.halo if halo is None else halo, spec.stride)
    read = (min(sides[0] + 2 * margin, padded.y1), min(sides[1] + 2 * margin, padded.x1))
    return sides, read, margin


def read_shape(
    shape: tuple[int, int], core: int | tuple[int, int], spec: UNetSpec, *, halo: int | None = None
) -> tuple[int, int]:
    """(height, width) of every read box of `equal_tiles`: a plan's images for these tiles."""
    padded = Box(0, padded_size(shape[0], spec.stride), 0, padded_size(shape[1], spec.stride))
    return _sides(core, padded, spec, halo)[1]


def equal_tiles(
    shape: tuple[int, int], core: int | tuple[int, int], spec: UNetSpec, *, halo: int | None = None
) -> tuple[Tile, ...]:
    """Tiles of one shape that write every pixel of an image of (height, width) exactly once.

    Cores start on multiples of `core`; the last ones are shifted inward, and write only what no
    tile before them does. `out` cuts the core, not the write box, out of the last map.

    Raises
    ------
    ShapeError : see `bigunet.tiles.tile_image`.
    """
    padded = Box(0, padded_size(shape[0], spec.stride), 0, padded_size(shape[1], spec.stride))
    return tuple(
        equal_tile(tile, padded, core, spec, halo=halo)
        for tile in tile_image(shape, core, spec, halo=halo)
    )


def equal_tile(
    tile: Tile, padded: Box, core: int | tuple[int, int], spec: UNetSpec, *, halo: int | None = None
) -> Tile:
    """`tile`, whose core may be smaller, with the full core and a read box of the full size."""
    sides, read_sides, margin = _sides(core, padded, spec, halo)
    whole = _inside((tile.core.y0, tile.core.x0), sides, padded)
    read = _inside((whole.y0 - margin, whole.x0 - margin), read_sides, padded)
    needs = spec.margins
    reads, kept, one_core = [read], [], whole
    for level in range(spec.levels - 1):
        need, space = needs.decoder_in[level], reads[level]
        size = tuple(
            min(side + 2 * need, most)
            for side, most in zip(one_core.shape, space.shape, strict=True)
        )
        kept.append(_inside((one_core.y0 - need, one_core.x0 - need), (size[0], size[1]), space))
        reads.append(space.halve())
        one_core = one_core.halve()
    last = kept[0] if kept else reads[0]
    return Tile(
        tile.index, read, whole, tile.write, crops_of(kept, reads, spec), whole.within(last)
    )


def _inside(start: tuple[int, int], sides: tuple[int, int], space: Box) -> Box:
    """A box of these sides, shifted into `space`."""
    y = max(space.y0, min(start[0], space.y1 - sides[0]))
    x = max(space.x0, min(start[1], space.x1 - sides[1]))
    return Box(y, y + sides[0], x, x + sides[1])


def check_plan(plan: Plan, shape: tuple[int, int]) -> None:
    """Raise `PlanError` unless the plan's images are tiles of a scene of (height, width)."""
    train = plan.train
    if plan.scene_shape is not None and tuple(plan.scene_shape) != tuple(shape):
        fail(
            PlanError,
            rule=f"the plan was made for a scene of {plan.scene_shape[0]} x {plan.scene_shape[1]}",
            got=f"{shape[0]} x {shape[1]}",
            remedy="Plan anew for this scene.",
        )
    read = read_shape(shape, train.tile, plan.spec, halo=train.halo)
    if plan.shape_BCHW[2:] != read:
        fail(
            PlanError,
            rule=f"tiles of {train.tile} pixels are read from {read[0]} x {read[1]} here, which "
            "is the size of a plan's images",
            got=f"{plan.shape_BCHW[2]} x {plan.shape_BCHW[3]}",
            remedy=f"Plan for images of {read[0]} x {read[1]}, or another train.tile.",
        )
    if plan.spec.norm == "batch" and not train.freeze_norm:
        fail(
            SpecError,
            rule="batch norm is frozen in a pipelined run",
            got="freeze_norm=False, with statistics that differ in each micro-batch",
            remedy="Set freeze_norm=True, or train sample-parallel (bigunet.train.fit).",
        )


@dataclass(frozen=True, eq=False)
class Tiles:
    """Samples of one scene, one micro-batch after the other; None fills up, and counts nothing.

    With one tile a micro-batch the decoder is cropped; with more, whose crops differ, it is not.
    """

    reader: TileReader
    samples: tuple[Sample | None, ...]
    plan: Plan

    @property
    def cropped(self) -> bool:
        return self.plan.micro_batch == 1

    @property
    def tiles(self) -> tuple[Tile, ...] | None:
        return tuple(s.tile for s in self._filled()) if self.cropped else None

    def _filled(self) -> list[Sample]:
        one = next(s for s in self.samples if s is not None)
        return [one if s is None else s for s in self.samples]

    def check(self, plan: Plan, dtype: torch.dtype, *, first: bool, last: bool) -> None:
        shapes = {s.tile.read.shape for s in self._filled()}
        if shapes != {plan.shape_BCHW[2:]} or len(self.samples) != plan.shape_BCHW[0]:
            fail(
                PlanError,
                rule="the images of a plan are the read boxes of its tiles, "
                f"{plan.shape_BCHW[0]} of {plan.shape_BCHW[2]} x {plan.shape_BCHW[3]}",
                got=f"{len(self.samples)} of " + ", ".join(f"{h} x {w}" for h, w in sorted(shapes)),
                remedy="Plan for this scene, train.tile and train.halo (see read_shape); an image "
                "narrower than a read box cannot be turned (augment).",
            )

    def pixels(self, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.stack([self.reader.pixels(s) for s in self._filled()])).to(dtype)

    def labels(self) -> Tensor:
        ignore = self.reader.ignore
        stack = []
        for sample in self.samples:
            tile = self._filled()[0].tile if sample is None else sample.tile
            box = tile.core if self.cropped else tile.read
            labels = np.full(box.shape, ignore, np.int64)
            if sample is not None:
                labels[tile.write.within(box).slices] = self.reader.truth(sample)
            stack.append(labels)
        return torch.from_numpy(np.stack(stack))


def deal(
    plan: Plan, reader: TileReader, samples: Sequence[Sample], pipeline: int, num_pipelines: int
) -> list[Feed]:
    """The passes of one pipeline: its share of the samples, with equal tiles, filled up.

    Samples are dealt in turn; each pipeline makes as many passes as its share needs.
    """
    spec, train = plan.spec, plan.train
    stride = spec.stride
    size = padded_size(reader.shape[0], stride), padded_size(reader.shape[1], stride)
    share: list[Sample | None] = []
    for sample in samples[pipeline::num_pipelines]:
        height, width = turned_shape(size, sample.symmetry)
        tile = equal_tile(sample.tile, Box(0, height, 0, width), train.tile, spec, halo=train.halo)
        share.append(Sample(tile, sample.symmetry, sample.gain, sample.offset))
    batch = plan.shape_BCHW[0]
    share += [None] * (-len(share) % batch)
    return [Tiles(reader, tuple(share[i : i + batch]), plan) for i in range(0, len(share), batch)]
