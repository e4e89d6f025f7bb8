"""Which tiles a training step sees: a pure function of the seed and the step.

Nothing else enters, so a resumed run, or one on another number of ranks, sees the same tiles.
Cores start on multiples of the stride of the image, or of the image turned by the drawn symmetry,
so every trained pixel gets the logits that the whole image would give it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bigunet.augment import turned_tile
from bigunet.errors import SceneError, SpecError, fail
from bigunet.geometry import padded_size
from bigunet.scenes import iter_blocks, read_labels
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tile_reader import Sample, TileReader
from bigunet.tiles import Box, check_core, tile_image

__all__ = ["Sampler"]

_BLOCK = 256


@dataclass(frozen=True, eq=False)
class Sampler:
    """Draws the samples of a step. `focus_counts` (blocks, classes) counts labels by block."""

    spec: UNetSpec
    train: TrainSpec
    reader: TileReader
    whole: bool = False
    focus_counts: np.ndarray[Any, Any] | None = None

    @classmethod
    def of(
        cls, spec: UNetSpec, train: TrainSpec, reader: TileReader, *, whole: bool = False
    ) -> Sampler:
        """With `train.focus` the labels are read once, block by block, to count classes.

        Raises
        ------
        ShapeError : for an image smaller than the stride or the tile, or a tile off the stride.
        SpecError, SceneError : for a focus of another number of classes, or on absent ones only.
        """
        check_core(train.tile, spec)
        tile_image(reader.shape, train.tile, spec, halo=train.halo)
        counts = None
        if train.focus is not None and not whole:
            if len(train.focus) != spec.classes:
                fail(
                    SpecError,
                    rule=f"focus has one number for each of the {spec.classes} classes",
                    got=len(train.focus),
                    remedy="Give one number a class.",
                )
            blocks = list(iter_blocks(reader.shape, _BLOCK))
            counts = np.zeros((len(blocks), spec.classes), np.int64)
            for row, window in zip(counts, blocks, strict=True):
                ids = read_labels(reader.labels, *window)
                ids = ids[(ids != reader.ignore) & (ids >= 0) & (ids < spec.classes)]
                row += np.bincount(ids.astype(np.int64).ravel(), minlength=spec.classes)
            if not (counts.sum(0) * np.asarray(train.focus) > 0).any():
                fail(
                    SceneError,
                    rule="a class that focus names occurs in the labels",
                    got=f"pixels of the classes: {counts.sum(0).tolist()}",
                    remedy="Change focus, or leave it out.",
                )
        return cls(spec, train, reader, whole, counts)

    def draw(self, step: int, *, stream: int = 0) -> list[Sample]:
        """The samples of one step, on all ranks together. `stream` separates uses of one seed."""
        train, spec = self.train, self.spec
        # Seeds that differ in trailing zeros alone give one stream; the 1 keeps ours apart from
        # whatever else was drawn with the plain seed, such as a synthetic scene.
        rng = np.random.default_rng([train.seed, stream, step, 1])
        if self.whole:
            symmetry = int(rng.integers(8)) if train.augment else 0
            gain, offset = self._jitter(rng)
            cores = [t.core for t in tile_image(self.reader.shape, train.tile, spec)]
            return [self._sample(core, symmetry, gain, offset) for core in cores]
        samples = []
        for _ in range(train.batch):
            core = self._core(rng)
            symmetry = int(rng.integers(8)) if train.augment else 0
            samples.append(self._sample(core, symmetry, *self._jitter(rng)))
        return samples

    def _sample(
        self,
        core: Box,
        symmetry: int,
        gain: tuple[float, ...] | None,
        offset: tuple[float, ...] | None,
    ) -> Sample:
        tile = turned_tile(core, self.reader.shape, self.spec, symmetry, halo=self.train.halo)
        return Sample(tile, symmetry, gain, offset)

    def _jitter(
        self, rng: np.random.Generator
    ) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
        if not self.train.jitter:
            return None, None
        draws = self.train.jitter * rng.standard_normal((2, self.spec.in_channels))
        return tuple((1 + draws[0]).tolist()), tuple(draws[1].tolist())

    def _core(self, rng: np.random.Generator) -> Box:
        side, stride = self.train.tile, self.spec.stride
        limits = [padded_size(size, stride) - side for size in self.reader.shape]
        if self.focus_counts is None:
            y, x = (int(rng.integers(limit // stride + 1)) * stride for limit in limits)
        else:
            # One of the starts on the stride whose core holds the pixel, all alike.
            back = rng.integers(side // stride, size=2)
            y, x = (
                min(max(p // stride - int(b), 0) * stride, limit)
                for p, b, limit in zip(self._pixel(rng), back, limits, strict=True)
            )
        return Box(y, y + side, x, x + side)

    def _pixel(self, rng: np.random.Generator) -> tuple[int, int]:
        """A pixel of a class drawn by `focus`, every pixel of the class alike."""
        assert self.focus_counts is not None
        counts = self.focus_counts
        share = np.where(counts.sum(0) > 0, np.asarray(self.train.focus, float), 0.0)
        label = int(rng.choice(len(share), p=share / share.sum()))
        ends = np.cumsum(counts[:, label])
        rank = int(rng.integers(ends[-1]))
        block = int(np.searchsorted(ends, rank, side="right"))
        columns = -(-self.reader.shape[1] // _BLOCK)
        y, x = (block // columns) * _BLOCK, (block % columns) * _BLOCK
        window = y, min(y + _BLOCK, self.reader.shape[0]), x, min(x + _BLOCK, self.reader.shape[1])
        ids = read_labels(self.reader.labels, *window)
        before = int(ends[block] - counts[block, label])
        row, column = np.argwhere(ids == label)[rank - before]
        return y + int(row), x + int(column)
