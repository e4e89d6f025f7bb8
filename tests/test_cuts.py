"""What cuts cost: bytes that cross, hop by hop and direct, and memory by device."""

from __future__ import annotations

from typing import Any

import numpy as np

from bigunet.cost import RowCosts, Skip
from bigunet.cuts import (
    CutProblem,
    durations,
    link_seconds,
    peak_bytes,
    skips_stay,
    step_seconds,
    transfer_bytes,
)
from bigunet.machines import Link

LINK = Link("l", 10.0, 0.5)
SKIPS = (Skip(0, 5, 100), Skip(2, 4, 7))


def problem(**changes: Any) -> CutProblem:
    values: dict[str, Any] = {
        "costs": RowCosts(np.arange(1.0, 7.0), np.full(6, 2.0)),
        "output_bytes": np.array([10, 20, 30, 40, 50, 60]),
        "skips": SKIPS,
        "devices": (0, 1, 2),
        "micro_batches": 3,
        "schedule": "gpipe",
        "link": lambda a, b: LINK if a != b else Link("same", np.inf),
    }
    return CutProblem(**(values | changes))


def test_skips_hop_by_hop() -> None:
    sent = transfer_bytes(problem(), np.array([[0, 1, 3, 6], [0, 2, 5, 6]]))
    # Before row 1: output of row 0 and the long skip. Before row 3 and 5: row 2's skip as well,
    # until row 4 joined it.
    assert {k: v.tolist() for k, v in sent.items()} == {(0, 1): [110, 120], (1, 2): [137, 150]}


def test_skips_direct() -> None:
    sent = transfer_bytes(problem(direct_skips=True), np.array([[0, 1, 3, 6], [0, 3, 5, 6]]))
    assert {k: v.tolist() for k, v in sent.items()} == {
        (0, 1): [10, 37],
        (1, 2): [37, 50],
        (0, 2): [100, 100],
    }


def test_nothing_crosses_within_a_device() -> None:
    # Row 5 joins row 0's output on device 0 again; row 2's skip goes to device 0, too.
    sent = transfer_bytes(problem(devices=(0, 1, 0)), np.array([[0, 1, 3, 6]]))
    assert {k: v.tolist() for k, v in sent.items()} == {(0, 1): [10], (1, 2): [37]}
    sent = transfer_bytes(problem(devices=(0, 0, 1)), np.array([[0, 1, 3, 6]]))
    assert {k: v.tolist() for k, v in sent.items()} == {(1, 2): [137]}
    folded = problem(devices=(0, 1, 1, 0))
    sent = transfer_bytes(folded, np.array([[0, 1, 3, 5, 6]]))
    assert {k: v.tolist() for k, v in sent.items()} == {(0, 1): [10], (2, 3): [50]}


def test_gpipe_by_hand() -> None:
    """Two stages, three micro-batches: sums of all durations, twice the longest each way."""
    two = problem(devices=(0, 1), skips=())
    cuts = np.array([[0, 4, 6]])
    times = durations(two, cuts)
    assert [t.item() for t in times.forward] == [10.0, 11.0]
    assert [t.item() for t in times.backward] == [8.0, 4.0]
    assert times.transfer[0, 1].item() == times.transfer[1, 0].item() == 4.5
    assert step_seconds(two, cuts).item() == (10 + 11 + 8 + 4 + 9) + 2 * (11 + 8)


def test_links() -> None:
    assert link_seconds(LINK, np.array([0, 10])).tolist() == [0.0, 1.5]
    assert link_seconds(Link("free", np.inf), np.array([10])).tolist() == [0.0]


def test_memory_counts_the_schedule_s_micro_batches() -> None:
    def stage_bytes(first: Any, stop: Any, *, in_flight: int, stage: int) -> Any:
        return 100 * stage + in_flight * (stop - first)

    cuts = np.array([[0, 1, 3, 6]])
    assert peak_bytes(problem(stage_bytes=stage_bytes), cuts).tolist() == [[3, 106, 209]]
    one = problem(stage_bytes=stage_bytes, schedule="1f1b")
    assert peak_bytes(one, cuts).tolist() == [[3, 104, 203]]
    shared = problem(stage_bytes=stage_bytes, devices=(0, 1, 0))
    assert peak_bytes(shared, cuts).tolist() == [[3 + 209, 106]]
    assert peak_bytes(problem(), cuts).tolist() == [[0, 0, 0]]


def test_folded_cuts_keep_skips() -> None:
    folded = problem(devices=(0, 1, 1, 0))
    cuts = np.array([[0, 1, 3, 5, 6], [0, 3, 4, 5, 6], [0, 2, 3, 4, 6]])
    assert skips_stay(folded, cuts).tolist() == [True, False, False]
