"""What tests run on ranks: functions that other processes can import."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bigunet import ranks as ranks_module
from bigunet.errors import SceneError, fail
from bigunet.losses import Objective
from bigunet.model import UNet
from bigunet.progress import Progress
from bigunet.ranks import current
from bigunet.sample_parallel import exact_step
from bigunet.scenes import synthetic
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile, tile_image
from bigunet.train import fit

Gradients = dict[str, Tensor]


def network(**options: Any) -> UNet:
    """A small float64 network with random frozen statistics."""
    defaults = {"levels": 3, "convs": 1, "channels": 4, "classes": 4, "activation": "gelu"}
    torch.manual_seed(3)
    model = UNet(UNetSpec(**{**defaults, **options})).double().eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


def scene(shape: tuple[int, int] = (77, 58)) -> tuple[np.ndarray, np.ndarray]:
    """Random pixels and labels, one in ten of them ignored, and a whole strip."""
    rng = np.random.default_rng(5)
    labels = rng.integers(0, 3, shape).astype(np.uint8)
    labels[rng.random(shape) < 0.1] = 255
    labels[:20] = 255
    return rng.standard_normal((3, *shape)), labels


def whole_gradients(
    model: UNet,
    image: np.ndarray,
    labels: np.ndarray,
    *,
    loss: str = "cross_entropy",
    weights: tuple[float, ...] | None = None,
    smoothing: float = 0.0,
) -> tuple[float, Gradients]:
    """Loss and gradients of the image in one piece, by torch's own losses; Dice by definition."""
    model.zero_grad()
    logits = model(torch.from_numpy(image)[None])
    truth = torch.from_numpy(labels.astype(np.int64))[None]
    weight = None if weights is None else torch.tensor(weights, dtype=logits.dtype)
    total = logits.new_zeros(())
    if "cross_entropy" in loss:
        total = total + F.cross_entropy(
            logits, truth, weight, ignore_index=255, label_smoothing=smoothing
        )
    if "dice" in loss:
        valid = (truth != 255)[:, None]
        hot = F.one_hot(torch.where(truth == 255, 0, truth), logits.shape[1])
        hot = hot.permute(0, 3, 1, 2) * valid
        probability = logits.softmax(1) * valid
        sizes = probability.sum((0, 2, 3)), hot.sum((0, 2, 3))
        share = (torch.ones_like(sizes[0]) if weight is None else weight) * (sizes[1] > 0)
        score = 2 * (probability * hot).sum((0, 2, 3)) / (sizes[0] + sizes[1])
        total = total + 1 - (share * score).sum() / share.sum()
    total.backward()
    return total.item(), gradients(model)


def gradients(model: UNet) -> Gradients:
    """Copies, by name."""
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def worst(got: Gradients, expected: Gradients) -> float:
    """Largest relative difference of any named gradient."""
    assert got.keys() == expected.keys()
    return max(((got[n] - e).norm() / e.norm()).item() for n, e in expected.items())


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "weights, smoothing, batch norm": {
        "norm": "batch",
        "weights": (1.0, 0.2, 3.0, 0.5),
        "smoothing": 0.1,
    },
    "dice": {"loss": "dice", "up": "bilinear"},
    "both": {"loss": "cross_entropy+dice", "weights": (1.0, 2.0, 0.0, 1.0), "norm": "batch"},
    "two tiles, one of them empty": {"core": (40, 60), "loss": "cross_entropy+dice"},
}


def exactness() -> dict[str, tuple[float, float, int]]:
    """Each case: worst gradient difference, loss difference, tiles of this rank; see CASES."""
    image, labels = scene()
    results = {}
    for name, case in CASES.items():
        case = dict(case)
        core = case.pop("core", (16, 24))
        how = {k: case.pop(k) for k in ("loss", "weights", "smoothing") if k in case}
        model = network(**case)
        truth = labels.copy()
        tiles: list[Tile] = list(tile_image(image.shape[1:], core, model.spec))
        if "empty" in name:
            truth[:40] = 255
        loss, expected = whole_gradients(model, image, truth, **how)
        objective = Objective(
            4, how.get("loss", "cross_entropy"), how.get("weights"), how.get("smoothing", 0.0)
        )
        result = exact_step(model, image, truth, tiles, loss=objective)
        difference = worst(gradients(model), expected)
        results[name] = (difference, abs(result.loss - loss), result.tiles)
    return results


def everyone(function: str, *args: Any) -> list[Any]:
    """What a function of this module returns on each rank."""
    ranks = current()
    mine = globals()[function](*args)
    gathered: list[Any] = [None] * ranks.size
    if ranks.size == 1:
        return [mine]
    torch.distributed.all_gather_object(gathered, mine)
    return gathered


def bad_label() -> None:
    """Only one tile, of one rank, holds a label outside the classes."""
    image, labels = scene()
    labels[70, 50] = 9
    model = network()
    exact_step(model, image, labels, tile_image((77, 58), 16, model.spec))


SPEC = UNetSpec(levels=2, convs=1, channels=4, classes=5, norm="batch", dropout=0.1)
TRAIN = TrainSpec(
    tile=16, batch=3, steps=8, warmup_steps=2, average=0.8, clip_norm=1.0, learning_rate=0.01
)


def train_in_parts(folder: str, parts: list[int | None]) -> bytes:
    """The finished weights' bytes of a run that stops after so many steps each time."""
    for stop_after in parts:
        fitted = fit(
            SPEC,
            synthetic((70, 90), 1),
            TRAIN,
            out=folder,
            stop_after=stop_after,
            save_every=3,
            progress=False,
        )
    return fitted.weights.read_bytes()


def train_long(folder: str) -> None:
    """Steps until it is stopped."""
    train = TRAIN.replace(steps=100_000)
    fit(SPEC, synthetic((70, 90), 1), train, out=folder, save_every=10**6)


def train_to_the_end(folder: str) -> None:
    """40 steps with a checkpoint after every second one, in this process."""
    torch.set_num_threads(1)
    train = TRAIN.replace(steps=40)
    fit(SPEC, synthetic((70, 90), 1), train, out=folder, save_every=2, progress=False)


def add(a: int, b: int = 0) -> tuple[int, int, float, str]:
    """Arguments, ranks, a sum over them, and the threads each may use."""
    ranks = current()
    with Progress(5, "adding", shown=ranks.first) as progress:
        for i in range(5):
            progress.update(value=i)
            time.sleep(0.05)
    total = ranks.sum_(torch.tensor([float(ranks.rank + 1)]))
    return a + b, ranks.size, total.item(), os.environ["OMP_NUM_THREADS"]


def fail_on(rank: int, how: str) -> None:
    """One rank fails while the others wait for it."""
    ranks = current()
    if ranks.rank == rank:
        if how == "bigunet":
            fail(SceneError, rule="a rule", got="a value", remedy="Do this.")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError(f"raised on rank {rank}")
    ranks.wait()


def communicate() -> dict[str, Any]:
    """Every kind of sum; buckets are made so small that one does not hold all."""
    ranks = current()
    one = float(ranks.rank + 1)
    tensors = [torch.full((5,), one), torch.full((1,), 5 * one), torch.full((3,), 100 * one)]
    tensors[2] = tensors[2].double()
    before = ranks_module._BUCKET_ELEMENTS
    ranks_module._BUCKET_ELEMENTS = 5
    try:
        ranks.sum_all_(tensors)
    finally:
        ranks_module._BUCKET_ELEMENTS = before
    return {
        "rank": ranks.rank,
        "size": ranks.size,
        "sum": ranks.sum_(torch.tensor([1.0, 2.0])).tolist(),
        "integers": ranks.sum_(torch.tensor([ranks.rank])).tolist(),
        "all": [tensor.tolist() for tensor in tensors],
        "any": (ranks.any(ranks.rank == 2), ranks.any(False)),
        "shared": ranks.share({"from": ranks.rank}),
    }
