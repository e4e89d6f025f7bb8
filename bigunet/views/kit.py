"""The kit that every explorer is made of: state in, tables out, pictures that follow.

An explorer has one frozen state value. Its core ipywidgets build a new state; a pure function
turns that into an `xarray.Dataset`, pure functions turn the dataset into HoloViews elements, a
plain table and a sentence. The callbacks here only carry values from one to the next, so that an
explorer is tested without a browser.

Plots are Bokeh figures that HoloViews keeps up to date through the notebook's comm. Where the
server lacks Bokeh's extension the comm stays silent; then each plot is redrawn as SVG in a core
`ipywidgets.HTML`, which works everywhere, and the explorer says how to get the full one.

A subclass gives a title, its controls and five functions:

    class HaloExplorer(Explorer[HaloState]):
        title = "Tile and halo"
        def controls(self): ...          # {name: core widget}, in the order of the Tab key
        def values(self, state): ...     # state -> {name: value} (default: the state's fields)
        def build(self, values): ...     # {name: value} -> state, raises BigUNetError
        def tables(self, state): ...     # state -> xr.Dataset
        def plots(self, data): ...       # dataset -> {name: HoloViews element or overlay}
        def rows(self, data): ...        # dataset -> rows of the plain table, the header first
        def summary(self, data): ...     # dataset -> what a reader must know, as text

The element types of a plot, and their order in an overlay, stay the same from state to state;
what is not to be seen is an element without items. A plot that did not change may be the object
that it was before: it is not drawn anew. Plots are given the option `apply_ranges=False`: their
axes are set here, alike in the live plot and in the still one (`bigunet.views.draw.extent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import dataclasses
import html
import io
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import holoviews as hv
import holoviews.plotting.bokeh  # registers the renderer, without output in the page
import ipywidgets as widgets
import xarray as xr
import yaml
from bokeh.models import Plot
from holoviews.streams import Stream

from bigunet.errors import BigUNetError, SpecError, fail
from bigunet.views.draw import Extent, extent, to_png, to_svg
from bigunet.views.page import STYLE, as_table, download_link, png_bundle

__all__ = ["FIX", "Explorer", "Row", "fix_command"]

S = TypeVar("S")
Row = Sequence[object]

# Bokeh reports the plot's size on the page as soon as the comm works.
_TICKS, _TICK_SECONDS = 12, 0.25
# Changes of one control that follow each other this closely are one step for "Undo".
_ONE_STEP_SECONDS = 0.8

_Version = Stream.define("Version", number=0)


def fix_command() -> str:
    """The shell command that lends this kernel's Bokeh extension to the Jupyter server."""
    folder = "share/jupyter/labextensions/@bokeh"
    return (
        f"mkdir -p ~/.local/{folder} && "
        f"ln -sfn {Path(sys.prefix) / folder}/jupyter_bokeh ~/.local/{folder}/jupyter_bokeh"
    )


FIX = (
    "This page's server cannot reach the plots, so they are redrawn as plain pictures: every "
    "control works, zooming by mouse does not. To get the full plots, run this in a terminal of "
    "the same machine (no administrator needed), then restart the server and reload the page:"
)


class Explorer(Generic[S]):
    """Base of all explorers; see the module's text for what a subclass gives.

    Attributes
    ----------
    state : the frozen value that is shown; set it with `show`.
    data : the dataset of that state.
    view : the widget tree; displaying the explorer displays it.
    widgets : the controls by name.
    message : what is wrong with the controls' values, in words, or "".
    """

    title: ClassVar[str] = ""
    # Says what the plots are and what can be done, for those who come to the page first.
    help: ClassVar[str] = ""
    # Plots of one group stand in so many columns.
    columns: ClassVar[int] = 2

    def __init__(self, state: S) -> None:
        self.state = self._first = self._packed = state
        self.message = ""
        self.live: bool | None = None
        self._history: list[S] = []
        self._last_change: tuple[str, float] = ("", 0.0)
        self._quiet = False
        self.data = self.tables(state)
        self._plots = self.plots(self.data)
        self._streams = {name: _Version() for name in self._plots}
        self.widgets: dict[str, Any] = dict(self.controls())
        for name, widget in self.widgets.items():
            widget.observe(lambda change, name=name: self._changed(name), names="value")
        self._write_controls()
        self._lay_out()
        self._write_texts()

    # What a subclass gives ---------------------------------------------------------------------

    def controls(self) -> Mapping[str, widgets.ValueWidget]:
        """Core widgets by name, each with a description and a tooltip."""
        raise NotImplementedError

    def values(self, state: S) -> dict[str, Any]:
        """The controls' values in `state`; the state's own fields by default."""
        fields = dataclasses.fields(state)  # type: ignore[arg-type]
        return {f.name: getattr(state, f.name) for f in fields}

    def build(self, values: Mapping[str, Any]) -> S:
        """The state of these values; `self.state` with them replaced by default."""
        return dataclasses.replace(self.state, **values)  # type: ignore[type-var]

    def tables(self, state: S) -> xr.Dataset:
        raise NotImplementedError

    def plots(self, data: xr.Dataset) -> Mapping[str, Any]:
        raise NotImplementedError

    def rows(self, data: xr.Dataset) -> Sequence[Row]:
        raise NotImplementedError

    def more_tables(self, data: xr.Dataset) -> Mapping[str, Sequence[Row]]:
        """Further tables below the first, by caption; none by default."""
        return {}

    def summary(self, data: xr.Dataset) -> str:
        raise NotImplementedError

    def to_dict(self, state: S) -> dict[str, Any]:
        """What the YAML export holds; `from_dict` is its inverse."""
        return self.values(state)

    def from_dict(self, values: Mapping[str, Any]) -> S:
        return self.build(values)

    def exports(self) -> dict[str, str]:
        """Downloads by file name: the state as YAML and the table as CSV."""
        name = type(self).__name__
        content = {"explorer": name, "version": 1, "state": self.to_dict(self.state)}
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows(self.rows(self.data))
        return {
            f"{name}.yaml": yaml.safe_dump(content, sort_keys=False),
            f"{name}.csv": lines.getvalue(),
        }

    # What everybody uses -----------------------------------------------------------------------

    def show(self, state: S) -> None:
        """Show `state`; the one before it can be had back by `undo`."""
        self._history.append(self.state)
        self._last_change = ("", 0.0)
        self._apply(state)

    def undo(self) -> None:
        """Back by one step; nothing where there is none."""
        if self._history:
            self._last_change = ("", 0.0)
            self._apply(self._history.pop())

    def reset(self) -> None:
        """The state that the explorer began with, as one more step."""
        if self.state != self._first or self.message:
            self.show(self._first)

    def load(self, text: str) -> None:
        """Show the state of a YAML export.

        Raises
        ------
        SpecError : for a text that is no export of this explorer, or of another version.
        """
        name = type(self).__name__
        rule = f"the file is an export of {name}, version 1"
        remedy = f"Choose a file that {name} exported."
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            fail(SpecError, rule=rule, got=str(error).splitlines()[0], remedy=remedy)
        kind = content.get("explorer") if isinstance(content, dict) else None
        if (
            kind != name
            or content.get("version") != 1
            or not isinstance(content.get("state"), dict)
        ):
            got = f"{kind}, version {content.get('version')}" if kind else "something else"
            fail(SpecError, rule=rule, got=got, remedy=remedy)
        self.show(self.from_dict(content["state"]))

    def png(self) -> bytes:
        """The plots as one still picture."""
        linked = any(len(names) > 1 for names in self.groups().values())
        plots = [self.still(plot) for plot in self._plots.values()]
        return to_png(plots, self.columns if linked else 1)

    def still(self, plot: Any) -> Any:
        """What of a plot goes into still pictures; the plot itself by default."""
        return plot

    # Callbacks: they carry values, nothing more ------------------------------------------------

    def _changed(self, name: str) -> None:
        if self._quiet:
            return
        began = time.monotonic()
        try:
            state = self.build({n: w.value for n, w in self.widgets.items()})
            if state == self.state:
                self._say("")
                return
            before, previous = self._last_change, self.state
            self._apply(state, write_controls=False)
        except BigUNetError as error:
            self._say(str(error))
            return
        if before[0] != name or began - before[1] > _ONE_STEP_SECONDS:
            self._history.append(previous)
        self._last_change = (name, time.monotonic())
        self._undo_button.disabled = False

    def _apply(self, state: S, *, write_controls: bool = True) -> None:
        data = self.tables(state)
        plots = self.plots(data)
        changed = [name for name, plot in plots.items() if plot is not self._plots[name]]
        self.state, self.data, self._plots = state, data, plots
        self._say("")
        self._draw(changed)
        if write_controls:
            self._write_controls()
        self._write_texts()

    def _draw(self, names: Sequence[str]) -> None:
        """Bring plots on the page up to date; `plots` returned other objects for these."""
        if self.live is False:
            for name in names:
                self._stills[name].value = self._svg(name, self._plots[name])
            return
        with contextlib.ExitStack() as stack:
            # Bokeh walks all its models after each change, unless told to wait for the last.
            for figure in self._figures.values():
                stack.enter_context(figure._model.document.models.freeze())
            for name in names:
                stream = self._streams[name]
                stream.event(number=stream.number + 1)
            self._set_axes(names)

    def extent(self, name: str) -> Extent:
        """The axes' limits of a plot, its data's by default."""
        return extent(self.still(self._plots[name]))

    def _set_axes(self, names: Sequence[str]) -> None:
        for group, members in self.groups().items():
            # Linked plots share their axes.
            if group in self._figures and not set(members).isdisjoint(names):
                (xlim, ylim, flip) = self.extent(members[0])
                figure = self._axes_of[group]
                ends = ((figure.x_range, xlim), (figure.y_range, ylim[::-1] if flip else ylim))
                for axis, (start, end) in ends:
                    if (axis.start, axis.end) != (start, end):
                        axis.update(start=start, end=end)

    def _svg(self, name: str, plot: Any) -> str:
        return to_svg(self.still(plot), f"{self.title}, {name}: {self.summary(self.data)}")

    def _say(self, text: str) -> None:
        self.message = text
        inner = html.escape(text)
        self._message.value = f'<div role="alert" class="bigunet-bad">{inner}</div>' if text else ""

    def _write_controls(self) -> None:
        self._quiet = True
        try:
            for name, value in self.values(self.state).items():
                if name in self.widgets:
                    self.widgets[name].value = value
        finally:
            self._quiet = False

    def _write_texts(self) -> None:
        self._summary.value = (
            f'<div role="status" aria-live="polite" class="bigunet-summary">'
            f"{html.escape(self.summary(self.data))}</div>"
        )
        tables = {self.title: self.rows(self.data), **self.more_tables(self.data)}
        self._table.value = "".join(as_table(rows, name) for name, rows in tables.items())
        self._undo_button.disabled = not self._history
        self._links.value = " ".join(download_link(*item) for item in self.exports().items())

    def _uploaded(self, change: Mapping[str, Any]) -> None:
        if not change["new"]:
            return
        try:
            self.load(bytes(change["new"][0].content).decode(errors="replace"))
        except BigUNetError as error:
            self._say(str(error))
        self._upload.value = ()

    # The widget tree ---------------------------------------------------------------------------

    def _lay_out(self) -> None:
        head = f"{STYLE}<h3 class='bigunet-title'>{html.escape(self.title)}</h3>"
        text = f"<p class='bigunet-help'>{html.escape(self.help)}</p>" if self.help else ""
        self._message, self._summary = widgets.HTML(), widgets.HTML()
        self._table, self._links, self._notice = widgets.HTML(), widgets.HTML(), widgets.HTML()
        self._undo_button = _button("Undo", "Take back the last change", self.undo)
        self._reset_button = _button("Reset", "Back to the values at the beginning", self.reset)
        self._upload = widgets.FileUpload(
            accept=".yaml,.yml", description="Load YAML", tooltip="Show an exported state again"
        )
        self._upload.observe(self._uploaded, names="value")
        for widget in (self._undo_button, self._reset_button, self._upload):
            widget.layout.width = "auto"
        self._stills = {name: widgets.HTML() for name in self._plots}
        self._figures: dict[str, Any] = {}
        self._axes_of: dict[str, Any] = {}
        self._figures = self._make_figures()
        self._plot_box = widgets.VBox(list(self._figures.values()) or list(self._stills.values()))
        buttons = widgets.HBox([self._undo_button, self._reset_button, self._upload])
        buttons.layout.flex_flow = "row wrap"
        controls = widgets.VBox(
            [*self.extra_controls(), self._message, buttons, self._links, self._summary],
            layout=widgets.Layout(width="318px", flex="0 0 auto"),
        )
        body = widgets.HBox(
            [controls, self._plot_box, self._table],
            layout=widgets.Layout(flex_flow="row wrap", grid_gap="8px 14px"),
        )
        self.view = widgets.VBox([widgets.HTML(head + text), self._notice, body])
        self.view.add_class("bigunet-explorer")

    def extra_controls(self) -> Sequence[Any]:
        """The widgets of the left column, in order: the controls, and what a subclass adds."""
        return list(self.widgets.values())

    def _make_figures(self) -> dict[str, Any]:
        """The live figures, each in the widget that keeps it up to date; none without Bokeh's."""
        try:
            from jupyter_bokeh import BokehModel
        except ImportError:
            self._go_still()
            return {}
        figures: dict[str, Any] = {}
        for group, names in self.groups().items():
            live = [self._live_plot(name) for name in names]
            shown = live[0] if len(live) == 1 else hv.Layout(live).cols(self.columns)
            model = hv.renderer("bokeh").get_plot(shown).state
            parts = list(model.select({"type": Plot}))
            for figure in parts:
                figure.on_change("inner_width", lambda attr, old, new: self._go_live())
            self._axes_of[group] = parts[0]
            figures[group] = model
        # Before the figures are packed for the page, which reads later changes only once it is up.
        self._figures = figures
        self._set_axes(list(self._plots))
        return {group: BokehModel(model) for group, model in figures.items()}

    def _pack_figures(self) -> None:
        """Pack the figures anew, as they are now, for a view that is about to be made."""
        for figure in self._figures.values():
            figure.render_bundle = figure._model_to_traits(figure._model)

    def groups(self) -> Mapping[str, Sequence[str]]:
        """Plots that are shown as one, their axes linked; each by itself by default."""
        return {name: [name] for name in self._plots}

    def _live_plot(self, name: str) -> Any:
        return hv.DynamicMap(lambda **_: self._plots[name], streams=[self._streams[name]])

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
        if hasattr(self, "_plot_box"):
            self._plot_box.children = list(self._stills.values())

    async def _wait_for_handshake(self) -> None:
        # Counted in ticks of the kernel's loop, since messages queue while a cell runs.
        for _ in range(_TICKS):
            await asyncio.sleep(_TICK_SECONDS)
            if self.live is not None:
                return
        self._go_still()

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The live widget and, for the saved notebook, a picture and the summary."""
        if self.state != self._packed:
            self._packed = self.state
            self._pack_figures()
        if self.live is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                pass
            else:
                self._waiting = loop.create_task(self._wait_for_handshake())
        bundle = dict(self.view._repr_mimebundle_(**kwargs))
        text = f"{self.title}: {self.summary(self.data)}"
        return bundle | png_bundle(self.png()) | {"text/plain": text}


def _button(text: str, tooltip: str, action: Callable[[], None]) -> widgets.Button:
    button = widgets.Button(description=text, tooltip=tooltip)
    button.on_click(lambda _: action())
    return button
