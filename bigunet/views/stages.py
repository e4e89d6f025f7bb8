"""StageExplorer: cut a U-Net into stages, by hand or by planner, and see what follows."""

from __future__ import annotations

import asyncio
import dataclasses
import html
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, get_args

import holoviews as hv
import ipywidgets as widgets
import xarray as xr
from bokeh.models.annotations.geometry import Span

from bigunet.balance import balance
from bigunet.cost import CostModel, micro_batch_rows
from bigunet.errors import BigUNetError, SpecError, fail
from bigunet.hardware import Machine
from bigunet.layers import Shape
from bigunet.plan import Plan, Schedule, SkipRoute
from bigunet.planner import balanced_plan, find_plan
from bigunet.spec import Recompute, TrainSpec, UNetSpec
from bigunet.views.kit import Explorer, Row
from bigunet.views.stage_plots import plot_devices, plot_layers, plot_timeline
from bigunet.views.stage_spans import cut_spans, set_spans
from bigunet.views.stage_tables import StageSetting, StageState, moved_cut, stage_tables

__all__ = ["StageExplorer", "StageState"]

_MOST_STAGES = 12
_GIB, _MB = 2.0**30, 1e6

#: Buttons: text, tooltip and way of `StageExplorer.balanced`.
_WAYS = (
    ("Balance by time", "Stages of equal time", "time"),
    ("Balance by memory", "Stages of equal memory", "memory"),
    ("fairscale's", "The cuts of fairscale's balance_by_time", "fairscale"),
    ("Best", "The cuts of least step time within the memory", "best"),
    ("Folded", "First and last stages on one device, so that no skip leaves it", "folded"),
)

# How HoloViews names the columns of an element's Bokeh source.
_COLUMNS = {
    hv.Rectangles: ("left", "bottom", "right", "top", "fill_color"),
    hv.Segments: ("x0", "y0", "x1", "y1", "color"),
    hv.Labels: ("x", "y", "text"),
}

# What of a state the engines see: runs are remembered by it.
_RunKey = tuple[Any, ...]


class StageExplorer(Explorer[StageState]):
    """A U-Net's layers with cuts that can be moved, and the pipelined step that follows.

    Parameters
    ----------
    spec : the network.
    shape_BCHW : the images that one pipeline takes in one step.
    train : precision, optimiser and the like; recomputation is a control.
    stages, micro_batches, schedule, machine : to begin with, balanced by time.
    machines : more machines by name, with the seconds of layers there, such as
        `{"here": (machine, cost)}` of `bigunet.timing`.
    run : runs a plan on this machine and gives its measured timeline
        (`bigunet.rehearsal.run_here`); without it, the button "Run it here" is absent.
    skips, tiles, scene_shape : see `bigunet.plan.Plan`.

    Raises
    ------
    SpecError : for more stages than can be shown. PlanError : for what is no plan.
    """

    title = "Stages of a pipeline"
    help = (
        "Each colour is one stage. Its micro-batches pass through all stages; a skip (arc) that "
        "is joined on another device has to travel. A step ends when the slowest device does."
    )

    def __init__(
        self,
        spec: UNetSpec,
        shape_BCHW: Shape,
        *,
        train: TrainSpec | None = None,
        stages: int = 3,
        micro_batches: int | None = None,
        schedule: Schedule = "gpipe",
        machine: str | None = None,
        machines: Mapping[str, tuple[Machine, CostModel]] | None = None,
        run: Callable[[Plan], xr.Dataset] | None = None,
        skips: SkipRoute = "hop",
        tiles: int = 1,
        scene_shape: tuple[int, int] | None = None,
    ) -> None:
        training = train or TrainSpec()
        self.setting = StageSetting(
            spec, shape_BCHW, training, machines or {}, skips, tiles, scene_shape
        )
        self._run = run
        self._runs: dict[_RunKey, xr.Dataset] = {}
        self._spans: list[Span] = []
        self._held: int | None = None
        state = StageState(
            cuts=(),
            micro_batches=micro_batches or shape_BCHW[0],
            schedule=schedule,
            recompute=training.recompute,
            machine=machine or next(iter(self.setting.all_machines)),
        )
        super().__init__(dataclasses.replace(state, cuts=self.by_time(state, stages)))

    # States ------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that is shown."""
        return self.setting.plan(self.state)

    def by_time(self, state: StageState, stages: int) -> tuple[int, ...]:
        """Cuts of so many stages of equal time, forward and backward.

        Raises
        ------
        PlanError, SpecError : for more stages than layers, or than can be shown.
        """
        if stages > _MOST_STAGES:
            fail(
                SpecError,
                rule=f"at most {_MOST_STAGES} stages are shown",
                got=stages,
                remedy="Use fewer, or plan without the explorer.",
            )
        rows = micro_batch_rows(self.setting.table, state.micro_batches)
        costs = self.setting.machine(state.machine)[1](rows)
        both = costs.forward_seconds + costs.backward_seconds
        return balance(both.tolist(), stages)[1:-1]

    def balanced(self, way: str) -> StageState:
        """The state on as many devices, cut in another way (see `bigunet.comparison`).

        Raises
        ------
        MemoryBudgetError : where nothing fits. PlanError : where the way does not work.
        """
        state, plan = self.state, self.plan
        machine, cost = self.setting.machine(state.machine)
        common: dict[str, Any] = {
            "spec": plan.spec,
            "train": plan.train,
            "machine": machine,
            "micro_batches": plan.micro_batches,
            "schedule": plan.schedule,
            "skips": plan.skips,
            "memory": self.setting.memory,
        }
        table, devices = self.setting.table, plan.num_devices
        if way in ("best", "folded"):
            folded = way == "folded"
            if folded and 2 * devices > _MOST_STAGES:
                fail(
                    SpecError,
                    rule=f"a folded plan has two stages a device, at most {_MOST_STAGES} here",
                    got=f"{devices} devices",
                    remedy="Use fewer stages.",
                )
            found = find_plan(
                table, cost, stages=2 * devices if folded else devices,
                placement="folded" if folded else "straight", max_labels=1000, **common,
            )  # fmt: skip
        else:
            by: Any = way
            found = balanced_plan(table, cost, by=by, stages=devices, **common)
        return dataclasses.replace(
            state,
            cuts=found.plan.cuts[1:-1],
            placement="folded" if way == "folded" else "straight",
        )

    def values(self, state: StageState) -> dict[str, Any]:
        chosen = ("micro_batches", "schedule", "recompute", "machine", "height")
        cuts = {f"cut{i}": cut for i, cut in enumerate(state.cuts, 1)}
        return {"stages": state.num_stages} | cuts | {n: getattr(state, n) for n in chosen}

    def build(self, values: Mapping[str, Any]) -> StageState:
        chosen = ("micro_batches", "schedule", "recompute", "machine", "height")
        state = dataclasses.replace(self.state, **{n: values[n] for n in chosen})
        if values["stages"] != state.num_stages:
            cuts = self.by_time(state, values["stages"])
            return dataclasses.replace(state, cuts=cuts, placement="straight")
        cuts = state.cuts
        for i, cut in enumerate(state.cuts):
            if values[f"cut{i + 1}"] != cut:
                cuts = moved_cut(cuts, i, values[f"cut{i + 1}"], len(self.setting.table))
        return dataclasses.replace(state, cuts=cuts)

    def to_dict(self, state: StageState) -> dict[str, Any]:
        about = {"spec": self.setting.spec.to_dict(), "shape_BCHW": list(self.setting.shape_BCHW)}
        return about | dataclasses.asdict(state) | {"cuts": list(state.cuts)}

    def from_dict(self, values: Mapping[str, Any]) -> StageState:
        own = {"spec": self.setting.spec.to_dict(), "shape_BCHW": list(self.setting.shape_BCHW)}
        names = {f.name for f in dataclasses.fields(StageState)}
        rule = "the state is of this network and shape, with the fields " + ", ".join(sorted(names))
        remedy = "Choose a file that an explorer of this network exported."
        if set(values) != names | set(own) or any(values[n] != own[n] for n in own):
            fail(SpecError, rule=rule, got=", ".join(map(str, values)), remedy=remedy)
        cuts = values["cuts"]
        if not isinstance(cuts, list) or not all(type(c) is int for c in cuts):
            fail(SpecError, rule="cuts are whole numbers", got=cuts, remedy=remedy)
        ends = [0, *cuts, len(self.setting.table)]
        if len(cuts) >= _MOST_STAGES or any(a >= b for a, b in pairwise(ends)):
            fail(
                SpecError,
                rule=f"cuts rise between 0 and {ends[-1]}, fewer than {_MOST_STAGES}",
                got=cuts,
                remedy=remedy,
            )
        chosen = {n: values[n] for n in names} | {"cuts": tuple(cuts)}
        state = StageState(**chosen)
        if state.height not in ("ms", "GiB"):
            fail(SpecError, rule="height is ms or GiB", got=state.height, remedy=remedy)
        self.setting.plan(state)  # refuses all the rest
        return state

    # State in, tables out ----------------------------------------------------------------------

    def tables(self, state: StageState) -> xr.Dataset:
        return stage_tables(self.setting, state, self._runs.get(_run_key(state)))

    def plots(self, data: xr.Dataset) -> Mapping[str, Any]:
        return {
            "layers": plot_layers(data, self._add_spans),
            "devices": plot_devices(data),
            "timeline": plot_timeline(data),
        }

    def rows(self, data: xr.Dataset) -> Sequence[Row]:
        header = ["stage", "device", "layers", "first", "last", "forward ms", "backward ms",
                  "in flight", "sends MB", "GiB", "% of device"]  # fmt: skip
        names = ("stage_device", "num_layers", "first", "last", "forward", "backward",
                 "in_flight", "sends", "peak")  # fmt: skip
        columns = [data[name].values.tolist() for name in names]
        limit = data.attrs["limit_bytes"]
        rows: list[Row] = [header]
        for i, line in enumerate(zip(*columns, strict=True)):
            device, count, first, last, forward, backward, flight, sends, peak = line
            rows.append([i, device, count, first, last, f"{1e3 * forward:.2f}",
                         f"{1e3 * backward:.2f}", flight, f"{sends / _MB:.1f}",
                         f"{peak / _GIB:.2f}", f"{100 * peak / limit:.0f}"])  # fmt: skip
        return rows

    def summary(self, data: xr.Dataset) -> str:
        a, idle = data.attrs, 1e3 * data["idle"].values.mean(axis=0)
        causes = ", ".join(
            f"{name} {value:.1f}" for name, value in zip(data["cause"].values, idle, strict=True)
        )
        over = [
            f"device {d} is OVER by {(peak - a['limit_bytes']) / _GIB:.1f} GiB"
            for d, peak in enumerate(data["device_peak"].values)
            if peak > a["limit_bytes"]
        ]
        text = (
            f"Predicted for {a['machine']}: {1e3 * a['step_seconds']:.1f} ms a step, "
            f"{a['speed_up']:.2f} times as fast as one device. Bubble {100 * a['bubble']:.0f} %; "
            f"idle ms a device: {causes}. Skips over links: "
            f"{a['skip_link_bytes'] / _MB:,.1f} MB a micro-batch. "
            f"Memory: {'; '.join(over) if over else 'every device holds its stages'}. "
            f"{a['placement'].capitalize()}, {a['schedule']}, {a['micro_batches']} micro-batches, "
            f"recompute {a['recompute']}; {a['about']}."
        )
        if "measured_seconds" in a:
            text += (
                f" {a['measured_on'].capitalize()}: {1e3 * a['measured_seconds']:.1f} ms a step, "
                f"{a['measured_seconds'] / a['step_seconds']:.2f} times the prediction."
            )
        return text

    def exports(self) -> dict[str, str]:
        """Beside the state and the table: the plan, and the command that runs it."""
        command = f"#!/bin/sh\n{self.data.attrs['command']}\n"
        return super().exports() | {"plan.yaml": self.plan.to_yaml(), "run.sh": command}

    # Widgets -----------------------------------------------------------------------------------

    def controls(self) -> Mapping[str, Any]:
        batch, num_rows = self.setting.shape_BCHW[0], len(self.setting.table)
        most = min(_MOST_STAGES, num_rows)
        made: dict[str, Any] = {
            "stages": widgets.IntSlider(
                min=1, max=most, description="Stages", tooltip="Number of stages; balances anew"
            )
        }
        for i in range(1, most):
            made[f"cut{i}"] = widgets.IntSlider(
                min=1, max=num_rows - 1, description=f"Cut {i}",
                tooltip=f"Number of the layer that stage {i} begins with",
            )  # fmt: skip
        made["micro_batches"] = widgets.SelectionSlider(
            options=[m for m in range(1, batch + 1) if batch % m == 0],
            description="Micro-batches",
            tooltip="Equal parts of the batch",
        )
        for name, text, options, tooltip in (
            ("schedule", "Schedule", get_args(Schedule), "Order of forward and backward passes"),
            ("recompute", "Recompute", get_args(Recompute), "What is computed twice"),
            ("machine", "Machine", list(self.setting.all_machines), "Whose figures are used"),
            ("height", "Height", ["ms", "GiB"], "What the bar of layers shows"),
        ):
            made[name] = widgets.Dropdown(options=options, description=text, tooltip=tooltip)
        for widget in made.values():
            widget.style.description_width = "95px"
            widget.layout.width = "310px"
        return made

    def extra_controls(self) -> Sequence[Any]:
        buttons = []
        for text, tooltip, way in _WAYS:
            button = widgets.Button(description=text, tooltip=tooltip)
            button.on_click(lambda _, way=way: self._balance(way))
            buttons.append(button)
        self._run_button = widgets.Button(
            description="Run it here", tooltip="On processes of this machine; shows what they took"
        )
        self._run_button.on_click(lambda _: self._start_run())
        if self._run is not None:
            buttons.append(self._run_button)
        for button in buttons:
            button.layout.width = "auto"
        self._command = widgets.HTML()
        box = widgets.HBox(buttons, layout=widgets.Layout(flex_flow="row wrap"))
        return [*self.widgets.values(), box, self._command]

    def _balance(self, way: str) -> None:
        try:
            self.show(self.balanced(way))
        except BigUNetError as error:
            self._say(str(error))

    def _changed(self, name: str) -> None:
        super()._changed(name)
        # A cut stops at its neighbours, and the number of stages moves them all.
        if not self._quiet and not self.message:
            self._write_controls()

    def _write_controls(self) -> None:
        super()._write_controls()
        quiet, self._quiet = self._quiet, True
        try:
            cuts = self.state.cuts
            for i in range(1, _MOST_STAGES):
                if (slider := self.widgets.get(f"cut{i}")) is not None:
                    slider.layout.display = None if i <= len(cuts) else "none"
            set_spans(self._spans, cuts, self._held)
        finally:
            self._quiet = quiet

    def _write_texts(self) -> None:
        super()._write_texts()
        command = html.escape(self.data.attrs["command"])
        self._command.value = (
            f'<pre style="white-space:pre-wrap;margin:4px 0" aria-label="Launch command">'
            f"{command}</pre>"
        )

    def _draw(self, names: Sequence[str]) -> None:
        """While a cut moves, new numbers go straight to Bokeh: a tenth of HoloViews' time."""
        look = (self.state.machine, self.state.height, self.data.sizes["of_device"])
        known, self._look = getattr(self, "_look", None), look
        sources = [self._sources(name) for name in names] if self.live is not False else []
        if look != known or not sources or not all(sources):
            super()._draw(names)
            return
        for name, pairs in zip(names, sources, strict=True):
            figure = self._figures[name]._model
            with figure.document.models.freeze():
                for element, columns, source in pairs:
                    source.data = {
                        column: _plain(element.dimension_values(i))
                        for i, column in enumerate(columns)
                    }
                figure.title.text = hv.Store.lookup_options(
                    "bokeh", self._plots[name], "plot"
                ).kwargs["title"]
        self._set_axes(names)

    def _sources(self, name: str) -> list[tuple[Any, tuple[str, ...], Any]]:
        """(element, columns, Bokeh source) of each part of a live plot; none if they differ."""
        if name not in self._figures:
            return []
        parts = list(self._plots[name])
        renderers = self._figures[name]._model.renderers
        found = []
        for element, renderer in zip(parts, renderers, strict=False):
            columns, source = _COLUMNS.get(type(element), ()), renderer.data_source
            if set(source.data) == set(columns[:4]) and len(columns) == 5:
                # A colour that all items share is no column.
                glyph = renderer.glyph
                colour = glyph.line_color if columns[4] == "color" else glyph.fill_color
                shared = {getattr(colour, "value", colour)}
                columns = columns[:4] if set(element.dimension_values(4)) == shared else ()
            if set(source.data) != set(columns):
                return []
            found.append((element, columns, source))
        return found if len(parts) == len(renderers) else []

    # Lines that are dragged --------------------------------------------------------------------

    def _add_spans(self, plot: Any, element: Any) -> None:
        """HoloViews calls it whenever the live bar is drawn; the lines are made once."""
        if self._spans:
            return
        self._spans = cut_spans(_MOST_STAGES - 1, len(self.setting.table))
        for i, span in enumerate(self._spans):
            plot.state.add_layout(span)
            span.on_change("location", lambda attr, old, new, i=i: self._dragged(i, new))
        set_spans(self._spans, self.state.cuts)

    def _dragged(self, index: int, location: float) -> None:
        if self._quiet or index >= len(self.state.cuts):
            return
        self._held = index
        try:
            self.widgets[f"cut{index + 1}"].value = round(location)
        finally:
            self._held = None

    # Runs on this machine ----------------------------------------------------------------------

    def _start_run(self) -> None:
        """Run the plan in its own processes, beside the kernel's loop where there is one."""
        self._run_button.disabled = True
        self._say(f"Running on {self.plan.num_ranks} processes of this machine ...")
        plan, key = self.plan, _run_key(self.state)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            self._finish_run(key, self._try_run(plan))
        else:
            self._waiting_run = loop.create_task(self._run_apart(plan, key))

    async def _run_apart(self, plan: Plan, key: _RunKey) -> None:
        self._finish_run(key, await asyncio.to_thread(self._try_run, plan))

    def _try_run(self, plan: Plan) -> xr.Dataset | BigUNetError:
        assert self._run is not None
        try:
            return self._run(plan)
        except BigUNetError as error:
            return error

    def _finish_run(self, key: _RunKey, result: xr.Dataset | BigUNetError) -> None:
        self._run_button.disabled = False
        if isinstance(result, BigUNetError):
            self._say(str(result))
            return
        self._runs[key] = result
        self._apply(self.state)


def _plain(values: Any) -> Any:
    return values.tolist() if values.dtype == object else values


def _run_key(state: StageState) -> _RunKey:
    return (state.cuts, state.placement, state.micro_batches, state.schedule, state.recompute)
