"""Pipelined training on this machine: speed-up, planned cuts, and the simulator's word.

    python benchmarks/pipeline_speed.py speedup     # 2 ranks of one thread against one process
    python benchmarks/pipeline_speed.py plans       # planned against fairscale's cuts, and
                                                    # simulated against measured step times
    python benchmarks/pipeline_speed.py plans --quick --json

Layers and messages are timed here first, with one thread and both cores at work, and the planner
works with those seconds. Needs two idle cores. Steps are those of the engine `distributed`:
forward, backward and the sums over ranks, without the optimiser. fairscale's cuts are those that
its `balance_by_time` makes from the same layer times; they run on the same engine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator
from typing import Any

from pipeline_runs import NETS, one_process, steps

from bigunet.cost import MeasuredCost
from bigunet.here import here
from bigunet.launch import launch
from bigunet.layers import layer_table
from bigunet.machines import Machine
from bigunet.plan import Plan
from bigunet.planner import balanced_plan, find_plan
from bigunet.simulate import simulate
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.timing import time_layers

Row = dict[str, Any]


def run(function: Any, *args: Any, ranks: int) -> Any:
    return launch(function, args, ranks=ranks, threads_per_rank=1, progress=False)


def layer_seconds(spec: UNetSpec, side: int, rounds: int, micro_batches: int) -> MeasuredCost:
    """Timed on two ranks at once, each holding about what one of two stages holds."""
    options = {"threads": 1, "rounds": rounds, "in_flight": max(1, micro_batches // 2)}
    cost: MeasuredCost = launch(
        time_layers, (spec, (side, side)), options, ranks=2, threads_per_rank=1, progress=False
    )
    return cost


def speedup(machine: Machine, nets: Any, rounds: int, micro_batches: int) -> Iterator[Row]:
    """2 stages on 2 ranks against one process, which takes the batch whole or in parts."""
    for name, spec, side in nets:
        cost = layer_seconds(spec, side, rounds, micro_batches)
        table = layer_table(spec, (micro_batches, spec.in_channels, side, side))
        plan = find_plan(
            table, cost, spec=spec, train=TrainSpec(), machine=machine, stages=2,
            micro_batches=micro_batches,
        ).plan  # fmt: skip
        text = plan.to_yaml()
        plain, parts = map(statistics.median, run(one_process, text, rounds, ranks=1))
        (two,) = map(statistics.median, run(steps, [text], rounds, ranks=2))
        yield {
            "net": name,
            "second stage": plan.stages[1][0],
            "whole batch s": plain,
            "micro-batches s": parts,
            "2 ranks s": two,
            "speed-up": min(plain, parts) / two,
            "simulated speed-up": min(plain, parts)
            / simulate(plan, cost, machine).attrs["step_seconds"],
        }  # fmt: skip


def plans(machine: Machine, nets: Any, rounds: int, micro_batches: int) -> Iterator[Row]:
    """Planned cuts and fairscale's, GPipe and 1F1B: simulated and measured step times."""
    for i, (name, spec, side) in enumerate(nets):
        cost = layer_seconds(spec, side, rounds, micro_batches)
        table = layer_table(spec, (micro_batches, spec.in_channels, side, side))
        arguments: dict[str, Any] = {
            "spec": spec, "train": TrainSpec(), "machine": machine, "stages": 2,
            "micro_batches": micro_batches, "schedule": ("gpipe", "1f1b")[i % 2],
        }  # fmt: skip
        ours = find_plan(table, cost, **arguments).plan
        theirs = balanced_plan(table, cost, by="fairscale", **arguments).plan
        both: list[Plan] = [ours, theirs]
        # Where the cuts agree there is one plan, and nothing to compare.
        texts = [p.to_yaml() for p in (both if ours != theirs else both[:1])]
        measured = [statistics.median(times) for times in run(steps, texts, rounds, ranks=2)]
        measured = [measured[0], measured[-1]]
        simulated = [simulate(p, cost, machine).attrs["step_seconds"] for p in both]
        yield {
            "net": name,
            "schedule": arguments["schedule"],
            "ours": ours.stages[1][0],
            "fairscale's": theirs.stages[1][0],
            "ours s": measured[0],
            "fairscale's s": measured[1],
            "gain": measured[1] / measured[0],
            "simulated gain": simulated[1] / simulated[0],
            "simulated / measured, ours": simulated[0] / measured[0],
            "simulated / measured, fairscale's": simulated[1] / measured[1],
        }  # fmt: skip


def summary(rows: list[Row]) -> dict[str, float]:
    if "gain" not in rows[0]:
        return {"least speed-up": min(r["speed-up"] for r in rows)}
    gains = [r["gain"] for r in rows]
    errors = [abs(v - 1) for r in rows for k, v in r.items() if k.startswith("simulated /")]
    return {
        "geometric mean of the gain": math.exp(statistics.fmean(map(math.log, gains))),
        "least gain": min(gains),
        "largest error of the simulator": max(errors),
        "median error of the simulator": statistics.median(errors),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["speedup", "plans"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="two networks, three rounds")
    parser.add_argument("--nets", default="", help="numbers in pipeline_runs.NETS, as 0,2,5")
    parser.add_argument("--json", action="store_true", help="print JSON only")
    args = parser.parse_args()
    nets, rounds = (NETS[:2], 3) if args.quick else (NETS, args.rounds)
    if args.nets:
        nets = [NETS[int(i)] for i in args.nets.split(",")]
    machine = here(refresh=True)
    link = machine.inside
    if not args.json:
        print(f"link: {link.bytes_per_second / 1e9:.2f} GB/s, {link.latency_seconds * 1e6:.0f} us")
    rows = []
    for row in (speedup if args.what == "speedup" else plans)(
        machine, nets, rounds, args.micro_batches
    ):
        rows.append(row)
        if not args.json:
            print(", ".join(f"{k}: {v:.3f}" if isinstance(v, float) else f"{k}: {v}"
                            for k, v in row.items()), flush=True)  # fmt: skip
    totals = summary(rows)
    if args.json:
        print(json.dumps({"link": [link.bytes_per_second, link.latency_seconds], "rows": rows,
                          **totals}))  # fmt: skip
        return
    for key, value in totals.items():
        print(f"{key}: {value:.3f}")


if __name__ == "__main__":
    main()
