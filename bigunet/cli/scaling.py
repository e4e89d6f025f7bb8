"""`bigunet scale`: training steps on more and more ranks, measured here or predicted elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigunet.cli.inputs import MACHINES_HELP, counts_of, machine_of
from bigunet.cli.options import with_spec
from bigunet.cli.output import Json, Quiet, emit, gib, shown, table
from bigunet.spec import TrainSpec, UNetSpec

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["scale"]


@with_spec(UNetSpec, TrainSpec)
def scale(
    spec: UNetSpec,
    train: TrainSpec,
    height: Annotated[int, typer.Option(help="Height of an image in pixels.")] = 512,
    width: Annotated[int, typer.Option(help="Width of an image in pixels.")] = 512,
    images: Annotated[int, typer.Option(help="Images in a step (--weak: for each rank).")] = 1,
    weak: Annotated[bool, typer.Option("--weak", help="The images grow with the ranks.")] = False,
    ranks: Annotated[
        str, typer.Option(help="Measure: numbers of ranks, with commas between.")
    ] = "1,2",
    rounds: Annotated[int, typer.Option(help="Steps of each number of ranks.")] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads of a rank.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Write what is measured as NetCDF.")] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Predict instead, for these numbers of GPUs.")
    ] = None,
    machine: Annotated[str, typer.Option(help="For --gpus. " + MACHINES_HELP)] = "summit",
    strategy: Annotated[
        str,
        typer.Option(help="For --gpus: sample-parallel, halo-exchange, pipeline, tiles-x-stages."),
    ] = "sample-parallel",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Measure training steps on 1, 2, ... ranks; or, with --gpus, predict them on a machine.

    Inside a batch allocation, start it on every rank (torchrun -m bigunet scale ...): the first
    --ranks of them are measured while the others wait. Ctrl-C keeps what --out has by then.
    """
    if gpus is not None:
        counts = counts_of(gpus, "gpus", "1,2,4")
        _predict(spec, train, (height, width), images, weak, counts, machine, strategy, json)
        return
    from bigunet.scaling_file import measured_curve
    from bigunet.scaling_run import measure_scaling

    counts = counts_of(ranks, "ranks", "1,2,4")
    first = int(os.environ.get("RANK", 0)) == 0
    try:
        found = measure_scaling(
            spec,
            train,
            (height, width),
            counts,
            images=images,
            weak=weak,
            rounds=rounds,
            threads=threads,
            out=out,
            progress=shown(quiet),
        )
    except KeyboardInterrupt:
        if first and out is not None and out.exists():
            typer.echo(f"stopped; {out} has what was measured", err=True)
        raise typer.Exit(130) from None
    if not first:
        return
    curve = measured_curve(found)
    rows = _plain(curve, ("step_seconds", "images_per_second", "speedup", "efficiency"))
    for row, (tiles, idle) in zip(
        rows, zip(found.num_tiles.values, found.idle_gpus.values, strict=True), strict=True
    ):
        row["num_tiles"], row["idle_gpus"] = int(tiles), int(idle)
    lines = [
        f"{found.attrs['kind']} scaling of {spec.levels} levels x {spec.channels}, tile "
        f"{train.tile}, {height} x {width} pixels, {threads} thread(s) a rank",
        *table(
            ("ranks", "tiles", "s a step", "speed-up", "efficiency"),
            (
                (
                    row["gpus"],
                    row["num_tiles"],
                    f"{row['step_seconds']:.3f}",
                    f"{row['speedup']:.2f}",
                    f"{100 * row['efficiency']:.0f} %",
                )
                for row in rows
            ),
        ),
        *([f"Wrote {out}"] if out is not None else []),
    ]
    values = {"kind": found.attrs["kind"], "measured": rows, "out": None if out is None else out}
    emit(values, lines, json)


def _plain(found: xr.Dataset, names: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row for each number of ranks."""
    columns = {name: found[name].values.tolist() for name in ("gpus", *names)}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _predict(
    spec: UNetSpec,
    train: TrainSpec,
    shape: tuple[int, int],
    images: int,
    weak: bool,
    gpus: list[int],
    machine: str,
    strategy: str,
    json: bool,
) -> None:
    from bigunet.scaling import predict

    on = machine_of(machine)
    found = predict(
        spec,
        shape,
        train,
        on,
        gpus,
        strategy,  # type: ignore[arg-type]
        images=images,
        weak=weak,
    )
    names = ("step_seconds", "speedup", "efficiency", "num_tiles", "idle_gpus", "memory_bytes",
             "feasible", "reason", "gpu_hours", "energy_joules")  # fmt: skip
    rows = _plain(found, names)
    terms = [str(term) for term in found["term"].values]
    for i, row in enumerate(rows):
        row["terms_seconds"] = dict(zip(terms, found["seconds"].values[:, i].tolist(), strict=True))
    seen = [t for t in terms if any(row["terms_seconds"][t] > 0 for row in rows)]
    lines = [
        f"predicted: {strategy}, {'weak' if weak else 'strong'} scaling on {on.name}, "
        f"{shape[0]} x {shape[1]} pixels, tile {train.tile}",
        *table(
            ("GPUs", "ms a step", "speed-up", "efficiency", *(f"{t} ms" for t in seen), "memory",
             "note"),
            (
                (
                    row["gpus"],
                    round(1e3 * row["step_seconds"], 2),
                    f"{row['speedup']:.1f}",
                    f"{100 * row['efficiency']:.0f} %",
                    *(round(1e3 * row["terms_seconds"][t], 2) for t in seen),
                    gib(row["memory_bytes"]),
                    row["reason"],
                )
                for row in rows
            ),
        ),
    ]  # fmt: skip
    values = {"machine": on.name, "strategy": strategy, "predicted": rows}
    emit(values, lines, json)
