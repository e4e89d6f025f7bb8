"""The timeline against an independent simulation that advances from event to event."""

from __future__ import annotations

import heapq
from collections import defaultdict

import numpy as np
import pytest

from bigunet.plan import devices_of
from bigunet.schedule import DeviceLists, device_actions
from bigunet.timeline import Durations, run, topological

Times = dict[tuple[str, int], float]


def event_simulation(
    lists: DeviceLists, devices: tuple[int, ...], passes: Times, wires: dict[tuple[int, int], float]
) -> float:
    """Devices wake up when they are free or when data arrive; links serve sends in turn."""
    at = [0] * len(lists)
    waiting: dict[tuple[int, int, int], int] = {}
    arrived: set[tuple[int, int, int]] = set()
    queues: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    idle_link: dict[tuple[int, int], bool] = defaultdict(lambda: True)
    events: list[tuple[float, int, str, object]] = []
    ticket, last = 0, 0.0

    def post(time: float, what: str, value: object) -> None:
        nonlocal ticket
        ticket += 1
        heapq.heappush(events, (time, ticket, what, value))

    def serve(link: tuple[int, int], now: float) -> None:
        if idle_link[link] and queues[link]:
            message = queues[link].pop(0)
            idle_link[link] = False
            post(now + wires[message[:2]], "arrive", message)

    for device in range(len(lists)):
        post(0.0, "free", device)
    while events:
        now, _, what, value = heapq.heappop(events)
        if what == "arrive":
            assert isinstance(value, tuple)
            link = devices[value[0]], devices[value[1]]
            idle_link[link] = True
            serve(link, now)
            arrived.add(value)
            if value in waiting:
                post(now, "free", waiting.pop(value))
            continue
        assert isinstance(value, int)
        line = lists[value]
        while at[value] < len(line):
            action = line[at[value]]
            if action.kind == "receive":
                assert action.peer is not None
                message = (action.peer, action.stage, action.micro_batch)
                if message not in arrived:
                    waiting[message] = value
                    break
                at[value] += 1
            elif action.kind == "send":
                assert action.peer is not None
                link = value, devices[action.peer]
                queues[link].append((action.stage, action.peer, action.micro_batch))
                serve(link, now)
                at[value] += 1
            else:
                at[value] += 1
                end = now + passes[action.kind, action.stage]
                last = max(last, end)
                post(end, "free", value)
                break
        else:
            last = max(last, now)
    assert all(i == len(line) for i, line in zip(at, lists, strict=True))
    return last


@pytest.mark.parametrize("part", range(4))
def test_step_times_equal_the_event_simulation(part: int) -> None:
    rng = np.random.default_rng(part)
    for _ in range(50):
        placement = str(rng.choice(["straight", "folded", "interleaved"]))
        stages = int(rng.choice([2, 4, 6]))
        devices = devices_of(placement, stages, 2)  # type: ignore[arg-type]
        count = 2 * int(rng.integers(1, 5))
        pairs = ((0, stages - 1),) if rng.integers(2) else ()
        lists = device_actions(
            devices,
            count,
            str(rng.choice(["gpipe", "1f1b"])),  # type: ignore[arg-type]
            recompute=str(rng.choice(["none", "stage", "except_last"])),  # type: ignore[arg-type]
            skip_pairs=pairs,
            reduce=bool(rng.integers(2)),
        )
        kinds = ("forward", "backward", "recompute", "reduce")
        passes = {(k, s): float(rng.uniform(0.1, 3)) for k in kinds for s in range(stages)}
        # Some transfers rival the passes, as skips do.
        wires = {(s, t): float(rng.uniform(0.01, 2)) for s in range(stages) for t in range(stages)}
        arrays = {k: [np.array([passes[k, s]]) for s in range(stages)] for k in kinds}
        times = Durations(**arrays, transfer={k: np.array([v]) for k, v in wires.items()})
        step = run(topological(lists), times)[0]
        assert step == pytest.approx(event_simulation(lists, devices, passes, wires), rel=1e-12)


def test_many_candidates_at_once_are_each_alone() -> None:
    rng = np.random.default_rng(0)
    devices = (0, 1, 2)
    order = topological(device_actions(devices, 4, "1f1b", skip_pairs=((0, 2),)))
    pairs = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)]

    def durations(values: np.ndarray) -> Durations:
        forward, backward = list(values[:3]), list(values[3:6])
        return Durations(forward, backward, forward, dict(zip(pairs, values[6:], strict=True)))

    values = rng.uniform(0.1, 2, (12, 50)) * (rng.uniform(0, 1, (12, 50)) > 0.2)
    together = run(order, durations(values))
    for i in range(50):
        assert run(order, durations(values[:, i : i + 1]))[0] == together[i]


def test_a_link_serves_one_send_at_a_time() -> None:
    order = topological(device_actions((0, 1), 3, "gpipe"))
    free, one = [np.zeros(1)] * 2, np.ones(1)
    nothing = Durations(free, free, free, {(0, 1): one, (1, 0): one})
    assert run(order, nothing)[0] == 6.0
