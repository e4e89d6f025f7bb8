"""The rule checker: every kind of broken list is caught, with the step marked in the grid."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bigunet.errors import PlanError
from bigunet.plan import Plan
from bigunet.rules import check_actions, check_plan
from bigunet.schedule import Action, DeviceLists, device_actions
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.timeline import grid

GOOD = device_actions((0, 1), 2, "gpipe", recompute="stage")
Line = list[Action]


def remove(line: Line, action: Action) -> Line:
    return [a for a in line if a != action]


def swap(line: Line, i: int, j: int) -> Line:
    line = list(line)
    line[i], line[j] = line[j], line[i]
    return line


BROKEN: list[tuple[str, Callable[[Line, Line], tuple[Line, Line]], str, str]] = [
    ("lost pass", lambda a, b: (remove(a, Action("backward", 0, 0)), b), "each stage runs", "."),
    (
        "twice",
        lambda a, b: ([*a, Action("forward", 0, 0)], b),
        "happens once",
        "F0.0",
    ),
    ("foreign stage", lambda a, b: ([*a, Action("forward", 1, 0)], b), "its own", "F1.0"),
    ("no such micro-batch", lambda a, b: ([*a, Action("forward", 0, 7)], b), "0 to 1", "F0.7"),
    (
        "backward first",
        lambda a, b: (a, [b[1], b[0], *b[2:]]),
        "comes before",
        "F1.0",
    ),
    (
        "late recompute",
        lambda a, b: ([*remove(a, Action("recompute", 0, 0)), Action("recompute", 0, 0)], b),
        "recomputation comes between",
        "C0.0",
    ),
    (
        "no receive",
        lambda a, b: (a, remove(b, Action("receive", 1, 1, 0))),
        "comes before F1.1",
        "F1.1",
    ),
    (
        "send without receive",
        lambda a, b: (remove(a, Action("receive", 0, 1, 1)), b),
        "r1>0.1 comes before",
        "B0.1",
    ),
    (
        "receive without send",
        lambda a, b: (remove(a, Action("send", 0, 1, 1)), b),
        "every receive has its send",
        "r0>1.1",
    ),
    (
        "send too early",
        lambda a, b: (swap(a, 0, 1), b),
        "a send comes after",
        "s0>1.0",
    ),
    (
        "peer on the same device",
        lambda a, b: ([*a, Action("send", 0, 0, 0)], b),
        "another device",
        "s0>0.0",
    ),
    (
        "backward before forward",
        lambda a, b: (
            a,
            [
                b[0],
                Action("recompute", 1, 0),
                Action("backward", 1, 0),
                *[
                    x
                    for x in b[1:]
                    if (x.micro_batch, x.kind) not in ((0, "recompute"), (0, "backward"))
                ],
            ],
        ),
        "forward pass comes before its backward",
        "B1.0",
    ),
]


def test_the_good_list_passes() -> None:
    check_actions(GOOD, (0, 1), 2, most_in_flight=(2, 2))


@pytest.mark.parametrize(
    ("change", "rule", "marked"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_broken_lists_are_marked(
    change: Callable[[Line, Line], tuple[Line, Line]], rule: str, marked: str
) -> None:
    first, second = change(list(GOOD[0]), list(GOOD[1]))
    with pytest.raises(PlanError) as caught:
        check_actions((tuple(first), tuple(second)), (0, 1), 2)
    text = str(caught.value)
    assert rule in text
    assert f">{marked}<" in text
    assert "device 1" in text.split("\n", 1)[1]


def test_in_flight_limits() -> None:
    with pytest.raises(PlanError, match="stage 0 holds at most 1") as caught:
        check_actions(GOOD, (0, 1), 2, most_in_flight=(1, 2))
    assert ">F0.1<" in str(caught.value)


def test_deadlock_is_found() -> None:
    """Each of two devices waits for what the other sends only afterwards."""
    devices = (0, 1, 0)
    good = device_actions(devices, 2, "1f1b")
    check_actions(good, devices, 2)
    lines = [list(line) for line in good]
    # Device 0 takes stage 2's first micro-batch before it sends the activation that leads to it.
    send, receive = Action("send", 0, 0, 1), Action("receive", 2, 0, 1)
    lines[0].remove(receive)
    lines[0].insert(lines[0].index(send), receive)
    broken: DeviceLists = tuple(tuple(line) for line in lines)
    with pytest.raises(PlanError, match="deadlock") as caught:
        check_actions(broken, devices, 2)
    assert ">r1>2.0<" in str(caught.value)


def test_a_list_is_missing() -> None:
    with pytest.raises(PlanError, match="2 devices have one list each"):
        check_actions(GOOD[:1], (0, 1), 2)


def test_grid_shows_all_devices() -> None:
    lines = grid(GOOD).splitlines()
    assert len(lines) == 3
    assert lines[1].split()[2:] == [str(a) for a in GOOD[0]]
    short = grid(GOOD, (0, 0), around=1).splitlines()
    assert short[1].split()[2:] == [">F0.0<", "s0>1.0"]


def test_plans_are_checked_too() -> None:
    plan = Plan(
        spec=UNetSpec(levels=2, channels=4),
        train=TrainSpec(),
        shape_BCHW=(4, 3, 8, 8),
        stages=(("enc0_conv0", "pool0"), ("mid_conv0", "up0"), ("cat0", "head")),
        devices=(0, 1, 2),
        micro_batches=4,
        schedule="1f1b",
        skips="direct",
    )
    lists = check_plan(plan)
    assert Action("send", 0, 3, 2) in lists[0]
