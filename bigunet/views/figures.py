"""How an explorer's plots stand on the page: live where the comm works, else as pictures.

Plots are Bokeh figures that are kept up to date through the notebook's comm. Where the server
lacks Bokeh's extension the comm stays silent; then each plot is redrawn as SVG in a core
`ipywidgets.HTML`, which works everywhere, and the explorer says how to get the full one.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import holoviews as hv
import holoviews.plotting.bokeh  # registers the renderer, without output in the page
import ipywidgets as widgets
from holoviews.plotting.bokeh.element import ElementPlot
from holoviews.streams import Stream

from bigunet.views.draw import to_svg
from bigunet.views.lower import Extent, extent
from bigunet.views.quick import redraw

__all__ = ["FIX", "OnPage", "fix_command"]

# Bokeh reports the plot's size on the page as soon as the comm works.
_TICKS, _TICK_SECONDS = 12, 0.25

_Version = Stream.define("Version", number=0)


def fix_command() -> str:
    """The shell command that lends this kernel's Bokeh extension to the Jupyter server."""
    return f"{shlex.quote(sys.executable)} -m bigunet doctor --link-labextensions"


FIX = (
    "This page's server cannot reach the plots, so they are redrawn as plain pictures: every "
    "control works, zooming by mouse does not. To get the full plots, run this in a terminal of "
    "the same machine (no administrator needed), then restart the server and reload the page:"
)


class OnPage:
    """The part of an explorer that brings its plots to the page and keeps them up to date.

    Attributes
    ----------
    live : whether the comm works; None until that is known.
    """

    title: ClassVar[str] = ""
    # Plots of one group stand in so many columns.
    columns: ClassVar[int] = 2

    live: bool | None = None
    _plots: Mapping[str, Any]

    def summary(self, data: Any) -> str:
        raise NotImplementedError

    def groups(self) -> Mapping[str, Sequence[str]]:
        """Plots that are shown as one, their axes linked; each by itself by default."""
        return {name: [name] for name in self._plots}

    def still(self, plot: Any) -> Any:
        """What of a plot goes into still pictures; the plot itself by default."""
        return plot

    def extent(self, name: str) -> Extent:
        """The axes' limits of a plot, its data's by default."""
        return extent(self.still(self._plots[name]))

    # Making ------------------------------------------------------------------------------------

    def _make_plots(self) -> None:
        """The figures, each in the widget that keeps it up to date, and the box that holds them."""
        self._notice = widgets.HTML()
        self._stills = {name: widgets.HTML() for name in self._plots}
        self._streams = {name: _Version() for name in self._plots}
        # What each figure shows, which lags behind while there are pictures instead.
        self._drawn = dict(self._plots)
        # Widgets and models with axes by group, models by plot.
        self._figures: dict[str, Any] = {}
        self._axes_of: dict[str, Any] = {}
        self._figure_of: dict[str, Any] = {}
        self._plot_box = widgets.VBox()
        try:
            from bigunet.views.live import LiveFigure
        except ImportError:
            self._go_still()
            return
        models = {group: self._model(group, names) for group, names in self.groups().items()}
        # Before the figures are packed for the page, which reads later changes only once it is up.
        for group in models:
            self._set_limits(group, self.extent(self.groups()[group][0]))
        self._figures = {group: LiveFigure(model) for group, model in models.items()}
        self._plot_box.children = list(self._figures.values())

    def _model(self, group: str, names: Sequence[str]) -> Any:
        live = [self._live_plot(name) for name in names]
        shown = live[0] if len(live) == 1 else hv.Layout(live).cols(self.columns)
        plot = hv.renderer("bokeh").get_plot(shown)
        drawn = plot.traverse(lambda part: part, [lambda p: isinstance(p, ElementPlot)])
        # Of an overlay's plots, the first one found is the overlay's own.
        models = list(dict.fromkeys(part.state for part in drawn))
        self._figure_of |= zip(names, models, strict=True)
        self._axes_of[group] = models[0]
        for figure in models:
            figure.on_change("inner_width", lambda attr, old, new: self._go_live())
        return plot.state

    def _live_plot(self, name: str) -> Any:
        return hv.DynamicMap(lambda **_: self._plots[name], streams=[self._streams[name]])

    def _pack_figures(self) -> None:
        for figure in self._figures.values():
            figure.pack()

    # Drawing -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _one_message(self) -> Iterator[None]:
        """All that changes on the figures within travels at the end, one message a figure."""
        with contextlib.ExitStack() as stack:
            for figure in self._figures.values():
                stack.enter_context(figure.one_message())
            yield

    def _draw(self, names: Sequence[str]) -> None:
        """Bring plots on the page up to date; `plots` returned other objects for these."""
        if self.live is False:
            for name in names:
                self._stills[name].value = self._svg(name)
            return
        with self._one_message():
            pairs = [(self._figure_of[n], self._drawn[n], self._plots[n]) for n in names]
            if not redraw(pairs):
                self._draw_anew(names)
            self._drawn |= {name: self._plots[name] for name in names}
            for group, members in self.groups().items():
                if not set(members).isdisjoint(names):
                    self._set_limits(group, self.extent(members[0]))

    def _draw_anew(self, names: Sequence[str]) -> None:
        """By HoloViews, which may make other models."""
        with contextlib.ExitStack() as stack:
            # Bokeh walks all its models after each change, unless told to wait for the last.
            for figure in self._figures.values():
                stack.enter_context(figure._model.document.models.freeze())
            for name in names:
                stream = self._streams[name]
                stream.event(number=stream.number + 1)

    def _set_limits(self, group: str, limits: Extent) -> None:
        """The axes of a group's figures; linked plots share them."""
        xlim, ylim, flip = limits
        figure = self._axes_of[group]
        ends = ((figure.x_range, xlim), (figure.y_range, ylim[::-1] if flip else ylim))
        for axis, (start, end) in ends:
            if (axis.start, axis.end) != (start, end):
                axis.update(start=start, end=end)

    def _describe(self) -> str:
        """The summary of what is shown."""
        raise NotImplementedError

    def _svg(self, name: str) -> str:
        label = f"{self.title}, {name}: {self._describe()}"
        return to_svg(self.still(self._plots[name]), label)

    # Handshake ---------------------------------------------------------------------------------

    def _go_live(self) -> None:
        """The comm works: it brought a message from the page."""
        if self.live:
            return
        was_still = self.live is False
        self.live = True
        self._notice.value = ""
        if was_still:
            self._plot_box.children = list(self._figures.values())
            self._draw(list(self._plots))

    def _go_still(self) -> None:
        """The comm is silent: draw pictures that need none."""
        self.live = False
        self._notice.value = (
            f'<div class="bigunet-notice" role="status">{FIX}<pre>{html.escape(fix_command())}'
            "</pre></div>"
        )
        self._draw(list(self._plots))
        self._plot_box.children = list(self._stills.values())

    async def _wait_for_handshake(self, patience: int = 1) -> None:
        # Counted in ticks of the kernel's loop, since messages queue while a cell runs.
        for _ in range(_TICKS * patience):
            await asyncio.sleep(_TICK_SECONDS)
            if self.live is not None:
                return
        self._go_still()
