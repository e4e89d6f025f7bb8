"""The kit that every explorer is made of: state in, tables out, pictures that follow.

An explorer has one frozen state value. Its core ipywidgets build a new state; a pure function
turns that into an `xarray.Dataset`, pure functions turn the dataset into HoloViews elements, a
plain table and a sentence. The callbacks here only carry values from one to the next, so that an
explorer is tested without a browser.

How the plots stand on the page, and what happens where the server cannot reach them, is the
matter of `bigunet.views.figures`. After a change they come first: what only tables and texts
need (`details`) is computed, and they are written, once the picture is on its way. While a key
is held down, ipywidgets' page sends the next value when the kernel is through with the last, and
keeps only the newest meanwhile.

A subclass gives a title, its controls and five functions:

    class HaloExplorer(Explorer[HaloState]):
        title = "Tile and halo"
        def controls(self): ...          # {name: core widget}, in the order of the Tab key
        def values(self, state): ...     # state -> {name: value} (default: the state's fields)
        def build(self, values): ...     # {name: value} -> state, raises BigUNetError
        def tables(self, state): ...     # state -> xr.Dataset, all that the plots need
        def plots(self, data): ...       # dataset -> {name: HoloViews element or overlay}
        def rows(self, data): ...        # dataset -> rows of the plain table, the header first
        def summary(self, data): ...     # dataset -> what a reader must know, as text

The element types of a plot, and their order in an overlay, stay the same from state to state, and
so best do their styles (a colour that changes is a column): then new values are drawn without
HoloViews, which is quicker. What is not to be seen is an element without items. A plot that did
not change may be the object that it was before: it is not drawn anew. Plots are given the option
`apply_ranges=False`: their axes are set here, alike in the live plot and in the still one
(`bigunet.views.lower.extent`).
"""

from __future__ import annotations

import asyncio
import csv
import dataclasses
import html
import io
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import ipywidgets as widgets
import xarray as xr
import yaml

from bigunet.errors import BigUNetError, PlanError, SpecError, fail
from bigunet.plan import Plan
from bigunet.views.draw import to_png
from bigunet.views.figures import OnPage
from bigunet.views.page import STYLE, as_table, download_link, png_bundle

__all__ = ["Explorer", "Row"]

S = TypeVar("S")
Row = Sequence[object]

# Changes of one control that follow each other this closely are one step for "Undo".
_ONE_STEP_SECONDS = 0.8
# By then the picture has been drawn.
_TEXT_SECONDS = 0.06


class Explorer(OnPage, Generic[S]):
    """Base of all explorers; see the module's text for what a subclass gives.

    Attributes
    ----------
    state : the frozen value that is shown; set it with `show`.
    data : the dataset of that state.
    view : the widget tree; displaying the explorer displays it.
    widgets : the controls by name.
    message : what is wrong with the controls' values, in words, or "".
    """

    # Says what the plots are and what can be done, for those who come to the page first.
    help: ClassVar[str] = ""

    def __init__(self, state: S) -> None:
        self.state = self._first = self._packed = state
        self.message = ""
        self._history: list[S] = []
        self._last_change: tuple[str, float] = ("", 0.0)
        self._quiet = False
        self._texts_due: tuple[Any, Any] | None = None
        self._data, self._detailed = self.tables(state), False
        self._plots = dict(self.plots(self._data))
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

    def details(self, state: S, data: xr.Dataset) -> xr.Dataset:
        """`tables`' dataset with what the texts need beside it; nothing by default."""
        return data

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

    def from_plan(self, plan: Plan) -> S:
        """The state that shows a plan; by default none does."""
        fail(
            PlanError,
            rule=f"{type(self).__name__} shows no plans",
            got=f"a plan of {len(plan.stages)} stages",
            remedy=f"Choose a file that {type(self).__name__} exported.",
        )

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

    @property
    def data(self) -> xr.Dataset:
        if not self._detailed:
            self._data, self._detailed = self.details(self.state, self._data), True
        return self._data

    def show(self, state: S) -> None:
        """Show `state`; the one before it can be had back by `undo`."""
        before = self.state
        self._apply(state)
        self._history.append(before)
        self._last_change = ("", 0.0)
        self._undo_button.disabled = False

    def undo(self) -> None:
        """Back by one step; nothing where there is none.

        Where the controls stand at what cannot be, they go back to the state that is shown.
        """
        self._last_change = ("", 0.0)
        if self.message:
            self._write_controls()
            self._say("")
        elif self._history:
            self._apply(self._history.pop())
        self._undo_button.disabled = not self._history

    def reset(self) -> None:
        """The state that the explorer began with, as one more step."""
        if self.state != self._first or self.message:
            self.show(self._first)

    def load(self, text: str) -> None:
        """Show the state of a YAML export, or what a plan's YAML says of it.

        Raises
        ------
        SpecError : for a text that is neither, or of another version.
        PlanError : for a plan of another version, or one that cannot be shown here.
        """
        self.show(self._read(text))

    def _read(self, text: str) -> S:
        name = type(self).__name__
        rule = f"the file is an export of {name}, version 1"
        remedy = f"Choose a file that {name} exported."
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            fail(SpecError, rule=rule, got=str(error).splitlines()[0], remedy=remedy)
        if isinstance(content, dict) and "bigunet_plan" in content:
            return self.from_plan(Plan.from_dict(content))
        kind = content.get("explorer") if isinstance(content, dict) else None
        if (
            kind != name
            or content.get("version") != 1
            or not isinstance(content.get("state"), dict)
        ):
            got = f"{kind}, version {content.get('version')}" if kind else "something else"
            fail(SpecError, rule=rule, got=got, remedy=remedy)
        try:
            return self.from_dict(content["state"])
        except BigUNetError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            fail(SpecError, rule=rule, got=f"a state that is none: {error}", remedy=remedy)

    def png(self) -> bytes:
        """The plots as one still picture."""
        linked = any(len(names) > 1 for names in self.groups().values())
        plots = [self.still(plot) for plot in self._plots.values()]
        return to_png(plots, self.columns if linked else 1)

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
            self._undo_button.disabled = False
            return
        if before[0] != name or began - before[1] > _ONE_STEP_SECONDS:
            self._history.append(previous)
        self._last_change = (name, time.monotonic())
        self._undo_button.disabled = False

    def _apply(self, state: S, *, write_controls: bool = True) -> None:
        data = self.tables(state)
        plots = dict(self.plots(data))
        changed = [name for name, plot in plots.items() if plot is not self._plots[name]]
        self.state, self._data, self._detailed, self._plots = state, data, False, plots
        self._draw(changed)
        self._say("")
        if write_controls:
            self._write_controls()
        self._write_texts_soon()

    def _write_texts_soon(self) -> None:
        """Once the picture is on its way; at once where no loop runs."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._write_texts()
            return
        # One that waits already will write what is shown by then.
        if self._texts_due is None or self._texts_due[0] is not loop:
            self._texts_due = (loop, loop.call_later(_TEXT_SECONDS, self._write_texts))

    def _describe(self) -> str:
        return self.summary(self.data)

    def _say(self, text: str) -> None:
        self.message = text
        inner = html.escape(text)
        self._message.value = f'<div role="alert" class="bigunet-bad">{inner}</div>' if text else ""

    def _write_controls(self) -> None:
        self._quiet = True
        try:
            for name, value in self.values(self.state).items():
                if name in self.widgets:
                    _set(self.widgets[name], value)
        finally:
            self._quiet = False

    def _write_texts(self) -> None:
        self._texts_due = None
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
        self._table, self._links = widgets.HTML(), widgets.HTML()
        self._undo_button = _button("Undo", "Take back the last change", self.undo)
        self._reset_button = _button("Reset", "Back to the values at the beginning", self.reset)
        self._upload = widgets.FileUpload(
            accept=".yaml,.yml", description="Load YAML", tooltip="Show an exported state or a plan"
        )
        self._upload.observe(self._uploaded, names="value")
        for widget in (self._undo_button, self._reset_button, self._upload):
            widget.layout.width = "auto"
        self._make_plots()
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

    def appear(self, patience: int = 1) -> None:
        """To be called where `view` is about to be shown as a part of something larger.

        It packs the plots as they are now, and begins to wait for the page's first sign: about
        3 s times `patience`, then pictures that need no comm take the plots' place for good.
        """
        if self.state != self._packed:
            self._packed = self.state
            self._pack_figures()
        if self.live is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return
            self._waiting = loop.create_task(self._wait_for_handshake(patience))

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The live widget and, for the saved notebook, a picture and the summary."""
        self.appear()
        bundle = dict(self.view._repr_mimebundle_(**kwargs))
        text = f"{self.title}: {self.summary(self.data)}"
        return bundle | png_bundle(self.png()) | {"text/plain": text}


def _button(text: str, tooltip: str, action: Callable[[], None]) -> widgets.Button:
    button = widgets.Button(description=text, tooltip=tooltip)
    button.on_click(lambda _: action())
    return button


def _set(widget: Any, value: Any) -> None:
    """Show a value, though it be none that the control offers by itself."""
    if hasattr(widget, "options"):
        known = [o[1] if isinstance(o, tuple) else o for o in widget.options]
        if value not in known:
            widget.options = [*widget.options, value]
    elif hasattr(widget, "max"):
        widget.max, widget.min = max(widget.max, value), min(widget.min, value)
    if widget.value != value:
        widget.value = value
