"""MemoryExplorer's two plots: bytes piled up layer by layer, and alive along one step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import holoviews as hv
import numpy as np
import xarray as xr

from bigunet.views.colours import GREY, LIGHT, OKABE_ITO, TEXT
from bigunet.views.hatch import hatch

__all__ = ["COLOURS", "plot_layers", "plot_step", "size"]

COLOURS: dict[str, str] = {
    "parameters": OKABE_ITO["blue"],
    "buffers": OKABE_ITO["black"],
    "gradients": OKABE_ITO["sky"],
    "optimiser": OKABE_ITO["purple"],
    "average": GREY,
    "input": OKABE_ITO["green"],
    "activations": OKABE_ITO["orange"],
    "skips": OKABE_ITO["vermillion"],
    "casts": OKABE_ITO["yellow"],
    "temporaries": LIGHT,
}

_GIB = 2**30
_FRAME = (560, 260)
# More steps than this are finer than the screen's pixels are worth: keep each group's highest.
_MOST_MOMENTS = 140
# A limit higher than this many times the data would leave the data flat: it is named instead.
_MOST_LIMIT = 4.0

# Mean width of a character of the plots' texts, pixels.
_CHARACTER = 6.3

Box = tuple[float, float, float, float]
Bar = tuple[float, float, float, float, str]
Text = tuple[float, float, str]


def size(num_bytes: float) -> str:
    """GiB with one decimal, or MiB where that would say too little."""
    if num_bytes >= 0.1 * _GIB:
        return f"{num_bytes / _GIB:,.1f} GiB"
    return f"{num_bytes / 2**20:,.1f} MiB"


def _frame(title: str, top: float, right: float, **more: Any) -> dict[str, Any]:
    return {
        "title": title,
        "frame_width": _FRAME[0],
        "frame_height": _FRAME[1],
        "apply_ranges": False,
        "show_legend": False,
        "ylabel": "GiB",
        "ylim": (0, top),
        "xlim": (-0.6, right),
        "toolbar": None,
        "default_tools": [],
        "active_tools": [],
        **more,
    }


def _height(highest: float, limit: float) -> float:
    """Top of the axis, with the limit on it unless that is far above."""
    shown = limit <= _MOST_LIMIT * highest
    return 1.2 * max(highest, limit if shown else 0.0, 1e-9)


def _limit(
    name: str, limit: float, top: float, right: float, start: float = -0.6
) -> tuple[list[Bar], list[Text]]:
    """The device's limit as a heavy line, named at the upper right; or said to lie above."""
    above = limit > top
    text = f"{'' if above else 'heavy line: '}limit of {name}, {limit:,.1f} GiB"
    text += ", above this plot" if above else ""
    half = 0.004 * top
    line = [] if above else [(start, limit - half, right, limit + half, TEXT)]
    return line, [(_left_of(0.99 * right, text, right), 0.95 * top, text)]


def _left_of(end: float, text: str, right: float) -> float:
    """Where a text begins that ends at `end`; all texts of a plot are one left-aligned element."""
    return end - len(text) * _CHARACTER / _FRAME[0] * right


def _overlay(bars: list[Bar], over: list[Box], texts: list[Text], top: float, right: float) -> Any:
    """Few elements: Bokeh's time goes by their number, not by that of their bars."""
    return hv.Overlay(
        [
            hv.Rectangles(bars, vdims=["colour"]).opts(fill_color="colour", line_color=None),
            hatch(over, (right, top)),
            hv.Labels(texts, vdims="text").opts(
                text_align="left", text_color=TEXT, text_font_size="12px"
            ),
        ]
    )


def _over(bars: Sequence[Bar], limit: float) -> list[Box]:
    """The parts of bars above the limit."""
    return [(x0, max(y0, limit), x1, y1) for x0, y0, x1, y1, _ in bars if y1 > limit]


def plot_layers(data: xr.Dataset) -> hv.Overlay:
    """Each layer's (or block's) bytes by cause, piled upon those of the layers before it."""
    pile = data["pile"].values / _GIB
    causes = [str(name) for name in data["cause"].values]
    kept = [k for k, name in enumerate(causes) if name != "temporaries" and pile[:, k].any()]
    limit = data.attrs["capacity_bytes"] / _GIB
    bars: list[Bar] = []
    level = 0.0
    for i, row in enumerate(pile):
        for k in kept:
            if row[k]:
                bars.append((i - 0.45, level, i + 0.45, level + row[k], COLOURS[causes[k]]))
                level += row[k]
    top = _height(level, limit)
    right = len(pile) - 0.4
    over = _over(bars, limit)
    # The line leaves the legend's texts readable.
    start = 0.36 * right if limit > (0.9 - 0.068 * len(kept)) * top else -0.6
    line, texts = _limit(data.attrs["device"], limit, top, right, start)
    for n, k in enumerate(kept):
        y = (0.95 - 0.068 * n) * top
        box = (0.03 * right, y - 0.022 * top, 0.055 * right, y + 0.022 * top)
        bars.append((*box, COLOURS[causes[k]]))
        texts.append((0.065 * right, y, f"{causes[k]} {size(pile[:, k].sum() * _GIB)}"))
    what = "block" if data.attrs["grouped"] else "layer"
    every = f" ({data.attrs['layers']} layers)" if data.attrs["grouped"] else ""
    excess = f", {size((level - limit) * _GIB)} over the limit" if level > limit else ""
    return _overlay(bars + line, over, texts, top, right).opts(
        **_frame(
            f"Held by each {what}{every}, piled up: {size(level * _GIB)}{excess}",
            top,
            right,
            xticks=_block_ticks([str(b) for b in data["bar_block"].values]),
            xlabel="block, in the order they run",
        )
    )


def _block_ticks(blocks: Sequence[str]) -> list[tuple[float, str]]:
    """A tick in the middle of each block, where its name has room."""
    ticks: list[tuple[float, str]] = []
    room = len(blocks) / 18
    for name in dict.fromkeys(blocks):
        places = [i for i, block in enumerate(blocks) if block == name]
        middle = (places[0] + places[-1]) / 2
        if not ticks or middle - ticks[-1][0] >= room:
            ticks.append((middle, name))
    return ticks


def plot_step(data: xr.Dataset) -> hv.Overlay:
    """All that is alive at the highest point of each operation of one step, by cause."""
    live = data["live"].values / _GIB
    total = live.sum(axis=1)
    peak_at = int(data["peak_moment"][0])
    width = -(-len(live) // _MOST_MOMENTS)
    # Of each group of `width` moments the highest, so that the peak is among them.
    starts = np.arange(0, len(live), width)
    chosen = [int(s + np.argmax(total[s : s + width])) for s in starts]
    causes = [str(name) for name in data["cause"].values]
    order = [k for k in range(len(causes)) if live[:, k].any()]
    limit = data.attrs["capacity_bytes"] / _GIB
    ends = np.append(starts[1:], len(live))
    columns = live[chosen][:, order]
    upper = np.cumsum(columns, axis=1)
    bars: list[Bar] = []
    for n, k in enumerate(order):
        lower = upper[:, n] - columns[:, n]
        # Columns alike side by side are one bar; a little wider, so that no seam shows.
        new = (np.diff(upper[:, n]) != 0) | (np.diff(lower) != 0)
        first = np.concatenate(([0], np.flatnonzero(new) + 1, [len(starts)]))
        bars += [
            (float(starts[i]), float(lower[i]), float(ends[j - 1]) + 0.05 * width,
             float(upper[i, n]), COLOURS[causes[k]])
            for i, j in pairwise(first.tolist())
            if columns[i, n]
        ]  # fmt: skip
    peak = float(total[peak_at])
    top = _height(peak, limit)
    right = float(len(live)) * 1.03
    crowns = [
        (float(s), limit, float(e), float(t))
        for s, e, t in zip(starts, ends, total[chosen], strict=True)
        if t > limit
    ]
    a = data.attrs
    line, texts = _limit(a["device"], limit, top, right)
    ticks, edges = _phases(data)
    thin = 0.0008 * right
    bars += [(x - thin, 0.0, x + thin, top, GREY) for x in edges]
    # The peak: a mark and its name, kept inside the frame.
    middle = min((peak_at // width) * width + width / 2, float(len(live)))
    mark = (0.008 * right, 0.017 * top)
    bars += line
    bars.append(
        (middle - mark[0], peak - mark[1], middle + mark[0], peak + mark[1], OKABE_ITO["black"])
    )
    name = f"peak {size(peak * _GIB)}: {a['peak_phase']}, {a['peak_layer']}"
    half = len(name) * _CHARACTER / _FRAME[0] / 2 * right
    begin = min(max(middle - half, 0.01 * right), 0.99 * right - 2 * half)
    texts.append((begin, peak + 0.05 * top, name))
    return _overlay(bars, crowns, texts, top, right).opts(
        **_frame(
            f"Alive along one step: {a['precision']}, batch {a['batch']}, {a['optimiser']}",
            top,
            right,
            xticks=ticks,
            xlabel="operations of one step, in order; colours as above, light grey: temporaries",
        )
    )


def _phases(data: xr.Dataset) -> tuple[list[tuple[float, str]], list[float]]:
    """A tick in the middle of each phase, and where phases meet; recomputing is backward's."""
    names = [str(name) for name in data["phase"].values]
    numbers = data["moment_phase"].values.copy()
    recompute, backward = names.index("recompute"), names.index("backward")
    again = bool((numbers == recompute).any())
    numbers[numbers == recompute] = backward
    edges = np.flatnonzero(np.diff(numbers)) + 1
    bounds = [0, *edges.tolist(), len(numbers)]
    ticks = []
    for start, stop in pairwise(bounds):
        name = names[numbers[start]]
        text = "recompute and backward" if again and name == "backward" else name
        ticks.append(((start + stop) / 2, text))
    return ticks, [float(edge) for edge in edges]
