"""The plan of a pipelined step: a frozen value that planner, simulator and engines share.

A plan says which layers form a stage, which device runs it, in how many micro-batches and in
which order. `tiles` pipelines may run side by side, each on its own tiles; then rank
`tile * num_devices + device` runs the stages of `device` in pipeline `tile`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, get_args

import yaml

from bigunet.errors import BigUNetError, PlanError, fail
from bigunet.layers import LayerRow, layer_table
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["PLAN_VERSION", "Placement", "Plan", "Schedule", "SkipRoute", "devices_of", "place"]

PLAN_VERSION = 1

Schedule = Literal["gpipe", "1f1b"]
Placement = Literal["straight", "folded", "interleaved"]
SkipRoute = Literal["hop", "direct"]


def devices_of(
    placement: Placement, num_stages: int, num_devices: int | None = None
) -> tuple[int, ...]:
    """The device of each stage.

    "straight" gives each stage its own device; "folded" puts stages i and K - 1 - i together;
    "interleaved" deals the stages to `num_devices` devices in turn.

    Raises
    ------
    PlanError : for a stage count that the placement cannot take.
    """
    if placement == "straight":
        return tuple(range(num_stages))
    if placement == "folded":
        if num_stages % 2:
            _bad("a folded placement has an even number of stages", num_stages)
        return tuple(min(s, num_stages - 1 - s) for s in range(num_stages))
    if placement not in get_args(Placement):
        _bad(f"a placement is one of {', '.join(get_args(Placement))}", placement)
    if num_devices is None or num_devices < 1 or num_stages % num_devices:
        _bad(
            f"an interleaved placement deals {num_stages} stages evenly to its devices",
            f"{num_devices} devices",
        )
    return tuple(s % num_devices for s in range(num_stages))


def place(devices: tuple[int, ...]) -> Placement | None:
    """The placement that `devices` follows, or None for one of another kind."""
    num_stages, num_devices = len(devices), max(devices) + 1
    if devices == tuple(range(num_stages)):
        return "straight"
    if num_stages % 2 == 0 and devices == devices_of("folded", num_stages):
        return "folded"
    if num_stages % num_devices == 0 and devices == devices_of(
        "interleaved", num_stages, num_devices
    ):
        return "interleaved"
    return None


def _bad(rule: str, got: object, remedy: str = "Change the plan.") -> NoReturn:
    fail(PlanError, rule=rule, got=got, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One pipelined training step.

    Parameters
    ----------
    spec, train : the network and its training; `train.recompute` holds for the stages.
    shape_BCHW : all images (or read boxes of tiles) that one pipeline takes in one step.
    stages : (first, last) layer names of each stage, in order, both included.
    devices : the device of each stage, numbered from 0 within a pipeline.
    micro_batches : equal parts of the batch.
    schedule : "gpipe" or "1f1b"; with several stages a device, their interleaved or folded forms.
    skips : "hop" passes a skip from stage to stage, "direct" sends it to the stage that joins it.
        A skip that is joined on the device that made it stays there, either way.
    tiles : pipelines side by side; the gradients of a stage are summed over them.
    scene_shape : (height, width) of the scene that the tiles are cut from, if it was planned.
    machine : name of the machine the plan was made for, if any.

    Raises
    ------
    PlanError : naming every fault.
    """

    spec: UNetSpec
    train: TrainSpec
    shape_BCHW: tuple[int, int, int, int]  # noqa: N815 - names carry their axes
    stages: tuple[tuple[str, str], ...]
    devices: tuple[int, ...]
    micro_batches: int
    schedule: Schedule = "gpipe"
    skips: SkipRoute = "hop"
    tiles: int = 1
    scene_shape: tuple[int, int] | None = None
    machine: str = ""

    def __post_init__(self) -> None:
        faults = [*self._plain_faults()]
        if not faults:
            faults += self._stage_faults()
        if faults:
            _bad("a plan: " + "; ".join(faults), None)

    def _plain_faults(self) -> list[str]:
        faults = []
        shape = self.shape_BCHW
        if len(shape) != 4 or not all(type(n) is int and n >= 1 for n in shape):
            faults.append(f"shape_BCHW is four whole numbers >= 1, not {shape!r}")
        for name, value in (("micro_batches", self.micro_batches), ("tiles", self.tiles)):
            if type(value) is not int or value < 1:
                faults.append(f"{name} is a whole number >= 1, not {value!r}")
        for name, word, known in (
            ("schedule", self.schedule, get_args(Schedule)),
            ("skips", self.skips, get_args(SkipRoute)),
        ):
            if word not in known:
                faults.append(f"{name} is one of {', '.join(known)}, not {word!r}")
        scene = self.scene_shape
        if scene is not None and (len(scene) != 2 or not all(type(n) is int for n in scene)):
            faults.append(f"scene_shape is null or (height, width), not {scene!r}")
        if not faults and shape[0] % self.micro_batches:
            faults.append(
                f"micro-batches are equal, so {self.micro_batches} must divide the batch, "
                f"{shape[0]}"
            )
        return faults

    def _stage_faults(self) -> list[str]:
        faults = []
        names = [row.name for row in self.table]
        place = {name: i for i, name in enumerate(names)}
        num = len(self.stages)
        if not 1 <= num <= len(names):
            return [f"the number of stages is 1 to {len(names)}, the layers, not {num}"]
        if any(len(stage) != 2 for stage in self.stages):
            return ["a stage is a pair (first layer, last layer)"]
        unknown = sorted({n for stage in self.stages for n in stage if n not in place})
        if unknown:
            return [f"unknown layers: {', '.join(unknown)} (a plan of another spec?)"]
        start = 0
        for i, (first, last) in enumerate(self.stages):
            if place[first] != start or place[last] < start:
                faults.append(
                    f"stage {i} starts at {names[min(start, len(names) - 1)]} and does not end "
                    f"before it, not ({first}, {last}): stages are in order, without gap"
                )
                break
            start = place[last] + 1
        else:
            if start != len(names):
                faults.append(f"the last stage ends at {names[-1]}, not {self.stages[-1][1]}")
        if len(self.devices) != num:
            faults.append(f"{num} stages have {num} devices, not {len(self.devices)}")
        elif not all(type(d) is int for d in self.devices) or set(self.devices) != set(
            range(max(self.devices) + 1)
        ):
            faults.append(f"devices are numbered from 0 without gap, not {self.devices!r}")
        elif (
            self.schedule == "1f1b"
            and self.placement == "interleaved"
            and self.micro_batches % self.num_devices
        ):
            faults.append(
                f"interleaved 1f1b takes micro-batches in groups of {self.num_devices} devices, "
                f"not {self.micro_batches}"
            )
        return faults

    # Read-outs ---------------------------------------------------------------------------------

    @property
    def table(self) -> tuple[LayerRow, ...]:
        """The layer table of the whole batch of one pipeline."""
        return layer_table(self.spec, self.shape_BCHW)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Row numbers where stages begin, and the number of rows at the end."""
        place = {row.name: i for i, row in enumerate(self.table)}
        return (*(place[first] for first, _ in self.stages), len(self.table))

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        """Devices of one pipeline."""
        return max(self.devices) + 1

    @property
    def num_ranks(self) -> int:
        return self.tiles * self.num_devices

    @property
    def micro_batch(self) -> int:
        """Images in one micro-batch."""
        return self.shape_BCHW[0] // self.micro_batches

    @property
    def placement(self) -> Placement | None:
        return place(self.devices)

    def stages_of(self, device: int) -> tuple[int, ...]:
        """The stages of a device, in order."""
        return tuple(s for s, d in enumerate(self.devices) if d == device)

    def stage_rows(self, stage: int) -> tuple[LayerRow, ...]:
        """The rows of a stage, with the shapes of the whole batch."""
        cuts = self.cuts
        return self.table[cuts[stage] : cuts[stage + 1]]

    def position(self, rank: int) -> tuple[int, int]:
        """(pipeline, device) of a rank."""
        return divmod(rank, self.num_devices)

    def skip_pairs(self) -> tuple[tuple[int, int], ...]:
        """(source stage, joining stage) of every skip that leaves its stage, each pair once."""
        stage_of = {row.name: s for s in range(self.num_stages) for row in self.stage_rows(s)}
        pairs = {
            (stage_of[row.source], stage_of[row.name])
            for row in self.table
            if row.source is not None
        }
        return tuple(sorted(pair for pair in pairs if pair[0] != pair[1]))

    def check_run(self, spec: UNetSpec, num_ranks: int) -> None:
        """Raise `PlanError` unless this network on so many ranks is what was planned."""
        if spec != self.spec:
            ours, theirs = self.spec.to_dict(), spec.to_dict()
            differing = [k for k in ours if ours[k] != theirs[k]]
            _bad(
                "a plan runs the network that it was made for",
                ", ".join(f"{k}={theirs[k]!r} (planned {ours[k]!r})" for k in differing),
                "Plan anew for this network.",
            )
        if num_ranks != self.num_ranks:
            _bad(
                f"a plan of {self.tiles} x {self.num_devices} (tiles x devices) runs on "
                f"{self.num_ranks} ranks",
                num_ranks,
                f"Start {self.num_ranks} ranks, or plan for {num_ranks}.",
            )

    # YAML --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, with the version of the format."""
        values: dict[str, Any] = {"bigunet_plan": PLAN_VERSION}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, UNetSpec | TrainSpec):
                value = value.to_dict()
            elif f.name == "stages":
                value = [list(stage) for stage in value]
            elif isinstance(value, tuple):
                value = list(value)
            values[f.name] = value
        return values

    @classmethod
    def from_dict(cls, values: Any) -> Self:
        """The plan with these values; the inverse of `to_dict`.

        Raises
        ------
        PlanError : for another version, a missing or unknown field, or any fault of the plan.
        """
        if not isinstance(values, Mapping) or "bigunet_plan" not in values:
            _bad("a plan is a mapping with the key bigunet_plan", type(values).__name__)
        if values["bigunet_plan"] != PLAN_VERSION:
            _bad(
                f"this release reads plans of version {PLAN_VERSION}",
                values["bigunet_plan"],
                "Plan anew, or use the release that wrote it.",
            )
        given = {k: v for k, v in values.items() if k != "bigunet_plan"}
        known = {f.name for f in fields(cls)}
        optional = {"schedule", "skips", "tiles", "scene_shape", "machine"}
        wrong = [f"unknown {k}" for k in given if k not in known]
        wrong += [f"missing {k}" for k in sorted(known - optional - set(given))]
        if wrong:
            _bad(f"a plan has the fields {', '.join(sorted(known))}", "; ".join(wrong))
        try:
            for name, kind in (("spec", UNetSpec), ("train", TrainSpec)):
                if isinstance(given[name], Mapping):
                    given[name] = kind.from_dict(given[name])
                else:
                    _bad(f"{name} is a mapping", given[name])
            for name in ("shape_BCHW", "devices", "scene_shape"):
                if isinstance(given.get(name), list):
                    given[name] = tuple(given[name])
            given["stages"] = tuple(tuple(stage) for stage in given["stages"])
            return cls(**given)
        except PlanError:
            raise
        except BigUNetError as error:
            raise PlanError(f"a plan's parts are valid: {error}") from error
        except TypeError as error:
            raise PlanError("a plan's fields have their types", str(error)) from error

    def to_yaml(self) -> str:
        """The plan as YAML text; `from_yaml` gives back an equal plan."""
        text: str = yaml.safe_dump(self.to_dict(), sort_keys=False, default_flow_style=None)
        return text

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """The plan in YAML text, read by the safe loader.

        Raises
        ------
        PlanError : for text that is no YAML or no plan.
        """
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PlanError("a plan is YAML", str(error).splitlines()[0]) from error
        return cls.from_dict(values)

    def save(self, path: str | Path) -> None:
        """Write the plan as YAML; `PlanError` where that cannot be."""
        try:
            Path(path).write_text(self.to_yaml(), encoding="utf-8")
        except OSError as error:
            raise PlanError("a plan's file can be written", error, "Choose a path.") from error

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a plan that `save` wrote; `PlanError` for a file that is missing or no plan."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError("a plan's file can be read", error, "Check the path.") from error
        return cls.from_yaml(text)
