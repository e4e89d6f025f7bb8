"""`bigunet train`: sample-parallel, or by a plan with pipeline stages."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bigunet.cli.inputs import NAMES, pair_of
from bigunet.cli.options import with_spec
from bigunet.cli.output import Json, Quiet, emit, shown
from bigunet.errors import PlanError, SceneError, fail
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["run_training", "train"]


@with_spec(UNetSpec, TrainSpec)
def train(
    image: Annotated[str, typer.Argument(help=NAMES + " Also earth:training.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; a stopped run goes on there.")],
    spec: UNetSpec,
    train: TrainSpec,
    given: frozenset[str],
    labels: Annotated[str | None, typer.Option(help="File of class ids or colours.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="YAML plan: its network and training, in stages.")
    ] = None,
    engine: Annotated[
        Literal["distributed", "reference", "fairscale_pipe"], typer.Option(help="For --plan.")
    ] = "distributed",
    val_image: Annotated[str | None, typer.Option(help="To score. " + NAMES)] = None,
    val_labels: Annotated[str | None, typer.Option(help="Its labels.")] = None,
    validate_every: Annotated[int | None, typer.Option(help="Steps between scores.")] = None,
    leave_out: Annotated[str, typer.Option(help="Classes left out of the mean IoU.")] = "",
    mode: Annotated[
        Literal["tiles", "whole"] | None,
        typer.Option(help="Drawn tiles, or the whole image in each step (a plan's default)."),
    ] = None,
    mean: Annotated[str | None, typer.Option(help="Of each band; measured by default.")] = None,
    std: Annotated[str | None, typer.Option(help="Of each band; measured by default.")] = None,
    ranks: Annotated[int, typer.Option(help="Processes to start; a plan says its own.")] = 1,
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

    Classes and bands are the scene's where neither options nor YAML say otherwise.
    """
    from bigunet.launch import launch

    arguments: dict[str, Any] = {
        "spec": spec.to_dict(),
        "train": train.to_dict(),
        "given": sorted(given),
        "image": image,
        "labels": labels,
        "val_image": val_image,
        "val_labels": val_labels,
        "mean": mean,
        "std": std,
        "plan": None if plan is None else str(plan),
        "options": {
            "out": str(out),
            "resume": resume,
            "save_every": save_every,
            "validate_every": validate_every,
            "weights_dtype": weights_dtype,
            "leave_out": [part for part in leave_out.split(",") if part],
            "progress": shown(quiet),
            "card": {"command": "bigunet " + " ".join(sys.argv[1:])},
        },
    }
    if mode is not None:
        arguments["options"]["mode"] = mode
    if plan is not None:
        ranks = _plan_ranks(plan, engine, given)
        arguments["options"]["engine"] = engine
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


def _plan_ranks(path: Path, engine: str, given: frozenset[str]) -> int:
    """Ranks that the plan needs with this engine."""
    from bigunet.plan import Plan

    if given:
        fail(
            PlanError,
            rule="with --plan, network and training are the plan's",
            got=", ".join(sorted(given)),
            remedy="Leave these options out, or change the plan's file.",
        )
    return Plan.load(path).num_ranks if engine == "distributed" else 1


def run_training(
    *,
    spec: dict[str, Any],
    train: dict[str, Any],
    given: list[str],
    image: str,
    labels: str | None,
    val_image: str | None,
    val_labels: str | None,
    mean: str | None,
    std: str | None,
    plan: str | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """What every rank runs: plain arguments in, plain results out."""
    from bigunet.pipeline import train_plan
    from bigunet.plan import Plan
    from bigunet.scenes import Normalise
    from bigunet.train import fit

    pair = pair_of(image, labels)
    if (mean is None) != (std is None):
        fail(SceneError, rule="mean and std come together", got=(mean, std), remedy="Give both.")
    common: dict[str, Any] = {
        **options,
        "val": None if val_image is None else pair_of(val_image, val_labels),
        "normalise": None
        if mean is None or std is None
        else Normalise(_floats(mean), _floats(std)),
    }
    if plan is not None:
        fitted = train_plan(Plan.load(plan), pair, **common)
    else:
        scene = {"in_channels": pair.image.sizes["band"]}
        if pair.classes is not None:
            scene["classes"] = len(pair.classes)
        network = spec | {name: n for name, n in scene.items() if name not in given}
        fitted = fit(UNetSpec.from_dict(network), pair, TrainSpec.from_dict(train), **common)
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
