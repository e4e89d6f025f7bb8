"""What makes two mosaic runs the same run, and the checks before one starts."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

from bigunet.errors import ExactnessError, OutputError, SceneError, ShapeError, SpecError, fail
from bigunet.model import UNet
from bigunet.mosaic.pyramid import IGNORE
from bigunet.scenes import ClassTable, Normalise, open_scene, read_block
from bigunet.spec import UNetSpec

__all__ = [
    "Network",
    "Settings",
    "as_network",
    "as_scene",
    "check_exactness",
    "check_output",
    "read_window",
    "scene_identity",
]

FORMAT = 1
SUFFIXES = (".zarr", ".tif", ".tiff")


@dataclass(frozen=True)
class Network:
    """A model with what belongs to it: input normalisation (None: values as they are), classes."""

    model: UNet
    normalise: Normalise | None
    classes: ClassTable

    @property
    def spec(self) -> UNetSpec:
        return self.model.spec


@dataclass(frozen=True)
class Settings:
    """Everything that the result depends on; equal settings give equal bytes.

    `threads` is the number of threads that each tile is computed with: it may decide the order in
    which a convolution sums, and so the last bit.
    """

    spec: dict[str, Any]
    weights: str
    normalise: dict[str, Any] | None
    classes: dict[str, Any]
    scene: dict[str, Any]
    precision: str
    tile: tuple[int, int]
    halo: int
    batch: int
    threads: int
    probabilities: str | None
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        """Plain values; tuples as lists, as JSON gives them back."""
        values = asdict(self)
        values["tile"] = list(self.tile)
        return values

    def differences(self, other: dict[str, Any], ignore: tuple[str, ...] = ()) -> list[str]:
        """Names of the fields in which another run's settings differ."""
        mine = self.to_dict()
        names = sorted((set(mine) | set(other)) - set(ignore))
        return [name for name in names if mine.get(name) != other.get(name)]


def as_network(model: Any, normalise: Normalise | None, classes: ClassTable | None) -> Network:
    """A `UNet`, or a value with `.model`, `.normalise` and `.classes`, with overrides.

    Raises
    ------
    SpecError : for anything else, and where classes or bands do not match the network's.
    """
    net = model if isinstance(model, UNet) else getattr(model, "model", None)
    if not isinstance(net, UNet):
        fail(
            SpecError,
            rule="the model is a UNet, or weights with a UNet as `.model`",
            got=type(model).__name__,
            remedy="Pass UNet(spec), or what load_weights(path) gives.",
        )
    if normalise is None:
        normalise = getattr(model, "normalise", None)
    if classes is None:
        classes = getattr(model, "classes", None)
    num = max(2, net.spec.classes)
    if classes is None:
        classes = ClassTable(tuple(f"class {i}" for i in range(num)))
    if len(classes) != num or num > IGNORE:
        fail(
            SpecError,
            rule=f"the class table has the network's {num} classes (at most {IGNORE})",
            got=f"{len(classes)} classes",
            remedy="Pass the class table that the network was trained with.",
        )
    if normalise is not None and len(normalise.mean) != net.spec.in_channels:
        fail(
            SpecError,
            rule=f"the normalisation has the network's {net.spec.in_channels} bands",
            got=f"{len(normalise.mean)} bands",
            remedy="Pass the normalisation that the network was trained with.",
        )
    return Network(net, normalise, classes)


def as_scene(scene: Any, spec: UNetSpec) -> xr.DataArray:
    """A scene from a path, a (band, y, x) DataArray or NumPy array, checked against the network.

    Raises
    ------
    SceneError : for other bands than the network's.
    ShapeError : for an image smaller than the stride.
    """
    if isinstance(scene, str | Path):
        scene = open_scene(scene)
    elif isinstance(scene, np.ndarray):
        if scene.ndim != 3:
            fail(
                SceneError,
                rule="an array has the axes (band, y, x)",
                got=f"shape {scene.shape}",
                remedy="Add or reorder axes.",
            )
        scene = xr.DataArray(scene, dims=("band", "y", "x"))
    if not isinstance(scene, xr.DataArray) or scene.dims != ("band", "y", "x"):
        fail(
            SceneError,
            rule="a scene is a path or an array with the dims (band, y, x)",
            got=getattr(scene, "dims", type(scene).__name__),
            remedy="Use open_scene(path), or transpose.",
        )
    bands, height, width = scene.shape
    if bands != spec.in_channels:
        fail(
            SceneError,
            rule=f"the network takes {spec.in_channels} bands",
            got=f"{bands} bands",
            remedy=f"Choose bands, as in open_scene(path, bands={list(range(spec.in_channels))}), "
            "or a network for these.",
        )
    if min(height, width) < spec.stride:
        fail(
            ShapeError,
            rule=f"each side of an image is at least the network's stride, {spec.stride} pixels",
            got=f"{height} x {width}",
            remedy="Use a larger image, or a network with fewer levels.",
        )
    for axis in ("y", "x"):
        if axis not in scene.coords:
            scene = scene.assign_coords({axis: np.arange(scene.sizes[axis]) + 0.5})
    checked: xr.DataArray = scene
    return checked


def read_window(scene: xr.DataArray, y0: int, y1: int, x0: int, x1: int) -> np.ndarray[Any, Any]:
    """`read_block`, whose disk errors are the scene's: they must not pass for the output's.

    Raises
    ------
    SceneError : naming the window.
    """
    try:
        return read_block(scene, y0, y1, x0, x1)
    except OSError as error:
        fail(
            SceneError,
            rule="every window of a scene must be readable",
            got=f"rows {y0}:{y1}, columns {x0}:{x1}: {error}",
            remedy="Check the disk or the connection that the scene is on.",
        )


def scene_identity(scene: xr.DataArray) -> dict[str, Any]:
    """Shape, dtype, georeference, file size and time where there is a file, and a sample's hash.

    The sample is 25 windows of up to 32 x 32 pixels, spread evenly, corners included: a scene
    changed between them, in place and within the clock's resolution, is not noticed.
    """
    height, width = scene.shape[1:]
    digest = hashlib.sha256()
    for y in np.linspace(0, max(0, height - 32), 5).astype(int).tolist():
        for x in np.linspace(0, max(0, width - 32), 5).astype(int).tolist():
            block = read_window(scene, y, min(y + 32, height), x, min(x + 32, width))
            digest.update(np.ascontiguousarray(block).tobytes())
    identity: dict[str, Any] = {
        "shape": list(scene.shape),
        "dtype": str(scene.dtype),
        "sample": digest.hexdigest(),
    }
    for name in ("crs", "transform", "nodata"):
        if name in scene.attrs:
            value = scene.attrs[name]
            value = list(value) if isinstance(value, tuple) else value
            # NaN is not equal to itself, and a missing value must be.
            identity[name] = str(value) if value != value else value
    source = Path(str(scene.attrs.get("source", "")))
    if source.is_file():
        stat = source.stat()
        identity["file"] = {"bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}
    return identity


def check_exactness(spec: UNetSpec, halo: int | None, exact: bool) -> None:
    """Refuse an exact run of a network that sees more than its halo.

    Raises
    ------
    ExactnessError : for a norm that depends on the extent it sees.
    """
    if exact and not spec.tile_exact:
        fail(
            ExactnessError,
            rule="exact tiles need norm 'none' or 'batch' (with its running statistics): others "
            "depend on the extent that they see",
            got=f"norm {spec.norm!r}",
            remedy="Pass exact=False to accept tiles that differ from the whole image.",
        )
    if halo is not None and (isinstance(halo, bool) or not isinstance(halo, int) or halo < 0):
        fail(ShapeError, rule="a halo is 0 or more pixels", got=halo, remedy="Leave it out.")


def check_output(out: Path) -> None:
    """The output's suffix says its format.

    Raises
    ------
    OutputError : for another one.
    """
    if out.suffix.lower() not in SUFFIXES:
        fail(
            OutputError,
            rule=f"an output's name ends in one of {', '.join(SUFFIXES)}",
            got=str(out),
            remedy=f"Call it {out.name}.zarr, say.",
        )
