"""HoloViews elements as a few primitives in screen pixels, for `bigunet.views.draw` to write.

Only the elements that this package's views use are known; others raise `TypeError`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import holoviews as hv
import numpy as np

from bigunet.views.colours import LIGHT, TEXT

__all__ = [
    "Drawing",
    "Extent",
    "Path",
    "Picture",
    "Text",
    "column",
    "extent",
    "lower",
    "nice_ticks",
]

# Room for the axes' numbers and names around the frame: left, right, top, bottom.
_MARGINS = (74, 16, 30, 46)
_FRAME = (420, 320)


class Path(NamedTuple):
    """A line or, with `fill`, a polygon."""

    points: list[tuple[float, float]]
    stroke: str | None
    fill: str | None
    width: float = 1.0
    dashed: bool = False
    opacity: float = 1.0


class Text(NamedTuple):
    """A text at a point of the picture, in pixels."""

    x: float
    y: float
    text: str
    colour: str = TEXT
    size: float = 11.0
    anchor: str = "middle"  # start | middle | end
    turned: bool = False


class Picture(NamedTuple):
    """Pixels (rows, columns, 4) uint8 in the box x, y, width, height."""

    x: float
    y: float
    width: float
    height: float
    rgba: np.ndarray


class Drawing(NamedTuple):
    """Primitives on a canvas of width x height; those in `inner` are cut at `frame`."""

    width: int
    height: int
    frame: tuple[float, float, float, float]
    inner: list[Path | Text | Picture]
    outer: list[Path | Text]


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About `count` round numbers between `low` and `high`."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _leaves(plot: Any) -> list[Any]:
    if isinstance(plot, hv.DynamicMap):
        plot = plot[()] if not plot.kdims else plot.last
    if isinstance(plot, hv.Overlay):
        return [leaf for part in plot for leaf in _leaves(part)]
    return [plot]


def _options(element: Any, group: str) -> dict[str, Any]:
    return dict(hv.Store.lookup_options("bokeh", element, group).kwargs)


def column(element: Any, index: int) -> Any:
    """A column of an element: its `dimension_values`, at a third of the time; bands are 2-D."""
    flat = not isinstance(element, hv.RGB)
    return element.interface.values(element, element.get_dimension(index), True, flat)


def _column(element: Any, value: Any, count: int) -> list[Any]:
    """An option's value for each item: a column's name, a `hv.dim`, or one value for all."""
    if isinstance(value, str) and value in [d.name for d in element.vdims]:
        return list(element.dimension_values(value))
    if isinstance(value, hv.dim):
        return list(value.apply(element))
    return [value] * count


class _Axes:
    """Data to screen."""

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], frame: tuple[float, ...], flip: bool
    ) -> None:
        self.x0, self.x1 = x
        self.y0, self.y1 = y
        self.left, self.top, self.width, self.height = frame
        self.flip = flip

    def x(self, value: float) -> float:
        return self.left + (value - self.x0) / (self.x1 - self.x0) * self.width

    def y(self, value: float) -> float:
        share = (value - self.y0) / (self.y1 - self.y0)
        return self.top + (share if self.flip else 1 - share) * self.height


def _extent(leaves: Sequence[Any], limits: Any, dim: int, padding: float) -> tuple[float, float]:
    if limits is not None and limits[0] is not None:
        return float(limits[0]), float(limits[1])
    lows, highs = [], []
    for leaf in leaves:
        if not len(leaf):
            continue
        if isinstance(leaf, hv.RGB):
            bounds = leaf.bounds.lbrt()
            values = np.array([bounds[dim], bounds[dim + 2]], float)
        else:
            ends = (dim, dim + 2) if isinstance(leaf, hv.Rectangles | hv.Segments) else (dim,)
            values = np.concatenate([np.asarray(leaf.dimension_values(i), float) for i in ends])
        values = values[np.isfinite(values)]
        if values.size:
            lows.append(float(values.min()))
            highs.append(float(values.max()))
    if not lows:
        return 0.0, 1.0
    low, high = min(lows), max(highs)
    if low == high:
        low, high = low - 0.5, high + 0.5
    pad = (high - low) * padding
    return low - pad, high + pad


def _rectangles(element: Any, axes: _Axes) -> Iterable[Path]:
    style = _options(element, "style")
    count = len(element)
    x0, y0, x1, y1 = (element.dimension_values(i) for i in range(4))
    fill = _column(element, style.get("fill_color", style.get("color", LIGHT)), count)
    line = _column(element, style.get("line_color", TEXT), count)
    alpha = _column(element, style.get("fill_alpha", style.get("alpha", 1.0)), count)
    dashed = style.get("line_dash", "solid") != "solid"
    width = float(style.get("line_width", 1.0))
    for i in range(count):
        left, right = sorted((axes.x(x0[i]), axes.x(x1[i])))
        top, bottom = sorted((axes.y(y0[i]), axes.y(y1[i])))
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
        if alpha[i]:
            yield Path(corners, None, fill[i], 0, False, float(alpha[i]))
        if line[i] and line[i] != "transparent":
            yield Path([*corners, corners[0]], line[i], None, width, dashed)


def _segments(element: Any, axes: _Axes) -> Iterable[Path]:
    style = _options(element, "style")
    ends = [element.dimension_values(i) for i in range(4)]
    colour = _column(element, style.get("color", TEXT), len(element))
    dashed = style.get("line_dash", "solid") != "solid"
    width, alpha = float(style.get("line_width", 1.0)), float(style.get("alpha", 1.0))
    for x0, y0, x1, y1, shade in zip(*ends, colour, strict=True):
        points = [(axes.x(x0), axes.y(y0)), (axes.x(x1), axes.y(y1))]
        yield Path(points, shade, None, width, dashed, alpha)


def _curve(element: Any, axes: _Axes) -> Iterable[Path]:
    style = _options(element, "style")
    values = zip(element.dimension_values(0), element.dimension_values(1), strict=True)
    points = [(axes.x(x), axes.y(y)) for x, y in values if math.isfinite(x) and math.isfinite(y)]
    dashed = style.get("line_dash", "solid") != "solid"
    colour = style.get("color", TEXT)
    yield Path(points, colour, None, float(style.get("line_width", 1.5)), dashed)


def _points(element: Any, axes: _Axes) -> Iterable[Path]:
    style = _options(element, "style")
    radius = float(style.get("size", 6)) / 2
    colour = _column(element, style.get("color", TEXT), len(element))
    values = zip(element.dimension_values(0), element.dimension_values(1), colour, strict=True)
    for x, y, shade in values:
        angles = np.linspace(0, 2 * math.pi, 13)[:-1]
        ring = [
            (axes.x(x) + radius * math.cos(a), axes.y(y) + radius * math.sin(a)) for a in angles
        ]
        yield Path(ring, None, shade)


def _labels(element: Any, axes: _Axes) -> Iterable[Text]:
    style = _options(element, "style")
    anchor = {"left": "start", "center": "middle", "right": "end"}[
        style.get("text_align", "center")
    ]
    shift = {"top": 0.8, "middle": 0.35, "bottom": -0.3}[style.get("text_baseline", "middle")]
    size = float(str(style.get("text_font_size", "11px")).removesuffix("px").removesuffix("pt"))
    dx, dy = float(style.get("x_offset", 0)), float(style.get("y_offset", 0))
    colour = _column(element, style.get("text_color", TEXT), len(element))
    values = [element.dimension_values(i) for i in range(3)]
    for x, y, text, shade in zip(*values, colour, strict=True):
        left, top = axes.x(x) + dx, axes.y(y) + dy + shift * size
        yield Text(left, top, str(text), shade, size, anchor)


def _image(element: Any, axes: _Axes) -> Iterable[Picture]:
    left, bottom, right, top = element.bounds.lbrt()
    bands = [element.dimension_values(i, flat=False) for i in range(2, 2 + len(element.vdims))]
    if len(bands) < 3:
        raise TypeError("a still picture knows hv.RGB; turn an hv.Image into one")
    rgba = np.stack(bands[:4], axis=-1)
    if rgba.dtype.kind == "f":
        rgba = np.clip(rgba * 255, 0, 255)
    rgba = rgba.astype(np.uint8)
    if rgba.shape[-1] == 3:
        rgba = np.concatenate([rgba, np.full_like(rgba[..., :1], 255)], axis=-1)
    x0, x1 = axes.x(left), axes.x(right)
    y0, y1 = sorted((axes.y(bottom), axes.y(top)))
    # `dimension_values` has the lowest y first, which is the upper row on a flipped axis.
    style = _options(element, "style")
    if (alpha := float(style.get("alpha", 1.0))) < 1:
        rgba = rgba.copy()
        rgba[..., 3] = (rgba[..., 3] * alpha).astype(np.uint8)
    yield Picture(x0, y0, x1 - x0, y1 - y0, rgba if axes.flip else rgba[::-1])


_LOWERERS: list[tuple[type | tuple[type, ...], Callable[[Any, _Axes], Iterable[Any]]]] = [
    (hv.Rectangles, _rectangles),
    (hv.Segments, _segments),
    (hv.Labels, _labels),
    (hv.RGB, _image),
    (hv.Curve, _curve),
    ((hv.Scatter, hv.Points), _points),
]


class Extent(NamedTuple):
    """What of the data a plot shows; with `flip`, the y axis points down."""

    x: tuple[float, float]
    y: tuple[float, float]
    flip: bool


def _all_options(leaves: Sequence[Any], plot: Any) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for element in (*leaves, plot):
        options |= _options(element, "plot")
    return options


def _frame_size(options: dict[str, Any]) -> tuple[int, int]:
    width, height = options.get("frame_width"), options.get("frame_height")
    return int(width or _FRAME[0]), int(height or _FRAME[1])


def extent(plot: Any) -> Extent:
    """The axes' limits: `xlim` and `ylim` where they are given, else those of the data, padded.

    With `data_aspect`, one of them is widened so that a unit is as long down as across.
    """
    leaves = _leaves(plot)
    return _limits(leaves, _all_options(leaves, plot))


def _limits(leaves: Sequence[Any], options: dict[str, Any]) -> Extent:
    width, height = _frame_size(options)
    padding = options.get("padding", 0.0)
    padding = float(padding if isinstance(padding, int | float) else padding[0])
    xlim = _extent(leaves, options.get("xlim"), 0, padding)
    ylim = _extent(leaves, options.get("ylim"), 1, padding)
    if options.get("data_aspect"):
        scale = max((xlim[1] - xlim[0]) / width, (ylim[1] - ylim[0]) / height)
        xlim, ylim = (
            (sum(lim) / 2 - scale * size / 2, sum(lim) / 2 + scale * size / 2)
            for lim, size in ((xlim, width), (ylim, height))
        )
    return Extent(xlim, ylim, bool(options.get("invert_yaxis")))


def lower(plot: Any) -> Drawing:
    """The primitives of one element or overlay.

    Raises
    ------
    TypeError : for an element that is not known here.
    """
    leaves = _leaves(plot)
    options = _all_options(leaves, plot)
    left, right, top, bottom = _MARGINS
    width, height = _frame_size(options)
    xlim, ylim, flip = _limits(leaves, options)
    frame = (float(left), float(top), float(width), float(height))
    axes = _Axes(xlim, ylim, frame, flip)
    inner: list[Path | Text | Picture] = []
    for leaf in leaves:
        lowerer = next((make for kind, make in _LOWERERS if isinstance(leaf, kind)), None)
        if lowerer is None:
            raise TypeError(f"no still picture of {type(leaf).__name__} is known")
        if len(leaf):
            inner.extend(lowerer(leaf, axes))
    outer = _decorations(options, axes, xlim, ylim)
    return Drawing(width + left + right, height + top + bottom, frame, inner, outer)


def _ticks(given: Any, limits: tuple[float, float]) -> list[tuple[float, str]]:
    if isinstance(given, list | tuple):
        pairs = [t if isinstance(t, tuple) else (t, f"{t:g}") for t in given]
        return [(float(at), str(text)) for at, text in pairs if limits[0] <= at <= limits[1]]
    return [(at, f"{at:g}") for at in nice_ticks(*limits)]


def _decorations(
    options: dict[str, Any],
    axes: _Axes,
    xlim: tuple[float, float],
    ylim: tuple[float, float],
) -> list[Path | Text]:
    left, top = axes.left, axes.top
    right, bottom = left + axes.width, top + axes.height
    box = [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    outer: list[Path | Text] = [Path(box, "#888888", None)]
    names = [options.get(f"{axis}label") or "" for axis in "xy"]
    if options.get("xaxis", "bottom") is not None:
        for at, text in _ticks(options.get("xticks"), xlim):
            outer.append(Path([(axes.x(at), bottom), (axes.x(at), bottom + 4)], "#888888", None))
            outer.append(Text(axes.x(at), bottom + 16, text))
        outer.append(Text((left + right) / 2, bottom + 35, names[0], size=12))
    if options.get("yaxis", "left") is not None:
        for at, text in _ticks(options.get("yticks"), ylim):
            outer.append(Path([(left - 4, axes.y(at)), (left, axes.y(at))], "#888888", None))
            outer.append(Text(left - 8, axes.y(at) + 4, text, anchor="end"))
        outer.append(Text(16, (top + bottom) / 2, names[1], size=12, turned=True))
    title = options.get("title")
    if title:
        outer.append(Text(left, top - 10, str(title), size=13, anchor="start"))
    return outer
