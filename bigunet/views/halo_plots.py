"""HaloExplorer's two plots: one tile to scale, and its work block by block."""

from __future__ import annotations

import holoviews as hv
import numpy as np
import xarray as xr

from bigunet.views.colours import LIGHT, OKABE_ITO, TEXT
from bigunet.views.hatch import hatch

__all__ = ["plot_tile", "plot_work"]

# More lattice lines than this are a grey mist: draw every second, fourth, ... one.
_MOST_LINES = 40
_RGBA = ["R", "G", "B", "A"]


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
