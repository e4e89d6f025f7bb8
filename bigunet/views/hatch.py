"""Hatching, so that no meaning rests on colour alone."""

from __future__ import annotations

from collections.abc import Iterable

import holoviews as hv
import numpy as np

from bigunet.views.colours import TEXT

__all__ = ["hatch"]

Rectangle = tuple[float, float, float, float]


def hatch(boxes: Iterable[Rectangle], span: tuple[float, float], lines: int = 40) -> hv.Segments:
    """Diagonals over the boxes (x0, y0, x1, y1), about `lines` of them across the plot.

    HoloViews' rectangles know no hatching of their own. `span` is the plot's extent (x, y) in
    data units, which makes the diagonals equally steep in all boxes.
    """
    segments: list[Rectangle] = []
    for x0, y0, x1, y1 in boxes:
        # In units of the plot's extent the diagonals are x + y = offset.
        left, right = x0 / span[0], x1 / span[0]
        low, high = y0 / span[1], y1 / span[1]
        if right <= left or high <= low:
            continue
        first = np.ceil((left + low) * lines)
        for offset in np.arange(first, (right + high) * lines) / lines:
            start, end = max(left, offset - high), min(right, offset - low)
            if end > start:
                segments.append(
                    (
                        start * span[0],
                        (offset - start) * span[1],
                        end * span[0],
                        (offset - end) * span[1],
                    )
                )
    return hv.Segments(segments).opts(color=TEXT, line_width=0.8)
