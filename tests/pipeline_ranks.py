"""What the ranks of the pipeline tests run, and what they are compared with.

One start of a group of ranks costs seconds, so each function here runs many cases.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xarray as xr
from torch.nn import functional as F

from bigunet.errors import BigUNetError
from bigunet.launch import launch
from bigunet.losses import Objective
from bigunet.model import UNet
from bigunet.pipeline import Pipeline, deal, measured_timeline, read_shape, train_plan
from bigunet.plan import Plan, devices_of
from bigunet.ranks import current
from bigunet.scenes import ScenePair, pair
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tile_reader import Sample, TileReader
from bigunet.tiles import tile_image

SHAPE = (4, 2, 14, 16)  # 14 is no multiple of the stride: the network pads
WEIGHTS = (0.5, 2.0, 1.0)

SPECS = {
    "plain": UNetSpec(levels=3, convs=1, channels=3, in_channels=2, classes=3),
    "torchgpipe": UNetSpec.torchgpipe(1, 4, depth=2, classes=3).replace(
        in_channels=2, dropout=0.0
    ),
    "bilinear": UNetSpec(
        levels=3, convs=1, channels=3, in_channels=2, classes=3, up="bilinear", norm="batch",
        activation="gelu", padding_mode="replicate",
    ),
}  # fmt: skip


def network(spec: UNetSpec, dtype: torch.dtype = torch.float64) -> UNet:
    torch.manual_seed(3)
    return UNet(spec).to(dtype).eval()  # batch norm frozen


def data(shape: Sequence[int] = SHAPE) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, and labels of which each image has very different numbers; the last has none."""
    generator = torch.Generator().manual_seed(5)
    batch, _, height, width = shape
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 3, (batch, height, width), generator=generator)
    for i in range(batch):
        labels[i, : height * i // (batch - 1)] = 255
    return x, labels


def plan_of(
    name: str, cuts: Sequence[int], *, micro_batches: int = 4, placement: str = "straight",
    schedule: str = "gpipe", recompute: str = "none", shape: Sequence[int] = SHAPE, **more: Any,
) -> Plan:  # fmt: skip
    spec = SPECS[name]
    rows = UNet(spec).rows
    ends = [0, *cuts, len(rows)]
    stages = tuple((rows[a].name, rows[b - 1].name) for a, b in pairwise(ends))
    return Plan(
        spec=spec,
        train=more.pop("train", TrainSpec()).replace(recompute=recompute, class_weights=WEIGHTS),
        shape_BCHW=tuple(shape),
        stages=stages,
        devices=devices_of(placement, len(stages)),
        micro_batches=micro_batches,
        schedule=schedule,
        **more,
    )


def whole(name: str) -> tuple[torch.Tensor, float, dict[str, torch.Tensor]]:
    """Output, loss and named gradients of the plain network on the whole batch, by torch alone."""
    model = network(SPECS[name])
    x, labels = data()
    logits = model(x)
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    loss = F.cross_entropy(logits, labels, weights, ignore_index=255)
    loss.backward()
    return logits.detach(), float(loss.detach()), {n: p.grad for n, p in model.named_parameters()}


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-300))


def compare(pipeline: Pipeline, done: Any, want: Any) -> float:
    """The largest relative difference in what this rank holds: output, loss, each gradient."""
    logits, loss, gradients = want
    errors = [abs(done.loss - loss) / loss]
    errors += [relative(torch.cat(done.logits), logits)] if done.logits else []
    named = pipeline.named_parameters()
    errors += [relative(p.grad, gradients[n]) for n, p in named.items()]
    return max(errors)


def one(plan: Plan, name: str, engine: str, **options: Any) -> tuple[float, set[str]]:
    """(largest difference, names of the parameters compared) of one step."""
    model = network(SPECS[name])
    objective = Objective(3, class_weights=WEIGHTS)
    pipeline = Pipeline(plan, model, objective, engine=engine, **options)
    x, labels = data()
    pipeline.step_images(x, labels)  # twice: nothing of the first step may be left over
    done = pipeline.step_images(x, labels, keep_logits=True)
    return compare(pipeline, done, whole(name)), set(pipeline.named_parameters())


def cases(num_stages: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(spec, arguments of `plan_of`): every cut for 2 stages, a spread of them for more."""
    for name, spec in SPECS.items():
        rows = UNet(spec).rows
        count = len(rows)
        modes = ("none", "block", "stage", "except_last")
        if num_stages == 2:
            cuts = [(c,) for c in range(1, count)] if name == "plain" else [(5,), (count // 2,)]
        else:
            spread = np.linspace(0, count, num_stages + 1)[1:-1].astype(int).tolist()
            cuts = [tuple(spread), tuple(range(1, num_stages)),
                    tuple(range(count - num_stages + 1, count)),
                    tuple(range(count // 2, count // 2 + num_stages - 1))]  # fmt: skip
        for i, cut in enumerate(cuts):
            for schedule in ("gpipe", "1f1b"):
                yield name, {"cuts": cut, "schedule": schedule, "recompute": modes[i % 4]}
        for mode in modes:
            yield name, {"cuts": cuts[len(cuts) // 2], "schedule": "1f1b", "recompute": mode}
    yield "plain", {"cuts": cuts[0], "micro_batches": 2 if num_stages < 4 else 4}


def run_cases() -> list[tuple[str, float, int]]:
    """Every case of as many stages as ranks; (case, worst difference, parameters compared)."""
    ranks = current()
    results = []
    for name, arguments in cases(ranks.size):
        plan = plan_of(name, **arguments)
        worst, names = one(plan, name, "distributed")
        worst = max(gathered(worst))
        results.append((f"{name} {arguments}", worst, sum(gathered(len(names)))))
    return results


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def die(how: str) -> None:
    """A rank that ends in the middle of a step: by an exception, or killed."""
    ranks = current()
    plan = plan_of("plain", (9,))
    model = network(plan.spec)
    pipeline = Pipeline(plan, model, Objective(3), engine="distributed")
    x, labels = data()
    pipeline.step_images(x, labels)
    if ranks.rank == 1:

        def hook(module: Any, inputs: Any) -> None:
            if how == "killed":
                os.kill(os.getpid(), 9)
            raise ArithmeticError("the layer that failed on purpose")

        model.layers["head"].register_forward_pre_hook(hook)
    pipeline.step_images(x, labels)


# Tiles x stages ---------------------------------------------------------------------------------

SCENE = (77, 45)


def scene(shape: tuple[int, int] = SCENE) -> tuple[np.ndarray, np.ndarray]:
    """Float64 pixels and labels of a scene; some pixels, and one whole corner, not labelled."""
    rng = np.random.default_rng(7)
    image = rng.standard_normal((2, *shape))
    labels = rng.integers(0, 3, shape).astype(np.uint8)
    labels[rng.random(shape) < 0.2] = 255
    labels[: shape[0] // 3, : shape[1] // 3] = 255
    return image, labels


def whole_scene(name: str, shape: tuple[int, int] = SCENE) -> tuple[float, dict[str, Any]]:
    """Loss and named gradients of the whole image in one piece, by torch alone."""
    model = network(SPECS[name])
    image, labels = scene(shape)
    logits = model(torch.from_numpy(image)[None])
    weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    loss = F.cross_entropy(logits, torch.from_numpy(labels)[None].long(), weights,
                           ignore_index=255)  # fmt: skip
    loss.backward()
    return float(loss.detach()), {n: p.grad for n, p in model.named_parameters()}


def tiled_step(
    plan: Plan, name: str, engine: str, shape: tuple[int, int] = SCENE, symmetry: int = 0
) -> tuple[float, int, set[str]]:
    """(largest difference from the whole image, passes, parameters compared) of one step."""
    model = network(plan.spec)
    pipeline = Pipeline(plan, model, Objective(3, class_weights=WEIGHTS), engine=engine)
    reader = TileReader.of(plan.spec, *scene(shape))
    samples = [Sample(t) for t in tile_image(shape, plan.train.tile, plan.spec)]
    places = pipeline.places
    feeds = deal(plan, reader, samples, places.index, places.num_pipelines)
    loss, gradients = whole_scene(name, shape)
    for _ in range(2):
        done = pipeline.step(feeds)
    named = pipeline.named_parameters()
    errors = [abs(done.loss - loss) / loss]
    errors += [relative(p.grad, gradients[n]) for n, p in named.items()]
    return max(errors), len(feeds), set(named)


def tiled_plan(
    name: str, cuts: Sequence[int], *, batch: int, side: int = 16,
    shape: tuple[int, int] = SCENE, **more: Any,
) -> Plan:  # fmt: skip
    spec = SPECS[name]
    read = read_shape(shape, side, spec)
    return plan_of(
        name, cuts, shape=(batch, 2, *read), scene_shape=shape,
        train=TrainSpec(tile=side), **more,
    )  # fmt: skip


def run_tiles() -> list[tuple[str, float, int, list[int]]]:
    """Tiles x stages on 4 ranks: 2 x 2, 4 x 1 and 1 x 4; cropped tiles and stacked ones."""
    results = []
    for name in ("plain", "bilinear"):
        for tiles, cuts in ((2, (9,)), (2, (5,)), (4, ()), (1, (5, 9, 14))):
            for schedule, batch, micro in (("gpipe", 4, 4), ("1f1b", 8, 4), ("1f1b", 7, 7)):
                plan = tiled_plan(
                    name, cuts, batch=batch, tiles=tiles, micro_batches=micro,
                    schedule=schedule, recompute="block" if batch == 4 else "none",
                )  # fmt: skip
                worst, passes, names = tiled_step(plan, name, "distributed")
                results.append((
                    f"{name} {tiles} x {len(cuts) + 1} {schedule} {batch}/{micro}",
                    max(gathered(worst)),
                    len(set().union(*gathered(names))),
                    gathered(passes),
                ))  # fmt: skip
    return results


# Training ---------------------------------------------------------------------------------------


def scene_pair() -> ScenePair:
    image, labels = scene()
    image[0] += 2.0 * (labels == 1)  # something to learn
    return pair(
        xr.DataArray(image.astype(np.float32), dims=("band", "y", "x")),
        xr.DataArray(labels, dims=("y", "x"), attrs={"ignore": 255}),
        check=False,
    )


def fitted_plan(cuts: Sequence[int] = (9,), *, tiles: int = 1, **train: Any) -> Plan:
    """Batch norm, clipping and averages: whatever couples the stages."""
    spec = SPECS["plain"].replace(norm="batch")
    settings = TrainSpec(
        tile=16, learning_rate=1e-2, steps=4, augment=True, clip_norm=0.05, average=0.9,
        calibrate_bias=True, class_weights=WEIGHTS,
    ).replace(**train)  # fmt: skip
    rows = UNet(spec).rows
    ends = [0, *cuts, len(rows)]
    read = read_shape(SCENE, 16, spec)
    return Plan(
        spec=spec, train=settings, shape_BCHW=(4, 2, *read), micro_batches=4, tiles=tiles,
        stages=tuple((rows[a].name, rows[b - 1].name) for a, b in pairwise(ends)),
        devices=tuple(range(len(ends) - 1)), schedule="1f1b", scene_shape=SCENE,
    )  # fmt: skip


def train_cases(folder: str) -> None:
    """2 pipelines of 2 stages, stopped after 3 steps and taken up again; scored at every second."""
    plan, pair = fitted_plan(tiles=2), scene_pair()
    for stop in (3, None):
        train_plan(plan, pair, f"{folder}/ranks", stop_after=stop, val=pair, validate_every=2,
                   progress=False)  # fmt: skip


# One start for all ------------------------------------------------------------------------------


@functools.cache
def on_ranks(ranks: int) -> dict[str, Any]:
    """The results of everything that is run on so many ranks; they are started once."""
    folder = tempfile.mkdtemp(prefix="bigunet-pipeline-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    results: dict[str, Any] = launch(
        everything, (folder,), ranks=ranks, threads_per_rank=1, progress=False, timeout_seconds=400
    )
    return {**results, "folder": Path(folder)}


def timeline_plan(stages: int) -> Plan:
    cuts = {2: (9,), 3: (5, 9), 4: (5, 9, 14)}[stages]
    return plan_of("plain", cuts, schedule="gpipe" if stages == 3 else "1f1b", micro_batches=4)


def everything(folder: str) -> dict[str, Any]:
    size = current().size
    results: dict[str, Any] = {"cases": run_cases()}
    results["timeline"] = measured_timeline(timeline_plan(size).to_yaml(), rounds=3)
    if size == 2:
        results["bad"] = bad_steps()
    if size == 4:
        results["tiles"] = run_tiles()
        train_cases(folder)
    return results


# Faults -----------------------------------------------------------------------------------------


def bad_steps() -> list[list[str]]:
    """What each rank says: to other weights on rank 1, images of a wrong shape on rank 0 alone,
    wrong labels, a plan for 4 ranks, and a good step after all that."""
    rank = current().rank
    plan = plan_of("plain", (9,))
    pipeline = Pipeline(plan, network(plan.spec), Objective(3), engine="distributed")
    x, labels = data()

    def said(step: Callable[[], Any]) -> str:
        try:
            step()
        except BigUNetError as error:
            return str(error)
        return "ok"

    wide = plan_of("plain", (9,), tiles=2)
    mixed = network(plan.spec, (torch.float64, torch.float32)[rank])
    mine = [
        said(lambda: Pipeline(plan, mixed, Objective(3), engine="distributed")),
        said(lambda: pipeline.step_images(x[:2] if rank == 0 else None, labels)),
        said(lambda: pipeline.step_images(x, labels + 1)),
        said(lambda: Pipeline(wide, network(plan.spec), Objective(3), engine="distributed")),
        said(lambda: pipeline.step_images(*((x, None) if rank == 0 else (None, labels)))),
    ]
    return gathered(mine)
