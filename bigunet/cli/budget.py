"""`bigunet memory` and `bigunet fit`: what a training step takes, and what fits."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bigunet.cli.options import with_spec
from bigunet.cli.output import Json, emit, gib, table
from bigunet.errors import SpecError, fail
from bigunet.layers import Shape
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile, inner_tile

__all__ = ["fit", "memory"]

Height = Annotated[int, typer.Option(help="Height of the image in pixels.")]
Width = Annotated[int, typer.Option(help="Width of the image in pixels.")]
Tiled = Annotated[
    bool, typer.Option("--tiled", help="Train on tiles of --tile with their halo, not the image.")
]
Layers = Annotated[bool, typer.Option("--layers", help="Also list every layer.")]


def _subject(
    spec: UNetSpec, train: TrainSpec, height: int, width: int, tiled: bool
) -> tuple[Shape, Tile | None]:
    """What a step sees: the whole image, or a tile with its whole halo around it."""
    if not tiled:
        return (train.batch, spec.in_channels, height, width), None
    tile = inner_tile(train.tile, spec, halo=train.halo)
    return (train.batch, spec.in_channels, *tile.read.shape), tile


@with_spec(UNetSpec, TrainSpec)
def memory(
    spec: UNetSpec,
    train: TrainSpec,
    height: Height = 1024,
    width: Width = 1024,
    tiled: Tiled = False,
    device: Annotated[str | None, typer.Option(help="Such as V100-16GB; a CPU by default.")] = None,
    layers: Layers = False,
    json: Json = False,
) -> None:
    """Predict the memory of one training step, cause by cause, and when its peak is reached."""
    from bigunet.memory import memory as predict
    from bigunet.memory import memory_table

    shape, tile = _subject(spec, train, height, width, tiled)
    values = memory_table(predict(spec, shape, train, tile=tile, device=device), layers=layers)
    peak = values["stages"][0]
    lines = [
        f"peak {gib(values['peak_bytes'])} in the {peak['phase']} pass, at {peak['layer']}",
        *_used(values),
        "",
        *table(("cause", "GiB at the peak"), ((k, _gib(v)) for k, v in peak["causes"].items())),
    ]
    if layers:
        names = [name for name in values["layers"][0] if name != "name"]
        rows = ((row["name"], *(_gib(row[name]) for name in names)) for row in values["layers"])
        lines += ["", *table(("layer", *names), rows)]
    emit(values, lines, json)


def _gib(num_bytes: float) -> float:
    return round(num_bytes / 2**30, 3)


def _used(values: dict[str, Any]) -> list[str]:
    if "capacity_bytes" not in values:
        return []
    capacity, used = values["capacity_bytes"], values["used_percent"]
    return [f"{gib(values['peak_bytes'])} / {gib(capacity)} ({used:.0f} %)"]


@with_spec(UNetSpec, TrainSpec)
def fit(
    spec: UNetSpec,
    train: TrainSpec,
    device: Annotated[str | None, typer.Option(help="A device's name, such as V100-16GB.")] = None,
    budget_gib: Annotated[float | None, typer.Option(help="Instead of a device: GiB.")] = None,
    height: Height = 1024,
    width: Width = 1024,
    tiled: Tiled = False,
    json: Json = False,
) -> None:
    """Find the largest tile, batch and depth that train within a device's memory, and why not."""
    from bigunet.memory import fit_table

    if (device is None) == (budget_gib is None):
        fail(
            SpecError,
            rule="a budget is a --device or a number of --budget-gib",
            got="both" if device else "neither",
            remedy="Give one of the two.",
        )
    budget: int | str = device if device is not None else int((budget_gib or 0) * 2**30)
    shape, tile = _subject(spec, train, height, width, tiled)
    values = fit_table(spec, shape, train, budget, tile=tile)
    lines = [f"budget {gib(values['budget_bytes'])}"]
    units = {"largest_tile": "pixels a side", "largest_batch": "images", "deepest": "levels"}
    for name, unit in units.items():
        found = values[name]
        text = "nothing fits" if found is None else f"{found['size']} {unit}, {gib(found['peak'])}"
        lines.append(f"{name.replace('_', ' '):14} {text}")
    diagnosis = values["diagnosis"]
    lines += [
        "",
        f"as asked: {gib(diagnosis['peak_bytes'])}, "
        f"{'fits' if diagnosis['fits'] else 'does not fit'}; remedies:",
        *table(
            ("remedy", "change", "saves GiB", "time", "then"),
            (
                (
                    r["remedy"],
                    r["change"],
                    _gib(r["saved_bytes"]),
                    f"x {r['time_factor']:.2f}",
                    "fits" if r["fits"] else "too much",
                )
                for r in diagnosis["remedies"]
            ),
        ),
    ]
    emit(values, lines, json)
