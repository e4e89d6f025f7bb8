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

__all__ = ["LETTERS", "TERM_COLOURS", "plot_efficiency", "plot_map", "plot_speedup", "plot_terms"]

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
_WIDTH = 560
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
# Room for texts at the right, as a share of the axis of GPUs.
_ROOM = 0.5


def plot_speedup(data: xr.Dataset) -> hv.Overlay:
    """Speed-up by GPUs, both logarithmic: a curve a strategy, dashed where memory does not hold."""
    last = math.log10(int(data["gpus"].values[-1]))
    values = np.log10(data["speedup"].values, where=data["speedup"].values > 0,
                      out=np.full(data["speedup"].shape, np.nan))  # fmt: skip
    top = max(last + 0.15, 0.4)
    low = -0.4
    ideal = np.array([[0.0], [0.0], [last], [last]])
    measured = np.log10(data["measured_speedup"].values) if "measured_gpus" in data else []
    ticks = [(float(p), f"{10**p:,}") for p in range(int(top) + 1)]
    at = _legend_at(data, low, top)
    chosen = data["speedup"].sel(gpus=data.attrs["chosen"]).values
    legend = [f"{v:,.1f} x" if math.isfinite(v) else "none" for v in chosen]
    return _curves(
        data, values, ideal, measured, legend, at, (low, top), letters_up=0.05 * (top - low)
    ).opts(
        title=f"Speed-up over one GPU by the same strategy ({_kind(data)})",
        frame_height=240,
        yticks=ticks,
        ylabel="speed-up",
        **_gpu_axis(data),
        **_FIXED,
    )


def plot_efficiency(data: xr.Dataset) -> hv.Overlay:
    """Speed-up divided by GPUs; the ideal is 1."""
    last = math.log10(int(data["gpus"].values[-1]))
    values = data["efficiency"].values
    measured = data["measured_efficiency"].values if "measured_gpus" in data else []
    ideal = np.array([[0.0], [1.0], [last], [1.0]])
    chosen = data["efficiency"].sel(gpus=data.attrs["chosen"]).values
    legend = [f"{100 * v:.0f} %" if math.isfinite(v) else "none" for v in chosen]
    limits = (0.0, 1.3)
    return _curves(
        data, values, ideal, measured, legend, _legend_at(data, *limits), limits, letters_up=0.07
    ).opts(
        title=f"Efficiency: speed-up divided by the GPUs ({_kind(data)})",
        frame_height=180,
        yticks=[(v / 4, f"{25 * v} %") for v in range(6)],
        ylabel="efficiency",
        **_gpu_axis(data),
        **_FIXED,
    )


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
    at: list[tuple[float, float]],
    limits: tuple[float, float],
    letters_up: float,
) -> hv.Overlay:
    """Curves over the GPUs with the ideal, the chosen number and a legend of its values."""
    low, top = limits
    x, feasible = np.log10(data["gpus"].values.astype(float)), data["feasible"].values
    chosen = math.log10(data.attrs["chosen"])
    start, _, end = _ends(data)
    solid = [(ideal, GREY), (np.array([[chosen], [low], [chosen], [top]]), TEXT)]
    dashed = []
    texts: list[Text] = []
    width = 0.05 * (end - start)
    texts.append((*at[0], f"at {data.attrs['chosen']:,} GPUs:"))
    for i, strategy in enumerate(STRATEGIES):
        name, colour = LETTERS[strategy], _COLOURS[strategy]
        kept = np.flatnonzero(np.isfinite(values[i]))
        ends = np.stack([x[kept[:-1]], values[i][kept[:-1]], x[kept[1:]], values[i][kept[1:]]])
        fits = feasible[i][kept[:-1]] & feasible[i][kept[1:]]
        solid.append((ends[:, fits], colour))
        dashed.append((ends[:, ~fits], colour))
        for place in _letter_places(kept, i):
            texts.append((x[place] - 0.01 * end, values[i][place] + letters_up, name))
        left, y = at[i + 1]
        solid.append((np.array([[left], [y], [left + width], [y]]), colour))
        over = "" if feasible[i][_chosen(data)] or legend[i] == "none" else ", too large"
        texts.append((left + 1.3 * width, y, f"{name} {strategy}: {legend[i]}{over}"))
    left, y = at[5]
    solid.append((np.array([[left], [y], [left + width], [y]]), GREY))
    texts.append((left + 1.3 * width, y, "ideal"))
    points = np.array([[_AWAY], [_AWAY]])
    if len(measured):
        x_measured = np.log10(data["measured_gpus"].values.astype(float))
        own = "" if data.attrs["measured_same"] else ", other setting"
        points = np.array([[*x_measured, at[6][0] + width / 2], [*measured, at[6][1]]])
        texts.append((left + 1.3 * width, at[6][1], f"measured{own}"))
    return hv.Overlay(
        [
            _lines(solid).opts(line_width=2.0),
            _lines(dashed).opts(line_width=2.0, line_dash="dashed"),
            hv.Scatter((points[0], points[1])).opts(color=TEXT, size=9),
            _texts(texts),
        ]
    ).opts(ylim=limits)


def _chosen(data: xr.Dataset) -> int:
    return int(np.flatnonzero(data["gpus"].values == data.attrs["chosen"])[0])


def _letter_places(kept: Any, number: int) -> list[int]:
    """Where a curve carries its letter: each strategy at another place."""
    if len(kept) < 2:
        return [int(n) for n in kept]
    return [int(kept[round(share * (len(kept) - 1))]) for share in (0.4 + 0.12 * number,)]


def _lines(groups: list[tuple[Floats, str]]) -> hv.Segments:
    """Lines of several colours as one element, which is quicker to draw."""
    some = [(c, colour) for c, colour in groups if c.size] or [(np.full((4, 1), _AWAY), TEXT)]
    columns = np.concatenate([c for c, _ in some], axis=1)
    colours = np.concatenate([np.full(c.shape[1], colour, object) for c, colour in some])
    return hv.Segments((*columns, colours), vdims=["colour"]).opts(color="colour")


def _texts(texts: list[Text], align: str = "left") -> hv.Labels:
    return hv.Labels(texts or [(_AWAY, _AWAY, "")], vdims=["text"]).opts(
        text_color=TEXT, text_font_size="11px", text_align=align
    )


def _bars(bars: list[Bar]) -> hv.Rectangles:
    some = bars or [(_AWAY, _AWAY, _AWAY + 1, _AWAY + 1, LIGHT)]
    return hv.Rectangles(some, vdims=["colour"]).opts(
        fill_color="colour", line_color="#FFFFFF", line_width=0.4
    )


def plot_terms(data: xr.Dataset) -> hv.Overlay:
    """Shares of a step, stacked over the GPUs; a column a prediction, as wide as to the next."""
    strategy = data.attrs["strategy"]
    seconds = data["seconds"].sel(strategy=strategy).values
    step = data["step_seconds"].sel(strategy=strategy).values
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
            _lines([(np.array([[mark], [0.0], [mark], [104.0]]), TEXT)]).opts(line_width=2.0),
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
        overlay = [_bars([]), _lines([]).opts(line_width=1.2), _texts([(0.02 * end, 3.0, words)])]
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
        model = " (a model only)" if strategy == "halo-exchange" else ""
        texts.append((at + 1.3 * size, y, f"{LETTERS[strategy]} {strategy}{model}"))
    if none:
        y = rows - 0.6 - 0.75 * len(shown)
        none.append((at, y - 0.22, at + size, y + 0.22))
        texts.append((at + 1.3 * size, y, "nothing fits"))
    texts.append((at, 0.5, "frame: the state shown"))
    lines = hatch(none, (end - start, rows), lines=60)
    columns = np.array([lines.dimension_values(i) for i in range(4)], dtype=float)
    groups = [(columns, TEXT), (_frame(data, left, right, sides), TEXT)]
    ticks = [(i + 0.5, f"{n:,}") for i, n in enumerate(sides)]
    old = "; OF ANOTHER STATE, press “Phase map”" if data.attrs["map_stale"] else ""
    title = f"Phase map: the fastest that fits, {data.attrs['map_of']}{old}"
    overlay = [_bars(bars), _lines(groups).opts(line_width=1.2), _texts(texts)]
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


def _frame(data: xr.Dataset, left: Floats, right: Floats, sides: Any) -> Floats:
    """Two frames, one in the other, around the cell next to the state that is shown."""
    chosen = math.log10(data.attrs["chosen"])
    j = int(np.argmin(np.abs(np.log10(data["map_gpus"].values) - chosen)))
    i = int(np.argmin(np.abs(np.log(sides) - math.log(data.attrs["image"]))))
    found = []
    for inset in (0.0, 0.05):
        x0, x1 = left[j] + inset * (right[j] - left[j]), right[j] - inset * (right[j] - left[j])
        y0, y1 = i + inset, i + 1 - inset
        found += [(x0, y0, x1, y0), (x1, y0, x1, y1), (x1, y1, x0, y1), (x0, y1, x0, y0)]
    return np.array(found, dtype=float).T
