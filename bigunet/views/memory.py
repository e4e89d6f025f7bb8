"""MemoryExplorer: what fills a device during one training step, when, and what would help."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import ipywidgets as widgets
import numpy as np
import xarray as xr
import yaml

from bigunet.errors import PlanError, SpecError, fail
from bigunet.layers import Shape
from bigunet.machines import DEVICES, device
from bigunet.memory import memory, why_not
from bigunet.plan import Plan
from bigunet.spec import Optimiser, Precision, TrainSpec, UNetSpec
from bigunet.tiles import Box, Tile, check_core, place_tile
from bigunet.views.kit import Explorer, Row
from bigunet.views.memory_plots import plot_layers, plot_step, size

__all__ = [
    "MemoryExplorer",
    "MemoryState",
    "describe",
    "largest_read",
    "memory_by_depth",
    "memory_tables",
    "with_remedies",
]

GIB = 2**30
# More bars than this cannot be told apart: one for each block, then.
MOST_BARS = 60


@dataclass(frozen=True)
class MemoryState:
    """A network, how it is trained, a square image's side in pixels, and the device.

    `tile` is the side of the tiles' cores that a step sees; 0 is the whole image.
    """

    spec: UNetSpec = field(default_factory=UNetSpec)
    train: TrainSpec = field(default_factory=TrainSpec)
    image: int = 10_000
    tile: int = 0
    device: str = "V100-16GB"


def largest_read(side: int, tile: int, spec: UNetSpec) -> Tile | None:
    """Of the tiles of a square image, one that reads most; None where one core covers it.

    Raises
    ------
    ShapeError : for a tile off the stride.
    """
    check_core(tile, spec)
    padded = -(-side // spec.stride) * spec.stride
    if tile >= padded:
        return None
    halo = spec.halo_aligned
    cores = [(low, min(low + tile, padded)) for low in range(0, padded, tile)]
    low, high = max(cores, key=lambda c: min(c[1] + halo, padded) - max(c[0] - halo, 0))
    image = Box(0, side, 0, side)
    return place_tile(Box(low, high, low, high), Box(0, padded, 0, padded), image, spec)


def _subject(state: MemoryState) -> tuple[Shape, Tile | None]:
    """The shape that one step sees, and its tile."""
    tile = largest_read(state.image, state.tile, state.spec) if state.tile else None
    sides = (state.image, state.image) if tile is None else tile.read.shape
    return (state.train.batch, state.spec.in_channels, *sides), tile


def memory_tables(state: MemoryState) -> xr.Dataset:
    """The dataset of `bigunet.memory.memory` with bars to draw.

    Dimension `bar` holds the layers or, where they are more than 60, the blocks; `pile` (bar,
    cause) is in bytes, of temporaries the largest.

    Raises
    ------
    ShapeError, SpecError : for a tile off the stride, or an unknown device.
    """
    shape, tile = _subject(state)
    data = memory(state.spec, shape, state.train, tile=tile, device=state.device)
    names = [str(name) for name in data["layer"].values]
    blocks = [str(name) for name in data["block"].values]
    pile = data["held"].values
    grouped = len(names) > MOST_BARS
    if grouped:
        names = list(dict.fromkeys(blocks))
        owner = np.array([names.index(block) for block in blocks])
        whole = np.zeros((len(names), pile.shape[1]), np.int64)
        np.add.at(whole, owner, pile)
        whole[:, -1] = [pile[owner == k, -1].max() for k in range(len(names))]
        pile, blocks = whole, names
    data["pile"] = (("bar", "cause"), pile, {"units": "bytes"})
    tiles = 1 if tile is None else (-(-state.image // state.tile)) ** 2
    peak = int(data["peak_moment"][0])
    return data.assign_coords(bar=names, bar_block=("bar", blocks)).assign_attrs(
        grouped=grouped,
        layers=len(data["layer"]),
        peak_phase=str(data["phase"].values[int(data["moment_phase"][peak])]),
        peak_layer=str(data["layer"].values[int(data["moment_layer"][peak])]),
        image=state.image,
        tile=state.tile if tile is not None else 0,
        tiles=tiles,
        batch=state.train.batch,
    )


def with_remedies(state: MemoryState, data: xr.Dataset) -> xr.Dataset:
    """`memory_tables`' dataset with the remedies, ranked.

    `saved` and `after` (remedy) are in bytes, `time_factor` (remedy) in times of the step now.
    """
    shape, tile = _subject(state)
    found = why_not(state.spec, shape, state.train, state.device, tile=tile)
    units = {"units": "bytes"}
    data = data.copy()
    ranked = found.remedies
    data["saved"] = ("remedy", np.array([r.saved for r in ranked], np.int64), units)
    data["after"] = ("remedy", np.array([r.peak for r in ranked], np.int64), units)
    data["time_factor"] = ("remedy", np.array([r.time_factor for r in ranked], float))
    data["time_factor"].attrs["units"] = "1"
    data["fits"] = ("remedy", np.array([r.fits for r in ranked], bool))
    return data.assign_coords(
        remedy=[r.name for r in ranked], change=("remedy", [r.change for r in ranked])
    )


def describe(data: xr.Dataset) -> str:
    """What a reader must know of `memory_tables`' dataset: used and capacity, peak, subject."""
    a = data.attrs
    peak, capacity = int(data["peak"][0]), int(a["capacity_bytes"])
    over = peak - capacity
    verdict = f"OVER BUDGET by {size(over)}" if over > 0 else f"fits, {size(-over)} left"
    height, width = a["shape"][2:]
    seen = f"the whole image of {a['image']} x {a['image']} pixels"
    if a["tile"]:
        seen = (
            f"{a['tiles']} tiles of {a['tile']}, each reading up to {height} x {width} pixels "
            f"of the image of {a['image']} x {a['image']}"
        )
    shares = data["at_peak"].isel(stage=0)
    share = float(shares.max()) / peak
    return (
        f"{peak / GIB:,.1f} / {capacity / GIB:,.1f} GiB ({100 * peak / capacity:,.0f} %) "
        f"of {a['device']}: {verdict}. Peak in the phase {a['peak_phase']}, at {a['peak_layer']}; "
        f"largest cause: {shares.idxmax().item()}, {share:.0%}. "
        f"{a['precision']}, batch {a['batch']}, {a['optimiser']}: {seen}."
    )


def memory_by_depth(
    spec: UNetSpec, shape_BCHW: Shape, train: TrainSpec, levels: Iterable[int]
) -> xr.Dataset:
    """Dim `levels`: GiB of parameters, of gradients and optimiser, and of activations and skips.

    Arguments and errors as `bigunet.memory.memory` has them.
    """
    depths = list(levels)
    rows = []
    for depth in depths:
        held = memory(spec.replace(levels=depth), shape_BCHW, train)["held"].sum("layer") / GIB
        rows.append(
            (
                float(held.sel(cause="parameters")),
                float(held.sel(cause=["gradients", "optimiser"]).sum()),
                float(held.sel(cause=["activations", "skips"]).sum()),
            )
        )
    names = ("parameters", "gradients_and_optimiser", "activations")
    return xr.Dataset(
        {
            name: ("levels", [row[k] for row in rows], {"units": "GiB"})
            for k, name in enumerate(names)
        },
        coords={"levels": ("levels", depths, {"units": "1"})},
    )


_SPEC = ("levels", "convs", "channels")
_TRAIN = ("batch", "precision", "optimiser", "recompute")
_RECOMPUTE = {
    "none": "none",
    "each block": "block",
    "whole stage": "stage",
    "whole stage, but not the last micro-batch": "except_last",
}


class MemoryExplorer(Explorer[MemoryState]):
    """Predicted memory of one training step against a device's; controls for all that decides it.

    Parameters
    ----------
    spec, train : to begin with; what has no control here (kernel, norm, loss, ...) stays theirs.
    image : side of the square image in pixels.
    tile : side of a tile's core in pixels; 0 trains on the whole image.
    device : a name in `bigunet.machines.DEVICES`, or "here".
    """

    title = "Memory of one training step (predicted)"
    help = (
        "Upper plot: what each layer holds when the loss is reached, piled up from the first "
        "layer to the last, with the gradients to come; where the pile crosses the device's limit, "
        "the rest does not fit (hatched). Lower plot: all that is alive, operation by operation."
    )

    def __init__(
        self,
        spec: UNetSpec | None = None,
        train: TrainSpec | None = None,
        *,
        image: int = 10_000,
        tile: int = 0,
        device: str = "V100-16GB",
    ) -> None:
        super().__init__(self._state(spec or UNetSpec(), train or TrainSpec(), image, tile, device))

    @staticmethod
    def _state(spec: UNetSpec, train: TrainSpec, image: int, tile: int, name: str) -> MemoryState:
        """`train.tile` follows the explorer's tile, where there is one."""
        ok = all(isinstance(n, int) and not isinstance(n, bool) for n in (image, tile))
        if not ok or image < 1 or tile < 0:
            fail(
                SpecError,
                rule="image and tile are sides in pixels; tile 0 is the whole image",
                got=f"image {image!r}, tile {tile!r}",
                remedy="Give integers, the image at least 1.",
            )
        name = device(name).name
        return MemoryState(spec, train.replace(tile=tile) if tile else train, image, tile, name)

    def controls(self) -> Mapping[str, Any]:
        slider, menu = widgets.IntSlider, widgets.Dropdown
        made: dict[str, Any] = {
            "levels": slider(
                min=1, max=8, description="Levels", tooltip="Resolutions; one less poolings"
            ),
            "convs": slider(
                min=1, max=12, description="Convolutions", tooltip="Convolutions in each block"
            ),
            "channels": slider(
                min=1, max=160, description="Channels", tooltip="Width of the first level"
            ),
            "image": slider(
                min=64, max=20_000, step=16, description="Image", tooltip="Side of the image, px"
            ),
            "tile": slider(
                min=0,
                max=4096,
                step=16,
                description="Tile (0: none)",
                tooltip="Side of a tile's core in pixels; 0 is the whole image",
            ),
            "batch": slider(
                min=1, max=64, description="Batch", tooltip="Images or tiles in one step"
            ),
            "precision": menu(
                options=get_args(Precision), description="Precision", tooltip="Of the arithmetic"
            ),
            "optimiser": menu(
                options=get_args(Optimiser), description="Optimiser", tooltip="Its state is kept"
            ),
            "recompute": menu(
                options=list(_RECOMPUTE.items()),
                description="Recompute",
                tooltip="What is computed again in the backward pass instead of being kept",
            ),
            "device": menu(
                options=[*DEVICES, "here"], description="Device", tooltip="Whose memory is used"
            ),
        }
        for widget in made.values():
            widget.style.description_width = "95px"
            widget.layout.width = "310px"
        return made

    def values(self, state: MemoryState) -> dict[str, Any]:
        return (
            {name: getattr(state.spec, name) for name in _SPEC}
            | {"image": state.image, "tile": state.tile}
            | {name: getattr(state.train, name) for name in _TRAIN}
            | {"device": state.device}
        )

    def build(self, values: Mapping[str, Any]) -> MemoryState:
        spec = self.state.spec.replace(**{name: values[name] for name in _SPEC})
        train = self.state.train.replace(**{name: values[name] for name in _TRAIN})
        return self._state(spec, train, values["image"], values["tile"], values["device"])

    def to_dict(self, state: MemoryState) -> dict[str, Any]:
        parts = {"spec": state.spec.to_dict(), "train": state.train.to_dict()}
        return parts | {"image": state.image, "tile": state.tile, "device": state.device}

    def from_dict(self, values: Mapping[str, Any]) -> MemoryState:
        fields = {"spec", "train", "image", "tile", "device"}
        parts = [values.get(name) for name in ("spec", "train")]
        if set(values) != fields or not all(isinstance(part, dict) for part in parts):
            fail(
                SpecError,
                rule="the state has the fields spec, train, image, tile and device",
                got=", ".join(map(str, values)),
                remedy="Choose a file that MemoryExplorer exported.",
            )
        spec, train = UNetSpec.from_dict(values["spec"]), TrainSpec.from_dict(values["train"])
        return self._state(spec, train, values["image"], values["tile"], str(values["device"]))

    def from_plan(self, plan: Plan) -> MemoryState:
        """The plan's network on one device: its whole batch of images, in one step."""
        batch, _, height, width = plan.shape_BCHW
        if height != width:
            fail(
                PlanError,
                rule="images are square here",
                got=f"a plan for {height} x {width} pixels",
                remedy="Use bigunet memory, which takes any shape.",
            )
        return self._state(plan.spec, plan.train.replace(batch=batch), height, 0, self.state.device)

    def exports(self) -> dict[str, str]:
        """The state as YAML, its sections `spec` and `train` in the place where the command line
        reads them (`bigunet memory --spec FILE --train FILE`), and bytes by layer as CSV."""
        name, state = type(self).__name__, self.to_dict(self.state)
        # YAML writes what appears twice once, and refers to it.
        content = {"explorer": name, "version": 1, "state": state}
        content |= {"spec": state["spec"], "train": state["train"]}
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(["layer", "block", *(f"{c}_bytes" for c in self.data["cause"].values)])
        held = self.data["held"]
        for layer, block, row in zip(
            held["layer"].values, held["block"].values, held.values.tolist(), strict=True
        ):
            writer.writerow([layer, block, *row])
        return {
            f"{name}.yaml": yaml.safe_dump(content, sort_keys=False),
            f"{name}.csv": lines.getvalue(),
        }

    def tables(self, state: MemoryState) -> xr.Dataset:
        return memory_tables(state)

    def details(self, state: MemoryState, data: xr.Dataset) -> xr.Dataset:
        return with_remedies(state, data)

    def plots(self, data: xr.Dataset) -> Mapping[str, Any]:
        return {"layers": plot_layers(data), "step": plot_step(data)}

    def rows(self, data: xr.Dataset) -> Sequence[Row]:
        peak = int(data["peak"][0])
        at_peak = data["at_peak"].values[0].tolist()
        held = data["held"].sum("layer").values.tolist()
        largest = int(data["held"].values[:, -1].max(initial=0))
        held[-1] = largest
        causes = [str(name) for name in data["cause"].values]
        body = sorted(zip(causes, at_peak, held, strict=True), key=lambda row: -row[1])
        rows: list[Row] = [["cause", "at the peak", "share", "over all layers"]]
        rows += [
            [cause, size(now), f"{100 * now / peak:.1f} %", size(all_layers)]
            for cause, now, all_layers in body
            if now or all_layers
        ]
        return [*rows, ["all", size(peak), "100.0 %", ""]]

    def more_tables(self, data: xr.Dataset) -> Mapping[str, Sequence[Row]]:
        rows: list[Row] = [["remedy", "what changes", "saves", "time", "then"]]
        for k, name in enumerate(data["remedy"].values):
            rows.append(
                [
                    str(name),
                    str(data["change"].values[k]),
                    size(int(data["saved"][k])),
                    f"x {float(data['time_factor'][k]):.2f}",
                    f"{size(int(data['after'][k]))}, "
                    + ("fits" if data["fits"][k] else "too much"),
                ]
            )
        return {"Remedies, each by itself: those that fit first, by time": rows}

    def summary(self, data: xr.Dataset) -> str:
        return describe(data)
