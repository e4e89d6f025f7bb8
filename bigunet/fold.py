"""A first folded plan: the devices' work as even as can be, skips kept where they are made."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bigunet.cuts import CutProblem, stage_peak

__all__ = ["even_fold"]

Ints = NDArray[np.int64]


def even_fold(problem: CutProblem, places: Ints) -> tuple[int, ...] | None:
    """Folded cuts at `places` whose busiest device has the least work, or None where none fit.

    Dynamic programming from the outside in: after device d, the rows up to cut a and from cut b
    on are placed, where no skip made before a is joined before b, and none after a at or after b.
    """
    devices = problem.num_devices
    if problem.num_stages != 2 * devices:
        return None
    rows, work = problem.num_rows, problem.work_before
    low, high = (g.ravel() for g in np.meshgrid(places, places, indexing="ij"))
    fine = (low < high) | ((low == 0) & (high == rows))
    for skip in problem.skips:
        fine &= (skip.source < low) == (skip.sink >= high)
    a, b = low[fine], high[fine]
    best = np.where((a == 0) & (b == rows), 0.0, np.inf)
    back: list[Ints] = []
    for device in range(devices - 1):
        came = np.zeros(len(a), dtype=np.int64)
        new = np.full(len(a), np.inf)
        from_ = np.flatnonzero(np.isfinite(best))
        if not len(from_):
            return None
        for i in range(len(a)):
            ok = from_[(a[from_] < a[i]) & (b[from_] > b[i])]
            if not len(ok):
                continue
            busy = work[a[i]] - work[a[ok]] + work[b[ok]] - work[b[i]]
            value = np.maximum(best[ok], busy)
            value = np.where(_fits(problem, device, a[ok], a[i], b[i], b[ok]), value, np.inf)
            k = int(value.argmin())
            new[i], came[i] = value[k], ok[k]
        back.append(came)
        best = new
    # The last device takes all that is left, in two stages without a transfer between.
    value = np.maximum(best, work[b] - work[a])
    middle = np.minimum(np.maximum(a + 1, (a + b) // 2), b - 1)
    value[b - a < 2] = np.inf
    value = np.where(_fits(problem, devices - 1, a, middle, middle, b), value, np.inf)
    at = int(value.argmin())
    if not np.isfinite(value[at]):
        return None
    left, right = [int(a[at])], [int(b[at])]
    centre = int(middle[at])
    for came in reversed(back):
        at = int(came[at])
        left.insert(0, int(a[at]))
        right.append(int(b[at]))
    return (*left, centre, *right)


def _fits(
    problem: CutProblem, device: int, first: Ints, stop: Ints, again: Ints, end: Ints
) -> NDArray[np.bool_]:
    """Whether a device holds rows first ... stop - 1 and again ... end - 1."""
    if problem.stage_bytes is None:
        return np.ones(np.broadcast(first, end).shape, dtype=bool)
    first, stop, again, end = np.broadcast_arrays(first, stop, again, end)
    # Ranges without a row are asked for nothing.
    some = (first < stop) & (again < end)
    total = np.full(first.shape, np.inf)
    mirror = problem.num_stages - 1 - device
    total[some] = stage_peak(problem, device, first[some], stop[some])
    total[some] += stage_peak(problem, mirror, again[some], end[some])
    fits: NDArray[np.bool_] = total <= problem.memory_limit
    return fits
