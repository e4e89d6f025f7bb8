"""Lines that can be dragged: one Bokeh span a cut, snapped and clamped in the browser."""

from __future__ import annotations

from collections.abc import Sequence

from bokeh.models import CustomJS
from bokeh.models.annotations.geometry import Span

from bigunet.views.colours import OKABE_ITO, TEXT

__all__ = ["cut_spans", "set_spans"]

# A line stops one layer before its neighbours; the kernel clamps by the same rule.
_SNAP = """
const low = index > 0 ? Math.round(spans[index - 1].location) + 1 : 1;
const next = spans[index + 1];
const high = next !== undefined && next.visible ? Math.round(next.location) - 1 : rows - 1;
const to = Math.min(Math.max(Math.round(cb_obj.location), low), Math.max(low, high));
if (cb_obj.visible && to !== cb_obj.location) cb_obj.location = to;
"""


def cut_spans(count: int, num_rows: int) -> list[Span]:
    """`count` upright lines among `num_rows` layers, none of them seen yet."""
    spans = [
        Span(
            location=0,
            dimension="height",
            editable=True,
            visible=False,
            level="overlay",
            line_color=TEXT,
            line_width=4,
            line_alpha=0.55,
            hover_line_color=OKABE_ITO["vermillion"],
            hover_line_alpha=1.0,
            hover_line_width=4,
        )
        for _ in range(count)
    ]
    for i, span in enumerate(spans):
        arguments = {"spans": spans, "index": i, "rows": num_rows}
        span.js_on_change("location", CustomJS(args=arguments, code=_SNAP))
    return spans


def set_spans(spans: Sequence[Span], cuts: Sequence[int], held: int | None = None) -> None:
    """Move the lines to the cuts, but for the one that the reader holds."""
    for i, span in enumerate(spans):
        seen = i < len(cuts)
        if span.visible != seen:
            span.visible = seen
        if seen and i != held and span.location != cuts[i]:
            span.location = cuts[i]
