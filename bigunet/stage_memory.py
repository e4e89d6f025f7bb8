"""The memory model as the planner needs it: the peak of any run of rows, for many runs at once.

`bigunet.memory` replays a stage tensor by tensor, too slowly for the thousands of stages that a
search looks at. Here its table of one micro-batch is summed by ranges instead: what stays for the
whole step, what each micro-batch in flight keeps, and the largest temporary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigunet.cost import Skip, activation_bytes, skips_of
from bigunet.layers import LayerRow
from bigunet.machines import Device
from bigunet.memory import memory, peak_bytes
from bigunet.plan import Plan
from bigunet.planner import MemoryModel
from bigunet.schedule import actions, in_flight
from bigunet.spec import Recompute, TrainSpec, UNetSpec
from bigunet.tiles import Tile

__all__ = ["RowMemory", "plan_peaks", "row_memory"]

Ints = NDArray[np.int64]

_KEPT = ("activations", "skips")
_ONCE = ("casts",)


@dataclass(frozen=True, eq=False)
class RowMemory:
    """Peak bytes of rows `first` to `stop - 1`; see `bigunet.cuts.StageBytes`.

    Parameters
    ----------
    fixed_bytes : what each row keeps for the whole step.
    kept_bytes : what each row keeps of one micro-batch from its forward to its backward pass.
    temporary_bytes : the most that each row needs for a moment.
    entering_bytes : the activation that enters each row.
    skips : with the bytes of one micro-batch.
    block_starts : whether a row begins a block (for recompute "block").
    """

    fixed_bytes: Ints
    kept_bytes: Ints
    temporary_bytes: Ints
    entering_bytes: Ints
    skips: tuple[Skip, ...]
    block_starts: NDArray[np.bool_]
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        def before(values: Ints) -> Ints:
            return np.concatenate(([0], np.cumsum(values)))

        starts = np.flatnonzero(self.block_starts)
        inputs = np.where(self.block_starts, self.entering_bytes, 0)
        for skip in self.skips:
            inputs[skip.sink] += skip.num_bytes
        blocks = np.add.reduceat(self.kept_bytes, starts) if len(starts) else self.kept_bytes
        block_of = np.cumsum(self.block_starts) - 1
        for name, value in (
            ("_fixed", before(self.fixed_bytes)),
            ("_kept", before(self.kept_bytes)),
            ("_inputs", before(inputs)),
            ("_temporary", _Maxima(self.temporary_bytes)),
            ("_block", _Maxima(blocks[block_of])),
        ):
            object.__setattr__(self, name, value)

    def __call__(self, first: Any, stop: Any, *, in_flight: int, stage: int) -> Any:
        first, stop = np.asarray(first), np.asarray(stop)
        own: Any = self
        fixed = own._fixed[stop] - own._fixed[first]
        kept = own._kept[stop] - own._kept[first]
        if in_flight == 0:
            return fixed
        now = own._temporary(first, stop)
        if self.recompute == "none":
            return fixed + in_flight * kept + now
        if self.recompute == "block":
            # The first block's input where the stage starts inside a block.
            inputs = own._inputs[stop] - own._inputs[first]
            inputs = inputs + np.where(self.block_starts[first], 0, self.entering_bytes[first])
            once = np.minimum(own._block(first, stop), kept)
            return fixed + in_flight * inputs + once + now
        entering = self.entering_bytes[first]
        for skip in self.skips:
            taken = (skip.source < first) & (first <= skip.sink) & (skip.sink < stop)
            entering = entering + np.where(taken, skip.num_bytes, 0)
        # The micro-batch that is run again, or was not thrown away, is there in full.
        return fixed + in_flight * entering + kept + now


class _Maxima:
    """Largest value of any range, from tables of the ranges of 1, 2, 4, ... values."""

    def __init__(self, values: Ints) -> None:
        self.tables = [np.asarray(values)]
        width = 1
        while 2 * width <= len(values):
            last = self.tables[-1]
            self.tables.append(np.maximum(last[:-width], last[width:]))
            width *= 2
        length = max(len(t) for t in self.tables)
        padded = [np.pad(t, (0, length - len(t))) for t in self.tables]
        self.table = np.stack(padded)

    def __call__(self, first: Any, stop: Any) -> Any:
        power = np.frexp(np.asarray(stop - first, dtype=np.float64))[1] - 1
        return np.maximum(self.table[power, first], self.table[power, stop - (1 << power)])


def row_memory(
    spec: UNetSpec, *, tile: Tile | None = None, device: str | Device | None = None
) -> MemoryModel:
    """The memory model of a network for `planner.find_plan(memory=...)`.

    `device` as in `bigunet.memory.memory`; it decides how sizes are rounded.
    """

    def model(rows: Sequence[LayerRow], train: TrainSpec) -> RowMemory:
        plain = train.replace(recompute="none")
        table = memory(spec, rows[0].in_shape, plain, tile=tile, device=device)
        held = table["held"]
        causes = [str(cause) for cause in held["cause"].values]
        values = held.values

        def of(names: Sequence[str]) -> Ints:
            chosen: Ints = values[:, [causes.index(n) for n in names]].sum(axis=1)
            return chosen

        moment = ("temporaries", *_ONCE)
        entering = np.concatenate(([0], activation_bytes(rows, train.precision)[:-1]))
        starts = np.array([i == 0 or rows[i - 1].block != r.block for i, r in enumerate(rows)])
        return RowMemory(
            fixed_bytes=of([c for c in causes if c not in (*_KEPT, *moment)]),
            kept_bytes=of(_KEPT),
            temporary_bytes=of(("temporaries",)) + of(_ONCE),
            entering_bytes=entering,
            skips=skips_of(rows, train.precision),
            block_starts=starts,
            recompute=train.recompute,
        )

    return model


def plan_peaks(
    plan: Plan, *, tile: Tile | None = None, device: str | None = None
) -> tuple[int, ...]:
    """Peak bytes of each device of a plan, replayed tensor by tensor.

    Stages that share a device are added up. For `planner.find_plan(check=plan_peaks)`.
    """
    held = in_flight(actions(plan), plan.num_stages)
    cuts = plan.cuts
    sizes = tuple(b - a for a, b in pairwise(cuts))
    by_count = {
        count: peak_bytes(
            plan.spec,
            plan.shape_BCHW,
            plan.train,
            tile=tile,
            stages=sizes,
            chunks=plan.micro_batches,
            in_flight=count,
            device=device,
        )
        for count in set(held)
    }
    peaks = [0] * plan.num_devices
    for stage, at in enumerate(plan.devices):
        peaks[at] += by_count[held[stage]][stage]
    return tuple(peaks)
