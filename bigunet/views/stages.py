"""StageExplorer: cut a U-Net into stages, by hand or by planner, and see what follows."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, get_args

import ipywidgets as widgets
import xarray as xr
from bokeh.models.annotations.geometry import Span

from bigunet.cost import CostModel
from bigunet.errors import BigUNetError
from bigunet.layers import Shape
from bigunet.machines import Machine
from bigunet.plan import Plan, Schedule, SkipRoute
from bigunet.spec import Recompute, TrainSpec, UNetSpec
from bigunet.views.kit import Explorer, Row
from bigunet.views.page import as_command
from bigunet.views.stage_plots import plot_devices, plot_layers, plot_timeline
from bigunet.views.stage_spans import cut_spans, set_spans
from bigunet.views.stage_tables import (
    StageSetting,
    StageState,
    launch_script,
    moved_cut,
    stage_tables,
)
from bigunet.views.stage_ways import (
    MOST_STAGES,
    WAYS,
    balanced,
    by_time,
    state_from_dict,
    state_from_plan,
    state_to_dict,
)

__all__ = ["StageExplorer", "StageState"]

_GIB, _MB = 2.0**30, 1e6

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
        super().__init__(dataclasses.replace(state, cuts=by_time(self.setting, state, stages)))

    # States ------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan that is shown."""
        return self.setting.plan(self.state)

    def balanced(self, way: str) -> StageState:
        """The state cut in another way, see `bigunet.views.stage_ways.balanced`."""
        return balanced(self.setting, self.state, way)

    def values(self, state: StageState) -> dict[str, Any]:
        chosen = ("micro_batches", "schedule", "recompute", "machine", "height")
        cuts = {f"cut{i}": cut for i, cut in enumerate(state.cuts, 1)}
        return {"stages": state.num_stages} | cuts | {n: getattr(state, n) for n in chosen}

    def build(self, values: Mapping[str, Any]) -> StageState:
        chosen = ("micro_batches", "schedule", "recompute", "machine", "height")
        state = dataclasses.replace(self.state, **{n: values[n] for n in chosen})
        if values["stages"] != state.num_stages:
            cuts = by_time(self.setting, state, values["stages"])
            return dataclasses.replace(state, cuts=cuts, placement="straight")
        cuts = state.cuts
        for i, cut in enumerate(state.cuts):
            if values[f"cut{i + 1}"] != cut:
                cuts = moved_cut(cuts, i, values[f"cut{i + 1}"], len(self.setting.table))
        return dataclasses.replace(state, cuts=cuts)

    def to_dict(self, state: StageState) -> dict[str, Any]:
        return state_to_dict(self.setting, state)

    def from_dict(self, values: Mapping[str, Any]) -> StageState:
        return state_from_dict(self.setting, values)

    def from_plan(self, plan: Plan) -> StageState:
        return state_from_plan(self.setting, self.state, plan)

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
        """Beside the state and the table: the plan, and the script that runs it."""
        script = launch_script(self.plan)
        return super().exports() | {"plan.yaml": self.plan.to_yaml(), "run.sh": script}

    # Widgets -----------------------------------------------------------------------------------

    def controls(self) -> Mapping[str, Any]:
        batch, num_rows = self.setting.shape_BCHW[0], len(self.setting.table)
        most = min(MOST_STAGES, num_rows)
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
        for text, tooltip, way in WAYS:
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
            for i in range(1, MOST_STAGES):
                if (slider := self.widgets.get(f"cut{i}")) is not None:
                    slider.layout.display = None if i <= len(cuts) else "none"
            set_spans(self._spans, cuts, self._held)
        finally:
            self._quiet = quiet

    def _write_texts(self) -> None:
        super()._write_texts()
        self._command.value = as_command(self.data.attrs["command"])

    def _draw(self, names: Sequence[str]) -> None:
        with self._one_message():
            super()._draw(names)
            quiet, self._quiet = self._quiet, True
            try:
                set_spans(self._spans, self.state.cuts, self._held)
            finally:
                self._quiet = quiet

    # Lines that are dragged --------------------------------------------------------------------

    def _add_spans(self, plot: Any, element: Any) -> None:
        """HoloViews calls it whenever the live bar is drawn; the lines are made once."""
        if self._spans:
            return
        self._spans = cut_spans(MOST_STAGES - 1, len(self.setting.table))
        for i, span in enumerate(self._spans):
            plot.state.add_layout(span)
            span.on_change("location", partial(self._heard, i))
        set_spans(self._spans, self.state.cuts)

    def _heard(self, index: int, attr: str, old: float, location: float) -> None:
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


def _run_key(state: StageState) -> _RunKey:
    return (state.cuts, state.placement, state.micro_batches, state.schedule, state.recompute)
