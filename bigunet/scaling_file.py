"""Measured scaling as NetCDF, with where it was measured: written in one place, read in another.

A file holds one `xarray.Dataset` with dimensions `gpus` (ranks, one a device) and `round`:
`step_seconds` of the slowest rank (NaN where a run was stopped before), and for each number of
ranks `images`, `num_tiles` and `idle_gpus`, those without a tile. Its attributes hold the network,
the training, the image's size and the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xarray as xr

from bigunet.environment import environment
from bigunet.errors import BigUNetError, OutputError, fail
from bigunet.spec import TrainSpec, UNetSpec

__all__ = [
    "SCALING_FILE_VERSION",
    "Kind",
    "load_scaling",
    "measured_curve",
    "new_scaling",
    "save_scaling",
    "scaling_setting",
]

SCALING_FILE_VERSION = 1
_FORMAT = "bigunet scaling"
_VARIABLES = {
    "step_seconds": ("gpus", "round"),
    "images": ("gpus",),
    "num_tiles": ("gpus",),
    "idle_gpus": ("gpus",),
}
_ATTRIBUTES = ("kind", "spec", "train", "scene_shape", "environment", "device", "threads")
_ENGINE: Literal["h5netcdf"] = "h5netcdf"

Kind = Literal["strong", "weak"]


def new_scaling(
    spec: UNetSpec,
    train: TrainSpec,
    scene_shape: tuple[int, int],
    gpus: Sequence[int],
    *,
    kind: Kind,
    images: Sequence[int],
    num_tiles: Sequence[int],
    rounds: int,
    threads: int,
    device: str,
) -> xr.Dataset:
    """A dataset for so many rounds, nothing measured yet, with this environment."""
    tiles = np.asarray(num_tiles, dtype=np.int64)
    columns: Mapping[str, Any] = {
        "images": np.asarray(images, dtype=np.int64),
        "num_tiles": tiles,
        "idle_gpus": np.maximum(0, np.asarray(gpus, dtype=np.int64) - tiles),
    }
    return xr.Dataset(
        {
            "step_seconds": (
                ("gpus", "round"),
                np.full((len(gpus), rounds), np.nan),
                {"units": "s", "long_name": "training step, slowest rank"},
            ),
            **{name: ("gpus", values, {"units": "1"}) for name, values in columns.items()},
        },
        {
            "gpus": ("gpus", np.asarray(gpus, dtype=np.int64), {"units": "1"}),
            "round": np.arange(rounds),
        },
        {
            "format": _FORMAT,
            "version": SCALING_FILE_VERSION,
            "kind": kind,
            "spec": json.dumps(spec.to_dict()),
            "train": json.dumps(train.to_dict()),
            "scene_shape": json.dumps(list(scene_shape)),
            "environment": json.dumps(environment()),
            "device": device,
            "threads": threads,
        },
    )


def save_scaling(table: xr.Dataset, path: Path) -> None:
    """Write the dataset, whole or not at all.

    Raises
    ------
    OutputError : where the file cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        table.to_netcdf(part, engine=_ENGINE)
        part.replace(path)
    except OSError as error:
        fail(OutputError, rule=f"{path} can be written", got=error, remedy="Choose another place.")


def load_scaling(path: Path | str) -> xr.Dataset:
    """The dataset of a file that `save_scaling` wrote, here or elsewhere, in memory.

    Raises
    ------
    OutputError : for a file that is missing, no NetCDF, another program's or of another version.
    """
    path = Path(path)
    try:
        table = xr.load_dataset(path, engine=_ENGINE)
    except (OSError, ValueError, KeyError) as error:
        fail(
            OutputError,
            rule=f"{path} is a NetCDF file",
            got=str(error).splitlines()[0] if path.exists() else "no such file",
            remedy="Write one with `bigunet scale --out FILE.nc`.",
        )
    if table.attrs.get("format") != _FORMAT:
        fail(
            OutputError,
            rule=f"{path} holds scaling measured by bigunet (its attribute format says so)",
            got=f"format {table.attrs.get('format')!r}",
            remedy="Choose a file that `bigunet scale` wrote.",
        )
    version = int(table.attrs.get("version", 0))
    if version != SCALING_FILE_VERSION:
        fail(
            OutputError,
            rule=f"a scaling file has version {SCALING_FILE_VERSION}, which this bigunet reads",
            got=f"version {version} in {path}",
            remedy="Measure again, or read it with the bigunet that wrote it.",
        )
    faults = [f"{name}{dims}" for name, dims in _VARIABLES.items()
              if name not in table or table[name].dims != dims]  # fmt: skip
    faults += [f"attribute {name}" for name in _ATTRIBUTES if name not in table.attrs]
    try:
        if not faults:
            scaling_setting(table)
    except (BigUNetError, ValueError, TypeError) as error:
        faults.append(str(error))
    if faults:
        fail(
            OutputError,
            rule=f"{path} is whole",
            got=f"without {', '.join(faults)}",
            remedy="Measure again.",
        )
    return table


def scaling_setting(table: xr.Dataset) -> tuple[UNetSpec, TrainSpec, tuple[int, int]]:
    """The network, the training and the (height, width) of the image that were measured."""
    height, width = json.loads(table.attrs["scene_shape"])
    return (
        UNetSpec.from_dict(json.loads(table.attrs["spec"])),
        TrainSpec.from_dict(json.loads(table.attrs["train"])),
        (int(height), int(width)),
    )


def measured_curve(table: xr.Dataset) -> xr.Dataset:
    """Medians over the rounds, and what follows from them, by `gpus`.

    `step_seconds` s, `images_per_second`, `speedup` over the smallest number of ranks (times that
    number, as if it scaled perfectly up to there) and `efficiency`, the speed-up per rank. Numbers
    of ranks that were not measured are left out.
    """
    seconds = table["step_seconds"].median("round", skipna=True).dropna("gpus")
    images = table["images"].sel(gpus=seconds.gpus)
    rate = images / seconds
    first = rate.isel(gpus=0) / int(seconds.gpus[0]) if seconds.size else 1.0
    speedup = rate / first
    units = {"step_seconds": "s", "images_per_second": "1/s", "speedup": "1", "efficiency": "1"}
    found = xr.Dataset(
        dict(zip(units, (seconds, rate, speedup, speedup / seconds.gpus), strict=True)),
        attrs=table.attrs,
    )
    for name, unit in units.items():
        found[name].attrs = {"units": unit}
    return found
