"""torchgpipe's published speed-ups beside the simulator's, nothing fitted to them."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple

from bigunet.cost import RooflineCost
from bigunet.layers import layer_table
from bigunet.machines import machine
from bigunet.memory.published import published_rows
from bigunet.plan import Plan
from bigunet.simulate import simulate
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["PublishedSpeed", "published_speed_ups"]

_SPEC = UNetSpec.torchgpipe(5, 64)


class PublishedSpeed(NamedTuple):
    """One row: images a second and speed-up over the first row, published and simulated."""

    experiment: str
    stages: int
    micro_batches: int
    published_rate: float
    simulated_rate: float
    published_speed_up: float
    simulated_speed_up: float
    ratio: float


def published_speed_ups() -> tuple[PublishedSpeed, ...]:
    """U-Net (5, 64) on 1, 2 and 4 Tesla P40 with torchgpipe's own, hand-tuned balances.

    Source: torchgpipe 0.0.5, "U-Net (5, 64) Speed Benchmark". The P40's figures are those of its
    data sheet (`bigunet.machines`); skips go direct, as torchgpipe sends them. `ratio` is the
    simulated speed-up over the published one.
    """
    p40 = machine("p40")
    cost = RooflineCost(p40.processor)
    found: list[PublishedSpeed] = []
    for row in published_rows("torchgpipe_unet_speed"):
        shape = (int(row["batch"]), 3, 192, 192)
        table = layer_table(_SPEC, shape)
        sizes = [int(n) for n in row["balance_in_flat_layers"].split(";") if n] or [len(table)]
        plan = Plan(
            spec=_SPEC,
            train=TrainSpec(recompute="except_last" if row["chunks"] else "none"),
            shape_BCHW=shape,
            stages=tuple(
                (table[a].name, table[b - 1].name) for a, b in pairwise((0, *accumulate(sizes)))
            ),
            devices=tuple(range(len(sizes))),
            micro_batches=int(row["chunks"] or 1),
            skips="direct",
            machine="p40",
        )
        rate = shape[0] / simulate(plan, cost, p40).attrs["step_seconds"]
        theirs, first = float(row["speed_up"]), found[0].simulated_rate if found else rate
        found.append(
            PublishedSpeed(
                row["experiment"], len(sizes), plan.micro_batches, float(row["samples_per_second"]),
                rate, theirs, rate / first, rate / first / theirs,
            )
        )  # fmt: skip
    return tuple(found)
