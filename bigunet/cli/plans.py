"""`bigunet stages` and `bigunet simulate`: cut a network into stages, and run the plan on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bigunet.cli.inputs import MACHINES_HELP, NAMES, machine_of, scene_of
from bigunet.cli.options import with_spec
from bigunet.cli.output import Json, emit, gib, table
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["simulate", "stages"]

MachineName = Annotated[str, typer.Option(help=MACHINES_HELP)]


@with_spec(UNetSpec, TrainSpec)
def stages(
    spec: UNetSpec,
    train: TrainSpec,
    num_stages: Annotated[int, typer.Option("--stages", help="Stages to cut into.")] = 2,
    micro_batches: Annotated[
        int | None, typer.Option(help="They divide the batch; all are tried by default.")
    ] = None,
    scene: Annotated[
        str | None, typer.Option(help="Plan for the tiles (--tile) of this scene. " + NAMES)
    ] = None,
    height: Annotated[int, typer.Option(help="Height of the images in pixels.")] = 512,
    width: Annotated[int, typer.Option(help="Width of the images in pixels.")] = 512,
    schedule: Annotated[Literal["gpipe", "1f1b"], typer.Option()] = "gpipe",
    placement: Annotated[Literal["straight", "folded"], typer.Option()] = "straight",
    machine: MachineName = "summit",
    tiles: Annotated[int, typer.Option(help="Pipelines side by side.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write the plan as YAML here.")] = None,
    json: Json = False,
) -> None:
    """Cut the network where a step is shortest within the memory, and compare other ways to cut."""
    from bigunet.comparison import compare_plans
    from bigunet.cost import RooflineCost
    from bigunet.layers import layer_table
    from bigunet.planner import find_plan
    from bigunet.simulate import stages_table
    from bigunet.stage_memory import row_memory

    on = machine_of(machine)
    scene_shape = None
    if scene is not None:
        from bigunet.pipeline import read_shape

        size = scene_of(scene).sizes
        scene_shape = (size["y"], size["x"])
        height, width = read_shape(scene_shape, train.tile, spec, halo=train.halo)
    rows = layer_table(spec, (train.batch, spec.in_channels, height, width))
    cost = RooflineCost(on.processor, train.precision)
    memory = row_memory(spec)
    planned = find_plan(
        rows,
        cost,
        spec=spec,
        train=train,
        machine=on,
        stages=num_stages,
        micro_batches=micro_batches,
        schedule=schedule,
        placement=placement,
        memory=memory,
        tiles=tiles,
        scene_shape=scene_shape,
    )
    plan = planned.plan
    if out is not None:
        plan.save(out)
    parts = stages_table(plan, cost, on, memory=memory)
    others = compare_plans(
        rows,
        cost,
        spec=spec,
        train=train,
        machine=on,
        num_devices=plan.num_devices,
        micro_batches=plan.micro_batches,
        schedule=schedule,
        memory=memory,
    )
    values = {
        "plan": plan.to_dict(),
        "step_seconds": planned.seconds,
        "proved": planned.proved,
        "stages": parts,
        "comparison": others,
        "out": None if out is None else str(out),
    }
    lines = [
        f"{num_stages} stages, {plan.micro_batches} micro-batches, {schedule}: "
        f"{1e3 * planned.seconds:.1f} ms a step on {on.name}"
        f"{'' if planned.proved else ' (not proved best)'}",
        *table(
            ("stage", "device", "first", "last", "forward ms", "backward ms", "send MB", "memory"),
            (
                (
                    p["stage"],
                    p["device"],
                    p["first"],
                    p["last"],
                    round(1e3 * p["forward_seconds"], 2),
                    round(1e3 * p["backward_seconds"], 2),
                    round(p["send_bytes"] / 1e6, 1),
                    f"{gib(p['peak_bytes'])} / {gib(p['limit_bytes'])}",
                )
                for p in parts
            ),
        ),
        "",
        *table(
            ("cut by", "ms a step"),
            (
                (o["way"], "-" if o["plan"] is None else round(1e3 * o["step_seconds"], 1))
                for o in others
            ),
        ),
        *([f"Wrote {out}"] if out is not None else []),
    ]
    emit(values, lines, json)


def simulate(
    plan_file: Annotated[Path, typer.Argument(help="A plan in YAML, as `stages --out` writes.")],
    machine: Annotated[
        str | None, typer.Option(help=MACHINES_HELP + " The plan's by default.")
    ] = None,
    json: Json = False,
) -> None:
    """Simulate one step of a plan: its time, its bubble, idle time by cause, bytes by link."""
    from bigunet.cost import RooflineCost
    from bigunet.plan import Plan
    from bigunet.simulate import simulate as run
    from bigunet.simulate import simulation_table

    plan = Plan.load(plan_file)
    on = machine_of(machine or plan.machine or "summit")
    result = run(plan, RooflineCost(on.processor, plan.train.precision), on)
    values = simulation_table(result)
    causes = list(values["devices"][0]["idle_seconds"])
    lines = [
        f"{1e3 * values['step_seconds']:.1f} ms a step on {on.name}, bubble "
        f"{100 * values['bubble']:.0f} %, {values['speed_up']:.2f} times one device",
        *table(
            ("device", "busy ms", *(f"{cause} ms" for cause in causes)),
            (
                (
                    d["device"],
                    round(1e3 * d["busy_seconds"], 1),
                    *(round(1e3 * d["idle_seconds"][cause], 1) for cause in causes),
                )
                for d in values["devices"]
            ),
        ),
        "",
        *table(
            ("from", "to", "MB"),
            ((k["source"], k["target"], round(k["bytes"] / 1e6, 1)) for k in values["links"]),
        ),
    ]
    emit(values, lines, json)
