"""The table of ways to cut."""

from __future__ import annotations

import json

import pytest

from bigunet.comparison import compare_plans
from bigunet.cost import RooflineCost
from bigunet.layers import layer_table
from bigunet.machines import machine
from bigunet.plan import Plan
from bigunet.simulate import simulate
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.stage_memory import row_memory

SPEC = UNetSpec(levels=3, channels=16)
TABLE = layer_table(SPEC, (8, 3, 64, 64))
SUMMIT = machine("summit")
COST = RooflineCost(SUMMIT.processor)


def test_every_way_is_timed_and_none_beats_the_best() -> None:
    rows = compare_plans(
        TABLE, COST, spec=SPEC, train=TrainSpec(), machine=SUMMIT, num_devices=3,
        micro_batches=4, memory=row_memory(SPEC),
    )  # fmt: skip
    rows = json.loads(json.dumps(rows))
    ways = {row["way"]: row for row in rows}
    assert set(ways) == {"best", "folded", "time", "memory", "parameters", "fairscale"}
    for way, row in ways.items():
        plan = Plan.from_dict(row["plan"])
        assert plan.num_devices == 3
        step = simulate(plan, COST, SUMMIT).attrs["step_seconds"]
        assert row["step_seconds"] == pytest.approx(step, rel=1e-10)
        assert len(row["peak_bytes"]) == 3
        if way != "folded":
            assert ways["best"]["step_seconds"] <= row["step_seconds"] * (1 + 1e-10)


def test_what_does_not_work_is_said_in_its_row() -> None:
    rows = compare_plans(
        TABLE, COST, spec=SPEC, train=TrainSpec(), machine=SUMMIT, num_devices=len(TABLE) - 1,
        micro_batches=4,
    )  # fmt: skip
    ways = {row["way"]: row for row in rows}
    assert "memory" not in ways
    assert "number of stages" in ways["folded"]["error"]
    assert ways["best"]["error"] is None
