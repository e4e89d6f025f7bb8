"""A plot without controls, as a picture that stays in the notebook."""

from __future__ import annotations

from typing import Any

import holoviews as hv
import numpy as np
import xarray as xr

from bigunet.views.colours import CYCLE, TEXT
from bigunet.views.draw import to_png, to_svg
from bigunet.views.page import as_table, png_bundle

__all__ = ["Still", "plot_against"]


class Still:
    """A plot with its numbers; displayed as SVG with a table, stored with a PNG and text too."""

    def __init__(self, plot: Any, rows: list[list[object]], caption: str) -> None:
        self.plot, self.rows, self.caption = plot, rows, caption

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        text = self.caption + "\n" + "\n".join("  ".join(map(str, row)) for row in self.rows)
        page = (
            '<div style="display:flex;flex-wrap:wrap;gap:20px;align-items:start">'
            f"{to_svg(self.plot, self.caption)}{as_table(self.rows, self.caption)}</div>"
        )
        return png_bundle(to_png([self.plot])) | {"text/html": page, "text/plain": text}


def plot_against(data: xr.Dataset, x: str, names: list[str], *, log: bool, title: str) -> Still:
    """Variables of `data` as lines over the dimension `x`, with the table of their values.

    On a logarithmic axis, values of 0 are drawn at the smallest power of ten below all others.
    """
    xs = data[x].values.astype(float)
    units = {name: data[name].attrs.get("units", "1") for name in names}
    series = {name: data[name].values.astype(float) for name in names}
    positive = np.concatenate([v[v > 0] for v in series.values()])
    # Zeros lie one power of ten below the rest.
    floor = np.floor(np.log10(positive.min())) - 1 if positive.size else -1.0
    parts: list[Any] = []
    ends = []
    for colour, (name, values) in zip(CYCLE, series.items(), strict=False):
        ys = values
        if log:
            ys = np.where(values > 0, np.log10(np.maximum(values, 1e-300)), floor)
        parts.append(hv.Curve((xs, ys)).opts(color=colour, line_width=2))
        parts.append(hv.Scatter((xs, ys)).opts(color=colour, size=8))
        ends.append((xs[0], ys[0], "  " + name.replace("_", " ")))
    parts.append(
        hv.Labels(ends).opts(
            text_align="left", text_baseline="bottom", text_color=TEXT, text_font_size="12px"
        )
    )
    extra: dict[str, Any] = {}
    if log:
        top = np.ceil(np.log10(positive.max())) if positive.size else 0.0
        step = max(1, int((top - floor) // 8))
        extra["yticks"] = [(p, f"1e{int(p)}") for p in np.arange(floor, top + 1, step)]
    unit = next(iter(units.values()))
    plot = hv.Overlay(parts).opts(
        title=title,
        frame_width=420,
        frame_height=260,
        padding=0.08,
        show_legend=False,
        xlabel=f"{x.replace('_', ' ')} ({data[x].attrs.get('units', '1')})",
        ylabel="" if unit == "1" else unit,
        **extra,
    )
    header: list[object] = [x, *(name.replace("_", " ") for name in names)]
    rows: list[list[object]] = [header]
    for i, at in enumerate(xs):
        rows.append([int(at) if at == int(at) else at, *(f"{series[n][i]:.3g}" for n in names)])
    return Still(plot, rows, title)
