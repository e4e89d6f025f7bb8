"""Simulated gain of planned cuts over fairscale's `balance_by_time`, and of folding.

    python benchmarks/planner_gain.py

Eight U-Nets on 3, 4 and 6 GPUs of a Summit node; layer times by the roofline of a V100. Straight
plans pass skips from stage to stage; a folded one has two stages a GPU and keeps them there.
"""

from __future__ import annotations

import math

from bigunet.cost import RooflineCost
from bigunet.layers import layer_table
from bigunet.machines import machine
from bigunet.plan import Schedule
from bigunet.planner import balanced_plan, find_plan
from bigunet.simulate import simulate
from bigunet.spec import TrainSpec, UNetSpec

# (name, network, side of the 48 images of a step)
NETS = (
    ("2015 U-Net", UNetSpec(), 512),
    ("2015 U-Net, batch norm", UNetSpec(norm="batch"), 512),
    ("6 levels x 32", UNetSpec(levels=6, channels=32, norm="group"), 512),
    ("4 levels x 48, 3 convs", UNetSpec(levels=4, channels=48, convs=3), 384),
    ("bilinear", UNetSpec(up="bilinear", channels=48, norm="batch"), 512),
    ("5 x 5 kernels", UNetSpec(kernel=5, channels=32), 256),
    ("torchgpipe (5, 64)", UNetSpec.torchgpipe(5, 64), 192),
    ("torchgpipe (6, 72)", UNetSpec.torchgpipe(6, 72), 192),
)


def gains(schedule: Schedule) -> dict[tuple[str, int], float]:
    """fairscale's step time over the planned one, by (network, stages)."""
    summit = machine("summit")
    cost = RooflineCost(summit.processor)
    found = {}
    for name, spec, side in NETS:
        table = layer_table(spec, (48, 3, side, side))
        for stages in (3, 4, 6):
            # The GPipe paper's advice: at least four micro-batches a stage.
            micro_batches = 4 * stages
            best = find_plan(
                table, cost, spec=spec, train=TrainSpec(), machine=summit, stages=stages,
                micro_batches=micro_batches, schedule=schedule,
            )  # fmt: skip
            theirs = balanced_plan(
                table, cost, by="fairscale", spec=spec, train=TrainSpec(), machine=summit,
                stages=stages, micro_batches=micro_batches, schedule=schedule,
            )  # fmt: skip
            ours, other = (
                simulate(p.plan, cost, summit).attrs["step_seconds"] for p in (best, theirs)
            )
            found[name, stages] = other / ours
    return found


def folded() -> tuple[float, float, int, int]:
    """Best straight and folded step on 6 GPUs, and the skip bytes each sends over links.

    torchgpipe's (24, 160), 4.0 billion parameters: 16 GB hold neither it nor its activations.
    """
    summit = machine("summit")
    cost = RooflineCost(summit.processor)
    spec = UNetSpec.torchgpipe(24, 160)
    train = TrainSpec(optimiser="sgd", recompute="except_last")
    table = layer_table(spec, (48, 3, 192, 192))
    seconds, skips = [], []
    for placement, stages in (("straight", 6), ("folded", 12)):
        plan = find_plan(
            table, cost, spec=spec, train=train, machine=summit, stages=stages,
            micro_batches=48, placement=placement,  # type: ignore[arg-type]
        ).plan  # fmt: skip
        result = simulate(plan, cost, summit)
        seconds.append(result.attrs["step_seconds"])
        # All bytes less those of the running map, which crosses every border between devices.
        cuts = plan.cuts
        maps = sum(
            2 * 4 * math.prod(plan.table[cuts[s + 1] - 1].out_shape)
            for s in range(plan.num_stages - 1)
            if plan.devices[s] != plan.devices[s + 1]
        )
        skips.append(int(result["link_bytes"].sum()) - maps)
    return seconds[0], seconds[1], skips[0], skips[1]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    for schedule in ("gpipe", "1f1b"):
        found = gains(schedule)  # type: ignore[arg-type]
        print(f"{schedule}, 4 micro-batches a stage: step time of fairscale's balance / planned")
        for name, _, _ in NETS:
            row = "  ".join(f"{k}: {found[name, k]:.3f}" for k in (3, 4, 6))
            print(f"  {name:24s} {row}")
        values = list(found.values())
        print(f"  least {min(values):.3f}, geometric mean {geometric_mean(values):.3f}")
    straight, fold, over, none = folded()
    print(
        f"(24, 160) on 6 GPUs: straight {straight:.2f} s with {over / 1e9:.1f} GB of skips over "
        f"links, folded {fold:.2f} s with {none / 1e9:.1f} GB: {straight / fold:.3f}x"
    )


if __name__ == "__main__":
    main()
