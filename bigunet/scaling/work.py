"""Seconds of tiles of every kind, by a cost model, and of the ranks that run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bigunet.cost import CostModel, RooflineCost
from bigunet.layers import LayerRow, layer_table
from bigunet.scaling.axis import TileKinds
from bigunet.scaling.deal import Shares
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["Passes", "RankSeconds", "Timed", "passes", "rank_seconds"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Passes:
    """Seconds of each layer (layer, kind) for a batch of tiles of every kind."""

    forward: Floats
    backward: Floats

    def total(self, train: TrainSpec) -> Floats:
        """Seconds of each kind: forward, backward, and what is recomputed between."""
        again = train.recompute in ("block", "stage")
        both = self.forward.sum(axis=0) * (1 + again) + self.backward.sum(axis=0)
        seconds: Floats = both
        return seconds


def passes(
    spec: UNetSpec, cost: CostModel, kinds: TileKinds, batch: int = 1, *, bare: bool = False
) -> Passes:
    """Seconds of a batch of tiles of each kind; `bare` without their halo."""
    entering = kinds.bare_entering if bare else kinds.entering
    leaving = kinds.bare_leaving if bare else kinds.leaving
    return _passes(spec, cost, entering, leaving, batch)


@lru_cache(maxsize=1024)
def _template(spec: UNetSpec, batch: int) -> tuple[tuple[LayerRow, ...], Floats, Floats, Floats]:
    """The layers of a batch; elements of a pixel that enters and leaves each; its operations.

    Operations go by output pixels; a transposed convolution's by all that it makes, which is four
    for one of its input: then the factor stands in the second column.
    """
    rows = layer_table(spec, (batch, spec.in_channels, spec.stride, spec.stride))
    widths = np.array([(batch * r.in_shape[1], batch * r.out_shape[1]) for r in rows], dtype=float)
    flops = np.zeros((len(rows), 2))
    for i, row in enumerate(rows):
        up = row.kind == "up"
        shape = row.in_shape if up else row.out_shape
        flops[i, int(up)] = row.flops / (shape[2] * shape[3])
    return rows, widths[:, :1], widths[:, 1:], flops


def _passes(spec: UNetSpec, cost: CostModel, entering: Ints, leaving: Ints, batch: int) -> Passes:
    rows, width_in, width_out, each = _template(spec, batch)
    flops = each[:, :1] * leaving + each[:, 1:] * entering
    if isinstance(cost, RooflineCost):
        return Passes(*cost.at_sizes(rows, width_in * entering, width_out * leaving, flops))
    found = [
        cost([_sized(row, *sizes) for row, *sizes in zip(rows, *columns, strict=True)])
        for columns in zip(entering.T, leaving.T, flops.T, strict=True)
    ]
    return Passes(
        np.stack([costs.forward_seconds for costs in found], axis=1),
        np.stack([costs.backward_seconds for costs in found], axis=1),
    )


def _sized(row: LayerRow, entering: int, leaving: int, flops: float) -> LayerRow:
    """The row with maps of so many pixels, as one column of them."""
    return row._replace(
        in_shape=(*row.in_shape[:2], int(entering), 1),
        out_shape=(*row.out_shape[:2], int(leaving), 1),
        flops=round(flops),
    )


@dataclass(frozen=True, eq=False)
class RankSeconds:
    """Seconds of each group of `shares`: with halos, and what they would take without."""

    shares: Shares
    seconds: Floats
    bare_seconds: Floats
    stacks: Ints

    @property
    def slowest(self) -> float:
        return float(self.seconds.max())

    def mean(self, values: Floats) -> float:
        """Mean over all ranks, idle ones included."""
        return float(values @ self.shares.ranks) / self.shares.num_ranks


Timed = Callable[[int, bool], tuple[Floats, Floats]]


def rank_seconds(train: TrainSpec, shares: Shares, timed: Timed) -> RankSeconds:
    """Seconds of the tiles of each group of ranks.

    `timed(batch, bare)` are the forward and backward seconds of a batch of tiles of each kind.

    A rank runs up to `train.batch` tiles of one kind at once. A loss with Dice runs the forward
    pass twice, unless the rank has one batch only (see `bigunet.sample_parallel.step`).
    """
    full, rest = np.divmod(shares.tiles, train.batch)
    stacks = full.sum(axis=1) + (rest > 0).sum(axis=1)
    twice = np.where(stacks > 1, 1.0, 0.0)[:, None] * ("dice" in train.loss)
    again = train.recompute in ("block", "stage")
    sums = []
    for bare in (False, True):
        total = np.zeros(shares.tiles.shape)
        sizes = [(full, train.batch), *(((rest == n) * 1, n) for n in range(1, train.batch))]
        for number, batch in sizes:
            if number.any():
                forward, backward = timed(batch, bare)
                total += number * (forward * (1 + again + twice) + backward)
        sums.append(total.sum(axis=1))
    return RankSeconds(shares, sums[0], sums[1], stacks)
