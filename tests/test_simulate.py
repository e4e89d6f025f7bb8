"""Simulations: closed forms, sums that must agree, and the published speed-ups."""

from __future__ import annotations

import csv
import importlib.resources
import json
import statistics
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from bigunet.cost import RooflineCost, RowCosts
from bigunet.layers import layer_table
from bigunet.machines import Link, Machine, machine
from bigunet.plan import Plan
from bigunet.planner import find_plan
from bigunet.schedule import bubble_fraction
from bigunet.simulate import one_device_seconds, simulate, simulation_table, stages_table
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.stage_memory import row_memory

SPEC = UNetSpec(levels=3, channels=8)
SUMMIT = machine("summit")
COST = RooflineCost(SUMMIT.processor)
FREE = Link("free", np.inf)
IDEAL = Machine("ideal", SUMMIT.processor, 64, FREE, FREE, FREE)


def plan_at(cuts: tuple[int, ...], **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "spec": SPEC,
        "train": TrainSpec(),
        "shape_BCHW": (8, 3, 64, 64),
        "micro_batches": 8,
    }
    values |= changes
    table = layer_table(values["spec"], values["shape_BCHW"])
    ends = (0, *cuts, len(table))
    stages = tuple((table[a].name, table[b - 1].name) for a, b in pairwise(ends))
    values.setdefault("devices", tuple(range(len(stages))))
    return Plan(stages=stages, **values)


def even(cuts: tuple[int, ...], num: int) -> Any:
    """A cost by which every stage takes 1 s forward and 2 s back."""

    def cost(rows: Any) -> RowCosts:
        forward = np.zeros(num)
        for a, b in pairwise((0, *cuts, num)):
            forward[a:b] = 1 / (b - a)
        return RowCosts(forward, 2 * forward)

    return cost


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_stages_idle_by_the_schedule_alone(schedule: str) -> None:
    cuts = (6, 12, 18)
    plan = plan_at(cuts, schedule=schedule)
    result = simulate(plan, even(cuts, len(plan.table)), IDEAL)
    assert result.attrs["step_seconds"] == pytest.approx(3 * (8 + 3), rel=1e-12)
    assert result.attrs["bubble"] == pytest.approx(bubble_fraction(4, 8), rel=1e-12)
    idle = result["idle"].sel(cause="start-up").values
    np.testing.assert_allclose(idle, 9.0, rtol=1e-12)
    np.testing.assert_allclose(result["idle"].sum("cause").values, idle, rtol=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("devices", [(0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 0, 1)])
@pytest.mark.parametrize("recompute", ["none", "except_last", "stage", "block"])
def test_every_second_and_byte_is_accounted_for(
    schedule: str, devices: tuple[int, ...], recompute: str
) -> None:
    plan = plan_at(
        (5, 12, 17),
        schedule=schedule,
        devices=devices,
        tiles=2,
        train=TrainSpec(recompute=recompute),  # type: ignore[arg-type]
    )
    result = simulate(plan, COST, SUMMIT, memory=row_memory(SPEC))
    step = result.attrs["step_seconds"]
    total = result["busy"] + result["idle"].sum("cause")
    np.testing.assert_allclose(total.values, step, rtol=1e-12)
    assert float(result["end"].max()) == pytest.approx(step, rel=1e-12)
    # Nothing overlaps on a device.
    for device in range(plan.num_devices):
        own = (result["device"] == device) & ~result["kind"].isin(["send", "receive"])
        starts, ends = result["start"].values[own], result["end"].values[own]
        assert (starts[1:] >= ends[:-1] - 1e-15).all()
    # What goes over comes back.
    links = result["link_bytes"].values
    np.testing.assert_array_equal(links, links.T)
    assert links.sum() == result["num_bytes"].sum() > 0
    # Memory comes back to where it began, and nowhere exceeds the sum of the stages' peaks.
    for device in range(plan.num_devices):
        level = result["memory_bytes"].values[result["memory_device"] == device]
        assert level[0] == level[-1] < level.max()
        table = stages_table(plan, COST, SUMMIT, memory=row_memory(SPEC))
        peak = sum(row["peak_bytes"] for row in table if row["device"] == device)
        assert level.max() <= peak
        if devices == (0, 1, 2, 3):
            assert level.max() == peak


def test_a_slow_link_is_idle_time_by_transfer() -> None:
    plan = plan_at((5, 12))
    slow = Link("slow", 1e6)
    result = simulate(plan, COST, Machine("slow", SUMMIT.processor, 8, slow, slow, slow))
    idle = result["idle"].sum("of_device")
    assert float(idle.sel(cause="transfer")) > 0.9 * float(idle.sum())
    ideal = simulate(plan, COST, IDEAL)
    assert float(ideal["idle"].sel(cause="transfer").sum()) == 0


def test_gradients_are_reduced_over_the_pipelines_by_a_ring() -> None:
    plan, twin = plan_at((12,)), plan_at((12,), tiles=3)
    alone, three = simulate(plan, COST, SUMMIT), simulate(twin, COST, SUMMIT)
    reduce = three.where(three["kind"] == "reduce", drop=True)
    seconds = (reduce["end"] - reduce["start"]).values
    parameters = [sum(row.parameters for row in twin.stage_rows(s)) for s in (0, 1)]
    for stage, took in zip(reduce["stage"].values, seconds, strict=True):
        link = SUMMIT.across  # the ring closes from device 4 or 5 to 0 or 1
        chunk = 4 * parameters[int(stage)] / 3
        assert took == pytest.approx(
            4 * (link.latency_seconds + chunk / link.bytes_per_second), rel=1e-9
        )
    assert three.attrs["step_seconds"] > alone.attrs["step_seconds"]


def test_one_stage_is_one_device() -> None:
    plan = plan_at((), micro_batches=1)
    result = simulate(plan, COST, SUMMIT)
    assert result.attrs["step_seconds"] == pytest.approx(one_device_seconds(plan, COST))
    assert result.attrs["speed_up"] == pytest.approx(1.0)
    assert result.attrs["bubble"] == pytest.approx(0.0, abs=1e-12)


def published() -> list[dict[str, str]]:
    source = importlib.resources.files("bigunet") / "data/published/torchgpipe_unet_speed.csv"
    lines = source.read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def test_published_speed_ups() -> None:
    """torchgpipe's hand-tuned U-Net (5, 64) on 1, 2 and 4 P40; nothing here is fitted to it."""
    p40 = machine("p40")
    cost = RooflineCost(p40.processor)
    rates, errors = [], []
    for row in published():
        batch = int(row["batch"])
        sizes = [int(n) for n in row["balance_in_flat_layers"].split(";") if n] or [241]
        mode = "except_last" if row["chunks"] else "none"
        plan = plan_at(
            tuple(np.cumsum(sizes)[:-1].tolist()),
            spec=UNetSpec.torchgpipe(5, 64),
            train=TrainSpec(recompute=mode),  # type: ignore[arg-type]
            shape_BCHW=(batch, 3, 192, 192),
            micro_batches=int(row["chunks"] or 1),
            skips="direct",
        )
        rates.append(batch / simulate(plan, cost, p40).attrs["step_seconds"])
        errors.append(abs(rates[-1] / rates[0] / float(row["speed_up"]) - 1))
    assert len(errors) == 4
    assert max(errors) <= 0.15
    assert statistics.median(errors[1:]) <= 0.08  # the baseline is 0 by definition


def test_folded_plans_send_no_skips() -> None:
    spec = UNetSpec(levels=5, channels=32)
    table = layer_table(spec, (16, 3, 256, 256))
    plan = find_plan(
        table, COST, spec=spec, train=TrainSpec(), machine=SUMMIT, stages=6, micro_batches=16,
        placement="folded",
    ).plan  # fmt: skip
    result = simulate(plan, COST, SUMMIT)
    cuts = plan.cuts
    maps = 0
    for s in range(plan.num_stages - 1):
        if plan.devices[s] != plan.devices[s + 1]:
            maps += 2 * 4 * int(np.prod(plan.table[cuts[s + 1] - 1].out_shape))
    assert int(result["link_bytes"].sum()) == maps


def test_tables_are_plain() -> None:
    plan = plan_at((5, 12))
    stages = json.loads(json.dumps(stages_table(plan, COST, SUMMIT)))
    assert [row["first"] for row in stages] == [first for first, _ in plan.stages]
    assert sum(row["num_layers"] for row in stages) == len(plan.table)
    assert stages[0]["peak_bytes"] is None
    table = json.loads(json.dumps(simulation_table(simulate(plan, COST, SUMMIT))))
    assert len(table["devices"]) == 3
    assert {link["source"] for link in table["links"]} == {0, 1, 2}
    assert table["actions"][0]["kind"] == "forward"


def test_a_simulation_is_quick_enough_to_follow_a_slider() -> None:
    """285 layers, 6 stages, 16 micro-batches: a part of the 200 ms from a cut's move to pixels."""
    spec = UNetSpec.torchgpipe(6, 72)
    plan = plan_at(
        (40, 90, 140, 190, 240), spec=spec, shape_BCHW=(16, 3, 192, 192), micro_batches=16
    )
    simulate(plan, COST, SUMMIT)
    start = time.process_time()
    for _ in range(5):
        simulate(plan, COST, SUMMIT)
    assert (time.process_time() - start) / 5 < 0.1
