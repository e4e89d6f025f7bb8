"""The paper's two findings, held against the model: where it agrees, and where it stops.

Seal et al., "Toward Large-Scale Image Segmentation on Summit", ICPP 2020, doi
10.1145/3404397.3404468, states in its abstract near-linear strong scaling of a sample-parallel
training to 256 nodes = 1536 GPUs of Summit, and about twice the speed from GPipe on the 6 GPUs of
one node. It names no data set, tile, parameter count or balance, so the model is asked for which
of them it would come out so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr

from bigunet.errors import PlanError, fail
from bigunet.layers import count_parameters
from bigunet.machines import machine
from bigunet.scaling.evaluate import evaluate
from bigunet.scaling.setting import AllReduce, Setting
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["paper_exhibit"]

_GPUS = 1536
_STAGES = 6


def paper_exhibit(
    spec: UNetSpec | None = None,
    train: TrainSpec | None = None,
    *,
    tiles: Sequence[int] = (128, 256, 512, 1024, 2048),
    channels: Sequence[int] = (16, 32, 64, 128),
    image: int = 10_000,
    images: int = 64,
    micro_batches: int = 24,
    near_linear: float = 0.9,
    about_twice: tuple[float, float] = (1.5, 2.5),
    gpus: Sequence[int] = (6, 24, 96, 384, 1536),
    all_reduce: AllReduce = "end",
) -> xr.Dataset:
    """Both findings over tile sizes and widths, on the Summit model.

    Parameters
    ----------
    spec, train : what is not `channels` and tile; a U-Net of 5 levels, AdamW in fp32 by default.
    image, images : side of the square images, and images in a step: strong scaling keeps both.
    micro_batches : in one pass of the pipeline.
    near_linear : least efficiency at 1536 GPUs over one that counts as near-linear.
    about_twice : speed-ups of 6 stages over one GPU that count as about two.

    Returns
    -------
    Dataset over (channels, tile): `efficiency` (channels, tile, gpus) sample-parallel, memory
    aside, `near_linear` where it holds at 1536 GPUs and one tile fits a GPU, and `linear_up_to`,
    the most of `gpus` at which it holds (0: none); `speedup_6`, `about_twice`; `fits_one` and
    `fits_6`: whether a tile fits one GPU, and the pipeline's stages theirs; `parameters`;
    `tiles_per_gpu` at 1536 GPUs. The criteria stand in attrs.

    Raises
    ------
    PlanError : criteria that cannot hold.
    """
    if not 0 < near_linear <= 1 or not 0 < about_twice[0] <= about_twice[1]:
        fail(
            PlanError,
            rule="near_linear is in (0, 1], and about_twice is (least, most), both > 0",
            got=(near_linear, about_twice),
            remedy="Try 0.9 and (1.5, 2.5).",
        )
    spec, train = spec or UNetSpec(), train or TrainSpec()
    summit = machine("summit")
    shape = (len(channels), len(tiles))
    efficiency = np.full((*shape, len(gpus)), np.nan)
    at_full, speedup = np.full(shape, np.nan), np.full(shape, np.nan)
    per_gpu = np.zeros(shape)
    fits_one, fits_6 = np.zeros(shape, bool), np.zeros(shape, bool)
    parameters = []
    for i, width in enumerate(channels):
        wide = spec.replace(channels=width)
        parameters.append(count_parameters(wide))
        setting = Setting.of(
            wide, (image, image), train, summit, images=images, all_reduce=all_reduce
        )
        for j, tile in enumerate(tiles):
            one = evaluate(setting, "sample-parallel", 1, tile=tile)
            fits_one[i, j] = one.feasible
            for k, number in enumerate(gpus):
                many = evaluate(setting, "sample-parallel", number, tile=tile)
                efficiency[i, j, k] = one.seconds / many.seconds / number
            full = evaluate(setting, "sample-parallel", _GPUS, tile=tile)
            at_full[i, j] = one.seconds / full.seconds / _GPUS
            per_gpu[i, j] = full.num_tiles / _GPUS
            single = evaluate(setting, "pipeline", 1, tile=tile, micro_batches=1)
            piped = evaluate(setting, "pipeline", _STAGES, tile=tile, micro_batches=micro_batches)
            speedup[i, j] = single.seconds / piped.seconds
            fits_6[i, j] = piped.feasible
    good = efficiency >= near_linear
    # The last of those in a row from the first.
    run = np.cumprod(good, axis=2).sum(axis=2)
    up_to = np.where(run > 0, np.asarray(gpus)[np.maximum(run - 1, 0)], 0)
    two = (speedup >= about_twice[0]) & (speedup <= about_twice[1])
    dims = ("channels", "tile")
    data: dict[str, Any] = {
        "efficiency": ((*dims, "gpus"), efficiency, {"units": "1"}),
        "efficiency_1536": (dims, at_full, {"units": "1"}),
        "near_linear": (dims, (at_full >= near_linear) & fits_one),
        "linear_up_to": (dims, up_to),
        "tiles_per_gpu": (dims, per_gpu, {"units": "1"}),
        "speedup_6": (dims, speedup, {"units": "1"}),
        "about_twice": (dims, two & fits_6),
        "fits_one": (dims, fits_one),
        "fits_6": (dims, fits_6),
        "parameters": ("channels", np.array(parameters), {"units": "1"}),
    }
    return xr.Dataset(
        data,
        coords={"channels": list(channels), "tile": list(tiles), "gpus": list(gpus)},
        attrs={
            "machine": summit.name,
            "image": image,
            "images": images,
            "micro_batches": micro_batches,
            "near_linear_from": near_linear,
            "about_twice_from": about_twice[0],
            "about_twice_to": about_twice[1],
            "claims": "near-linear strong scaling to 256 nodes (1536 GPUs), about 2x from GPipe "
            "on the 6 GPUs of a node: doi 10.1145/3404397.3404468, abstract, which names no "
            "tile, data set or parameter count",
        },
    )
