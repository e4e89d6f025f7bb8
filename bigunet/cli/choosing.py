"""`bigunet best`: the best way to use so many GPUs, the runner-up, and what decides."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bigunet.cli.inputs import MACHINES_HELP, counts_of, machine_of
from bigunet.cli.options import with_spec
from bigunet.cli.output import Json, emit, gib, table
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["best"]


@with_spec(UNetSpec, TrainSpec)
def best(
    spec: UNetSpec,
    train: TrainSpec,
    height: Annotated[int, typer.Option(help="Height of an image in pixels.")] = 10_000,
    width: Annotated[int, typer.Option(help="Width of an image in pixels.")] = 10_000,
    images: Annotated[int, typer.Option(help="Images in a step (--weak: for each GPU).")] = 1,
    weak: Annotated[bool, typer.Option("--weak", help="The images grow with the GPUs.")] = False,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, with commas between.")] = "6",
    machine: Annotated[str, typer.Option(help=MACHINES_HELP)] = "summit",
    json: Json = False,
) -> None:
    """Which strategy, tile, stages and micro-batches make a step shortest on so many GPUs."""
    from bigunet.scaling import best as choose

    on = machine_of(machine)
    counts = counts_of(gpus, "gpus", "1,6,24")
    choices = [
        choose(spec, (height, width), train, on, n, images=images, weak=weak) for n in counts
    ]
    rows: list[tuple[Any, ...]] = [
        (
            choice.gpus,
            str(choice.best),
            f"{choice.seconds:.4g}",
            f"{gib(choice.outcome.memory_bytes)} / {gib(on.processor.memory_bytes)}",
        )
        for choice in choices
    ]
    lines = [
        f"{spec.levels} levels x {spec.channels}, {images} x {height} x {width} pixels a step"
        f"{' and GPU' if weak else ''}, on {on.name} (predicted)",
        *table(("GPUs", "best", "s a step", "memory"), rows),
        *(f"{choice.gpus}: {choice.why}" for choice in choices),
    ]
    if any(choice.strategy == "halo-exchange" for choice in choices):
        lines.append("halo-exchange is a model only: bigunet does not run it.")
    emit({"choices": [choice.to_dict() for choice in choices]}, lines, json)
