"""HaloExplorer: how far a U-Net sees, what a tile must read for it, and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import holoviews as hv
import ipywidgets as widgets
import numpy as np
import xarray as xr

from bigunet.errors import SpecError, fail
from bigunet.geometry import closed_form_halo
from bigunet.layers import layer_table
from bigunet.spec import UNetSpec
from bigunet.tiles import Box, check_core, place_tile
from bigunet.views.colours import LIGHT, OKABE_ITO, TEXT
from bigunet.views.hatch import hatch
from bigunet.views.kit import Explorer, Row

__all__ = [
    "HaloExplorer",
    "HaloState",
    "halo_tables",
    "plot_tile",
    "plot_work",
    "tile_costs",
]

# More lattice lines than this are a grey mist: draw every second, fourth, ... one.
_MOST_LINES = 40
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


def plot_tile(data: xr.Dataset) -> hv.Overlay:
    """The tile seen from above, to scale; pixels are counted from the core's upper left corner.

    Where `data` has a `gradient` (row, column), what a probe measured for the output cell at the
    core's upper left corner, it is laid over the tile.
    """
    side, halo = data.attrs["tile"], data.attrs["halo_aligned"]
    low, high = -halo, side + halo
    stride = data.attrs["stride"]
    step = stride
    while (high - low) / step > _MOST_LINES:
        step *= 2
    lines = np.arange(-(halo // step) * step, high + 1, step)
    lattice = [(x, low, x, high) for x in lines] + [(low, y, high, y) for y in lines]
    decoder = [b for b in data["block"].values if str(b).startswith("dec")]
    kept = []
    for block in decoder:
        extra = (int(data["kept"].sel(block=block)) - side) / 2
        kept.append((-extra, -extra, side + extra, side + extra))
    reach = data.attrs["halo"]
    read_text = f"halo: {reach} needed, {halo} read" if halo else "no halo"
    labels = [
        (side / 2, side / 2, f"core {side} x {side}"),
        (side / 2, low / 2 if halo else 0.04 * side, read_text),
    ]
    limits = (low - 0.06 * (high - low), high + 0.06 * (high - low))
    shown, ring = _measured(data.get("gradient"))
    every = "" if step == stride else f", one line in {step // stride}"
    return hv.Overlay(
        [
            hv.Rectangles([(low, low, high, high)], label="read").opts(
                fill_color=OKABE_ITO["sky"], fill_alpha=0.45, line_color=OKABE_ITO["blue"]
            ),
            hv.Rectangles([(0, 0, side, side)], label="core").opts(
                fill_color=OKABE_ITO["green"], fill_alpha=0.55, line_color=TEXT, line_width=2
            ),
            shown,
            hv.Segments(lattice).opts(color="#FFFFFF", line_width=0.6, alpha=0.9),
            hv.Rectangles(kept).opts(
                fill_color=LIGHT, fill_alpha=0.0, line_color=OKABE_ITO["blue"], line_dash="dashed"
            ),
            ring,
            hv.Labels(labels).opts(text_color=TEXT, text_font_size="12px"),
        ]
    ).opts(
        title=f"One tile to scale; lattice of stride {stride}{every}",
        # To scale, the frame being square; `data_aspect` would cost a search of all Bokeh models.
        frame_width=420,
        frame_height=420,
        xlim=limits,
        ylim=limits,
        invert_yaxis=True,
        toolbar=None,
        default_tools=[],
        active_tools=[],
        apply_ranges=False,
        show_legend=False,
        xlabel="column, pixels from the core's corner",
        ylabel="row, pixels from the core's corner",
    )


def _measured(measured: xr.DataArray | None) -> tuple[hv.RGB, hv.Rectangles]:
    """The probe's gradient as a shade of orange by its logarithm, and its extent as a frame."""
    frame = {"fill_color": LIGHT, "fill_alpha": 0.0, "line_width": 2}
    frame["line_color"] = OKABE_ITO["vermillion"]
    if measured is None:
        clear = np.zeros((1, 1, 4), np.uint8)
        bounds = (0.0, 0.0, 1.0, 1.0)
        return hv.RGB(clear, bounds=bounds, vdims=_RGBA), hv.Rectangles([]).opts(**frame)
    values = measured.values
    seen = values > 0
    shade = np.zeros((*values.shape, 4), np.uint8)
    logs = np.log10(values, where=seen, out=np.full(values.shape, np.nan))
    depth = (logs - np.nanmin(logs)) / max(float(np.nanmax(logs) - np.nanmin(logs)), 1e-9)
    shade[..., :3] = (213, 94, 0)  # vermillion
    shade[..., 3] = np.where(seen, 40 + 190 * np.nan_to_num(depth), 0).astype(np.uint8)
    y, x = measured["row"].values, measured["column"].values
    bounds = (float(x[0]), float(y[0]), float(x[-1] + 1), float(y[-1] + 1))
    rows, columns = np.flatnonzero(seen.any(1)), np.flatnonzero(seen.any(0))
    extent = (x[columns[0]], y[rows[0]], x[columns[-1]] + 1, y[rows[-1]] + 1)
    # hv.RGB takes its first row as the upper one, at the largest y.
    image = hv.RGB(shade[::-1], bounds=bounds, vdims=_RGBA)
    return image, hv.Rectangles([extent]).opts(**frame)


_RGBA = ["R", "G", "B", "A"]


def plot_work(data: xr.Dataset) -> hv.Overlay:
    """Work of one tile, block by block: the core's own, the margins', what cropping saves."""
    giga = {name: data[name].values / 1e9 for name in ("core_flops", "cropped_flops", "full_flops")}
    blocks = [str(b) for b in data["block"].values]
    bars = []
    bottom = np.zeros(len(blocks))
    parts = (
        ("core_flops", OKABE_ITO["green"]),
        ("cropped_flops", OKABE_ITO["sky"]),
        ("full_flops", "#FFFFFF"),
    )
    for name, colour in parts:
        top = np.maximum(giga[name], bottom)
        bars += [
            (i - 0.4, bottom[i], i + 0.4, top[i], colour)
            for i in range(len(blocks))
            if top[i] > bottom[i]
        ]
        bottom = top
    peak = float(bottom.max())
    legend = [
        (0.09, 1.11, "core's own work"),
        (0.40, 1.11, "halo's work"),
        (0.65, 1.11, "saved by cropping"),
    ]
    width = len(blocks)
    at = [(-0.5 + x * width, y * peak, text) for x, y, text in legend]
    swatches = [
        (x - 0.05 * width, y - 0.02 * peak, x - 0.015 * width, y + 0.02 * peak, colour)
        for (x, y, _), (_, colour) in zip(at, parts, strict=True)
    ]
    return hv.Overlay(
        [
            hv.Rectangles(bars + swatches, vdims=["colour"]).opts(
                fill_color="colour", line_color=TEXT, line_width=0.7
            ),
            hatch([bar[:4] for bar in bars + swatches if bar[4] == "#FFFFFF"], (width, 1.2 * peak)),
            hv.Labels(at).opts(text_align="left", text_color=TEXT, text_font_size="12px"),
        ]
    ).opts(
        title="Work of one tile, block by block (forward pass)",
        frame_width=420,
        frame_height=240,
        apply_ranges=False,
        show_legend=False,
        xticks=list(enumerate(blocks)),
        xlabel="block",
        ylabel="GFLOP a tile",
        xlim=(-0.6, width - 0.4),
        ylim=(0, 1.2 * peak),
        toolbar=None,
        default_tools=[],
        active_tools=[],
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
