"""A record of tensors as they come and go: storages, who holds them, and events in order."""

from __future__ import annotations

from array import array

import numpy as np
from numpy.typing import NDArray

from bigunet.memory.causes import ACTIVATIONS, CAUSES, TEMPORARIES

__all__ = ["BACKWARD", "FORWARD", "LOSS", "OPTIMISE", "PHASES", "RECOMPUTE", "Tape"]

PHASES = ("forward", "loss", "recompute", "backward", "optimiser")
FORWARD, LOSS, RECOMPUTE, BACKWARD, OPTIMISE = range(len(PHASES))

Int = NDArray[np.int64]


class Tape:
    """Storages are numbered as they are made; each lives while its count of holders is above 0.

    `events` holds a storage's number when it is made and its complement when it is freed. An
    operation (`op`) is a run of events with a layer, a phase and a micro-batch.
    """

    __slots__ = (
        "cause",
        "events",
        "keeper",
        "kept_as",
        "maker",
        "ops",
        "quantum",
        "refs",
        "row",
        "size",
    )

    def __init__(self, quantum: int = 1) -> None:
        self.quantum = quantum
        self.size = array("q")
        self.refs: list[int] = []
        self.cause = array("q")
        self.maker = array("q")
        # The layer that keeps a storage, where another one made it.
        self.keeper: dict[int, int] = {}
        self.events = array("q")
        # Four numbers an operation: its first event, layer, phase and micro-batch.
        self.ops = array("q")
        self.row = 0
        self.kept_as = ACTIVATIONS

    def op(self, row: int, phase: int, micro_batch: int) -> None:
        """Begin an operation of layer number `row`."""
        self.row = row
        self.ops.extend((len(self.events), row, phase, micro_batch))

    def new(self, nbytes: int, cause: int = TEMPORARIES) -> int:
        """A new storage with one holder."""
        quantum = self.quantum
        if quantum > 1:
            nbytes = -(-nbytes // quantum) * quantum
        number = len(self.size)
        self.size.append(nbytes)
        self.refs.append(1)
        self.cause.append(cause)
        self.maker.append(self.row)
        self.events.append(number)
        return number

    def drop(self, number: int) -> None:
        """One holder less."""
        refs = self.refs
        refs[number] -= 1
        if not refs[number]:
            self.events.append(~number)

    def keep(self, number: int) -> int:
        """One holder more, until the backward pass (`kept_as`); the first one gets the credit."""
        self.refs[number] += 1
        if self.cause[number] == TEMPORARIES:
            self.cause[number] = self.kept_as
            self.keeper[number] = self.row
        return number

    # Afterwards ---------------------------------------------------------------------------------

    def deltas(self) -> tuple[Int, Int]:
        """Storage number and signed bytes of each event."""
        events = np.frombuffer(self.events, dtype=np.int64)
        freed = events < 0
        number = np.where(freed, ~events, events)
        size = np.frombuffer(self.size, dtype=np.int64)[number]
        return number, np.where(freed, -size, size)

    def held(self, num_rows: int, until: int) -> Int:
        """Bytes by (layer, cause) of the storages alive after the first `until` events."""
        events = np.frombuffer(self.events, dtype=np.int64)[:until]
        holds = np.zeros(len(self.size), dtype=bool)
        holds[events[events >= 0]] = True
        holds[~events[events < 0]] = False
        alive = np.flatnonzero(holds)
        table = np.zeros((num_rows, len(CAUSES)), dtype=np.int64)
        keeper = np.array(self.maker, dtype=np.int64)
        keeper[list(self.keeper.keys())] = list(self.keeper.values())
        keeper, cause = keeper[alive], np.frombuffer(self.cause, dtype=np.int64)[alive]
        np.add.at(table, (keeper, cause), np.frombuffer(self.size, dtype=np.int64)[alive])
        return table

    def largest(self, num_rows: int) -> Int:
        """The largest temporary that each layer makes, in bytes."""
        passing = np.frombuffer(self.cause, dtype=np.int64) == TEMPORARIES
        table = np.zeros(num_rows, dtype=np.int64)
        maker = np.frombuffer(self.maker, dtype=np.int64)[passing]
        np.maximum.at(table, maker, np.frombuffer(self.size, dtype=np.int64)[passing])
        return table
