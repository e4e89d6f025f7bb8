"""New numbers straight into a live plot's Bokeh sources: a tenth of the time of HoloViews' way.

For plots whose elements stay what they are while only their values change. Where an element and
its source do not match, nothing is written, and the caller draws as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import holoviews as hv

__all__ = ["redraw"]

# How HoloViews names the columns of an element's Bokeh source, colours last.
_COLUMNS = {
    hv.Rectangles: ("left", "bottom", "right", "top", "fill_color"),
    hv.Segments: ("x0", "y0", "x1", "y1", "color"),
    hv.Labels: ("x", "y", "text"),
}

_Part = tuple[Any, tuple[str, ...], Any]


def redraw(plots: Sequence[tuple[Any, Any]]) -> bool:
    """Bring Bokeh figures up to date with the overlays beside them; False: none was touched."""
    parts = [_parts(figure, overlay) for figure, overlay in plots]
    if not all(parts):
        return False
    for (figure, overlay), found in zip(plots, parts, strict=True):
        with figure.document.models.freeze():
            for element, columns, source in found:
                source.data = {c: _plain(element, i) for i, c in enumerate(columns)}
            options = hv.Store.lookup_options("bokeh", overlay, "plot").kwargs
            figure.title.text = options["title"]
    return True


def _parts(figure: Any, overlay: Any) -> list[_Part]:
    """(element, columns, source) of each part of a plot; none where they do not match."""
    elements, renderers = list(overlay), figure.renderers
    if len(elements) != len(renderers):
        return []
    found = []
    for element, renderer in zip(elements, renderers, strict=True):
        columns, source = _COLUMNS.get(type(element), ()), renderer.data_source
        if len(element.dimensions()) == len(columns) - 1:
            columns = columns[:-1]
        if len(columns) == 5 and set(source.data) == set(columns[:4]):
            # A colour that all items share is no column.
            glyph = renderer.glyph
            colour = glyph.line_color if columns[4] == "color" else glyph.fill_color
            if set(element.dimension_values(4)) != {getattr(colour, "value", colour)}:
                return []
            columns = columns[:4]
        if set(source.data) != set(columns):
            return []
        found.append((element, columns, source))
    return found


def _plain(element: Any, index: int) -> Any:
    values = element.dimension_values(index)
    return values.tolist() if values.dtype == object else values
