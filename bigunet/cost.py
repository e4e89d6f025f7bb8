"""Seconds of each layer, and what crosses a cut: the costs that plans are made of.

Two sources of seconds share one call, `cost(rows) -> RowCosts`. `RooflineCost` is the roofline
model (Williams, Waterman, Patterson 2009, doi 10.1145/1498765.1498785): a layer takes as long as
its FLOPs at the peak rate or its bytes at the memory's rate, whichever is longer, plus what it
costs to start its kernels. `MeasuredCost` interpolates seconds that were timed on a machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bigunet.errors import PlanError, fail
from bigunet.layers import LayerRow, Shape
from bigunet.machines import Processor

__all__ = [
    "CostModel",
    "MeasuredCost",
    "RooflineCost",
    "RowCosts",
    "Skip",
    "activation_bytes",
    "micro_batch_rows",
    "open_skips",
    "skips_of",
    "value_bytes",
]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RowCosts:
    """Seconds of each row for one micro-batch; recomputing a row takes its forward time."""

    forward_seconds: Floats
    backward_seconds: Floats

    def __post_init__(self) -> None:
        for values in (self.forward_seconds, self.backward_seconds):
            if len(values) != len(self.forward_seconds) or not (np.asarray(values) >= 0).all():
                fail(
                    PlanError,
                    rule="forward and backward seconds are one number >= 0 for each row",
                    got=f"{len(self.forward_seconds)} and {len(self.backward_seconds)} numbers",
                    remedy="Time every row of the layer table.",
                )


class CostModel(Protocol):
    """Anything that gives the seconds of rows whose shapes are those of one micro-batch."""

    def __call__(self, rows: Sequence[LayerRow]) -> RowCosts: ...


def value_bytes(precision: str) -> int:
    """Bytes of one number of an activation at a `TrainSpec.precision`."""
    return 4 if precision == "fp32" else 2


def _elements(shape: Shape) -> int:
    return shape[0] * shape[1] * shape[2] * shape[3]


# Whole tensors that the forward and the backward pass of a layer move: its input, its output, its
# weights. A tensor counts once for each time that a kernel reads or writes it whole: a
# normalisation reads its input for the statistics and again to apply them; an activation's
# gradient reads the gradient and the saved tensor and writes. A skip only keeps a name forward,
# and adds the two gradients of its output backward; a concatenation's gradient is split by views,
# which move nothing.
_MOVED: Mapping[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "conv": ((1, 1, 1), (2, 2, 2)),
    "head": ((1, 1, 1), (2, 2, 2)),
    "norm": ((2, 1, 0), (3, 2, 0)),
    "dropout": ((1, 1, 0), (1, 1, 0)),
    "activation": ((1, 1, 0), (1, 2, 0)),
    "skip": ((0, 0, 0), (0, 3, 0)),
    "pool": ((1, 1, 0), (1, 1, 0)),
    "up": ((1, 1, 0), (1, 1, 0)),
    "concat": ((0, 2, 0), (0, 0, 0)),
}
# A pooling also writes, and backward reads, the winners' positions: 64-bit whole numbers, one for
# each output.
_POSITION_BYTES = 8


# Kernels started by the two passes; "skip" starts none forward.
_LAUNCHES: Mapping[str, tuple[int, int]] = {
    "conv": (1, 2),
    "head": (1, 2),
    "dropout": (2, 1),
    "norm": (2, 2),
    "activation": (1, 1),
    "skip": (0, 1),
    "pool": (1, 1),
    "up": (1, 1),
    "concat": (1, 0),
}


@lru_cache(maxsize=256)
def _constants(layers: tuple[tuple[str, int], ...]) -> tuple[Floats, ...]:
    """What the roofline needs of layers (kind, parameters) beside their sizes, an array each."""
    # A transposed convolution is a convolution.
    moved = np.array([_MOVED["conv" if k == "up" and n else k] for k, n in layers], dtype=float)
    moved = moved.reshape(len(layers), 2, 3)
    starts = np.array([_LAUNCHES[k] for k, _ in layers], dtype=float).reshape(len(layers), 2)
    return (
        # Only products run at the peak; element-wise layers are bound by memory anyway.
        np.array([n > 0 and k != "norm" for k, n in layers], dtype=float),
        np.array([_POSITION_BYTES * (k == "pool") for k, _ in layers], dtype=float),
        np.array([n for _, n in layers], dtype=float),
        moved[:, 0],
        moved[:, 1],
        starts[:, 0],
        starts[:, 1],
    )


@dataclass(frozen=True)
class RooflineCost:
    """Seconds by the roofline of a processor at a `TrainSpec.precision`.

    A convolution's backward pass has the FLOPs of two forward passes (gradient of the input and
    of the weights); the network's first layer has no gradient of its input.
    """

    processor: Processor
    precision: str = "fp32"

    def __call__(self, rows: Sequence[LayerRow]) -> RowCosts:
        entering = np.array([_elements(row.in_shape) for row in rows], dtype=np.float64)
        leaving = np.array([_elements(row.out_shape) for row in rows], dtype=np.float64)
        flops = np.array([row.flops for row in rows], dtype=np.float64)
        return RowCosts(*self.at_sizes(rows, entering, leaving, flops))

    def at_sizes(
        self, rows: Sequence[LayerRow], entering: Floats, leaving: Floats, flops: Floats
    ) -> tuple[Floats, Floats]:
        """Forward and backward seconds of the rows at other sizes than theirs, many at once.

        `entering` and `leaving` (row, ...) are the elements of each row's input and output,
        `flops` its operations; only kinds and parameters are taken from `rows`.
        """
        size, peak = value_bytes(self.precision), self.processor.peak(self.precision)
        more = (..., *(None,) * (entering.ndim - 1))
        table = _constants(tuple((r.kind, r.parameters) for r in rows))
        products, positions, weights, forward, backward, starts, starts_back = (
            column[more] for column in table
        )
        flops = products * flops

        def moved(tensors: Floats) -> Floats:
            x, y, w = (size * tensors[:, i] for i in range(3))
            return x * entering + y * leaving + w * weights + positions * leaving

        bytes_forward, bytes_backward = moved(forward), moved(backward)
        flops_backward = 2 * flops
        if rows and rows[0].level == 0 and rows[0].block == "enc0":
            # The first layer: no gradient of the network's input.
            flops_backward[0], bytes_backward[0] = flops[0], bytes_forward[0]
        rate, launch = self.processor.bytes_per_second, self.processor.launch_seconds
        return (
            np.maximum(flops / peak, bytes_forward / rate) + launch * starts,
            np.maximum(flops_backward / peak, bytes_backward / rate) + launch * starts_back,
        )


@dataclass(frozen=True)
class MeasuredCost:
    """Seconds timed at one or more sizes, linear between and beyond them.

    `forward_seconds[name]` and `backward_seconds[name]` hold one number for each of `batches`,
    which rise. With one size only, seconds are proportional to the size.

    A layer's size is the number of images, unless `pixels[name]` holds the pixels of its output
    (images x height x width) at each timing: then it is those, and rows of any height and width,
    such as those of cropped tiles, have their seconds.
    """

    batches: tuple[int, ...]
    forward_seconds: Mapping[str, tuple[float, ...]]
    backward_seconds: Mapping[str, tuple[float, ...]]
    source: str = "measured"
    pixels: Mapping[str, tuple[int, ...]] | None = None

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.batches))
        tables = (self.forward_seconds, self.backward_seconds)
        sizes = {len(v) for table in tables for v in table.values()}
        same = set(tables[0]) == set(tables[1])
        if not self.batches or self.batches[0] < 1 or not rising or sizes - {len(self.batches)}:
            same = False
        if self.pixels is not None:
            columns = [self.pixels.get(name, ()) for name in tables[0]]
            same = same and all(
                len(c) == len(self.batches) and c[0] > 0 and all(a <= b for a, b in pairwise(c))
                for c in columns
            )
        if not same:
            fail(
                PlanError,
                rule="measured seconds have rising batch sizes, and one forward and backward "
                "number of each layer for each of them",
                got=f"batches {self.batches}, {sorted(sizes)} numbers a layer",
                remedy="Measure every layer at every batch size.",
            )

    def __call__(self, rows: Sequence[LayerRow]) -> RowCosts:
        missing = [row.name for row in rows if row.name not in self.forward_seconds]
        if missing:
            fail(
                PlanError,
                rule="measured seconds cover every layer of the network",
                got=f"none for {', '.join(missing[:5])}" + (" ..." if len(missing) > 5 else ""),
                remedy="Calibrate with the same spec.",
            )
        return RowCosts(
            np.array([self._of(row, self.forward_seconds) for row in rows]),
            np.array([self._of(row, self.backward_seconds) for row in rows]),
        )

    def _of(self, row: LayerRow, seconds: Mapping[str, tuple[float, ...]]) -> float:
        if self.pixels is None:
            return _interpolated(self.batches, seconds[row.name], row.in_shape[0])
        pixels = row.out_shape[0] * row.out_shape[2] * row.out_shape[3]
        return _interpolated(self.pixels[row.name], seconds[row.name], pixels)


def _interpolated(sizes: Sequence[int], seconds: Sequence[float], size: int) -> float:
    """Linear between and beyond points; proportional where all points are of one size."""
    if sizes[0] == sizes[-1]:
        return sum(seconds) / len(seconds) * size / sizes[0]
    k = next((k for k in range(1, len(sizes)) if sizes[k] > sizes[0] and size <= sizes[k]), None)
    if k is None:
        k = len(sizes) - 1
    j = max(i for i in range(k) if sizes[i] < sizes[k])
    slope = (seconds[k] - seconds[j]) / (sizes[k] - sizes[j])
    return max(0.0, seconds[j] + slope * (size - sizes[j]))


# What crosses a cut ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Skip:
    """A skip by row numbers: made by row `source`, joined by row `sink`, of so many bytes."""

    source: int
    sink: int
    num_bytes: int


def micro_batch_rows(table: Sequence[LayerRow], micro_batches: int) -> tuple[LayerRow, ...]:
    """The table of one micro-batch, where `table` is that of all of them together.

    Micro-batches are equal: a batch that does not divide is refused, since both engines need
    equal shapes.

    Raises
    ------
    PlanError : where the batch is no multiple of `micro_batches`, with the counts that divide.
    """
    batch = table[0].in_shape[0]
    if micro_batches < 1 or batch % micro_batches:
        divisors = [d for d in range(1, batch + 1) if batch % d == 0]
        fail(
            PlanError,
            rule=f"micro-batches are equal, so their count divides the batch of {batch}",
            got=micro_batches,
            remedy=f"Use one of {', '.join(map(str, divisors))}, or another batch.",
        )
    size = batch // micro_batches
    return tuple(
        row._replace(
            in_shape=(size, *row.in_shape[1:]),
            out_shape=(size, *row.out_shape[1:]),
            flops=row.flops // micro_batches,
        )
        for row in table
    )


def activation_bytes(rows: Sequence[LayerRow], precision: str) -> NDArray[np.int64]:
    """Bytes of each row's output."""
    size = value_bytes(precision)
    return np.array([size * _elements(row.out_shape) for row in rows], dtype=np.int64)


def skips_of(rows: Sequence[LayerRow], precision: str) -> tuple[Skip, ...]:
    """Every skip of the table. Its bytes are the skip layer's output's, uncropped."""
    index = {row.name: i for i, row in enumerate(rows)}
    size = value_bytes(precision)
    return tuple(
        Skip(index[row.source], i, size * _elements(rows[index[row.source]].out_shape))
        for i, row in enumerate(rows)
        if row.source is not None
    )


def open_skips(skips: Sequence[Skip], num_rows: int) -> NDArray[np.int64]:
    """Bytes of the skips alive at each cut: entry j for a cut before row j, 0 ... num_rows."""
    alive = np.zeros(num_rows + 1, dtype=np.int64)
    for skip in skips:
        alive[skip.source + 1 : skip.sink + 1] += skip.num_bytes
    return alive
