"""When each action of a schedule starts and ends, for one set of durations or for many at once.

The order in which things happen on a device and on a link is fixed by the lists, so times follow
by additions and maxima along one topological order; durations may be arrays, one entry for each
of many candidate plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from bigunet.errors import PlanError, fail
from bigunet.schedule import Action, DeviceLists

__all__ = ["Durations", "Step", "grid", "run", "topological"]

Floats = NDArray[np.float64]
Record = Callable[["Step", Floats, Floats], None]


@dataclass(frozen=True, eq=False)
class Durations:
    """Seconds, one array entry for each candidate: passes by stage, transfers by (from, to).

    A transfer of 0 seconds carries nothing and delays nobody.
    """

    forward: Sequence[Floats]
    backward: Sequence[Floats]
    recompute: Sequence[Floats]
    transfer: Mapping[tuple[int, int], Floats] = field(default_factory=dict)
    reduce: Sequence[Floats] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """One action in topological order; `link` is the (from, to) devices of a send."""

    action: Action
    device: int
    link: tuple[int, int] | None = None


def grid(
    lists: Sequence[Sequence[Action]], failing: tuple[int, int] | None = None, around: int = 8
) -> str:
    """The lists as a table, a row for each device, columns by position.

    The action at `failing` = (device, position) is marked >like this<; then only `around` columns
    on each side of it are shown.
    """
    longest = max((len(line) for line in lists), default=0)
    low, high = 0, longest
    if failing is not None:
        low, high = max(0, failing[1] - around), min(longest, failing[1] + around + 1)
    rows = [["", *(str(i) for i in range(low, high))]]
    for device, line in enumerate(lists):
        cells = [f"device {device}"]
        for i in range(low, high):
            text = str(line[i]) if i < len(line) else "."
            cells.append(f">{text}<" if failing == (device, i) else text)
        rows.append(cells)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


@lru_cache(maxsize=256)
def topological(lists: DeviceLists) -> tuple[Step, ...]:
    """All actions, each after everything it waits for.

    Raises
    ------
    PlanError : where devices wait for each other for ever, with the grid.
    """
    device_of = {a.stage: d for d, line in enumerate(lists) for a in line}
    at = [0] * len(lists)
    sent: set[tuple[int, int | None, int]] = set()
    order: list[Step] = []
    moved = True
    while moved:
        moved = False
        for device, line in enumerate(lists):
            while at[device] < len(line):
                action = line[at[device]]
                link = None
                if action.kind == "receive":
                    if (action.peer, action.stage, action.micro_batch) not in sent:
                        break
                elif action.kind == "send":
                    assert action.peer is not None
                    sent.add((action.stage, action.peer, action.micro_batch))
                    link = (device, device_of.get(action.peer, -1))
                order.append(Step(action, device, link))
                at[device] += 1
                moved = True
    stuck = [(d, at[d]) for d, line in enumerate(lists) if at[d] < len(line)]
    if stuck:
        waits = "; ".join(f"device {d} at {lists[d][i]}" for d, i in stuck)
        fail(
            PlanError,
            rule="no device waits for ever (deadlock)",
            got=f"{waits}\n{grid(lists, stuck[0])}\n",
            remedy="Send before, or in the order, that the other side receives.",
        )
    return tuple(order)


def run(order: Sequence[Step], durations: Durations, record: Record | None = None) -> Floats:
    """Seconds from the start to the last action's end.

    `record(step, start, end)` is called for each action. A send starts when the device comes to
    it and the link is free; a receive starts when the device comes to it and ends when the data
    are there.
    """
    num = len(durations.forward[0])
    zero = np.zeros(num)
    clock: dict[int, Floats] = {}
    busy: dict[tuple[int, int] | None, Floats] = {}
    arrival: dict[tuple[int | None, int | None, int], Floats] = {}
    passes = {
        "forward": durations.forward,
        "backward": durations.backward,
        "recompute": durations.recompute,
        "reduce": durations.reduce,
    }
    for step in order:
        action, device = step.action, step.device
        start = clock.get(device, zero)
        if action.kind == "send":
            key = (action.stage, action.peer, action.micro_batch)
            seconds = durations.transfer[key[:2]]  # type: ignore[index]
            begin = np.maximum(start, busy.get(step.link, zero))
            end = begin + seconds
            some = seconds > 0
            if not some.all():
                begin, end = np.where(some, begin, start), np.where(some, end, start)
                busy[step.link] = np.maximum(busy.get(step.link, zero), end)
            else:
                busy[step.link] = end
            arrival[key] = end
            start = begin
        elif action.kind == "receive":
            end = np.maximum(start, arrival[action.peer, action.stage, action.micro_batch])
            clock[device] = end
        else:
            end = start + passes[action.kind][action.stage]
            clock[device] = end
        if record is not None:
            record(step, start, end)
    total = zero
    for end in clock.values():
        total = np.maximum(total, end)
    return total
