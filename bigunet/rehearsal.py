"""Try a plan on this machine before it is trained: its timeline, and its gradients.

run_here(plan)                                                 # starts the ranks itself
launch(plan_gradients, (plan.to_yaml(),), ranks=plan.num_ranks)
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr

from bigunet.calibrate import freeze_norm
from bigunet.errors import MemoryBudgetError, fail
from bigunet.exactness import Gradients
from bigunet.launch import launch
from bigunet.losses import Objective
from bigunet.machines import device
from bigunet.model import UNet
from bigunet.pipeline import EngineName, Feed, Images, Pipeline, deal, measured_timeline
from bigunet.pipeline.distributed import check_distributed
from bigunet.plan import Plan
from bigunet.scenes import synthetic
from bigunet.stage_memory import plan_peaks
from bigunet.tile_reader import Sample, TileReader
from bigunet.tiles import tile_image

__all__ = ["plan_gradients", "run_here"]


def run_here(plan: Plan, *, rounds: int = 3, timeout_seconds: float = 180.0) -> xr.Dataset:
    """The measured timeline of a plan's step on processes of this machine, one thread each.

    See `bigunet.pipeline.measured_timeline`. For `bigunet.views.StageExplorer(run=run_here)`.

    Raises
    ------
    MemoryBudgetError : where the ranks together need more than this machine has. PlanError : what
    the engine does not run. LaunchError : a rank that failed, or more than `timeout_seconds`.
    """
    check_distributed(plan)
    need, have = plan.tiles * sum(plan_peaks(plan)), device("here").memory_bytes
    if need > have:
        fail(
            MemoryBudgetError,
            rule=f"all ranks together fit this machine's {have / 2**30:.1f} GiB",
            got=f"{need / 2**30:.1f} GiB",
            remedy="Run a smaller batch, image or network here.",
        )
    found: xr.Dataset = launch(
        measured_timeline,
        (plan.to_yaml(),),
        {"rounds": rounds},
        ranks=plan.num_ranks,
        threads_per_rank=1,
        progress=False,
        timeout_seconds=timeout_seconds,
    )
    return found


def plan_gradients(
    plan: Plan | str, *, engine: EngineName = "distributed", ignored: float = 0.1, seed: int = 0
) -> Gradients:
    """Every named gradient of one step in float64, on the first rank; of its stages on others.

    The data are `bigunet.scenes.synthetic`. With `plan.scene_shape` it is one scene in tiles of
    `plan.train.tile`, and the gradient is to equal `bigunet.exactness.synthetic_gradients` of the
    whole scene; without, as many images as the plan takes.

    Parameters
    ----------
    plan : for a network of 3 bands and the classes of `synthetic`, or its YAML.
    engine : "distributed" on the plan's ranks; "reference" where it is called.
    ignored : share of the labels that do not count, drawn at random.

    Raises
    ------
    PlanError : see `bigunet.pipeline.Pipeline`.
    """
    if isinstance(plan, str):
        plan = Plan.from_yaml(plan)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = UNet(plan.spec).double()
    freeze_norm(model)
    pipeline = Pipeline(plan, model, Objective(plan.spec.classes), engine=engine)
    pipeline.step(_feeds(plan, pipeline, ignored, seed))
    gradients = {
        name: parameter.grad.numpy(force=True)
        for name, parameter in pipeline.named_parameters().items()
        if parameter.grad is not None
    }
    if pipeline.places.all.size == 1:
        return gradients
    parts: list[Gradients | None] = [None] * pipeline.places.all.size
    dist.all_gather_object(parts, gradients)
    # In the network's order; replicas of a stage hold the same.
    merged = {name: grad for part in parts for name, grad in (part or {}).items()}
    if not pipeline.places.all.first:
        return gradients
    return {name: merged[name] for name, _ in UNet(plan.spec).named_parameters()}


def _scene(shape: tuple[int, int], ignored: float, seed: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Pixels in [0, 1] and labels, as `synthetic_gradients` has them."""
    scene = synthetic(shape, seed)
    labels = scene.labels.values.copy()
    labels[np.random.default_rng(seed).random(shape) < ignored] = scene.ignore
    return scene.image.values.astype(np.float64) / 255, labels, scene.ignore


def _feeds(plan: Plan, pipeline: Pipeline, ignored: float, seed: int) -> list[Feed]:
    if plan.scene_shape is None:
        batch, _, height, width = plan.shape_BCHW
        scenes = [_scene((height, width), ignored, seed + i) for i in range(batch)]
        x = torch.from_numpy(np.stack([image for image, _, _ in scenes]))
        labels = torch.from_numpy(np.stack([labels for _, labels, _ in scenes])).long()
        return [Images(x, labels, plan.spec.stride, scenes[0][2])]
    height, width = plan.scene_shape
    image, labels_yx, ignore = _scene((height, width), ignored, seed)
    reader = TileReader.of(plan.spec, image, labels_yx, ignore=ignore)
    tiles = tile_image((height, width), plan.train.tile, plan.spec, halo=plan.train.halo)
    places = pipeline.places
    samples = [Sample(tile) for tile in tiles]
    return deal(plan, reader, samples, places.index, places.num_pipelines)
