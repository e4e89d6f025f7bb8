"""Where to cut: the problem as arrays, and what a set of cuts costs in seconds and bytes.

Cuts are row numbers: stage s holds the rows from `cuts[s]` to `cuts[s + 1] - 1`. All functions
take many candidates at once, an array (candidates, stages + 1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bigunet.cost import RowCosts, Skip, open_skips
from bigunet.machines import Link
from bigunet.plan import Schedule, place
from bigunet.schedule import DeviceLists, device_actions, in_flight
from bigunet.spec import Recompute
from bigunet.timeline import Durations, run, topological

__all__ = [
    "CutProblem",
    "StageBytes",
    "durations",
    "link_seconds",
    "peak_bytes",
    "skips_stay",
    "stage_peak",
    "step_seconds",
    "transfer_bytes",
]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class StageBytes(Protocol):
    """Peak bytes of a stage of rows `first` to `stop - 1` that holds `in_flight` micro-batches.

    `first` and `stop` are whole numbers or arrays of one shape; the result has that shape.
    """

    def __call__(self, first: Any, stop: Any, *, in_flight: int, stage: int) -> Any: ...


@dataclass(frozen=True, eq=False)
class CutProblem:
    """Everything that the step time and the memory of a set of cuts depend on.

    Parameters
    ----------
    costs : seconds of each row for one micro-batch.
    output_bytes : bytes of each row's output for one micro-batch.
    skips : the skips, for one micro-batch.
    devices : the device of each stage.
    link : the link from one device to another.
    direct_skips : skips go straight to the stage that joins them instead of hop by hop.
    keep_skips : refuse cuts by which a skip would leave its device.
    stage_bytes, memory_limit : the memory model and each device's limit in bytes.
    """

    costs: RowCosts
    output_bytes: Ints
    skips: tuple[Skip, ...]
    devices: tuple[int, ...]
    micro_batches: int
    schedule: Schedule
    link: Callable[[int, int], Link]
    recompute: Recompute = "none"
    direct_skips: bool = False
    keep_skips: bool = False
    stage_bytes: StageBytes | None = None
    memory_limit: float = field(default=np.inf)

    @property
    def num_rows(self) -> int:
        return len(self.output_bytes)

    @property
    def num_stages(self) -> int:
        return len(self.devices)

    @property
    def num_devices(self) -> int:
        return max(self.devices) + 1

    @property
    def straight(self) -> bool:
        return place(self.devices) == "straight"

    @property
    def num_recomputes(self) -> int:
        """Separate recomputations of a stage in one step."""
        if self.recompute == "stage":
            return self.micro_batches
        return self.micro_batches - 1 if self.recompute == "except_last" else 0

    @cached_property
    def forward_before(self) -> Floats:
        """Forward seconds of all rows before a cut."""
        return np.concatenate(([0.0], np.cumsum(self.costs.forward_seconds)))

    @cached_property
    def backward_before(self) -> Floats:
        """Backward seconds likewise; recomputation by blocks is a part of them."""
        seconds = self.costs.backward_seconds
        if self.recompute == "block":
            seconds = seconds + self.costs.forward_seconds
        return np.concatenate(([0.0], np.cumsum(seconds)))

    @cached_property
    def work_before(self) -> Floats:
        """Seconds of all passes of one step of all rows before a cut."""
        rounds = self.micro_batches * (self.forward_before + self.backward_before)
        return rounds + self.num_recomputes * self.forward_before

    @cached_property
    def hop_bytes(self) -> Ints:
        """Bytes that a cut before row j sends on at least: the activation, and passed skips.

        Where stages share devices, which skips are passed on depends on all cuts.
        """
        sent = np.zeros(self.num_rows + 1, dtype=np.int64)
        sent[1:-1] = self.output_bytes[:-1]
        if not self.direct_skips and self.straight:
            sent[1:-1] += open_skips(self.skips, self.num_rows)[1:-1]
        return sent

    @cached_property
    def lists(self) -> DeviceLists:
        """Action lists; for direct skips, with every pair of stages that might need one."""
        num = self.num_stages
        pairs = tuple((s, t) for s in range(num) for t in range(s + 2, num))
        return device_actions(
            self.devices,
            self.micro_batches,
            self.schedule,
            recompute=self.recompute,
            skip_pairs=pairs if self.direct_skips and self.skips else (),
        )

    @cached_property
    def most_in_flight(self) -> tuple[int, ...]:
        return in_flight(self.lists, self.num_stages)

    @cached_property
    def exact_closed_form(self) -> bool:
        """Whether GPipe's closed form (`step_seconds`) holds to the last digit."""
        return (
            self.schedule == "gpipe"
            and self.straight
            and self.recompute != "stage"
            and not (self.direct_skips and self.skips)
            and not any(self.link(a, b).by_processors for a, b in pairwise(self.devices))
        )


def link_seconds(link: Link, num_bytes: Any) -> Any:
    """Seconds of a transfer of each number of bytes; nothing takes no time."""
    if link.bytes_per_second == np.inf and not link.latency_seconds:
        return np.zeros(np.shape(num_bytes))
    time = link.latency_seconds + num_bytes / link.bytes_per_second
    return np.where(np.asarray(num_bytes) > 0, time, 0.0)


def transfer_bytes(problem: CutProblem, cuts: Ints) -> dict[tuple[int, int], Ints]:
    """Bytes of one micro-batch from stage to later stage, entries for pairs on two devices.

    A skip that is joined on the device that made it stays there. Any other one is sent straight
    to the joining stage, or is passed on by every stage between.
    """
    num, devices = problem.num_stages, problem.devices
    sent = {(s, s + 1): problem.hop_bytes[cuts[:, s + 1]] for s in range(num - 1)}
    if problem.direct_skips or not problem.straight:
        for skip in problem.skips:
            source = (cuts[:, 1:] <= skip.source).sum(axis=1)
            sink = (cuts[:, 1:] <= skip.sink).sum(axis=1)
            for s in range(num):
                for t in range(s + 1, num):
                    if devices[s] == devices[t]:
                        continue
                    extra = np.where((source == s) & (sink == t), skip.num_bytes, 0)
                    hops = [(s, t)] if problem.direct_skips else pairwise(range(s, t + 1))
                    for hop in hops:
                        sent[hop] = sent.get(hop, 0) + extra
    return {(s, t): b for (s, t), b in sent.items() if devices[s] != devices[t]}


def durations(problem: CutProblem, cuts: Ints) -> Durations:
    """Seconds of every pass and transfer of candidates (candidates, stages + 1)."""
    forward = np.diff(problem.forward_before[cuts], axis=1).T
    backward = np.diff(problem.backward_before[cuts], axis=1).T
    again = forward.copy()
    transfer: dict[tuple[int, int], Floats] = {}
    for (s, t), sent in transfer_bytes(problem, cuts).items():
        here, there = problem.devices[s], problem.devices[t]
        for source, target, link, passes in (
            (s, t, problem.link(here, there), forward),
            (t, s, problem.link(there, here), backward),
        ):
            seconds = link_seconds(link, sent)
            if link.by_processors:
                # Both ends copy in the time of their passes; nothing is left to travel.
                passes[source] += seconds
                passes[target] += seconds
                seconds = np.zeros_like(seconds)
            transfer[source, target] = seconds
    return Durations(list(forward), list(backward), list(again), transfer)


def step_seconds(problem: CutProblem, cuts: Ints) -> Floats:
    """Step time of each candidate.

    GPipe with one stage a device is a flow shop of equal jobs in each direction, links being
    machines like the devices: sum of all durations, plus (M - 1) times the longest forward and
    (M - 1) times the longest backward one. A recomputation that precedes the gradient's arrival
    counts in the longest only. Everything else is run through the schedule, action by action.
    """
    cuts = np.atleast_2d(np.asarray(cuts, dtype=np.int64))
    times = durations(problem, cuts)
    if not problem.exact_closed_form:
        return run(topological(problem.lists), times)
    more = problem.micro_batches - 1
    again = 1 if problem.recompute == "except_last" else 0
    num = problem.num_stages
    sends = [times.transfer[s, s + 1] for s in range(num - 1)]
    returns = [times.transfer[s + 1, s] for s in range(num - 1)]
    forward = np.array([*times.forward, *sends])
    backward = np.array([*times.backward, *returns])
    longest = np.array(
        [*(b + again * r for b, r in zip(times.backward, times.recompute, strict=True)), *returns]
    )
    total: Floats = (
        forward.sum(axis=0)
        + backward.sum(axis=0)
        + more * (forward.max(axis=0) + longest.max(axis=0))
    )
    return total


def peak_bytes(problem: CutProblem, cuts: Ints) -> Floats:
    """Peak bytes of each device, (candidates, devices): the sum of its stages' peaks.

    A sum, since the stages of one device may peak together; never below the true peak.
    """
    cuts = np.atleast_2d(np.asarray(cuts, dtype=np.int64))
    total = np.zeros((len(cuts), problem.num_devices))
    if problem.stage_bytes is not None:
        for stage, device in enumerate(problem.devices):
            total[:, device] += stage_peak(problem, stage, cuts[:, stage], cuts[:, stage + 1])
    return total


def stage_peak(problem: CutProblem, stage: int, first: Any, stop: Any) -> Any:
    """Bytes of one stage by the problem's memory model."""
    assert problem.stage_bytes is not None
    held = problem.most_in_flight[stage]
    return problem.stage_bytes(first, stop, in_flight=held, stage=stage)


def skips_stay(problem: CutProblem, cuts: Ints) -> NDArray[np.bool_]:
    """Whether every skip is joined on the device that made it."""
    cuts = np.atleast_2d(np.asarray(cuts, dtype=np.int64))
    fine = np.ones(len(cuts), dtype=bool)
    device_of = np.array(problem.devices)
    for skip in problem.skips:
        source = (cuts <= skip.source).sum(axis=1) - 1
        sink = (cuts <= skip.sink).sum(axis=1) - 1
        fine &= device_of[source] == device_of[sink]
    return fine
