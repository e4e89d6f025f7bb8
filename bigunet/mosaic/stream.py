"""Read, compute and write at the same time, with bounded queues and no lost exception."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

__all__ = ["stream"]

U = TypeVar("U")
D = TypeVar("D")
R = TypeVar("R")

#: Seconds between looks at whether the others have stopped.
_PATIENCE = 0.1


class _StoppedError(Exception):
    """Another thread failed, or the consumer left."""


class _Pipe:
    """A bounded queue that gives up once `stop` is set."""

    def __init__(self, size: int, stop: threading.Event) -> None:
        self._queue: queue.Queue[Any] = queue.Queue(size)
        self._stop = stop

    def put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=_PATIENCE)
            except queue.Full:
                continue
        raise _StoppedError

    def get(self) -> Any:
        while not self._stop.is_set():
            try:
                return self._queue.get(timeout=_PATIENCE)
            except queue.Empty:
                continue
        raise _StoppedError


def stream(
    units: Iterable[U],
    read: Callable[[U], D],
    compute: Callable[[U, D], R],
    *,
    workers: int = 1,
    on_start: Callable[[], None] | None = None,
    describe: Callable[[U], str] = str,
) -> Iterator[tuple[U, R]]:
    """Yield (unit, compute(unit, read(unit))) as they get ready, in any order.

    One thread reads ahead, `workers` threads compute, the caller's own thread takes the results
    (and writes them). At most `workers` units wait in front of and behind the computation, so
    memory is bounded. An exception of any thread is raised here, with a note that names its unit;
    leaving the iteration early stops the threads and waits for them.

    `on_start` runs once in each computing thread.
    """
    stop = threading.Event()
    ready, done = _Pipe(workers, stop), _Pipe(workers, stop)
    end = object()

    def guarded(body: Callable[[], None]) -> None:
        try:
            body()
        except _StoppedError:
            pass
        except BaseException as error:  # handed to the caller's thread, whatever it is
            with contextlib.suppress(_StoppedError):
                done.put(error)

    def noted(unit: U, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:
            error.add_note(f"while {what} {describe(unit)}")
            raise

    def reader() -> None:
        for unit in units:
            if stop.is_set():
                return
            ready.put((unit, noted(unit, "reading", partial(read, unit))))
        for _ in range(workers):
            ready.put(end)

    def worker() -> None:
        if on_start is not None:
            on_start()
        while (item := ready.get()) is not end:
            unit, data = item
            del item
            result = noted(unit, "computing", partial(compute, unit, data))
            del data
            done.put((unit, result))
            del result
        done.put(end)

    threads = [threading.Thread(target=guarded, args=(reader,), name="mosaic-read", daemon=True)]
    threads += [
        threading.Thread(target=guarded, args=(worker,), name=f"mosaic-compute-{i}", daemon=True)
        for i in range(workers)
    ]
    for thread in threads:
        thread.start()
    try:
        running = workers
        while running:
            item = done.get()
            if item is end:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        stop.set()
        for thread in threads:
            thread.join()
