"""MosaicViewer: image, truth, prediction and error side by side, at any size, one view for all."""

from __future__ import annotations

import asyncio
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ipywidgets as widgets
import numpy as np
import xarray as xr

from bigunet.downscale import average, majority
from bigunet.errors import ShapeError, SpecError, fail
from bigunet.scenes import ClassTable, class_table
from bigunet.spec import UNetSpec
from bigunet.tiles import check_core
from bigunet.views.kit import Explorer, Row
from bigunet.views.levels import Levels, rgb_view
from bigunet.views.lower import Extent
from bigunet.views.mosaic_panes import confusion_counts, pane, pane_pixels, tile_edges

__all__ = ["MosaicState", "MosaicViewer"]

Array = np.ndarray[Any, np.dtype[Any]]

_PANE_WIDTH, _PANE_HEIGHT = 295, 295
# One turn of the wheel comes as several messages.
_SETTLE_SECONDS = 0.03
_CLOSEST = 32


@dataclass(frozen=True)
class MosaicState:
    """What is looked at: the view's upper left corner and its width in image pixels, and how.

    `opacity` is that of classes over the image; `grid` shows tile edges, `halo` what the tile at
    the view's centre reads.
    """

    opacity: float = 0.7
    grid: bool = False
    halo: bool = False
    tile: int = 512
    x: float = 0.0
    y: float = 0.0
    width: float = 1.0


class MosaicViewer(Explorer[MosaicState]):
    """Linked panes over one scene; drag to move, turn the wheel to zoom, or use the buttons.

    Parameters
    ----------
    image : (band, y, x) array, lazy or not, or a list of its resolution levels.
    truth, prediction : labels (y, x), likewise; 255 is ignored.
    classes : names and colours; needed where labels are given without a class table of their own.
    spec, tile : the network and tile side that the grid and halo overlays are drawn for.

    Raises
    ------
    ShapeError : for arrays of different size, or no labels' class table.
    """

    title = "Mosaic"
    help = (
        "Drag to move and turn the wheel to zoom, or use the buttons; all panes move together. "
        "Every class has its name beside its colour."
    )

    def __init__(
        self,
        image: Any,
        truth: Any = None,
        prediction: Any = None,
        *,
        classes: ClassTable | None = None,
        spec: UNetSpec | None = None,
        tile: int = 512,
    ) -> None:
        self.spec = spec or UNetSpec()
        self._image = Levels(image, average)
        self._labels = {
            name: Levels(array, majority)
            for name, array in (("truth", truth), ("prediction", prediction))
            if array is not None
        }
        self.shape = self._image.shape
        for name, levels in self._labels.items():
            if levels.shape != self.shape:
                fail(
                    ShapeError,
                    rule=f"image and {name} have the same size, {self.shape}",
                    got=levels.shape,
                    remedy="Crop or resample one of them.",
                )
        self.classes = classes or _classes_of(truth, prediction)
        self._to_rgb = rgb_view(self._image)
        palette = np.full((256, 3), 255, np.uint8)
        if self.classes is not None:
            palette[: len(self.classes.names)] = self.classes.rgb
        self._palette = palette
        self._counts = self._count()
        height, width = self.shape
        self.pane = (_PANE_WIDTH, int(np.clip(_PANE_WIDTH * height / width, 180, _PANE_HEIGHT)))
        self._shown: dict[str, tuple[Any, Any]] = {}
        self._following_mouse = False
        self._settling: Any = None
        super().__init__(self._whole(MosaicState(tile=tile)))
        if figure := self._axes_of.get("panes"):
            for axis in (figure.x_range, figure.y_range):
                for end in ("start", "end"):
                    axis.on_change(end, lambda attr, old, new: self._range_changed())

    def build(self, values: Mapping[str, Any]) -> MosaicState:
        state: MosaicState = super().build(values)
        numbers = (state.opacity, state.tile, state.x, state.y, state.width)
        real = all(isinstance(n, int | float) and np.isfinite(n) for n in numbers)
        real = real and all(isinstance(b, bool) for b in (state.grid, state.halo))
        if not real or not 0 <= state.opacity <= 1 or state.width < 1:
            fail(
                SpecError,
                rule="a view is finite numbers, its opacity from 0 to 1, its width at least 1; "
                "grid and halo are true or false",
                got=(*numbers, state.grid, state.halo),
                remedy="Choose a file that MosaicViewer exported.",
            )
        check_core(state.tile, self.spec)
        return state

    # The view ----------------------------------------------------------------------------------

    def _height(self, state: MosaicState) -> float:
        return state.width * self.pane[1] / self.pane[0]

    def _view(self, state: MosaicState) -> dict[str, tuple[float, float]]:
        return {
            "x_range": (state.x, state.x + state.width),
            "y_range": (state.y, state.y + self._height(state)),
        }

    def _whole(self, state: MosaicState) -> MosaicState:
        height, width = self.shape
        view = max(width, height * self.pane[0] / self.pane[1])
        tall = view * self.pane[1] / self.pane[0]
        return replace(state, x=(width - view) / 2, y=(height - tall) / 2, width=float(view))

    def moved(self, state: MosaicState, right: float, down: float, zoom: float) -> MosaicState:
        """`state` moved by shares of the view's size and zoomed about its centre."""
        whole = self._whole(state)
        width = float(np.clip(state.width / zoom, _CLOSEST, whole.width))
        tall, new_tall = self._height(state), width * self.pane[1] / self.pane[0]
        x = state.x + (right + 0.5) * state.width - width / 2
        y = state.y + (down + 0.5) * tall - new_tall / 2
        # The centre stays on the image.
        x = float(np.clip(x, -width / 2, self.shape[1] - width / 2))
        y = float(np.clip(y, -new_tall / 2, self.shape[0] - new_tall / 2))
        return replace(state, x=x, y=y, width=width)

    def _range_changed(self) -> None:
        """The mouse moves or zooms: follow it once its messages have come in."""
        if self._quiet:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._follow()
            return
        if self._settling is not None:
            self._settling.cancel()
        self._settling = loop.call_later(_SETTLE_SECONDS, self._follow)

    def _follow(self) -> None:
        """Show at the right level what the figures' axes show."""
        figure = self._axes_of["panes"]
        x0, x1 = sorted((float(figure.x_range.start), float(figure.x_range.end)))
        y0 = min(float(figure.y_range.start), float(figure.y_range.end))
        state = replace(self.state, x=x0, y=y0, width=max(x1 - x0, 1.0))
        if state != self.state:
            self._following_mouse = True
            try:
                self._apply(state, write_controls=False)
            finally:
                self._following_mouse = False

    def _apply(self, state: MosaicState, *, write_controls: bool = True) -> None:
        # What there is moves at once; the pixels of the new view follow when they have been read.
        if self._axes_of and self.live is not False:
            self._set_limits("panes", self._limits(state))
        super()._apply(state, write_controls=write_controls)

    def _set_limits(self, group: str, limits: Extent) -> None:
        if self._following_mouse:  # which may be further by now
            return
        quiet, self._quiet = self._quiet, True
        try:
            with self._one_message():
                super()._set_limits(group, limits)
        finally:
            self._quiet = quiet

    def _limits(self, state: MosaicState) -> Extent:
        view = self._view(state)
        return Extent(view["x_range"], view["y_range"], flip=True)

    def extent(self, name: str) -> Extent:
        return self._limits(self.state)

    # State in, tables out ----------------------------------------------------------------------

    def tables(self, state: MosaicState) -> xr.Dataset:
        """The pixels of the view at the level that suits the screen: image and labels."""
        tall = self._height(state)
        level = self._image.pick((tall, state.width), max(self.pane))
        scale = 2**level
        rows, columns = (-(-side // scale) for side in self.shape)
        # One pixel more on each side, so that a small move shows no gap.
        y0, y1 = _window(state.y, tall, scale, rows)
        x0, x1 = _window(state.x, state.width, scale, columns)
        image = self._to_rgb(self._image.read(level, y0, y1, x0, x1))
        data = xr.Dataset(
            {"image": (("y", "x", "band"), image)},
            coords={
                "y": (np.arange(y0, y1) + 0.5) * scale,
                "x": (np.arange(x0, x1) + 0.5) * scale,
            },
            attrs={"level": level, "bounds": (x0 * scale, y0 * scale, x1 * scale, y1 * scale)},
        )
        for name, levels in self._labels.items():
            data[name] = (("y", "x"), levels.read(level, y0, y1, x0, x1))
        edges = tile_edges(
            (state.x, state.y, state.width, tall),
            self.shape,
            state.tile,
            halo=self.spec.halo_aligned if state.halo else None,
            grid=state.grid,
        )
        data.attrs |= {"opacity": state.opacity, "edges": edges}
        data.attrs |= {"view": (state.x, state.y, state.width, tall)}
        return data

    def plots(self, data: xr.Dataset) -> Mapping[str, Any]:
        panes = ["image", *self._labels, *(["error"] if len(self._labels) == 2 else [])]
        plots = {}
        for name in panes:
            # A pane that shows the same as before stays the same object.
            key: tuple[Any, ...] = (
                data.attrs["bounds"],
                data.attrs["level"],
                tuple(data.attrs["edges"]),
            )
            if name in self._labels:
                key += (data.attrs["opacity"],)
            if self._shown.get(name, (None,))[0] != key:
                pixels = pane_pixels(name, data, self._palette)
                self._shown[name] = (key, pane(name, pixels, data, self.pane))
            plots[name] = self._shown[name][1]
        return plots

    def still(self, plot: Any) -> Any:
        x, y, width, height = self.data.attrs["view"]
        return plot.opts(xlim=(x, x + width), ylim=(y, y + height), clone=True)

    # Numbers -----------------------------------------------------------------------------------

    def _count(self) -> Array | None:
        if self.classes is None or not self._labels:
            return None
        truth = self._labels.get("truth") or self._labels["prediction"]
        prediction = self._labels.get("prediction") or truth
        return confusion_counts(truth.full, prediction.full, len(self.classes.names))

    def rows(self, data: xr.Dataset) -> Sequence[Row]:
        if self._counts is None or self.classes is None:
            return [["class", "pixels"], ["(no labels)", 0]]
        counts = self._counts
        total = max(int(counts.sum()), 1)
        only = len(self._labels) < 2
        name = next(iter(self._labels))
        header: Row = ["class", name, "%"] if only else ["class", "true %", "predicted %", "IoU"]
        rows: list[Row] = [header]
        for i, label in enumerate(self.classes.names):
            true, predicted = int(counts[i].sum()), int(counts[:, i].sum())
            if only:
                rows.append([label, true, f"{100 * true / total:.1f}"])
                continue
            union = true + predicted - int(counts[i, i])
            iou = f"{counts[i, i] / union:.3f}" if union else "-"
            shares = [f"{100 * n / total:.1f}" for n in (true, predicted)]
            rows.append([label, *shares, iou])
        return rows

    def summary(self, data: xr.Dataset) -> str:
        x, y, width, height = data.attrs["view"]
        scale = 2 ** data.attrs["level"]
        rows = f"{max(0, y):.0f} to {min(self.shape[0], y + height):.0f}"
        columns = f"{max(0, x):.0f} to {min(self.shape[1], x + width):.0f}"
        text = f"Rows {rows}, columns {columns} of {self.shape[0]} x {self.shape[1]} pixels"
        text += f", shown at 1/{scale} of full resolution." if scale > 1 else ", full resolution."
        if len(self._labels) == 2 and self._counts is not None and self._counts.sum():
            share = float(np.trace(self._counts) / self._counts.sum())
            text += f" {share:.1%} of all labelled pixels agree."
        return text

    # Widgets -----------------------------------------------------------------------------------

    def controls(self) -> Mapping[str, Any]:
        made: dict[str, Any] = {
            "opacity": widgets.FloatSlider(
                min=0, max=1, step=0.1, description="Opacity", tooltip="Of classes over the image"
            ),
            "grid": widgets.Checkbox(description="Tile grid", tooltip="Edges of the tiles' cores"),
            "halo": widgets.Checkbox(
                description="Halo of the central tile", tooltip="Black: its core; yellow: its halo"
            ),
            "tile": widgets.Dropdown(
                options=sorted({128, 256, 512, 1024, 2048, self._first.tile}),
                description="Tile",
                tooltip="Side of a tile's core, pixels",
            ),
        }
        for name in ("grid", "halo"):
            made[name].indent = False
        for name in ("opacity", "tile"):
            made[name].layout.width = "310px"
        return made

    def extra_controls(self) -> Sequence[Any]:
        moves = {
            "Zoom in": (0.0, 0.0, 2.0),
            "Zoom out": (0.0, 0.0, 0.5),
            "Left": (-0.25, 0.0, 1.0),
            "Right": (0.25, 0.0, 1.0),
            "Up": (0.0, -0.25, 1.0),
            "Down": (0.0, 0.25, 1.0),
        }
        buttons = []
        for text, move in moves.items():
            button = widgets.Button(description=text, tooltip=f"{text}, all panes")
            button.on_click(lambda _, move=move: self.show(self.moved(self.state, *move)))
            buttons.append(button)
        whole = widgets.Button(description="Whole image", tooltip="Show all of it")
        whole.on_click(lambda _: self.show(self._whole(self.state)))
        buttons.append(whole)
        for button in buttons:
            button.layout.width = "auto"
        box = widgets.HBox(buttons, layout=widgets.Layout(flex_flow="row wrap"))
        return [*self.widgets.values(), box, widgets.HTML(self._legend())]

    def _legend(self) -> str:
        if self.classes is None:
            return ""
        items = "".join(
            f'<li><span aria-hidden="true" style="background:{colour}"></span>'
            f"{html.escape(name)}</li>"
            for name, colour in zip(self.classes.names, self.classes.colours, strict=True)
        )
        return f'<ul class="bigunet-legend" aria-label="Classes">{items}</ul>'

    def groups(self) -> Mapping[str, Sequence[str]]:
        return {"panes": list(self._plots)}


def _window(start: float, size: float, scale: int, count: int) -> tuple[int, int]:
    low = int(np.clip(np.floor(start / scale) - 1, 0, count - 1))
    return low, int(np.clip(np.ceil((start + size) / scale) + 1, low + 1, count))


def _classes_of(*labels: Any) -> ClassTable | None:
    for array in labels:
        first = array[0] if isinstance(array, list | tuple) else array
        if isinstance(first, xr.DataArray) and (table := class_table(first)) is not None:
            return table
    return None
