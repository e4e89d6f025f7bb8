"""`bigunet segment`, `train` and `score`: what a user does with a scene."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bigunet.cli.inputs import NAMES, labels_of, pair_of, scene_of, weights_of
from bigunet.cli.options import with_spec
from bigunet.cli.output import Json, emit, table
from bigunet.errors import OutputError, SceneError, fail
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["score", "segment", "train"]

Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]


def _shown(quiet: bool) -> bool:
    return not quiet and sys.stderr.isatty()


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
        progress=_shown(quiet),
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


@with_spec(UNetSpec, TrainSpec)
def train(
    image: Annotated[str, typer.Argument(help=NAMES + " Also earth:training.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; a stopped run goes on there.")],
    spec: UNetSpec,
    train: TrainSpec,
    labels: Annotated[str | None, typer.Option(help="File of class ids or colours.")] = None,
    val_image: Annotated[str | None, typer.Option(help="To score. " + NAMES)] = None,
    val_labels: Annotated[str | None, typer.Option(help="Its labels.")] = None,
    validate_every: Annotated[int | None, typer.Option(help="Steps between scores.")] = None,
    leave_out: Annotated[str, typer.Option(help="Classes left out of the mean IoU.")] = "",
    mode: Annotated[Literal["tiles", "whole"], typer.Option(help="Drawn tiles, or all.")] = "tiles",
    mean: Annotated[str | None, typer.Option(help="Of each band; measured by default.")] = None,
    std: Annotated[str | None, typer.Option(help="Of each band; measured by default.")] = None,
    ranks: Annotated[int, typer.Option(help="Processes to start on this machine.")] = 1,
    threads: Annotated[int | None, typer.Option(help="CPU threads of a rank.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with a stopped run.")] = True,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 100,
    weights_dtype: Annotated[
        Literal["fp32", "bf16"], typer.Option(help="Of the final file; bf16 is half as large.")
    ] = "fp32",
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Train a network, sample-parallel; `torchrun -m bigunet train ...` works as well.

    The classes and bands are the scene's where the options do not say otherwise.
    """
    from bigunet.launch import launch

    arguments: dict[str, Any] = {
        "spec": spec.to_dict(),
        "train": train.to_dict(),
        "image": image,
        "labels": labels,
        "val_image": val_image,
        "val_labels": val_labels,
        "mean": mean,
        "std": std,
        "out": str(out),
        "mode": mode,
        "resume": resume,
        "save_every": save_every,
        "validate_every": validate_every,
        "weights_dtype": weights_dtype,
        "leave_out": [part for part in leave_out.split(",") if part],
        "progress": _shown(quiet),
        "command": "bigunet " + " ".join(sys.argv[1:]),
    }
    if ranks > 1 and "RANK" not in os.environ:
        values = launch(
            run_training,
            kwargs=arguments,
            ranks=ranks,
            threads_per_rank=threads,
            progress=not quiet,
        )
    else:
        if threads:
            import torch

            torch.set_num_threads(threads)
        values = run_training(**arguments)
    if int(os.environ.get("RANK", 0)) == 0:
        emit(values, [f"loss {values['loss']:.4f}: {values['weights']}", *_scores(values)], json)


def run_training(
    *,
    spec: dict[str, Any],
    train: dict[str, Any],
    image: str,
    labels: str | None,
    val_image: str | None,
    val_labels: str | None,
    mean: str | None,
    std: str | None,
    command: str,
    **options: Any,
) -> dict[str, Any]:
    """What every rank runs: plain arguments in, plain results out."""
    from bigunet.scenes import Normalise
    from bigunet.train import fit

    pair = pair_of(image, labels)
    val = None if val_image is None else pair_of(val_image, val_labels)
    if (mean is None) != (std is None):
        fail(SceneError, rule="mean and std come together", got=(mean, std), remedy="Give both.")
    normalise = None if mean is None or std is None else Normalise(_floats(mean), _floats(std))
    fitted = fit(
        UNetSpec.from_dict(spec),
        pair,
        TrainSpec.from_dict(train),
        val=val,
        normalise=normalise,
        card={"command": command},
        **options,
    )
    scores = fitted.scores
    return {
        "weights": str(fitted.weights),
        "loss": fitted.loss,
        "seconds": round(fitted.seconds, 1),
        "scores": None
        if scores is None
        else {str(name): scores[name].values.tolist() for name in scores.data_vars},
    }


def _floats(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        fail(SceneError, rule="numbers with commas between", got=text, remedy="63.8,66.3,40.8")


def _scores(values: dict[str, Any]) -> list[str]:
    scores = values["scores"] or {}
    return [
        f"{name} {scores[name]:.4f}" for name in ("mean_iou", "mean_iou_kept") if name in scores
    ]


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
