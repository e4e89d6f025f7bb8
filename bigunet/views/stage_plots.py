"""StageExplorer's three plots: the bar of layers, the devices' load, the timeline of one step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import holoviews as hv
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from bigunet.views.colours import CYCLE, GREY, OKABE_ITO, TEXT
from bigunet.views.hatch import hatch

__all__ = ["plot_devices", "plot_layers", "plot_timeline"]

Floats = NDArray[np.float64]
Hook = Callable[[Any, Any], None]

_WIDTH = 600
_GIB, _MB = 2.0**30, 1e6
_FIXED: dict[str, Any] = {
    "apply_ranges": False,
    "show_legend": False,
    "toolbar": None,
    "default_tools": [],
    "active_tools": [],
}
_KINDS = {
    "forward": ("F", OKABE_ITO["sky"]),
    "recompute": ("C", OKABE_ITO["yellow"]),
    "backward": ("B", OKABE_ITO["orange"]),
    "reduce": ("A", OKABE_ITO["purple"]),
}
# Letters narrower than this share of the plot would run into each other.
_LEAST_WIDTH = 0.024
_ARC = np.linspace(0, np.pi, 15)


def _gib(value: float) -> str:
    return f"{value:.1f}" if value >= 0.95 else f"{value:.2f}"


def stage_colour(stage: int) -> str:
    return CYCLE[stage % len(CYCLE)]


def plot_layers(data: xr.Dataset, hook: Hook | None = None) -> hv.Overlay:
    """A rectangle a layer; skips as arcs above, those that leave their device bold and priced.

    Cuts are upright lines, over which the live plot lays lines that can be dragged (`hook`).
    """
    in_ms = data.attrs["height"] == "ms"
    heights = data["layer_seconds"].values * 1e3 if in_ms else data["layer_bytes"].values / _GIB
    count = len(heights)
    top = float(heights.max()) or 1.0
    stages = data["stage_of"].values
    left = np.arange(count)
    colours = np.array([stage_colour(s) for s in range(int(stages.max()) + 1)], object)[stages]
    bars = (left, np.zeros(count), left + 1, heights, colours)
    cuts = data.attrs["cuts"]
    ends = (0, *cuts, count)
    boxes = [(ends[s], 0.0, ends[s + 1], 1.02 * top) for s in _stages_over(data)]
    arcs, marked, texts = _arcs(data, top)
    upright = np.array([(c, 0.0, c, 2.42 * top) for c in cuts]).reshape(-1, 4).T
    forward, backward, peak = (data[n].values for n in ("forward", "backward", "peak"))
    for s, (a, b) in enumerate(pairwise(ends)):
        seconds, share = f"{1e3 * (forward[s] + backward[s]):.1f} ms", (b - a) / count
        text = f"{s}" if share < 0.11 else f"{s}: {seconds}"
        if share > 0.22:
            text = f"stage {s}: {seconds}, {_gib(peak[s] / _GIB)} GiB"
        # Neighbours' texts stand at two heights.
        texts.append(((a + b) / 2, (2.58 if s % 2 else 2.8) * top, text))
    return hv.Overlay(
        [
            hv.Rectangles(bars, vdims=["colour"]).opts(
                fill_color="colour", line_color="#FFFFFF", line_width=0.3
            ),
            _lines((arcs, GREY), (marked, OKABE_ITO["vermillion"]), (upright, TEXT),
                   (_hatching(boxes, (count, 3 * top)), TEXT)),
            _texts(texts),
        ]
    ).opts(
        title="Layers in the order they run, by stage; drag a cut, or use its slider",
        frame_width=_WIDTH,
        frame_height=270,
        xlim=(-0.01 * count, 1.01 * count),
        ylim=(0, 3.0 * top),
        xlabel="layer",
        ylabel=f"{data.attrs['height']}, one micro-batch",
        hooks=[hook] if hook else [],
        **_FIXED,
    )  # fmt: skip


def _lines(*groups: tuple[Any, str]) -> hv.Segments:
    """All lines of a plot as one element, which is quicker to draw; (4, n) columns and a colour.

    Never empty: HoloViews cannot tell the kind of a column without a value.
    """
    some = [(columns, colour) for columns, colour in groups if np.size(columns)]
    if not some:
        some = [(np.full((4, 1), -9.0), TEXT)]
    columns = np.concatenate([c for c, _ in some], axis=1)
    colours = np.concatenate([np.full(c.shape[1], colour, object) for c, colour in some])
    return hv.Segments((*columns, colours), vdims=["colour"]).opts(color="colour", line_width=1.2)


def _texts(texts: list[tuple[float, float, str]], align: str = "center") -> hv.Labels:
    return hv.Labels(texts, vdims=["text"]).opts(
        text_color=TEXT, text_font_size="11px", text_align=align
    )


def _hatching(boxes: list[tuple[float, float, float, float]], span: tuple[float, float]) -> Floats:
    """The columns of the hatching of boxes."""
    element = hatch(boxes, span)
    return np.array([element.dimension_values(i) for i in range(4)], dtype=float)


def _stages_over(data: xr.Dataset) -> list[int]:
    """Stages on devices whose memory does not hold them."""
    full = data["device_peak"].values > data.attrs["limit_bytes"]
    return [int(s) for s in np.flatnonzero(full[data["stage_device"].values])]


def _arcs(data: xr.Dataset, top: float) -> tuple[Floats, Floats, list[Any]]:
    """Columns of the arcs of skips that stay and of those that leave their device; the prices."""
    source, sink = data["skip_source"].values + 0.5, data["skip_sink"].values + 0.5
    hops, size = data["skip_hops"].values, data["skip_bytes"].values
    parts: tuple[list[Floats], list[Floats]] = ([np.empty((4, 0))], [np.empty((4, 0))])
    prices = []
    # Arcs are equally far apart, the shortest lowest, so that a price fits below each.
    rank = np.argsort(np.argsort(sink - source))
    for a, b, times, num_bytes, at in zip(source, sink, hops, size, rank, strict=True):
        rise = 1.25 * top * (at + 1) / len(rank)
        x = (a + b) / 2 - (b - a) / 2 * np.cos(_ARC)
        # Three lines side by side make a bold one.
        for lift in (0.0, 0.012, 0.024) if times else (0.0,):
            y = (1.08 + lift) * top + rise * np.sin(_ARC)
            parts[int(times > 0)].append(np.stack([x[:-1], y[:-1], x[1:], y[1:]]))
        if times:
            text = f"{num_bytes / _MB:,.1f} MB" + (f" x {times} links" if times > 1 else "")
            middle = (a + b) / 2
            prices.append((middle, (1.0 + 1.25 * at / len(rank) + 0.17) * top, text))
    return np.concatenate(parts[0], axis=1), np.concatenate(parts[1], axis=1), prices


def plot_devices(data: xr.Dataset) -> hv.Overlay:
    """Each device's busy share of the step and its memory against the limit, in per cent."""
    step, limit = data.attrs["step_seconds"], data.attrs["limit_bytes"]
    busy = 100 * data["busy"].values / step if step else np.zeros(data.sizes["of_device"])
    peaks = data["device_peak"].values
    used = 100 * peaks / limit
    count = len(busy)
    # Room for the words beside what is over.
    end = max(118.0, (1.75 if used.max() > 100 else 1.18) * float(used.max()))
    at = np.arange(count, dtype=float)
    over = used > 100
    fill = np.where(over, OKABE_ITO["vermillion"], OKABE_ITO["green"]).astype(object)
    bars = (
        np.zeros(2 * count),
        np.concatenate([at - 0.40, at + 0.04]),
        np.concatenate([busy, used]),
        np.concatenate([at - 0.04, at + 0.40]),
        np.concatenate([np.full(count, OKABE_ITO["sky"], object), fill]),
    )
    boxes = [
        (100.0, float(d) + 0.04, float(used[d]), float(d) + 0.40) for d in np.flatnonzero(over)
    ]
    limits = np.array([[100.0, 100.3], [-0.5, -0.5], [100.0, 100.3], [count - 0.5] * 2])
    labels = []
    for d in range(count):
        gib = peaks[d] / _GIB
        text = f"{_gib(gib)} / {limit / _GIB:.1f} GiB ({used[d]:.0f} %)"
        at_x = 0.01 * end
        if over[d]:
            text += f" OVER by {gib - limit / _GIB:.1f} GiB"
            at_x += used[d]
        spent = f"busy {10 * busy[d] * step:.1f} ms ({busy[d]:.0f} %)"
        labels += [(0.01 * end, d - 0.22, spent), (at_x, d + 0.22, text)]
    return hv.Overlay(
        [
            hv.Rectangles(bars, vdims=["colour"]).opts(
                fill_color="colour", fill_alpha=0.75, line_color=TEXT, line_width=0.6
            ),
            _lines((limits, TEXT), (_hatching(boxes, (end, count)), TEXT)),
            _texts(labels, "left"),
        ]
    ).opts(
        title=f"Devices: time of the step, and memory ({data.attrs['processor']})",
        frame_width=_WIDTH,
        frame_height=160,
        xlim=(0, end),
        ylim=(-0.5, count - 0.5),
        yticks=[(d, f"device {d}") for d in range(count)],
        invert_yaxis=True,
        xlabel="% of the step, % of the memory (line: the limit)",
        ylabel="",
        **_FIXED,
    )


def plot_timeline(data: xr.Dataset) -> hv.Overlay:
    """What each device does when: F forward, C recompute, B backward, A all-reduce; white: idle.

    A measured step lies under the predicted one: on one clock where the machine is "here", else
    drawn to the predicted step's length.
    """
    count, step = data.sizes["of_device"], data.attrs["step_seconds"]
    both = "measured_start" in data
    taken = data.attrs.get("measured_seconds", 0.0)
    scale = 1.0 if data.attrs["machine"] == "here" or not taken else step / taken
    end = 1e3 * max(step, taken * scale if both else 0.0)
    groups = [_boxes(data, "", (-0.40, 0.04 if both else 0.40), 1.0, end)]
    ticks = [(d - 0.18 * both, f"device {d}") for d in range(count)]
    if both:
        groups.append(_boxes(data, "measured_", (0.10, 0.42), scale, end))
        ticks += [(d + 0.26, "measured") for d in range(count)]
    boxes = [np.concatenate(columns) for columns in zip(*(g[0] for g in groups), strict=True)]
    texts = [text for g in groups for text in g[1]]
    last = np.array([[1e3 * step], [-0.5], [1e3 * step], [count - 0.5]])
    title = f"One step: {1e3 * step:.1f} ms predicted, bubble {100 * data.attrs['bubble']:.0f} %"
    if both:
        title += f"; {1e3 * taken:.1f} ms {data.attrs['measured_on']}"
        title += "" if scale == 1.0 else " (drawn to the same length)"
    return hv.Overlay(
        [
            hv.Rectangles(tuple(boxes), vdims=["colour"]).opts(
                fill_color="colour", line_color=TEXT, line_width=0.4
            ),
            _lines((last, GREY)),
            _texts(texts),
        ]
    ).opts(
        title=title,
        frame_width=_WIDTH,
        frame_height=190,
        xlim=(0, 1.01 * end if end else 1.0),
        ylim=(-0.5, count - 0.5),
        yticks=ticks,
        invert_yaxis=True,
        xlabel="ms (F forward, C recompute, B backward, A all-reduce; white is idle)",
        ylabel="",
        **_FIXED,
    )


def _boxes(
    data: xr.Dataset, prefix: str, depth: tuple[float, float], scale: float, end: float
) -> tuple[tuple[Any, ...], list[tuple[float, float, str]]]:
    """Rectangles of passes as columns, and their letters where they are wide enough."""
    kind = data[f"{prefix}kind"].values
    kept = np.isin(kind, list(_KINDS))
    kind = kind[kept].tolist()
    start, stop, device, number = (
        data[prefix + name].values[kept] for name in ("start", "end", "device", "micro_batch")
    )
    start, stop = 1e3 * scale * start, 1e3 * scale * stop
    colours = np.array([_KINDS[k][1] for k in kind], dtype=object)
    middle = (depth[0] + depth[1]) / 2
    texts = [
        (
            (start[i] + stop[i]) / 2,
            device[i] + middle,
            _KINDS[kind[i]][0] + (str(number[i]) if number[i] >= 0 else ""),
        )
        for i in np.flatnonzero(stop - start > _LEAST_WIDTH * end)
    ]
    return (start, device + depth[0], stop, device + depth[1], colours), texts
