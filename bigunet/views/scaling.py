"""ScalingExplorer: what one more GPU buys, by which strategy, and where the time goes."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

import ipywidgets as widgets
import xarray as xr
import yaml

from bigunet.cost import CostModel
from bigunet.errors import BigUNetError, PlanError, SpecError, fail
from bigunet.machines import Machine
from bigunet.plan import Plan
from bigunet.scaling import STRATEGIES
from bigunet.scaling.setting import Strategy
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.views.kit import Explorer, Row
from bigunet.views.page import as_command
from bigunet.views.scaling_launch import best_plan, launch_line, run_script
from bigunet.views.scaling_plots import (
    map_cell,
    plot_efficiency,
    plot_map,
    plot_speedup,
    plot_terms,
)
from bigunet.views.scaling_tables import (
    ScalingSetting,
    ScalingState,
    gpu_stops,
    map_of,
    scaling_tables,
    with_choice,
)

__all__ = ["ScalingExplorer", "ScalingState", "describe"]

_GIB = 2.0**30
_SPEC = ("levels", "channels")
_FIELDS = ("image", "images", "weak", "machine", "strategy", "gpus")
_STATE = {"spec", "train", *_FIELDS}


class ScalingExplorer(Explorer[ScalingState]):
    """Predicted scaling on known machines, with what was measured laid over it.

    Parameters
    ----------
    spec, train : the network and its training; `train.tile` is a control.
    image, images, weak, machine, strategy, gpus : to begin with, see `ScalingState`.
    machines : more machines by name with the seconds of layers there, such as
        `{"here": (machine, cost)}`.
    measured : a table of `bigunet scale`, of `bigunet.scaling_file.load_scaling`.

    Raises
    ------
    SpecError, PlanError, ShapeError : for a state that cannot be.
    """

    title = "Scaling: what one more GPU buys"
    help = (
        "All curves are predictions from data sheets; black dots are measured. A step is the "
        "gradient of whole images and the update of the weights. Dashed, OVER: the memory does "
        "not hold it."
    )

    def __init__(
        self,
        spec: UNetSpec | None = None,
        train: TrainSpec | None = None,
        *,
        image: int = 10_000,
        images: int = 64,
        weak: bool = False,
        machine: str = "summit",
        strategy: Strategy = "sample-parallel",
        gpus: int | None = None,
        machines: Mapping[str, tuple[Machine, CostModel]] | None = None,
        measured: xr.Dataset | None = None,
    ) -> None:
        self.setting = ScalingSetting(machines or {}, measured)
        self._map: xr.Dataset | None = None
        self._map_packed: xr.Dataset | None = None
        self._map_drawn: tuple[Any, Any] = (None, None)
        most = gpu_stops(self.setting.machine(machine)[0])[-1]
        super().__init__(
            ScalingState(
                spec or UNetSpec(), train or TrainSpec(tile=512), image, images, weak, machine,
                strategy, min(1536, most) if gpus is None else gpus,
            )
        )  # fmt: skip

    @property
    def plan(self) -> Plan | None:
        """The best choice that can be run, as a plan; None where nothing fits."""
        return best_plan(self.setting, self.state)

    # States ------------------------------------------------------------------------------------

    def values(self, state: ScalingState) -> dict[str, Any]:
        own = {name: getattr(state, name) for name in _FIELDS}
        network = {name: getattr(state.spec, name) for name in _SPEC}
        return own | network | {"tile": state.train.tile}

    def build(self, values: Mapping[str, Any]) -> ScalingState:
        """On another machine there are no more GPUs than it has."""
        spec = self.state.spec.replace(**{name: values[name] for name in _SPEC})
        train = self.state.train.replace(tile=values["tile"])
        own = {name: values[name] for name in _FIELDS}
        if own["machine"] != self.state.machine:
            stops = gpu_stops(self.setting.machine(own["machine"])[0])
            own["gpus"] = min(own["gpus"], stops[-1])
        return ScalingState(spec, train, **own)

    def to_dict(self, state: ScalingState) -> dict[str, Any]:
        parts = {"spec": state.spec.to_dict(), "train": state.train.to_dict()}
        return parts | {name: getattr(state, name) for name in _FIELDS}

    def from_dict(self, values: Mapping[str, Any]) -> ScalingState:
        parts = [values.get(name) for name in ("spec", "train")]
        if set(values) != _STATE or not all(isinstance(part, dict) for part in parts):
            fail(
                SpecError,
                rule=f"the state has the fields {', '.join(sorted(_STATE))}",
                got=", ".join(map(str, values)),
                remedy="Choose a file that ScalingExplorer exported.",
            )
        spec, train = UNetSpec.from_dict(values["spec"]), TrainSpec.from_dict(values["train"])
        return ScalingState(spec, train, **{name: values[name] for name in _FIELDS})

    def from_plan(self, plan: Plan) -> ScalingState:
        """The plan's network, tile, ranks and kind of parallelism; the rest as it is shown."""
        sides = set(plan.scene_shape or (self.state.image,))
        if len(sides) > 1:
            fail(
                PlanError,
                rule="images are square here",
                got=f"a plan for a scene of {plan.scene_shape}",
                remedy="Use bigunet scale --gpus, which takes any shape.",
            )
        strategy: Strategy = "tiles-x-stages"
        if plan.num_stages == 1:
            strategy = "sample-parallel"
        elif plan.tiles == 1:
            strategy = "pipeline"
        known = plan.machine in self.setting.all_machines
        return ScalingState(
            plan.spec, plan.train, sides.pop(), self.state.images, self.state.weak,
            plan.machine if known else self.state.machine, strategy, plan.num_ranks,
        )  # fmt: skip

    # State in, tables out ----------------------------------------------------------------------

    def tables(self, state: ScalingState) -> xr.Dataset:
        return scaling_tables(self.setting, state, self._map)

    def details(self, state: ScalingState, data: xr.Dataset) -> xr.Dataset:
        return with_choice(self.setting, state, data)

    def plots(self, data: xr.Dataset) -> Mapping[str, Any]:
        a = data.attrs
        # The map changes with few controls; where it does not, it is not drawn again.
        shown = (id(self._map), map_cell(data), a.get("map_stale"), a["machine"])
        if self._map_drawn[0] != shown:
            self._map_drawn = shown, plot_map(data)
        return {
            "speedup": plot_speedup(data),
            "efficiency": plot_efficiency(data),
            "terms": plot_terms(data),
            "map": self._map_drawn[1],
        }

    def rows(self, data: xr.Dataset) -> Sequence[Row]:
        capacity = data.attrs["capacity_bytes"]
        rows: list[Row] = [["strategy", "ms a step", "speed-up", "efficiency", "images/s",
                            "GiB a GPU", "GPU-h / 1,000 images", "kWh", "fits"]]  # fmt: skip
        now = data.sel(gpus=data.attrs["chosen"])
        for strategy in STRATEGIES:
            at = now.sel(strategy=strategy)
            step, memory = float(at["step_seconds"]), float(at["memory_bytes"])
            if not step < float("inf"):
                rows.append([strategy, *["-"] * 7, "cannot be formed"])
                continue
            rows.append([
                strategy, f"{1e3 * step:,.1f}", f"{float(at['speedup']):,.1f}",
                f"{100 * float(at['efficiency']):.0f} %", f"{float(at['images_per_second']):,.4g}",
                f"{memory / _GIB:,.1f} / {capacity / _GIB:,.1f} ({100 * memory / capacity:,.0f} %)",
                *_thousand(at, now), "yes" if bool(at["feasible"]) else "NO",
            ])  # fmt: skip
        return rows

    def more_tables(self, data: xr.Dataset) -> Mapping[str, Sequence[Row]]:
        tables: dict[str, Sequence[Row]] = {}
        if "measured_gpus" in data:
            told = f"ms predicted, {data.attrs['machine']}"
            rows: list[Row] = [["ranks", "ms measured", "speed-up", "efficiency", told]]
            columns = [data[f"measured_{name}"].values.tolist() for name in (
                "gpus", "step_seconds", "speedup", "efficiency", "predicted")]  # fmt: skip
            for ranks, seconds, gain, share, predicted in zip(*columns, strict=True):
                own = f"{1e3 * predicted:,.1f}" if predicted == predicted else "-"
                rows.append([ranks, f"{1e3 * seconds:,.1f}", f"{gain:.2f}", f"{100 * share:.0f} %",
                             own])  # fmt: skip
            tables[f"Measured: {data.attrs['measured_about']}"] = rows
        return tables

    def summary(self, data: xr.Dataset) -> str:
        return describe(data)

    def exports(self) -> dict[str, str]:
        """The state, its sections `spec` and `train` where the command line reads them; all
        curves as CSV; and the best choice as a plan with the script of its job."""
        name, state = type(self).__name__, self.to_dict(self.state)
        content = {"explorer": name, "version": 1, "state": state}
        content |= {"spec": state["spec"], "train": state["train"]}
        files = {
            f"{name}.yaml": yaml.safe_dump(content, sort_keys=False),
            f"{name}.csv": _as_csv(self.data),
        }
        if (plan := self.plan) is not None:
            files["plan.yaml"] = plan.to_yaml()
            files["run.sh"] = run_script(self.setting, self.state, plan)
        return files

    # Widgets -----------------------------------------------------------------------------------

    def controls(self) -> Mapping[str, Any]:
        slider, choose, menu = widgets.IntSlider, widgets.SelectionSlider, widgets.Dropdown
        stops = gpu_stops(self.setting.machine(self.state.machine)[0])
        made: dict[str, Any] = {
            "gpus": choose(
                options=sorted({*stops, self.state.gpus}), value=self.state.gpus,
                description="GPUs", tooltip="Up to the machine's number, at most 10,000",
            ),
            "tile": slider(
                min=32, max=4096, step=32, description="Tile", tooltip="Side of the core, pixels"
            ),
            "image": slider(
                min=64, max=32_000, step=16, description="Image", tooltip="Side of the image, px"
            ),
            "levels": slider(
                min=1, max=8, description="Levels", tooltip="Resolutions; one less poolings"
            ),
            "channels": slider(
                min=1, max=160, description="Channels", tooltip="Width of the first level"
            ),
            "images": choose(
                options=[2**i for i in range(13)],
                description="Images", tooltip="In a step; in weak scaling, for each GPU",
            ),
            "weak": menu(
                options=[("strong: the same images", False), ("weak: images a GPU", True)],
                description="Scaling", tooltip="What stays the same with more GPUs",
            ),
            "strategy": menu(
                options=list(STRATEGIES),
                description="Strategy", tooltip="Whose time is taken apart",
            ),
            "machine": menu(
                options=list(self.setting.all_machines),
                description="Machine", tooltip="Whose figures are used",
            ),
        }  # fmt: skip
        for widget in made.values():
            widget.style.description_width = "95px"
            widget.layout.width = "310px"
        return made

    def extra_controls(self) -> Sequence[Any]:
        self._map_button = widgets.Button(
            description="Phase map",
            tooltip="Which strategy wins, over GPUs and image sizes, for this network and machine",
            layout=widgets.Layout(width="auto"),
        )
        self._map_button.on_click(lambda _: self.make_map())
        self._command = widgets.HTML()
        return [*self.widgets.values(), self._map_button, self._command]

    def make_map(self) -> None:
        """Compute the phase map for the state that is shown; it stays until the next one."""
        self._map_button.disabled = True
        try:
            self._map = map_of(self.setting, self.state)
        except BigUNetError as error:
            self._say(str(error))
        else:
            self._apply(self.state)
        finally:
            self._map_button.disabled = False

    def appear(self, patience: int = 1) -> None:
        """A map that was made before is shown from the start."""
        if self._map_packed is not self._map:
            self._map_packed = self._map
            self._pack_figures()
        super().appear(patience)

    def _changed(self, name: str) -> None:
        super()._changed(name)
        # Another machine may have fewer GPUs.
        if name == "machine" and not self._quiet and not self.message:
            self._write_controls()

    def _write_controls(self) -> None:
        control = self.widgets["gpus"]
        stops = gpu_stops(self.setting.machine(self.state.machine)[0])
        options = tuple(sorted({*stops, self.state.gpus}))
        if control.options != options:
            quiet, self._quiet = self._quiet, True
            try:
                control.options = options
                control.value = self.state.gpus
            finally:
                self._quiet = quiet
        super()._write_controls()

    def _write_texts(self) -> None:
        super()._write_texts()
        plan = self.plan
        words = "" if plan is None else launch_line(self.setting, self.state, plan)
        self._command.value = as_command(words)


def _thousand(at: xr.Dataset, now: xr.Dataset) -> tuple[str, str]:
    """GPU-hours and kWh of 1,000 images."""
    steps = 1000 / int(now["images"])
    hours, joules = steps * float(at["gpu_hours"]), steps * float(at["energy_joules"])
    return f"{hours:,.3g}", f"{joules / 3.6e6:,.3g}" if joules == joules else "-"


def _as_csv(data: xr.Dataset) -> str:
    """Every strategy and number of GPUs a line."""
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    names = ("step_seconds", "speedup", "efficiency", "images_per_second", "memory_bytes",
             "feasible", "gpu_hours", "energy_joules")  # fmt: skip
    terms = [str(term) for term in data["term"].values]
    writer.writerow(["strategy", "gpus", *names, *(f"{t} seconds" for t in terms)])
    columns = [data[name].values.tolist() for name in names]
    seconds = data["seconds"].values.tolist()
    for i, strategy in enumerate(data["strategy"].values):
        for j, gpus in enumerate(data["gpus"].values):
            if columns[0][i][j] == columns[0][i][j]:
                writer.writerow([strategy, gpus, *(c[i][j] for c in columns), *seconds[i][j]])
    return lines.getvalue()


def _gpus(number: int) -> str:
    return f"{number:,} GPU{'s' * (number > 1)}"


def describe(data: xr.Dataset) -> str:
    """What a reader must know of `with_choice`'s dataset."""
    a = data.attrs
    at = data.sel(strategy=a["strategy"], gpus=a["chosen"])
    step = float(at["step_seconds"])
    per = f"{a['images']} image{'s' * (a['images'] > 1)}{' a GPU' * a['weak']}"
    text = (
        f"Predicted for {a['machine']}, {'weak' if a['weak'] else 'strong'} scaling, a step of "
        f"{per} of {a['image']:,} x {a['image']:,} pixels in tiles of {a['tile']}; {a['network']}, "
        f"{a['training']}. "
    )
    if step < float("inf"):
        seconds = at["seconds"].values
        longest = int(seconds[1:].argmax()) + 1
        hours, power = _thousand(at, data.sel(gpus=a["chosen"]))
        power = "" if power == "-" else f" and about {power} kWh (design power, an estimate)"
        text += (
            f"{a['strategy']} on {_gpus(a['chosen'])}: {step:,.3g} s a step, "
            f"{float(at['speedup']):,.1f} times as fast as one GPU, efficiency "
            f"{100 * float(at['efficiency']):.0f} %; longest after compute: "
            f"{data['term'].values[longest]}, {100 * seconds[longest] / step:.0f} %. "
            f"1,000 images take {hours} GPU-hours{power}. "
        )
    else:
        text += f"{a['strategy']} on {_gpus(a['chosen'])} cannot be formed. "
    if a.get("reason"):
        fits = "Note" if bool(at["feasible"]) else "It does NOT fit"
        text += f"{fits}: {a['reason']}. "
    if "nothing" in a:
        return text + f"Nothing that was tried fits: {a['nothing']}"
    if "best" in a:
        text += f"Best here: {a['best']}, {a['best_seconds']:,.3g} s a step. Runner-up: {a['why']}."
        if a["best_strategy"] == "halo-exchange":
            text += " (halo-exchange is a model only: plan and command are the runner-up's.)"
    if "measured_same" in a:
        own = "this setting" if a["measured_same"] else "ANOTHER setting"
        text += f" Measured points are of {own}: {a['measured_about']}."
    return text
