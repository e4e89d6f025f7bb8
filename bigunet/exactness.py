"""The gradient of one scene, by any tiles and any number of ranks, ready to be compared."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import xarray as xr

from bigunet.calibrate import freeze_norm
from bigunet.errors import ShapeError, fail
from bigunet.model import UNet
from bigunet.sample_parallel import exact_step
from bigunet.scenes import synthetic
from bigunet.spec import UNetSpec
from bigunet.tiles import tile_image

__all__ = ["Gradients", "compare_gradients", "synthetic_gradients"]

Gradients = dict[str, np.ndarray]


def synthetic_gradients(
    spec: UNetSpec,
    shape: tuple[int, int],
    tile: int | tuple[int, int],
    *,
    halo: int | None = None,
    ignored: float = 0.1,
    seed: int = 0,
) -> Gradients:
    """Every named gradient of the mean loss over a synthetic scene, in float64.

    Runs on the ranks that there are: alone where it is called, on all of them through
    `bigunet.launch.launch(synthetic_gradients, ...)`.

    Parameters
    ----------
    spec : a network for 3 bands and the classes of `bigunet.scenes.synthetic`; its batch norms
        keep the statistics they start with.
    shape, tile : (height, width) of the scene and the tiles' side or sides, in pixels.
    halo : pixels read around each tile; the exact ones by default.
    ignored : share of the labels that do not count, drawn at random.
    """
    scene = synthetic(shape, seed)
    labels = scene.labels.values.copy()
    labels[np.random.default_rng(seed).random(shape) < ignored] = scene.ignore
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = UNet(spec).double()
    freeze_norm(model)  # with statistics of the tiles they would differ from the image's
    # Pixels in [0, 1]: how they are scaled changes nothing about exactness.
    image = scene.image.values.astype(np.float64) / 255
    tiles = tile_image(shape, tile, spec, halo=halo)
    exact_step(model, image, labels, tiles, ignore=scene.ignore)
    return {
        name: parameter.grad.numpy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def compare_gradients(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> xr.Dataset:
    """Dim `parameter`: norm of the difference relative to `one`'s norm, and that norm.

    Raises
    ------
    ShapeError : where the two are not of the same network.
    """
    if {n: g.shape for n, g in one.items()} != {n: g.shape for n, g in other.items()}:
        fail(
            ShapeError,
            rule="gradients are compared by name and shape",
            got="gradients of different networks",
            remedy="Use one spec for both.",
        )
    norms = np.array([np.linalg.norm(g) for g in one.values()])
    gaps = np.array([np.linalg.norm(g - other[n]) for n, g in one.items()])
    relative = np.divide(gaps, norms, out=np.where(gaps > 0, np.inf, 0.0), where=norms > 0)
    return xr.Dataset(
        {
            "relative_difference": ("parameter", relative, {"units": "1"}),
            "norm": ("parameter", norms, {"units": "1"}),
        },
        coords={"parameter": list(one)},
    )
