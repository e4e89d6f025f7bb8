"""The planner's sums of memory by ranges of rows, against the memory model itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from bigunet.cost import micro_batch_rows
from bigunet.layers import layer_table
from bigunet.memory import memory
from bigunet.plan import Plan
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.stage_memory import RowMemory, plan_peaks, row_memory

SPEC = UNetSpec(levels=4, channels=16, norm="batch")
SHAPE = (8, 3, 64, 64)
MODES = ("none", "block", "stage", "except_last")


def plan_at(cuts: tuple[int, ...], train: TrainSpec, schedule: str = "gpipe") -> Plan:
    names = [row.name for row in layer_table(SPEC, SHAPE)]
    ends = (0, *cuts, len(names))
    return Plan(
        spec=SPEC,
        train=train,
        shape_BCHW=SHAPE,
        stages=tuple((names[a], names[b - 1]) for a, b in pairwise(ends)),
        devices=tuple(range(len(ends) - 1)),
        micro_batches=4,
        schedule=schedule,  # type: ignore[arg-type]
    )


def test_ranges_add_up_by_hand() -> None:
    rows = RowMemory(
        fixed_bytes=np.array([1, 2, 3, 4]),
        kept_bytes=np.array([10, 20, 30, 40]),
        temporary_bytes=np.array([5, 900, 7, 800]),
        entering_bytes=np.array([0, 100, 200, 300]),
        skips=(),
        block_starts=np.array([True, False, True, False]),
    )
    assert rows(0, 4, in_flight=0, stage=0) == 10
    assert rows(0, 4, in_flight=3, stage=0) == 10 + 300 + 900
    assert rows(2, 3, in_flight=2, stage=0) == 3 + 60 + 7
    many = rows(np.array([0, 1, 2]), np.array([2, 4, 4]), in_flight=1, stage=0)
    assert many.tolist() == [3 + 30 + 900, 9 + 90 + 900, 7 + 70 + 800]


@pytest.mark.parametrize("mode", MODES)
def test_the_whole_network_is_near_the_model(mode: str) -> None:
    train = TrainSpec(recompute=mode)  # type: ignore[arg-type]
    rows = micro_batch_rows(layer_table(SPEC, SHAPE), 1)
    ours = int(row_memory(SPEC)(rows, train)(0, len(rows), in_flight=1, stage=0))
    theirs = int(memory(SPEC, SHAPE, train)["peak"].max())
    assert ours == pytest.approx(theirs, rel=0.15)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("mode", MODES)
def test_stages_are_near_the_replayed_peaks(mode: str, schedule: str) -> None:
    train = TrainSpec(recompute=mode, optimiser="sgd")  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    num = len(layer_table(SPEC, SHAPE))
    ratios = []
    for _ in range(8):
        cuts = np.sort(rng.choice(np.arange(6, num - 6), 2, replace=False))
        plan = plan_at(tuple(cuts.tolist()), train, schedule)
        exact = plan_peaks(plan)
        rows = micro_batch_rows(plan.table, 4)
        estimate = row_memory(SPEC)(rows, train)
        held = [4, 4, 4] if schedule == "gpipe" else [3, 2, 1]
        for stage, peak in enumerate(exact):
            ours = estimate(
                plan.cuts[stage], plan.cuts[stage + 1], in_flight=held[stage], stage=stage
            )
            ratios.append(float(ours) / peak)
    # An estimate to search with; `plan_peaks` decides.
    assert np.median(ratios) == pytest.approx(1.0, abs=0.15)
