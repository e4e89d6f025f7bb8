"""How long planning and simulating take.

    python benchmarks/planner_speed.py

Seconds of this process, the best of five: planning torchgpipe's (48, 160) with 8 stages, and for
285 layers what a moved cut asks for, a simulation and its tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bigunet.cost import RooflineCost
from bigunet.layers import layer_table
from bigunet.machines import machine
from bigunet.planner import Planned, find_plan
from bigunet.simulate import simulate, simulation_table, stages_table
from bigunet.spec import TrainSpec, UNetSpec

SUMMIT = machine("summit")
COST = RooflineCost(SUMMIT.processor)


def best_of(run: Callable[[], object], times: int = 5) -> float:
    took = []
    for _ in range(times):
        start = time.perf_counter()
        run()
        took.append(time.perf_counter() - start)
    return 1000 * min(took)


def planned(convs: int, channels: int, stages: int, schedule: str, placement: str) -> Planned:
    spec = UNetSpec.torchgpipe(convs, channels)
    table = layer_table(spec, (64, 3, 192, 192))
    return find_plan(
        table, COST, spec=spec, train=TrainSpec(recompute="except_last"), machine=SUMMIT,
        stages=stages, micro_batches=16, schedule=schedule, placement=placement,  # type: ignore
    )  # fmt: skip


def main() -> None:
    for net, stages, schedule, placement in (
        ((48, 160), 8, "gpipe", "straight"),
        ((48, 160), 8, "1f1b", "straight"),
        ((48, 160), 16, "gpipe", "folded"),
        ((6, 72), 6, "gpipe", "straight"),
        ((6, 72), 6, "1f1b", "straight"),
    ):
        found: list[Planned] = []
        took = best_of(lambda: found.append(planned(*net, stages, schedule, placement)), 3)  # noqa: B023
        gap = found[0].seconds / found[0].bound_seconds - 1
        state = "proved" if found[0].proved else f"within {100 * gap:.0f} % of a bound"
        rows = len(found[0].plan.table)
        print(
            f"plan {net}, {rows} layers, {stages} stages, {schedule}, {placement}: "
            f"{took:.0f} ms, {state}"
        )
    plan = planned(6, 72, 6, "gpipe", "straight").plan

    def moved() -> None:
        simulation_table(simulate(plan, COST, SUMMIT))
        stages_table(plan, COST, SUMMIT)

    print(f"simulation and tables of 285 layers, 6 stages: {best_of(moved):.0f} ms")


if __name__ == "__main__":
    main()
