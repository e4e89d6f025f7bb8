"""Reading, computing and writing overlap, in bounded memory, and no exception is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from bigunet.mosaic.stream import stream

PATIENCE = 20.0


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("mosaic-")]


@pytest.mark.parametrize("workers", [1, 3])
def test_every_unit_comes_out_once(workers: int) -> None:
    found = dict(stream(range(50), lambda u: u + 1, lambda u, d: (u, d * 2), workers=workers))
    assert found == {u: (u, 2 * (u + 1)) for u in range(50)}


def test_reading_and_writing_go_on_while_a_tile_is_computed() -> None:
    """Each part waits for its neighbour to be busy with another tile: without overlap, no end."""
    reading = [threading.Event() for _ in range(6)]
    computing = [threading.Event() for _ in range(6)]
    seen = []

    def read(unit: int) -> int:
        reading[unit].set()
        return unit

    def compute(unit: int, data: int) -> bool:
        computing[unit].set()
        return unit == 5 or reading[unit + 1].wait(PATIENCE)

    for unit, overlapped in stream(range(6), read, compute):
        seen.append(overlapped)  # "writing" unit: the next one is being computed meanwhile
        assert unit == 5 or computing[unit + 1].wait(PATIENCE)
    assert seen == [True] * 6


def test_workers_compute_at_the_same_time() -> None:
    together = threading.Barrier(3)
    units = [unit for unit, _ in stream(
        range(9), lambda u: u, lambda u, d: together.wait(PATIENCE), workers=3
    )]  # fmt: skip
    assert sorted(units) == list(range(9))


def test_no_more_units_are_in_memory_than_stated() -> None:
    alive, most, lock = 0, 0, threading.Lock()

    def read(unit: int) -> int:
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        return unit

    for _ in stream(range(200), read, lambda u, d: d, workers=2):
        with lock:
            alive -= 1
    # Two wait on each side, two are computed, one is being read and one written.
    assert most <= 2 + 2 + 2 + 1 + 1


@pytest.mark.parametrize("where", ["reading", "computing"])
def test_an_exception_is_raised_here_and_names_its_unit(where: str) -> None:
    def read(unit: int) -> int:
        if where == "reading" and unit == 4:
            raise OSError("no such block")
        return unit

    def compute(unit: int, data: int) -> int:
        if where == "computing" and unit == 4:
            raise OSError("no such block")
        return unit

    flow = stream(range(10), read, compute, workers=2, describe=lambda u: f"tile {u}")
    with pytest.raises(OSError, match="no such block") as caught:
        list(flow)
    assert caught.value.__notes__ == [f"while {where} tile 4"]


def test_leaving_early_stops_the_threads() -> None:
    flow = stream(range(10**9), lambda u: u, lambda u, d: u, workers=2)
    assert next(flow)[0] >= 0
    flow.close()  # type: ignore[attr-defined]


def test_every_worker_is_prepared() -> None:
    names: list[str] = []
    list(
        stream(
            range(8), lambda u: u, lambda u, d: u, workers=2,
            on_start=lambda: names.append(threading.current_thread().name),
        )
    )  # fmt: skip
    assert sorted(names) == ["mosaic-compute-0", "mosaic-compute-1"]
