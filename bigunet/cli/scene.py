"""`bigunet segment` and `score`: a scene in, a mosaic out, and how good it is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bigunet.cli.inputs import NAMES, labels_of, scene_of, weights_of
from bigunet.cli.output import Json, Quiet, emit, shown, table
from bigunet.errors import OutputError, fail

__all__ = ["score", "segment"]


def segment(
    scene: Annotated[str, typer.Argument(help=NAMES)],
    out: Annotated[Path, typer.Option(help="New .zarr or .tif.")],
    weights: Annotated[str, typer.Option(help="safetensors file, or `demo`.")] = "demo",
    tile: Annotated[int | None, typer.Option(help="Side of a tile's core, in pixels.")] = None,
    halo: Annotated[int | None, typer.Option(help="Smaller than the exact one: inexact.")] = None,
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp64"], typer.Option()] = "auto",
    bands: Annotated[str | None, typer.Option(help="Bands from 0, such as 3,2,1.")] = None,
    probabilities: Annotated[bool, typer.Option(help="Write class probabilities too.")] = False,
    exact: Annotated[bool, typer.Option(help="Refuse a norm that tiles would change.")] = True,
    overwrite: Annotated[bool, typer.Option(help="Replace another run's mosaic.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on with an interrupted run.")] = True,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Segment a scene of any size into a mosaic, exactly; go on where a run was interrupted."""
    import torch

    from bigunet.mosaic import segment as run

    if threads:
        torch.set_num_threads(threads)
    began = time.perf_counter()
    mosaic = run(
        weights_of(weights),
        scene_of(scene, bands),
        out=out,
        tile=tile,
        halo=halo,
        precision=precision,
        probabilities=probabilities,
        exact=exact,
        overwrite=overwrite,
        resume=resume,
        progress=shown(quiet),
    )
    seconds = time.perf_counter() - began
    height, width = mosaic["labels"].shape
    values: dict[str, Any] = {
        "out": str(out),
        "height": height,
        "width": width,
        "seconds": round(seconds, 3),
        **{k: mosaic.attrs[k] for k in ("precision", "tile", "halo", "exact") if k in mosaic.attrs},
    }
    emit(values, [f"{height} x {width} pixels in {seconds:.1f} s: {out}"], json)


def score(
    prediction: Annotated[str, typer.Argument(help="A mosaic or a file of class ids.")],
    truth: Annotated[str, typer.Argument(help="Labels: a file, `earth` or `earth:held-out`.")],
    leave_out: Annotated[str, typer.Option(help="Classes left out of the kept mean.")] = "",
    out: Annotated[Path | None, typer.Option(help="Also write the table as JSON here.")] = None,
    json: Json = False,
) -> None:
    """Compare a label map with the truth: IoU by class, mean IoU, accuracy."""
    from bigunet.metrics import score as run

    names = [part for part in leave_out.split(",") if part]
    result = run(labels_of(prediction), labels_of(truth), leave_out=names)
    values: dict[str, Any] = {
        "classes": [str(name) for name in result["class"].values],
        **{str(name): result[name].values.tolist() for name in result.data_vars},
    }
    if out is not None:
        import json as json_format

        try:
            out.write_text(json_format.dumps(values), encoding="utf-8")
        except OSError as error:
            fail(OutputError, rule="the table can be written", got=error, remedy="Choose a path.")
    lines = table(
        ("class", "IoU", "truth pixels", "predicted pixels"),
        (
            (name, round(iou, 4), truth_pixels, predicted)
            for name, iou, truth_pixels, predicted in zip(
                values["classes"],
                values["iou"],
                values["truth_pixels"],
                values["predicted_pixels"],
                strict=True,
            )
        ),
    )
    for name in ("mean_iou", "mean_iou_kept", "accuracy"):
        if name in values:
            lines.append(f"{name} {values[name]:.4f}")
    emit(values, lines, json)
