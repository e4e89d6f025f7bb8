"""StageExplorer's three plots: the bar of layers, the devices' load, the timeline of one step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import holoviews as hv
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from bigunet.views.colours import CYCLE, GREY, LIGHT, OKABE_ITO, TEXT
from bigunet.views.hatch import hatch

__all__ = ["plot_devices", "plot_layers", "plot_timeline"]

Floats = NDArray[np.float64]
Hook = Callable[[Any, Any], None]

_WIDTH = 760
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
_LEAST_WIDTH = 0.022
_ARC = np.linspace(0, np.pi, 15)


def stage_colour(stage: int) -> str:
    return CYCLE[stage % len(CYCLE)]


def plot_layers(data: xr.Dataset, hook: Hook | None = None) -> hv.Overlay:
    """A rectangle a layer; skips as arcs above, those that leave their device marked and priced.

    Cuts are dashed lines, over which the live plot lays lines that can be dragged (`hook`).
    """
    in_ms = data.attrs["height"] == "ms"
    heights = data["layer_seconds"].values * 1e3 if in_ms else data["layer_bytes"].values / _GIB
    count = len(heights)
    top = float(heights.max()) or 1.0
    stages = data["stage_of"].values
    left = np.arange(count)
    colours = np.array([stage_colour(s) for s in range(int(stages.max()) + 1)])[stages]
    bars = (left, np.zeros(count), left + 1, heights, colours)
    cuts = data.attrs["cuts"]
    over = _stages_over(data)
    ends = (0, *cuts, count)
    boxes = [(ends[s], 0.0, ends[s + 1], 1.02 * top) for s in over]
    arcs, marked, prices = _arcs(data, top)
    lines = [(c, 0.0, c, 2.42 * top) for c in cuts]
    named = []
    for s, (a, b) in enumerate(zip(ends[:-1], ends[1:], strict=True)):
        seconds = float(data["forward"][s] + data["backward"][s]) * 1e3
        size = float(data["peak"][s]) / _GIB
        wide = b - a > 0.11 * count
        text = f"stage {s}: {seconds:.1f} ms, {size:.1f} GiB" if wide else f"{s}"
        # Neighbours' texts stand at two heights.
        named.append(((a + b) / 2, (2.62 if s % 2 else 2.8) * top, text, "middle"))
    return hv.Overlay(
        [
            hv.Rectangles(bars, vdims=["colour"]).opts(
                fill_color="colour", line_color="#FFFFFF", line_width=0.3
            ),
            hatch(boxes, (count, 3 * top), lines=60),
            hv.Segments(arcs).opts(color=GREY, line_width=1.0),
            hv.Segments(marked).opts(color=OKABE_ITO["vermillion"], line_width=2.2),
            hv.Segments(lines).opts(color=TEXT, line_width=1.4, line_dash="dashed"),
            hv.Labels(prices).opts(
                text_color=OKABE_ITO["vermillion"], text_font_size="11px", text_baseline="bottom"
            ),
            hv.Labels([n[:3] for n in named]).opts(text_color=TEXT, text_font_size="11px"),
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
    )


def _stages_over(data: xr.Dataset) -> list[int]:
    """Stages on devices whose memory does not hold them."""
    full = data["device_peak"].values > data.attrs["limit_bytes"]
    return [int(s) for s in np.flatnonzero(full[data["stage_device"].values])]


def _arcs(data: xr.Dataset, top: float) -> tuple[Any, Any, list[tuple[float, float, str]]]:
    """Segments of the skips that stay and of those that leave their device, and the prices."""
    source, sink = data["skip_source"].values + 0.5, data["skip_sink"].values + 0.5
    hops, size = data["skip_hops"].values, data["skip_bytes"].values
    widest = float((sink - source).max()) if len(source) else 1.0
    parts: tuple[list[Floats], list[Floats]] = ([], [])
    prices = []
    for a, b, times, num_bytes in zip(source, sink, hops, size, strict=True):
        rise = 1.25 * top * (0.25 + 0.75 * (b - a) / widest)
        x = (a + b) / 2 - (b - a) / 2 * np.cos(_ARC)
        y = 1.08 * top + rise * np.sin(_ARC)
        parts[int(times > 0)].append(np.stack([x[:-1], y[:-1], x[1:], y[1:]]))
        if times:
            text = f"{num_bytes / _MB:,.1f} MB" + (f" x {times} links" if times > 1 else "")
            prices.append(((a + b) / 2, 1.08 * top + rise, text))
    both = [tuple(np.concatenate(p, axis=1)) if p else [] for p in parts]
    return both[0], both[1], prices


def plot_devices(data: xr.Dataset) -> hv.Overlay:
    """Each device's busy share of the step and its memory against the limit, in per cent."""
    step, limit = data.attrs["step_seconds"], data.attrs["limit_bytes"]
    busy = 100 * data["busy"].values / step if step else np.zeros(data.sizes["of_device"])
    used = 100 * data["device_peak"].values / limit
    count = len(busy)
    end = max(118.0, 1.18 * float(used.max()))
    at = np.arange(count, dtype=float)
    over = used > 100
    fill = np.where(over, OKABE_ITO["vermillion"], OKABE_ITO["green"])
    bars = (
        np.zeros(2 * count),
        np.concatenate([at + 0.04, at - 0.40]),
        np.concatenate([busy, used]),
        np.concatenate([at + 0.40, at - 0.04]),
        np.concatenate([np.full(count, OKABE_ITO["sky"]), fill]),
    )
    boxes = [(100.0, d - 0.40, used[d], d - 0.04) for d in np.flatnonzero(over)]
    labels = []
    for d in range(count):
        gib = float(data["device_peak"][d]) / _GIB
        text = f"{gib:.1f} / {limit / _GIB:.1f} GiB ({used[d]:.0f} %)"
        if over[d]:
            text += f" OVER by {gib - limit / _GIB:.1f} GiB"
        labels += [(1.0, d + 0.22, f"busy {1e3 * float(data['busy'][d]):.1f} ms ({busy[d]:.0f} %)"),
                   (1.0, d - 0.22, text)]  # fmt: skip
    return hv.Overlay(
        [
            hv.Rectangles(bars, vdims=["colour"]).opts(
                fill_color="colour", fill_alpha=0.75, line_color=TEXT, line_width=0.6
            ),
            hatch(boxes, (end, count), lines=60),
            hv.Segments([(100.0, -0.5, 100.0, count - 0.5)]).opts(color=TEXT, line_width=2),
            hv.Labels(labels).opts(text_align="left", text_color=TEXT, text_font_size="11px"),
        ]
    ).opts(
        title=f"Devices: time of the step, and memory of a {data.attrs['processor']}",
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

    A measured step lies under the predicted one, hatched: on one clock where the machine is
    "here", else drawn to the predicted step's length.
    """
    count, step = data.sizes["of_device"], data.attrs["step_seconds"]
    both = "measured_start" in data
    taken = data.attrs.get("measured_seconds", 0.0)
    scale = 1.0 if data.attrs["machine"] == "here" or not taken else step / taken
    end = 1e3 * max(step, taken * scale if both else 0.0)
    depth = 0.40 if not both else 0.04
    up, texts, _ = _boxes(data, "", (-0.40, depth), 1.0, end)
    low: Any = []
    seen: list[tuple[float, float, float, float]] = []
    if both:
        low, more, seen = _boxes(data, "measured_", (0.10, 0.42), scale, end)
        texts += more
    title = f"One step: {1e3 * step:.1f} ms predicted, bubble {100 * data.attrs['bubble']:.0f} %"
    if both:
        title += f"; {1e3 * taken:.1f} ms measured {data.attrs['measured_on']} (hatched"
        title += ")" if scale == 1.0 else ", drawn to the same length)"
    return hv.Overlay(
        [
            hv.Rectangles(up, vdims=["colour"]).opts(
                fill_color="colour", line_color=TEXT, line_width=0.4
            ),
            hv.Rectangles(low, vdims=["colour"]).opts(
                fill_color="colour", fill_alpha=0.55, line_color=TEXT, line_width=0.4
            ),
            hatch(seen, (end, count), lines=90),
            hv.Labels(texts).opts(text_color=TEXT, text_font_size="10px"),
            hv.Segments([(1e3 * step, -0.5, 1e3 * step, count - 0.5)]).opts(
                color=LIGHT, line_width=1.5
            ),
        ]
    ).opts(
        title=title,
        frame_width=_WIDTH,
        frame_height=190,
        xlim=(0, 1.01 * end if end else 1.0),
        ylim=(-0.5, count - 0.5),
        yticks=[(d, f"device {d}") for d in range(count)],
        invert_yaxis=True,
        xlabel="ms (F forward, C recompute, B backward, A all-reduce; white is idle)",
        ylabel="",
        **_FIXED,
    )


def _boxes(
    data: xr.Dataset, prefix: str, depth: tuple[float, float], scale: float, end: float
) -> tuple[Any, list[tuple[float, float, str]], list[tuple[float, float, float, float]]]:
    """Rectangles of passes as columns, their letters where they are wide enough, and the boxes."""
    kind = data[f"{prefix}kind"].values
    kept = np.isin(kind, list(_KINDS))
    kind = kind[kept]
    start, stop, device, number = (
        data[prefix + name].values[kept] for name in ("start", "end", "device", "micro_batch")
    )
    start, stop = 1e3 * scale * start, 1e3 * scale * stop
    colours = np.array([_KINDS[k][1] for k in kind], dtype="U7")
    columns = (start, device + depth[0], stop, device + depth[1], colours)
    wide = np.flatnonzero(stop - start > _LEAST_WIDTH * end)
    middle = (depth[0] + depth[1]) / 2
    texts = [
        (
            (start[i] + stop[i]) / 2,
            device[i] + middle,
            _KINDS[kind[i]][0] + (str(number[i]) if number[i] >= 0 else ""),
        )
        for i in wide
    ]
    boxes = list(zip(*(c.tolist() for c in columns[:4]), strict=True))
    return columns, texts, boxes
