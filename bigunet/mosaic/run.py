"""One run of a mosaic, planned: which tiles, how many at a time, and what its output says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
import xarray as xr

from bigunet.errors import ShapeError, fail
from bigunet.geometry import padded_size
from bigunet.mosaic.budget import available_bytes, choose_tile, num_workers, tile_bytes
from bigunet.mosaic.network import resolve_precision, weights_hash
from bigunet.mosaic.pyramid import IGNORE
from bigunet.mosaic.settings import FORMAT, Network, Settings, scene_identity
from bigunet.scenes import ClassTable
from bigunet.tiles import Tile, check_core, tile_image

__all__ = ["MARK", "Asked", "Run", "Unit"]

Unit = tuple[Tile, ...]
Array = np.ndarray[Any, Any]
#: A finished mosaic carries this attribute.
MARK = "bigunet_mosaic"


@dataclass(frozen=True)
class Run:
    """One run, ready to start."""

    net: Network
    scene: xr.DataArray
    settings: Settings
    units: tuple[Unit, ...]
    workers: int
    device: torch.device
    exact: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.scene.sizes["y"], self.scene.sizes["x"]

    @property
    def probabilities(self) -> tuple[int, str] | None:
        dtype = self.settings.probabilities
        return None if dtype is None else (self.net.spec.classes, dtype)

    @property
    def classes(self) -> ClassTable:
        return replace(self.net.classes, ignore=IGNORE)

    def attrs(self, ignored: int, probe: dict[str, Any]) -> dict[str, Any]:
        """The mosaic's attributes: no clock, no path, so that equal runs give equal bytes."""
        settings = self.settings.to_dict()
        settings["scene"] = {k: v for k, v in settings["scene"].items() if k != "file"}
        return {
            **settings,
            MARK: FORMAT,
            "exact": self.exact,
            "exact_halo": self.net.spec.halo_aligned,
            "ignored_pixels": ignored,
            **probe,
        }

    def label_attrs(self) -> dict[str, Any]:
        attrs: dict[str, Any] = {"classes": self.classes.to_dict(), "ignore": IGNORE}
        for name in ("crs", "transform"):
            if name in self.scene.attrs:
                value = self.scene.attrs[name]
                attrs[name] = [float(v) for v in value] if name == "transform" else str(value)
        return attrs

    def coords(self) -> dict[str, Array]:
        return {axis: np.asarray(self.scene[axis].values, float) for axis in ("y", "x")}

    def step(self) -> tuple[float, float]:
        steps = []
        for values in self.coords().values():
            steps.append(float(values[1] - values[0]) if values.size > 1 else 1.0)
        return steps[0], steps[1]


@dataclass(frozen=True)
class Asked:
    """What the caller asked for; `plan` fills in what was left open."""

    net: Network
    scene: xr.DataArray
    tile: int | tuple[int, int] | None
    precision: str
    halo: int | None
    exact: bool
    probabilities: str | None
    batch: int | None
    memory_bytes: int | None

    def output_bytes(self) -> tuple[int, int]:
        """Bytes of labels and of probabilities, uncompressed."""
        pixels = self.scene.sizes["y"] * self.scene.sizes["x"]
        if self.probabilities is None:
            return pixels, 0
        return pixels, pixels * self.net.spec.classes * np.dtype(self.probabilities).itemsize

    def plan(self, earlier: dict[str, Any] | None) -> Run:
        """A run; choices left open are those of an `earlier` one's settings where given.

        They depend on the memory and the hardware at hand, which may have changed since.
        """
        earlier = earlier or {}
        spec = self.net.spec
        shape = self.scene.sizes["y"], self.scene.sizes["x"]
        weight = next(self.net.model.parameters())
        device, num_threads = weight.device, torch.get_num_threads()
        precision = resolve_precision(self.precision, device, weight.dtype)
        if self.precision == "auto":
            precision = earlier.get("precision", precision)
        budget = available_bytes(device) // 2 if self.memory_bytes is None else self.memory_bytes
        halo = padded_size(spec.halo if self.halo is None else self.halo, spec.stride)
        if self.batch is not None and self.batch < 1:
            fail(ShapeError, rule="a batch is 1 or more tiles", got=self.batch, remedy="Use 1.")
        if self.tile is not None:
            core = check_core(self.tile, spec)
        elif "tile" in earlier:
            core = check_core(tuple(earlier["tile"]), spec)
        else:
            core = choose_tile(
                shape,
                spec,
                precision=precision,
                halo=halo,
                budget_bytes=budget,
                batch=self.batch or 1,
            )
        batch = self.batch or earlier.get("batch")
        if batch is None:
            batch = 1 if device.type == "cpu" else max(1, 2**20 // (core[0] * core[1]))
        tiles = tile_image(shape, core, spec, halo=halo, cropped=spec.tile_exact)
        units = tuple(_units(tiles, batch))
        workers, threads = 1, num_threads
        if device.type == "cpu":
            largest = max(tiles, key=lambda t: t.read.area)
            need = tile_bytes(spec, largest, precision, batch)
            workers, threads = num_workers(num_threads, len(units), need, budget)
            threads = earlier.get("threads", threads)
        settings = Settings(
            spec=spec.to_dict(),
            weights=weights_hash(self.net.model),
            normalise=None if self.net.normalise is None else self.net.normalise.to_dict(),
            classes=replace(self.net.classes, ignore=IGNORE).to_dict(),
            scene=scene_identity(self.scene),
            precision=precision,
            tile=core,
            halo=halo,
            batch=batch,
            threads=threads,
            probabilities=self.probabilities,
        )
        exact = spec.tile_exact and halo >= spec.halo
        return Run(self.net, self.scene, settings, units, workers, device, exact)


def _units(tiles: Iterable[Tile], batch: int) -> Iterable[Unit]:
    """Neighbouring tiles of one geometry, `batch` at a time."""

    def geometry(tile: Tile) -> Any:
        return tile.read.shape, tile.crops, tile.out

    for _, same in groupby(tiles, key=geometry):
        while unit := tuple(islice(same, batch)):
            yield unit
