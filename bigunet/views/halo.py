"""HaloExplorer: how far a U-Net sees, what a tile must read for it, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import ipywidgets as widgets
import xarray as xr

from bigunet.errors import SpecError, fail
from bigunet.geometry import closed_form_halo
from bigunet.layers import layer_table
from bigunet.plan import Plan
from bigunet.spec import UNetSpec
from bigunet.tiles import Box, check_core, place_tile
from bigunet.views.halo_plots import plot_tile, plot_work
from bigunet.views.kit import Explorer, Row

__all__ = ["HaloExplorer", "HaloState", "halo_tables", "tile_costs"]

_MOST_PIXELS = 2**15


@dataclass(frozen=True)
class HaloState:
    """A network and the side of its tiles' cores in pixels; `measure` asks for the probe."""

    spec: UNetSpec = field(default_factory=UNetSpec)
    tile: int = 512
    measure: bool = False


def halo_tables(state: HaloState) -> xr.Dataset:
    """Extents and work of one tile far from the image's border.

    Dimension `block` holds the network's blocks in the order they run; `margin` (pixels of that
    block's level) is what its output needs around the core, `kept` the side of the square that is
    computed, in image pixels. `core_flops` is the work that the core would need alone,
    `cropped_flops` and `full_flops` those of the whole tile with and without the decoder's crops.

    Raises
    ------
    ShapeError : for a tile off the stride.
    """
    spec, side = state.spec, state.tile
    check_core(side, spec)
    halo = spec.halo_aligned
    read = side + 2 * halo
    if read > _MOST_PIXELS:
        fail(
            SpecError,
            rule=f"a tile and its halo are at most {_MOST_PIXELS} pixels wide here",
            got=f"{side} + 2 x {halo}",
            remedy="Choose fewer levels or convolutions, or a smaller kernel.",
        )
    core = Box(halo, halo + side, halo, halo + side)
    image = Box(0, read, 0, read)
    tile = place_tile(core, image, image, spec)
    shape = (1, spec.in_channels, read, read)
    tables = {
        "core_flops": layer_table(spec, (1, spec.in_channels, side, side)),
        "cropped_flops": layer_table(spec, shape, tile=tile),
        "full_flops": layer_table(spec, shape),
    }
    blocks = list(dict.fromkeys(row.block for row in tables["full_flops"]))
    level = {row.block: row.level for row in tables["full_flops"]}
    work = {
        name: ("block", [float(sum(r.flops for r in rows if r.block == b)) for b in blocks])
        for name, rows in tables.items()
    }
    # The last layer of a block has the size that the block puts out.
    kept = {row.block: row.out_shape[-1] << row.level for row in tables["cropped_flops"]}
    needs = spec.margins
    margin = []
    for block in blocks:
        at = level[block]
        encoder = block.startswith("enc") or block == "mid"
        margins = needs.encoder_out if encoder else needs.decoder_out
        margin.append(0 if block == "head" else margins[at])
    flops = {"units": "FLOP"}
    data = xr.Dataset(
        {name: (*value, flops) for name, value in work.items()}
        | {
            "level": ("block", [level[b] for b in blocks]),
            "margin": ("block", margin, {"units": "pixels of the block's level"}),
            "kept": ("block", [kept[b] for b in blocks], {"units": "image pixels"}),
        },
        coords={"block": blocks},
        attrs={
            "tile": side,
            "halo": spec.halo,
            "halo_aligned": halo,
            "stride": spec.stride,
            "closed_form": closed_form_halo(spec.levels, spec.radius),
            "read": read,
            "up": spec.up,
            "area_redundancy": (read / side) ** 2,
        },
    )
    total = float(data["core_flops"].sum())
    data.attrs["cropped_redundancy"] = float(data["cropped_flops"].sum()) / total
    data.attrs["full_redundancy"] = float(data["full_flops"].sum()) / total
    return data


def tile_costs(spec: UNetSpec, tiles: Iterable[int]) -> xr.Dataset:
    """Dim `tile`: pixels read, and work with and without the cropped decoder, over the core's own.

    Raises
    ------
    ShapeError : for a tile off the stride.
    """
    sides = list(tiles)
    attrs = [halo_tables(HaloState(spec, side)).attrs for side in sides]
    names = ("area_redundancy", "full_redundancy", "cropped_redundancy")
    return xr.Dataset(
        {name: ("tile", [a[name] for a in attrs], {"units": "1"}) for name in names},
        coords={"tile": ("tile", sides, {"units": "pixels"})},
    )


class HaloExplorer(Explorer[HaloState]):
    """Levels, convolutions, kernel, tile and up-sampling; the tile drawn to scale and its cost.

    Parameters
    ----------
    spec : the network to begin with, `UNetSpec()` by default; channels and the like stay its own.
    tile : side of a tile's core in pixels.
    measure : the gradient probe `bigunet.probe.receptive_field`, or another function of a spec
        that returns its result; without it, the switch "Measure" is absent.
    """

    title = "Receptive field, halo and tile"
    help = (
        "An output pixel depends on everything in its receptive field. A tile therefore reads its "
        "core (green) plus a halo (blue), and answers for the core alone."
    )

    def __init__(
        self,
        spec: UNetSpec | None = None,
        *,
        tile: int = 512,
        measure: Callable[[UNetSpec], xr.DataArray] | None = None,
    ) -> None:
        self._measured = lru_cache(maxsize=32)(measure) if measure else None
        super().__init__(HaloState(spec or UNetSpec(), tile))

    def controls(self) -> Mapping[str, Any]:
        slider = widgets.IntSlider
        made: dict[str, Any] = {
            "levels": slider(
                min=1, max=8, description="Levels", tooltip="Resolutions; one less poolings"
            ),
            "convs": slider(
                min=1, max=5, description="Convolutions", tooltip="Convolutions in each block"
            ),
            "kernel": slider(
                min=1, max=9, step=2, description="Kernel", tooltip="Side of the square kernel"
            ),
            "tile": slider(
                min=32, max=2048, step=32, description="Tile", tooltip="Side of the core, pixels"
            ),
            "up": widgets.Dropdown(
                options=["transpose", "nearest", "bilinear"],
                description="Up-sampling",
                tooltip="How the decoder doubles its maps",
            ),
        }
        for widget in made.values():
            widget.style.description_width = "95px"
            widget.layout.width = "310px"
        if self._measured is not None:
            made["measure"] = widgets.Checkbox(
                description="Measure by a gradient probe",
                tooltip="Overlay the receptive field of a real network's output cell",
                indent=False,
            )
        return made

    def values(self, state: HaloState) -> dict[str, Any]:
        spec = state.spec
        fields = ("levels", "convs", "kernel", "up")
        chosen = {name: getattr(spec, name) for name in fields}
        return chosen | {"tile": state.tile, "measure": state.measure}

    def build(self, values: Mapping[str, Any]) -> HaloState:
        fields = ("levels", "convs", "kernel", "up")
        spec = self.state.spec.replace(**{name: values[name] for name in fields})
        return HaloState(spec, values["tile"], bool(values.get("measure", False)))

    def to_dict(self, state: HaloState) -> dict[str, Any]:
        return {"spec": state.spec.to_dict(), "tile": state.tile}

    def from_dict(self, values: Mapping[str, Any]) -> HaloState:
        if set(values) != {"spec", "tile"} or not isinstance(values["tile"], int):
            fail(
                SpecError,
                rule="the state has the fields spec and tile (an integer)",
                got=", ".join(map(str, values)),
                remedy="Choose a file that HaloExplorer exported.",
            )
        return HaloState(UNetSpec.from_dict(values["spec"]), values["tile"])

    def from_plan(self, plan: Plan) -> HaloState:
        return HaloState(plan.spec, self.state.tile)

    def tables(self, state: HaloState) -> xr.Dataset:
        data = halo_tables(state)
        if state.measure and self._measured is not None:
            found = self._measured(state.spec)
            data["gradient"] = found.rename(y="row", x="column")
            data.attrs["measured"] = int(found.attrs["reach"])
        return data

    def plots(self, data: xr.Dataset) -> Mapping[str, Any]:
        return {"tile": plot_tile(data), "work": plot_work(data)}

    def rows(self, data: xr.Dataset) -> Sequence[Row]:
        header = ["block", "level", "margin", "kept (px)", "core GFLOP", "cropped", "full decoder"]
        rows: list[Row] = [header]
        for block in data["block"].values:
            line = data.sel(block=block)
            work = [
                float(line[name]) / 1e9 for name in ("core_flops", "cropped_flops", "full_flops")
            ]
            rows.append(
                [str(block), int(line["level"]), int(line["margin"]), int(line["kept"]), *work]
            )
        names = ("core_flops", "cropped_flops", "full_flops")
        rows.append(["all", "", "", "", *(float(data[n].sum()) / 1e9 for n in names)])
        return rows

    def summary(self, data: xr.Dataset) -> str:
        a = data.attrs
        exact = "equal to" if a["closed_form"] == a["halo"] else "an upper bound of"
        closed = f"(3 x {a['stride']} - 1) x radius = {a['closed_form']} is {exact} it"
        text = (
            f"Stride {a['stride']}, halo {a['halo']} pixels, {a['halo_aligned']} on the stride. "
            f"A core of {a['tile']} reads {a['read']} x {a['read']} pixels, "
            f"{a['area_redundancy']:.2f} times its area. Its work is "
            f"{a['cropped_redundancy']:.2f} times the core's own with the cropped decoder, "
            f"{a['full_redundancy']:.2f} times without."
        )
        if a["up"] != "bilinear":
            text += f" Closed form: {closed}."
        if "measured" in a:
            text += f" Measured reach: {a['measured']} pixels."
        return text
