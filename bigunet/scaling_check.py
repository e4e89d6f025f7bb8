"""Is the scaling model right? Its predictions beside steps measured on this machine, in turn.

Round by round and for each number of ranks: the layers are timed with as many ranks at work, then
a real step is; so that whatever else the machine does slows both. The prediction is
`bigunet.scaling.predict`'s with the layer times of the slowest rank, for which all others wait, and
the figures of `bigunet.here.here` for that number of ranks. Nothing is fitted to the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr

from bigunet.cost import MeasuredCost
from bigunet.here import here
from bigunet.launch import launch
from bigunet.progress import Progress
from bigunet.ranks import Ranks, current
from bigunet.scaling import TERMS, predict
from bigunet.scaling_run import ScalingStep, group_of, slowest
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.timing import time_tiles

__all__ = ["ScalingCase", "check_scaling"]


class ScalingCase(NamedTuple):
    """What is run: training on all tiles of one image of (height, width) pixels."""

    spec: UNetSpec
    train: TrainSpec
    scene_shape: tuple[int, int]


_Round = list[tuple[MeasuredCost, float]]  # for each number of ranks


def check_scaling(
    cases: Mapping[str, ScalingCase],
    ranks: Sequence[int] = (1, 2),
    *,
    rounds: int = 3,
    threads: int = 1,
    progress: bool = True,
) -> xr.Dataset:
    """Predicted and measured seconds of a step.

    Returns
    -------
    Dataset over `case`, `gpus` (numbers of ranks) and `round`: `predicted_seconds` and
    `measured_seconds`; `ratio` (case, gpus): the median over the rounds of predicted over
    measured; and `terms` (case, gpus, term): medians of the parts of the prediction.
    """
    counts = sorted(set(ranks))
    machines = {r: here(r, threads=threads) for r in counts}
    timed: list[list[_Round]] = launch(
        _time_cases,
        (list(cases.values()), counts, rounds, threads, progress),
        ranks=counts[-1],
        threads_per_rank=threads,
        progress=progress,
    )
    shape = (len(cases), len(counts), rounds)
    predicted, measured = np.empty(shape), np.empty(shape)
    terms = np.empty((*shape, len(TERMS)))
    for c, case in enumerate(cases.values()):
        for k, one_round in enumerate(timed[c]):
            for i, (r, (cost, seconds)) in enumerate(zip(counts, one_round, strict=True)):
                table = predict(
                    case.spec,
                    case.scene_shape,
                    case.train,
                    machines[r],
                    r,
                    "sample-parallel",
                    cost=cost,
                    pixel_bytes=4.0,  # the image is one of floats
                )
                predicted[c, i, k] = float(table["step_seconds"].item())
                terms[c, i, k] = table["seconds"].sel(term=list(TERMS)).values[:, 0]
                measured[c, i, k] = seconds
    dims = ("case", "gpus", "round")
    return xr.Dataset(
        {
            "predicted_seconds": (dims, predicted, {"units": "s"}),
            "measured_seconds": (dims, measured, {"units": "s"}),
            "ratio": (dims[:2], np.median(predicted / measured, axis=2), {"units": "1"}),
            "terms": ((*dims[:2], "term"), np.median(terms, axis=2), {"units": "s"}),
        },
        {"case": list(cases), "gpus": counts, "round": np.arange(rounds), "term": list(TERMS)},
    )


def _time_cases(
    cases: Sequence[ScalingCase], counts: Sequence[int], rounds: int, threads: int, shown: bool
) -> list[list[_Round]]:
    """On every rank: for each case and round, layer times and seconds of a step."""
    world = current()
    torch.set_num_threads(threads)
    groups = {r: group_of(world, r) for r in counts}
    result: list[list[_Round]] = []
    with Progress(len(cases) * rounds, "check", shown=shown and world.first) as bar:
        for case in cases:
            work = ScalingStep(case.spec, case.train, case.scene_shape, world)
            result.append([])
            for k in range(rounds):
                one_round: _Round = []
                for r in counts:
                    for warm in (True, False) if k == 0 else (False,):
                        work.reset()
                        world.wait()
                        cost: MeasuredCost | None = None
                        if world.rank < r:
                            cost = time_tiles(
                                case.spec,
                                work.tiles,
                                precision=case.train.precision,
                                rounds=1 if warm else 2,
                                threads=threads,
                                device=world.device,
                            )
                        world.wait()
                        seconds = slowest(world, work.run(groups[r], 1) if world.rank < r else 0.0)
                    one_round.append((_slowest_cost(world, cost), seconds))
                result[-1].append(one_round)
                bar.update(1)
    return result


def _slowest_cost(world: Ranks, own: MeasuredCost | None) -> MeasuredCost:
    """The layer times of the rank that takes longest; None from ranks that were not at work."""
    costs: list[MeasuredCost | None] = [own]
    if world.size > 1:
        costs = [None] * world.size
        dist.all_gather_object(costs, own)
    return max((cost for cost in costs if cost is not None), key=_total)


def _total(cost: MeasuredCost) -> float:
    tables = (cost.forward_seconds, cost.backward_seconds)
    return sum(sum(seconds) for table in tables for seconds in table.values())
