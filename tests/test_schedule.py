"""Schedules: known lists, closed-form bubbles, and rules kept for every placement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigunet.errors import PlanError
from bigunet.plan import devices_of
from bigunet.rules import check_actions
from bigunet.schedule import Action, bubble_fraction, device_actions, in_flight
from bigunet.timeline import Durations, run, topological

F = 1.0
B = 2.0


def computes(line: tuple[Action, ...]) -> str:
    return " ".join(str(a) for a in line if a.kind in ("forward", "backward", "recompute"))


def equal_step(devices: tuple[int, ...], count: int, schedule: str) -> float:
    lists = device_actions(devices, count, schedule)  # type: ignore[arg-type]
    num = len(devices)
    free = {(s, t): np.zeros(1) for s in range(num) for t in range(num)}
    times = Durations([np.full(1, F)] * num, [np.full(1, B)] * num, [np.full(1, F)] * num, free)
    return float(run(topological(lists), times)[0])


def test_gpipe_is_the_staircase_and_back() -> None:
    lists = device_actions((0, 1), 3, "gpipe")
    assert computes(lists[0]) == "F0.0 F0.1 F0.2 B0.2 B0.1 B0.0"
    assert " ".join(map(str, lists[1])) == (
        "r0>1.0 F1.0 r0>1.1 F1.1 r0>1.2 F1.2 B1.2 s1>0.2 B1.1 s1>0.1 B1.0 s1>0.0"
    )


def test_one_forward_one_backward() -> None:
    lists = device_actions((0, 1, 2), 4, "1f1b")
    assert computes(lists[0]) == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    assert computes(lists[2]) == "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3"


def test_interleaved_follows_megatron() -> None:
    """Device 0 of 2 with 2 chunks: fill with 2 (2 - 0 - 1) + (2 - 1) 2 = 4 forward passes."""
    lists = device_actions((0, 1, 0, 1), 4, "1f1b")
    assert computes(lists[0]).startswith("F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0")


def test_folded_tick_by_tick() -> None:
    lists = device_actions((0, 1, 1, 0), 2, "gpipe")
    assert computes(lists[0]) == "F0.0 F0.1 F3.0 F3.1 B3.1 B3.0 B0.1 B0.0"
    assert computes(lists[1]) == "F1.0 F1.1 F2.0 F2.1 B2.1 B2.0 B1.1 B1.0"


def test_recomputation_stands_before_the_receive() -> None:
    lists = device_actions((0, 1), 2, "gpipe", recompute="except_last")
    assert " ".join(map(str, lists[0][4:])) == "r1>0.1 B0.1 C0.0 r1>0.0 B0.0"
    lists = device_actions((0, 1), 2, "gpipe", recompute="stage")
    assert computes(lists[1]) == "F1.0 F1.1 C1.1 B1.1 C1.0 B1.0"
    assert "C" not in computes(device_actions((0, 1), 2, "gpipe", recompute="block")[0])


def test_direct_skips_have_sends_of_their_own() -> None:
    lists = device_actions((0, 1, 2), 1, "gpipe", skip_pairs=((0, 2), (0, 1)))
    assert " ".join(map(str, lists[0])) == "F0.0 s0>1.0 s0>2.0 r1>0.0 r2>0.0 B0.0"
    assert " ".join(map(str, lists[2])) == "r1>2.0 r0>2.0 F2.0 B2.0 s2>1.0 s2>0.0"
    assert lists[0][1].carries == "activation"
    assert lists[0][3].carries == "gradient"


def test_replicas_reduce_last_stage_first() -> None:
    lists = device_actions((0, 1, 1, 0), 2, "1f1b", reduce=True)
    assert lists[0][-2:] == (Action("reduce", 3, -1), Action("reduce", 0, -1))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("count", [1, 2, 4, 16])
def test_bubble_of_equal_stages_is_the_closed_form(schedule: str, num: int, count: int) -> None:
    step = equal_step(tuple(range(num)), count, schedule)
    assert 1 - count * (F + B) / step == pytest.approx(bubble_fraction(num, count), abs=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num", "chunks"), [(2, 2), (2, 3), (4, 2), (3, 3)])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_bubble_of_interleaved_stages(schedule: str, num: int, chunks: int, groups: int) -> None:
    count = groups * num
    step = equal_step(devices_of("interleaved", num * chunks, num), count, schedule)
    bubble = 1 - chunks * count * (F + B) / step
    assert bubble == pytest.approx(bubble_fraction(num, count, chunks=chunks), abs=1e-12)


def test_micro_batches_in_flight() -> None:
    for num in (1, 3, 5):
        devices = tuple(range(num))
        assert in_flight(device_actions(devices, 8, "gpipe"), num) == (8,) * num
        one = in_flight(device_actions(devices, 8, "1f1b"), num)
        assert one == tuple(num - s for s in range(num))
    folded = in_flight(device_actions(devices_of("folded", 6), 12, "1f1b"), 6)
    assert all(held <= 6 - stage for stage, held in enumerate(folded))


@settings(max_examples=60)
@given(
    placement=st.sampled_from(["straight", "folded", "interleaved"]),
    num=st.integers(1, 4),
    chunks=st.integers(1, 3),
    count=st.integers(1, 5),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    recompute=st.sampled_from(["none", "block", "stage", "except_last"]),
    direct=st.booleans(),
)
def test_every_schedule_keeps_the_rules(
    placement: str,
    num: int,
    chunks: int,
    count: int,
    schedule: str,
    recompute: str,
    direct: bool,
) -> None:
    stages = {"straight": num, "folded": 2 * num, "interleaved": num * chunks}[placement]
    devices = devices_of(placement, stages, num)  # type: ignore[arg-type]
    if placement == "interleaved":
        count *= num
    pairs = tuple((s, t) for s in range(stages) for t in range(s + 1, stages)) if direct else ()
    lists = device_actions(
        devices,
        count,
        schedule,  # type: ignore[arg-type]
        recompute=recompute,  # type: ignore[arg-type]
        skip_pairs=pairs,
    )
    check_actions(lists, devices, count)
    sends = sum(a.kind == "send" for line in lists for a in line)
    assert sends == sum(a.kind == "receive" for line in lists for a in line)


def test_interleaved_needs_whole_groups() -> None:
    with pytest.raises(PlanError, match="groups of 2"):
        device_actions((0, 1, 0, 1), 3, "1f1b")
