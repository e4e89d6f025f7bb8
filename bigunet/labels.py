"""Partial plans of the search for the best cuts, many in one set of arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

__all__ = ["Labels", "undominated"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(eq=False)
class Labels:
    """Partial plans, one an entry: cuts so far and what the future depends on."""

    cuts: Ints  # (labels, stages so far + 1)
    moved: Floats  # seconds of all transfers so far
    long_forward: Floats  # longest forward pass or transfer
    long_backward: Floats
    slack: Floats  # largest surplus over the sum of all durations that a stage causes
    before: Floats  # seconds before the last cut and back again, for one micro-batch
    start: Floats  # (labels, devices) when a device starts, and what follows its end
    work: Floats  # (labels, devices) seconds of all passes so far
    owed: Floats  # (labels, devices) of passes that kept skips force on a device later
    memory: Floats  # (labels, devices)
    bound: Floats

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> Labels:
        return Labels(*(getattr(self, f.name)[index] for f in fields(self)))

    @staticmethod
    def join(parts: list[Labels]) -> Labels:
        return Labels(
            *(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Labels))
        )


def undominated(labels: Labels, micro_batches: int, rounds: int = 8) -> Labels:
    """Drop labels that another with the same last cut beats or equals in everything.

    Compared with the most promising `rounds` labels of each last cut; others may remain.
    """
    more = micro_batches - 1
    value = labels.moved + more * (labels.long_forward + labels.long_backward)
    order = np.lexsort((value, labels.cuts[:, -1]))
    labels = labels.take(order)
    place = labels.cuts[:, -1]
    kept = np.ones(len(place), dtype=bool)
    champion = np.zeros(len(place), dtype=bool)
    for _ in range(rounds):
        open_ = np.flatnonzero(kept & ~champion)
        if not len(open_):
            break
        new = open_[np.r_[True, place[open_[1:]] != place[open_[:-1]]]]
        champion[new] = True
        group = np.searchsorted(place[new], place[open_])
        best = new[group]
        worse = best != open_
        for values in (labels.moved, labels.long_forward, labels.long_backward):
            worse &= values[open_] >= values[best]
        kept[open_[worse]] = False
    return labels.take(kept)
