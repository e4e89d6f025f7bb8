"""Plain arguments in, plain results out: what each rank of a plan runs.

launch(run_plan, ("plan.yaml", "scene.tif", "labels.tif", "out"), ranks=plan.num_ranks)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from bigunet.checkpoint import load_weights
from bigunet.errors import SceneError, fail
from bigunet.pipeline.protocol import EngineName
from bigunet.pipeline.train import train_plan
from bigunet.plan import Plan
from bigunet.run_folder import plain_scores
from bigunet.scenes import Normalise, open_labels, open_scene, pair

__all__ = ["run_plan"]


def run_plan(
    plan: str | Path,
    image: str | Path,
    labels: str | Path,
    out: str | Path,
    *,
    engine: EngineName = "distributed",
    val_image: str | Path | None = None,
    val_labels: str | Path | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    start: str | Path | None = None,
    mode: Literal["tiles", "whole"] = "whole",
    **options: Any,
) -> dict[str, Any]:
    """`train_plan` for a plan's file and files of images and labels; `options` are its others.

    Returns
    -------
    weights (path), loss, seconds, and the scores on the validation pair, if any.
    """
    if (mean is None) != (std is None):
        fail(SceneError, rule="mean and std come together", got=(mean, std), remedy="Give both.")
    if (val_image is None) != (val_labels is None):
        fail(
            SceneError,
            rule="an image to score comes with its labels",
            got=(val_image, val_labels),
            remedy="Give both.",
        )
    val = None
    if val_image is not None and val_labels is not None:
        val = pair(open_scene(val_image), open_labels(val_labels))
    normalise = None
    if mean is not None and std is not None:
        normalise = Normalise(tuple(mean), tuple(std))
    fitted = train_plan(
        Plan.load(plan),
        pair(open_scene(image), open_labels(labels)),
        out,
        engine=engine,
        val=val,
        normalise=normalise,
        start=None if start is None else load_weights(start),
        mode=mode,
        **options,
    )
    return {
        "weights": str(fitted.weights),
        "loss": fitted.loss,
        "seconds": fitted.seconds,
        "scores": None if fitted.scores is None else plain_scores(fitted.scores),
    }
