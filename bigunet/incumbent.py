"""The best cuts known so far, first good ones, and small moves that better them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bigunet.cuts import CutProblem, peak_bytes, skips_stay, stage_peak, step_seconds

__all__ = ["ROUNDING", "Incumbent"]

Ints = NDArray[np.int64]

# Sums of seconds in another order differ by rounding.
ROUNDING = 1e-11


class Incumbent:
    """Keeps the best allowed cuts that it has seen."""

    def __init__(self, problem: CutProblem) -> None:
        self.problem = problem
        self.rows, self.stages = problem.num_rows, problem.num_stages
        self.work = problem.work_before
        self.best = np.inf
        self.best_cuts: tuple[int, ...] | None = None

    def try_cuts(self, cuts: Ints) -> None:
        """Time complete candidates and keep the best that is allowed."""
        if not len(cuts):
            return
        p = self.problem
        fine = (peak_bytes(p, cuts) <= p.memory_limit).all(axis=1)
        if p.keep_skips:
            fine &= skips_stay(p, cuts)
        cuts = cuts[fine]
        if not len(cuts):
            return
        seconds = step_seconds(p, cuts)
        i = int(seconds.argmin())
        if seconds[i] < self.best:
            self.best = float(seconds[i])
            self.best_cuts = tuple(int(c) for c in cuts[i])

    # A first good plan ---------------------------------------------------------------------------

    def greedy(self) -> None:
        """Stages as long as a time allows; the least such time by bisection; then small moves."""
        low, high = float(self.work[-1]) / self.stages, float(self.work[-1])
        found: Ints | None = None
        for _ in range(24):
            middle = (low + high) / 2
            cuts = self.fill(middle)
            if cuts is None:
                low = middle
            else:
                high, found = middle, cuts
        if found is None:
            found = self.fill(float(self.work[-1]))
        if found is not None:
            self.try_cuts(found[None])
        self.polish()

    def fill(self, seconds: float) -> Ints | None:
        """Cuts where each stage is as long as time and memory allow, or None if rows are left."""
        p, cuts = self.problem, [0]
        for stage in range(self.stages):
            first = cuts[-1]
            left = self.stages - 1 - stage
            stop = int(np.searchsorted(self.work, self.work[first] + seconds, "right")) - 1
            stop = min(stop, self.rows - left)
            if stop <= first:
                return None
            if p.stage_bytes is not None:
                stops = np.arange(first + 1, stop + 1)
                fits = stage_peak(p, stage, np.full_like(stops, first), stops) <= p.memory_limit
                if not fits.any():
                    return None
                stop = int(stops[fits][-1])
            cuts.append(stop)
        return np.array(cuts) if cuts[-1] == self.rows else None

    def polish(self, reach: int = 24) -> None:
        """Move one cut at a time while that helps."""
        if self.best_cuts is None or self.stages == 1:
            return
        shifts = np.array([d for d in range(-reach, reach + 1) if d])
        while True:
            before, base = self.best, np.array(self.best_cuts)
            moves = np.repeat(base[None], len(shifts) * (self.stages - 1), axis=0)
            which = np.repeat(np.arange(1, self.stages), len(shifts))
            moves[np.arange(len(moves)), which] += np.tile(shifts, self.stages - 1)
            self.try_cuts(moves[(np.diff(moves, axis=1) > 0).all(axis=1)])
            if not self.best < before * (1 - ROUNDING):
                return
