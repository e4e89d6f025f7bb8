"""ScalingExplorer's four plots: speed-up, efficiency, where the time goes, and the phase map."""

from __future__ import annotations

import math
from typing import Any

import holoviews as hv
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from bigunet.scaling import STRATEGIES
from bigunet.views.colours import GREY, LIGHT, OKABE_ITO, TEXT
from bigunet.views.hatch import hatch

__all__ = ["LETTERS", "TERM_COLOURS", "map_cell", "plot_efficiency", "plot_map",
           "plot_speedup", "plot_terms"]  # fmt: skip

Floats = NDArray[np.float64]
Text = tuple[float, float, str]
Bar = tuple[float, float, float, float, str]

#: A letter for each strategy, so that curves and cells are told apart without colour.
LETTERS = {"sample-parallel": "S", "halo-exchange": "H", "pipeline": "P", "tiles-x-stages": "T"}
_COLOURS = {
    "sample-parallel": OKABE_ITO["blue"],
    "halo-exchange": OKABE_ITO["orange"],
    "pipeline": OKABE_ITO["purple"],
    "tiles-x-stages": OKABE_ITO["green"],
}
TERM_COLOURS = {
    "compute": OKABE_ITO["sky"],
    "halo redundancy": OKABE_ITO["orange"],
    "imbalance": OKABE_ITO["yellow"],
    "update": GREY,
    "all-reduce": OKABE_ITO["vermillion"],
    "halo exchange": OKABE_ITO["blue"],
    "bubble": OKABE_ITO["purple"],
    "transfers": OKABE_ITO["black"],
    "reading": OKABE_ITO["green"],
}
_WIDTH = 600
_FIXED: dict[str, Any] = {
    "frame_width": _WIDTH,
    "apply_ranges": False,
    "show_legend": False,
    "toolbar": None,
    "default_tools": [],
    "active_tools": [],
}
# Where no reader looks: an element needs an item, for HoloViews to know its columns' kinds.
_AWAY = -99.0
# Along which share of its curve a strategy's letter stands.
_LETTER_AT = (0.35, 0.5, 0.9, 0.7)
# Room for texts at the right, as a share of the axis of GPUs.
_ROOM = 0.55


def plot_speedup(data: xr.Dataset) -> hv.Overlay:
    """Speed-up by GPUs, both logarithmic: a curve a strategy, dashed where memory does not hold."""
    last = math.log10(int(data["gpus"].values[-1]))
    speedup = data["speedup"].values
    values = np.log10(speedup, where=speedup > 0, out=np.full(speedup.shape, np.nan))
    low, top = -0.4, max(last + 0.15, 0.4)
    ideal = np.array([[0.0], [0.0], [last], [last]])
    measured: Any = np.log10(data["measured_speedup"].values) if "measured_gpus" in data else []
    legend = [_times(v) for v in speedup[:, _chosen(data)].tolist()]
    return _curves(data, values, ideal, measured, legend, (low, top), 0.05 * (top - low)).opts(
        title=f"Speed-up over one GPU by the same strategy ({_kind(data)})",
        frame_height=240,
        ylim=(low, top),
        yticks=[(float(p), f"{10**p:,}") for p in range(int(top) + 1)],
        ylabel="speed-up",
        **_gpu_axis(data),
        **_FIXED,
    )


def plot_efficiency(data: xr.Dataset) -> hv.Overlay:
    """Speed-up divided by GPUs; the ideal is 1."""
    last = math.log10(int(data["gpus"].values[-1]))
    values = data["efficiency"].values
    measured: Any = data["measured_efficiency"].values if "measured_gpus" in data else []
    ideal = np.array([[0.0], [1.0], [last], [1.0]])
    now = values[:, _chosen(data)].tolist()
    legend = [f"{100 * v:.0f} %" if math.isfinite(v) else "none" for v in now]
    limits = (0.0, 1.3)
    return _curves(data, values, ideal, measured, legend, limits, 0.07).opts(
        title=f"Efficiency: speed-up divided by the GPUs ({_kind(data)})",
        frame_height=180,
        ylim=limits,
        yticks=[(v / 4, f"{25 * v} %") for v in range(6)],
        ylabel="efficiency",
        **_gpu_axis(data),
        **_FIXED,
    )


def _times(value: float) -> str:
    if not math.isfinite(value):
        return "none"
    return f"{value:,.0f} x" if value >= 100 else f"{value:.1f} x"


def _kind(data: xr.Dataset) -> str:
    return f"{'weak' if data.attrs['weak'] else 'strong'} scaling, {data.attrs['machine']}"


def _ends(data: xr.Dataset) -> tuple[float, float, float]:
    """The axis of GPUs in powers of ten: its start, the last GPU count, its end with the texts."""
    last = max(math.log10(int(data["gpus"].values[-1])), 0.3)
    return -0.05 * last, last, (1 + _ROOM) * last


def _gpu_axis(data: xr.Dataset) -> dict[str, Any]:
    start, _, end = _ends(data)
    most = int(data["gpus"].values[-1])
    base = 10 if most > 100 else 2
    numbers = [base**i for i in range(14) if base**i <= most]
    return {
        "xlim": (start, end),
        "xticks": [(math.log10(n), f"{n:,}") for n in numbers],
        "xlabel": "GPUs",
    }


def _legend_at(data: xr.Dataset, low: float, top: float) -> list[tuple[float, float]]:
    """Places of the lines of text at the right, from the top down."""
    _, last, end = _ends(data)
    x = last + 0.06 * (end - last)
    return [(x, top - (0.08 + 0.1 * i) * (top - low)) for i in range(10)]


def _curves(
    data: xr.Dataset,
    values: Floats,
    ideal: Floats,
    measured: Any,
    legend: list[str],
    limits: tuple[float, float],
    letters_up: float,
) -> hv.Overlay:
    """Curves over the GPUs with the ideal, the chosen number and a legend of its values."""
    low, top = limits
    x, feasible = np.log10(data["gpus"].values.astype(float)), data["feasible"].values
    now = _chosen(data)
    start, _, end = _ends(data)
    at = _legend_at(data, low, top)
    lines = [(ideal, GREY), (np.array([[x[now]], [low], [x[now]], [top]]), TEXT)]
    texts: list[Text] = [(*at[0], f"at {data.attrs['chosen']:,} GPUs:")]
    left, width = at[0][0], 0.05 * (end - start)
    for i, strategy in enumerate(STRATEGIES):
        name, colour = LETTERS[strategy], _COLOURS[strategy]
        kept = np.flatnonzero(np.isfinite(values[i]))
        ends = np.stack([x[kept[:-1]], values[i][kept[:-1]], x[kept[1:]], values[i][kept[1:]]])
        fits = feasible[i][kept[:-1]] & feasible[i][kept[1:]]
        lines += [(ends[:, fits], colour), (_dashed(ends[:, ~fits]), colour)]
        if len(kept):
            # Beside the upright line of the chosen number, not on it.
            place = x[kept[0]] + _LETTER_AT[i] * (x[kept[-1]] - x[kept[0]])
            place -= 0.04 * end * (abs(place - x[now]) < 0.025 * end)
            height = np.interp(place, x[kept], values[i][kept])
            texts.append((float(place) - 0.008 * end, float(height) + letters_up, name))
        y = at[i + 1][1]
        lines.append((np.array([[left], [y], [left + width], [y]]), colour))
        over = "" if feasible[i][now] or legend[i] == "none" else " OVER"
        texts.append((left + 1.3 * width, y, f"{name} {strategy}: {legend[i]}{over}"))
    y = at[5][1]
    lines.append((np.array([[left], [y], [left + width], [y]]), GREY))
    texts.append((left + 1.3 * width, y, "ideal"))
    elements = [_lines(lines)]
    # All of an explorer's plots have dots, or none.
    if "measured_gpus" in data:
        numbers = np.log10(data["measured_gpus"].values.astype(float))
        own = "" if data.attrs["measured_same"] else ", another setting"
        points = np.array([[*numbers, left + width / 2], [*measured, at[6][1]]])
        texts.append((left + 1.3 * width, at[6][1], f"measured{own}"))
        elements.append(hv.Scatter((points[0], points[1])).opts(color=TEXT, size=9))
    return hv.Overlay([*elements, _texts(texts)])


def _chosen(data: xr.Dataset) -> int:
    return int(np.flatnonzero(data["gpus"].values == data.attrs["chosen"])[0])


def _dashed(ends: Floats) -> Floats:
    """Each line as three dashes."""
    x0, y0, x1, y1 = ends
    shares = [(k / 3, (k + 0.55) / 3) for k in range(3)]
    parts = [
        np.stack([x0 + a * (x1 - x0), y0 + a * (y1 - y0), x0 + b * (x1 - x0), y0 + b * (y1 - y0)])
        for a, b in shares
    ]
    return np.concatenate(parts, axis=1)


def _lines(groups: list[tuple[Floats, str]], width: float = 2.0) -> hv.Segments:
    """Lines of several colours as one element, which is quicker to draw."""
    some = [(c, colour) for c, colour in groups if c.size] or [(np.full((4, 1), _AWAY), TEXT)]
    columns = np.concatenate([c for c, _ in some], axis=1)
    colours = np.concatenate([np.full(c.shape[1], colour, object) for c, colour in some])
    found = hv.Segments((*columns, colours), vdims=["colour"])
    return found.opts(color="colour", line_width=width)


def _texts(texts: list[Text]) -> hv.Labels:
    x, y, words = zip(*(texts or [(_AWAY, _AWAY, "")]), strict=True)
    return hv.Labels((np.array(x), np.array(y), np.array(words, object)), vdims=["text"]).opts(
        text_color=TEXT, text_font_size="11px", text_align="left"
    )


def _bars(bars: list[Bar], alpha: float = 1.0) -> hv.Rectangles:
    some = bars or [(_AWAY, _AWAY, _AWAY + 1, _AWAY + 1, LIGHT)]
    *numbers, colours = zip(*some, strict=True)
    columns = (*(np.array(c, float) for c in numbers), np.array(colours, object))
    return hv.Rectangles(columns, vdims=["colour"]).opts(
        fill_color="colour", fill_alpha=alpha, line_color="#FFFFFF", line_width=0.4
    )


def plot_terms(data: xr.Dataset) -> hv.Overlay:
    """Shares of a step, stacked over the GPUs; a column a prediction, as wide as to the next."""
    strategy = data.attrs["strategy"]
    row = STRATEGIES.index(strategy)
    seconds, step = data["seconds"].values[row], data["step_seconds"].values[row]
    kept = np.flatnonzero(np.isfinite(step) & (step > 0))
    terms = [str(name) for name in data["term"].values]
    x = np.log10(data["gpus"].values[kept].astype(float))
    start, last, end = _ends(data)
    middle = (x[1:] + x[:-1]) / 2
    left = np.concatenate([[start * 0.6], middle])
    right = np.concatenate([middle, [last if len(kept) > 1 else 0.1 * last]])
    share = 100 * seconds[kept] / step[kept, None]
    upper = np.cumsum(share, axis=1)
    bars: list[Bar] = []
    texts: list[Text] = []
    chosen = _chosen(data)
    now = 100 * seconds[chosen] / step[chosen]
    # The last of those with a share stands at the top of the stack, and of the legend.
    some = [k for k in range(len(terms)) if (share[:, k] > 0.005).any()]
    lines = _legend_at(data, 0.0, 112.0)
    number = f"at {data.attrs['chosen']:,} GPUs:"
    texts.append((*lines[0], number if chosen in kept else f"{number} cannot be formed"))
    for k in some:
        bars += [
            (float(left[n]), float(upper[n, k] - share[n, k]), float(right[n]),
             float(upper[n, k]), TERM_COLOURS[terms[k]])
            for n in range(len(kept))
            if share[n, k] > 0.005
        ]  # fmt: skip
    for (at, y), k in zip(lines[1:], reversed(some), strict=False):
        size = 0.045 * (end - start)
        bars.append((at, y - 3.2, at + size, y + 3.2, TERM_COLOURS[terms[k]]))
        value = f": {now[k]:.1f} %" if chosen in kept else ""
        texts.append((at + 1.3 * size, y, f"{terms[k]}{value}"))
    mark = math.log10(data.attrs["chosen"])
    return hv.Overlay(
        [
            _bars(bars),
            _lines([(np.array([[mark], [0.0], [mark], [104.0]]), TEXT)]),
            _texts(texts),
        ]
    ).opts(
        title=f"Where the time of a step goes: {strategy}, {_kind(data)}",
        frame_height=230,
        ylim=(0, 112),
        yticks=[(v, f"{v} %") for v in (0, 25, 50, 75, 100)],
        ylabel="share of the step",
        **_gpu_axis(data),
        **_FIXED,
    )


def plot_map(data: xr.Dataset) -> hv.Overlay:
    """Which strategy wins, over GPUs and image sizes; hatched where nothing fits."""
    start, last, end = _ends(data)
    if "map_winner" not in data:
        words = "Press “Phase map” to see which strategy wins where."
        overlay = [_bars([], 0.55), _lines([], 1.2), _texts([(0.02 * end, 3.0, words)])]
        rows, ticks, title = 6, [(0.0, "")], "Phase map: not computed yet"
        return _map_of(overlay, rows, ticks, title, data)
    gpus, sides = data["map_gpus"].values, data["map_image"].values
    winner = data["map_winner"].values
    x = np.log10(gpus.astype(float))
    middle = (x[1:] + x[:-1]) / 2
    left = np.concatenate([[start * 0.8], middle])
    right = np.concatenate([middle, [1.02 * last]])
    bars: list[Bar] = []
    texts: list[Text] = []
    none = []
    for i in range(len(sides)):
        for j in range(len(gpus)):
            box = (float(left[j]), float(i), float(right[j]), float(i + 1))
            name = STRATEGIES[winner[i, j]] if winner[i, j] >= 0 else ""
            bars.append((*box, _COLOURS[name] if name else "#FFFFFF"))
            if name:
                texts.append(((box[0] + box[2]) / 2 - 0.011 * end, i + 0.5, LETTERS[name]))
            else:
                none.append(box)
    size = 0.045 * (end - start)
    rows = len(sides)
    at = last + 0.06 * (end - last)
    shown = [s for k, s in enumerate(STRATEGIES) if (winner == k).any()]
    for n, strategy in enumerate(shown):
        y = rows - 0.6 - 0.75 * n
        bars.append((at, y - 0.22, at + size, y + 0.22, _COLOURS[strategy]))
        model = " (a model)" if strategy == "halo-exchange" else ""
        texts.append((at + 1.3 * size, y, f"{LETTERS[strategy]} {strategy}{model}"))
    if none:
        y = rows - 0.6 - 0.75 * len(shown)
        none.append((at, y - 0.22, at + size, y + 0.22))
        texts.append((at + 1.3 * size, y, "nothing fits"))
    texts.append((at, 0.5, "frame: the state shown"))
    lines = hatch(none, (end - start, rows), lines=60)
    columns = np.array([lines.dimension_values(i) for i in range(4)], dtype=float)
    groups = [(columns, TEXT), (_frame(data, left, right), TEXT)]
    ticks = [(i + 0.5, f"{n:,}") for i, n in enumerate(sides)]
    kind = "OF ANOTHER STATE" if data.attrs["map_stale"] else "the fastest that fits"
    title = f"Phase map, {kind}: {data.attrs['map_of']}"
    overlay = [_bars(bars, 0.55), _lines(groups, 1.2), _texts(texts)]
    return _map_of(overlay, rows, ticks, title, data)


def _map_of(
    overlay: list[Any], rows: int, ticks: list[tuple[float, str]], title: str, data: xr.Dataset
) -> hv.Overlay:
    return hv.Overlay(overlay).opts(
        title=title,
        frame_height=210,
        ylim=(0, rows),
        yticks=ticks,
        ylabel="image side, pixels",
        **_gpu_axis(data),
        **_FIXED,
    )


def map_cell(data: xr.Dataset) -> tuple[int, int]:
    """Row and column of the map's cell that is next to the state shown; (-1, -1) without a map."""
    if "map_winner" not in data:
        return -1, -1
    chosen, side = math.log(data.attrs["chosen"]), math.log(data.attrs["image"])
    column = np.argmin(np.abs(np.log(data["map_gpus"].values) - chosen))
    return int(np.argmin(np.abs(np.log(data["map_image"].values) - side))), int(column)


def _frame(data: xr.Dataset, left: Floats, right: Floats) -> Floats:
    """Two frames, one in the other, around that cell."""
    i, j = map_cell(data)
    found = []
    for inset in (0.0, 0.05):
        x0, x1 = left[j] + inset * (right[j] - left[j]), right[j] - inset * (right[j] - left[j])
        y0, y1 = i + inset, i + 1 - inset
        found += [(x0, y0, x1, y0), (x1, y0, x1, y1), (x1, y1, x0, y1), (x0, y1, x0, y0)]
    return np.array(found, dtype=float).T
