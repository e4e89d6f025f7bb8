"""The best cuts: dynamic programming over stages with a bound, proved or with its gap stated.

Stage by stage, partial plans ("labels") are extended by every next cut that could still lead to
a step shorter than the best one known. A label is dropped where a lower bound of all its
completions is no better; for GPipe, where the step time has a closed form, also where another
label with the same last cut is no worse in all that the future depends on. What is left at the
end is timed exactly. Where more labels are open than `max_labels`, the least promising are
dropped and the result is marked as not proved, with the bound it is within.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bigunet.cuts import (
    CutProblem,
    link_seconds,
    stage_peak,
)
from bigunet.fold import even_fold
from bigunet.incumbent import ROUNDING, Incumbent
from bigunet.labels import Labels, undominated

__all__ = ["BestCuts", "best_cuts", "fits_memory"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Labels times next cuts: so many are made at once, and in one stage where nothing is proved yet.
_CHUNK = 500_000
_MOST_PAIRS = 60_000
# Networks of more rows are first cut at so many places only, spread evenly over the work.
_COARSE = 96


@dataclass(frozen=True, eq=False)
class BestCuts:
    """The cuts found, their step time, and a lower bound of any cuts' (equal where `proved`)."""

    cuts: tuple[int, ...]
    seconds: float
    bound_seconds: float
    proved: bool


class _Search(Incumbent):
    def __init__(self, problem: CutProblem) -> None:
        super().__init__(problem)
        p = problem
        self.forward, self.backward = p.forward_before, p.backward_before
        self.total = float(self.forward[-1] + self.backward[-1])
        self.dropped = np.inf  # least bound among labels that were dropped unproved
        # Dominance and bounds must look at the same things, or a label that a bound excludes may
        # have excluded another one before.
        self.all_bounds = True
        self.places: Ints = np.arange(problem.num_rows + 1)  # where to cut
        self.sources = np.array([s.source for s in p.skips], dtype=np.int64)
        self.sinks = np.array([s.sink for s in p.skips], dtype=np.int64)
        # No device does less than its share, whatever the cuts.
        self.share = float(self.work[-1]) / problem.num_devices
        # Seconds forward and back of a transfer at each cut, and the least of those to come.
        self.hops = [self._hop(s) for s in range(self.stages - 1)]
        least = [float((f + b)[1:-1].min()) for f, b in self.hops] if self.rows > 1 else []
        self.hops_left = [sum(least[s:]) for s in range(self.stages)]

    def _hop(self, stage: int) -> tuple[Floats, Floats]:
        p, devices = self.problem, self.problem.devices
        here, there = devices[stage], devices[stage + 1]
        sent = p.hop_bytes if here != there else np.zeros(self.rows + 1)
        go, back = p.link(here, there), p.link(there, here)
        return link_seconds(go, sent), link_seconds(back, sent)

    # All plans -----------------------------------------------------------------------------------

    def coarse(self) -> None:
        """Cut at a few places only: the borders of equal shares of the work."""
        shares = np.linspace(0, self.work[-1], _COARSE + 1)
        near = np.searchsorted(self.work, shares).clip(0, self.rows)
        joins = np.concatenate([self.sources + 1, self.sinks, [0, self.rows]])
        self.places = np.unique(np.concatenate([near, joins]))

    def sweep(self, *, dominance: bool, max_labels: int) -> float:
        """Extend labels stage by stage and time the last; the least bound of what was left."""
        d = self.problem.num_devices
        zero = np.zeros(1)
        zeros = np.zeros((1, d))
        labels = Labels(
            np.zeros((1, 1), dtype=np.int64),
            *(zero,) * 5,
            np.full((1, d), -1.0),
            zeros,
            zeros,
            zeros,
            zero,
        )
        for stage in range(self.stages):
            low, counts = self.windows(labels, stage)
            if not dominance:
                # A network of many rows is not proved that way anyway.
                pairs = _MOST_PAIRS if self.rows <= 2 * _COARSE else _MOST_PAIRS // 4
                most = np.searchsorted(np.cumsum(counts), pairs, "right")
                # The labels come sorted by promise.
                labels, (low, counts) = self.cap(labels, int(most), low, counts)
            labels = self.extend(labels, stage, low, counts)
            if dominance and stage < self.stages - 1:
                labels = undominated(labels, self.problem.micro_batches)
            order = np.argsort(self.promise(labels, stage), kind="stable")
            labels = self.cap(labels.take(order), max_labels)[0]
            if not len(labels.bound):
                return np.inf
        order = np.argsort(labels.bound, kind="stable")
        least = float(labels.bound[order[0]])
        for at in range(0, len(order), 2048):
            part = order[at : at + 2048]
            if labels.bound[part[0]] >= self.best * (1 - ROUNDING):
                break
            self.try_cuts(labels.cuts[part])
        return least

    def cap(self, labels: Labels, most: int, *more: Ints) -> tuple[Labels, list[Ints]]:
        """The first labels only (at least one); the least bound of the others is noted."""
        most = max(most, 1)
        if len(labels.bound) <= most:
            return labels, list(more)
        self.dropped = min(self.dropped, float(labels.bound[most:].min()))
        return labels.take(np.arange(most)), [values[:most] for values in more]

    def promise(self, labels: Labels, stage: int) -> Floats:
        """Smaller is better: the bound, then how evenly the work is spread."""
        share = self.work[-1] / self.problem.num_devices
        heaviest = np.maximum((labels.work + labels.owed).max(axis=1), share)
        even = self.work[labels.cuts[:, -1]] - self.work[-1] * (stage + 1) / self.stages
        value: Floats = np.maximum(labels.bound, heaviest + labels.moved) + 1e-3 * np.abs(even)
        return value

    def windows(self, labels: Labels, stage: int) -> tuple[Ints, Ints]:
        """First entry of `places`, and number of them, where each label's next stage may end."""
        first = labels.cuts[:, -1]
        p, left = self.problem, self.stages - 1 - stage
        device = p.devices[stage]
        high = np.full(len(first), self.rows - left)
        low = first + 1
        if left == 0:
            low = np.maximum(low, high)
        elif np.isfinite(self.best):
            used = np.maximum(labels.start[:, device], 0) + labels.work[:, device]
            room = self.work[first] + self.best - used
            high = np.minimum(high, np.searchsorted(self.work, room, "right") - 1)
            later = sorted(set(p.devices[stage + 1 :]))
            room = (self.best - labels.work[:, later]).sum(axis=1)
            low = np.maximum(low, np.searchsorted(self.work, self.work[-1] - room, "left"))
        begin = np.searchsorted(self.places, low, "left")
        end = np.searchsorted(self.places, high, "right")
        return begin, np.maximum(end - begin, 0)

    def extend(self, labels: Labels, stage: int, low: Ints, counts: Ints) -> Labels:
        """Every label with every next cut of its window that may still win."""
        parts: list[Labels] = []
        at = 0
        ends = np.cumsum(counts)
        while at < len(counts) or not parts:
            done = ends[at - 1] if at else 0
            stop = max(at + 1, int(np.searchsorted(ends, done + _CHUNK, "right")))
            some = np.arange(at, min(stop, len(counts)))
            which = np.repeat(some, counts[some])
            offset = np.arange(len(which)) - np.repeat(
                ends[some] - counts[some] - done, counts[some]
            )
            stops = self.places[low[which] + offset]
            parts.append(self._extended(labels.take(which), stage, stops))
            at = stop
        return Labels.join(parts)

    def _extended(self, old: Labels, stage: int, stop: Ints) -> Labels:
        """Labels with the stage from their last cut to `stop` added, those that may still win."""
        p, first, device = self.problem, old.cuts[:, -1], self.problem.devices[stage]
        memory = old.memory
        if p.stage_bytes is not None:
            memory = memory.copy()
            memory[:, device] += stage_peak(p, stage, first, stop)
            fits = memory[:, device] <= p.memory_limit
            if p.keep_skips:
                fits &= self._kept(old, stage, stop)
            old, first, stop, memory = old.take(fits), first[fits], stop[fits], memory[fits]
        elif p.keep_skips:
            fits = self._kept(old, stage, stop)
            old, first, stop, memory = old.take(fits), first[fits], stop[fits], memory[fits]
        m, more = p.micro_batches, p.micro_batches - 1
        forward = self.forward[stop] - self.forward[first]
        backward = self.backward[stop] - self.backward[first]
        again = forward if p.num_recomputes else np.zeros(len(first))
        last = stage == self.stages - 1
        if last:
            go = back = np.zeros(len(first))
        else:
            go, back = (seconds[stop] for seconds in self.hops[stage])
        moved = old.moved + go + back
        # The path of one micro-batch through everything takes the sum of all durations. Every
        # stage and link delays the last micro-batch behind the first one by what it takes itself.
        slack = np.maximum.reduce([old.slack, more * forward, more * go, more * back])
        repeats = min(more, max(p.num_recomputes - 1, 0))
        between = more * backward + repeats * again
        if p.straight and p.schedule == "1f1b":
            between = between + (m - min(m, self.stages - stage)) * forward
        slack = np.maximum(slack, between)
        base = self.total + moved + self.hops_left[stage if last else stage + 1]
        if last and p.recompute == "stage":
            base = base + again
        long_forward = np.maximum.reduce([old.long_forward, forward, go])
        backwards = backward + (again if p.num_recomputes >= m - 1 else 0)
        long_backward = np.maximum.reduce([old.long_backward, backwards, back])
        bound = np.maximum(old.bound, base)
        if self.all_bounds:
            bound = np.maximum(bound, base + slack)
        left = self.stages - 1 - stage
        if p.schedule == "gpipe":
            rest_f, rest_b = long_forward, long_backward
            if left:
                # What is left goes to `left` stages, the longest at least their mean.
                ahead_f = self.forward[-1] - self.forward[stop]
                ahead_b = self.backward[-1] - self.backward[stop]
                if p.num_recomputes:
                    ahead_b = ahead_b + ahead_f
                rest_f = np.maximum(rest_f, ahead_f / left)
                rest_b = np.maximum(rest_b, ahead_b / left)
            bound = np.maximum(bound, base + more * (rest_f + rest_b))
        # A device is busy from its first pass to its last; earlier stages come before and after.
        start, work, owed = old.start.copy(), old.work.copy(), old.owed.copy()
        fresh = start[:, device] < 0
        start[fresh, device] = old.before[fresh]
        work[:, device] += self.work[stop] - self.work[first]
        owed[:, device] = self._owed(stage, first, stop)
        if self.all_bounds:
            bound = np.maximum(bound, start[:, device] + work[:, device] + owed[:, device])
        before = old.before + forward + backward + go + back
        cuts = np.concatenate([old.cuts, stop[:, None]], axis=1)
        labels = Labels(
            cuts,
            moved,
            long_forward,
            long_backward,
            slack,
            before,
            start,
            work,
            owed,
            memory,
            bound,
        )
        return labels.take(bound < self.best * (1 - ROUNDING))

    def _kept(self, labels: Labels, stage: int, stop: Ints) -> NDArray[np.bool_]:
        """Whether skips joined in the new stage were made on its device, and the others can be."""
        p = self.problem
        fine = np.ones(len(stop), dtype=bool)
        first = labels.cuts[:, -1]
        device_of = np.array(p.devices)
        ends_here = np.array([d not in p.devices[stage + 1 :] for d in range(p.num_devices)])
        for source, sink in zip(self.sources, self.sinks, strict=True):
            here = (first <= sink) & (sink < stop)
            made = device_of[(labels.cuts <= source).sum(axis=1) - 1]
            fine &= ~here | (made == p.devices[stage])
            waits = (source < stop) & (sink >= stop)
            fine &= ~waits | ~ends_here[made]
        return fine

    def _owed(self, stage: int, first: Ints, stop: Ints) -> Floats:
        """Seconds of the joining rows that a stage's kept skips will bring to its device."""
        p = self.problem
        mirror = self.stages - 1 - stage
        if not p.keep_skips or mirror <= stage or p.devices[mirror] != p.devices[stage]:
            return np.zeros(len(first))
        low = np.full(len(first), self.rows)
        high = np.zeros(len(first), dtype=np.int64)
        for source, sink in zip(self.sources, self.sinks, strict=True):
            made = (first <= source) & (source < stop) & (sink >= stop)
            low = np.where(made, np.minimum(low, sink), low)
            high = np.where(made, np.maximum(high, sink + 1), high)
        return np.where(high > low, self.work[high] - self.work[np.minimum(low, high)], 0.0)


def best_cuts(problem: CutProblem, *, max_labels: int = 4000) -> BestCuts | None:
    """The cuts of least step time within the memory limit, or None where none fit.

    Parameters
    ----------
    max_labels : open partial plans kept after each stage; more make a proof likelier, and cost
        time. GPipe with one stage a device is proved within a few hundred.
    """
    search = _Search(problem)
    if problem.num_stages > problem.num_rows:
        return None
    if not problem.keep_skips and problem.straight:
        search.greedy()
    if search.best_cuts is None:
        # A narrow sweep finds a first plan where stages share devices or memory is tight.
        if problem.num_rows > 2 * _COARSE:
            search.coarse()
        if problem.keep_skips:
            fold = even_fold(problem, search.places)
            if fold is not None:
                search.try_cuts(np.array([fold]))
                search.polish()
        if problem.num_rows > 2 * _COARSE:
            search.sweep(dominance=False, max_labels=min(max_labels, 600))
            search.polish()
            search.places = np.arange(problem.num_rows + 1)
            search.dropped = np.inf
        if search.best_cuts is None:
            search.sweep(dominance=False, max_labels=min(max_labels, 300))
            if np.isinf(search.dropped):
                return _result(search, search.best)
            search.polish()
    search.dropped = np.inf
    if problem.schedule == "gpipe" and problem.straight:
        search.all_bounds = problem.exact_closed_form
        least = search.sweep(dominance=True, max_labels=10 * max_labels)
        search.all_bounds = True
        least = min(least, search.dropped)
        if search.best_cuts is not None and least >= search.best * (1 - ROUNDING):
            return _result(search, search.best)
        if problem.exact_closed_form and np.isinf(search.dropped):
            return _result(search, search.best)
        search.dropped = np.inf
    elif problem.straight and problem.num_stages > 1:
        # 1F1B has the same longest stages; GPipe's best cuts are a good place to start from.
        easier = replace(problem, schedule="gpipe", stage_bytes=None, memory_limit=np.inf)
        start = best_cuts(easier, max_labels=max_labels)
        if start is not None:
            search.try_cuts(np.array([start.cuts]))
            search.polish()
    search.sweep(dominance=False, max_labels=max_labels)
    search.polish()
    return _result(search, min(search.best, search.dropped))


def fits_memory(problem: CutProblem) -> bool:
    """Whether some cuts fit.

    Decided where a stage of more rows needs more bytes, as it does here. Stages that share a
    device are searched.
    """
    if problem.num_stages > problem.num_rows:
        return False
    if not problem.straight:
        return best_cuts(problem, max_labels=300) is not None
    reachable = np.zeros(problem.num_rows + 1, dtype=bool)
    reachable[0] = True
    for stage in range(problem.num_stages):
        starts = np.flatnonzero(reachable[:-1])
        stops = _furthest(problem, stage, starts)
        # Where stages may end: anywhere from one row on to as far as memory allows. The longest
        # stages first would not do: 1F1B's earlier stages hold more, and may not take a row that
        # a later one could.
        edges = np.zeros(problem.num_rows + 2, dtype=np.int64)
        np.add.at(edges, starts + 1, 1)
        np.add.at(edges, stops + 1, -1)
        reachable = np.cumsum(edges[:-1]) > 0
    return bool(reachable[-1])


def _furthest(problem: CutProblem, stage: int, starts: Ints) -> Ints:
    """The last row number at which a stage from each start fits; the start itself for none."""
    low, high = starts.copy(), np.full(len(starts), problem.num_rows)
    if problem.stage_bytes is None:
        return high
    while (low < high).any():
        middle = (low + high + 1) // 2
        fits = stage_peak(problem, stage, starts, middle) <= problem.memory_limit
        low = np.where(fits & (low < high), middle, low)
        high = np.where(~fits & (low < high), middle - 1, high)
    return low


def _result(search: _Search, bound: float) -> BestCuts | None:
    if search.best_cuts is None:
        return None
    bound = max(bound, search.share)
    proved = bool(bound >= search.best * (1 - ROUNDING))
    return BestCuts(search.best_cuts, search.best, min(bound, search.best), proved)
