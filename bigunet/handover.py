"""What one notebook of the course hands to the next: one scene, one network, and its plan so far.

    course = take_up("02_memory")               # the nearest earlier notebook's, or the defaults
    hand_on("02_memory", course.replace(train=course.train.replace(recompute="block")))

A hand-over is a YAML file `work/<notebook>.yaml` beside the notebooks. Its sections `spec` and
`train` are what the command line reads (`--spec`, `--train`), its plan is a file of
`bigunet.plan.Plan.save` that `--plan` reads. So each notebook runs by itself, and also goes on
where the one before it ended.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self

import yaml

from bigunet.errors import BigUNetError, PlanError, fail
from bigunet.plan import Plan
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["COURSE", "HANDOVER_VERSION", "WORK", "Handover", "hand_on", "narrow_plan", "take_up"]

HANDOVER_VERSION = 1

#: The notebooks in their order; each takes up what the nearest earlier one handed on.
COURSE = (
    "00_start",
    "01_receptive_field_and_halo",
    "02_memory",
    "03_sample_parallel",
    "04_stage_splits",
    "05_scaling",
    "06_tiles_times_stages",
    "07_your_own_scene",
)
#: Folder of the hand-overs, relative to where a notebook runs.
WORK = Path("work")

_DEMO = Path(__file__).resolve().parent / "data" / "earth_unet.yaml"


def _shipped_spec() -> UNetSpec:
    """The network that comes with the package."""
    return UNetSpec.from_dict(yaml.safe_load(_DEMO.read_text(encoding="utf-8"))["spec"])


def _bad(rule: str, got: object, remedy: str) -> NoReturn:
    fail(PlanError, rule=rule, got=got, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class Handover:
    """The course's scene, network, training and, once it is planned, the plan.

    Parameters
    ----------
    scene : a scene by the name that the command line gives it: "earth" or a file.
    window : (first row, end row, first column, end column) of it, in pixels.
    spec : the network; by default the one that comes with the package.
    train : its training: tile, batch, what is recomputed.
    plan : of that network and that training, or None.
    origin : the notebook that handed it on; empty for the defaults.

    Raises
    ------
    PlanError : for a window that is none, or a plan of another network or training.
    """

    scene: str = "earth"
    window: tuple[int, int, int, int] = (260, 1040, 2250, 3450)
    spec: UNetSpec = field(default_factory=_shipped_spec)
    train: TrainSpec = field(default_factory=lambda: TrainSpec(tile=384))
    plan: Plan | None = None
    origin: str = ""

    def __post_init__(self) -> None:
        w = self.window
        if (
            len(w) != 4
            or not all(type(n) is int for n in w)
            or not (0 <= w[0] < w[1] and 0 <= w[2] < w[3])
        ):
            _bad(
                "a window is (first row, end row, first column, end column)",
                w,
                "Give four whole numbers, the ends beyond the firsts.",
            )
        if self.plan is not None:
            for name in ("spec", "train"):
                if getattr(self.plan, name) != getattr(self, name):
                    _bad(
                        f"a plan is handed on with the {name} that it was made for",
                        f"another {name}",
                        "Use with_plan(plan), or replace(plan=None, ...) to plan anew.",
                    )

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the window."""
        return self.window[1] - self.window[0], self.window[3] - self.window[2]

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked anew."""
        return dataclasses.replace(self, **changes)

    def with_plan(self, plan: Plan) -> Self:
        """A copy with this plan, its network and its training."""
        return self.replace(plan=plan, spec=plan.spec, train=plan.train)

    def narrow(self, classes: int, channels: int = 4) -> UNetSpec:
        """The same layers with few channels, for checks that would take minutes at full width.

        Names, halo and stride are the network's own.
        """
        return self.spec.replace(channels=channels, max_channels=None, classes=classes)

    def __str__(self) -> str:
        rows = f"rows {self.window[0]}:{self.window[1]}, columns {self.window[2]}:{self.window[3]}"
        spec, train = self.spec, self.train
        text = (
            f"{self.scene}, {rows}; {spec.levels} levels, {spec.channels} channels, "
            f"{spec.classes} classes; tile {train.tile}, batch {train.batch}, "
            f"recompute {train.recompute}"
        )
        if self.plan is not None:
            text += f"; plan of {self.plan.tiles} x {self.plan.num_devices} ranks"
        return f"{text} (from {self.origin or 'the defaults'})"

    # YAML --------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """All fields but the plan as plain values, with the version of the format."""
        return {
            "bigunet_handover": HANDOVER_VERSION,
            "origin": self.origin,
            "scene": self.scene,
            "window": list(self.window),
            "spec": self.spec.to_dict(),
            "train": self.train.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Any, plan: Plan | None = None) -> Self:
        """The inverse of `to_dict`.

        Raises
        ------
        PlanError : for another version, a missing or unknown field, or any fault in one.
        """
        if not isinstance(values, Mapping) or "bigunet_handover" not in values:
            _bad("a hand-over is a mapping with the key bigunet_handover", type(values).__name__,
                 "Delete the file: the notebook then starts from the defaults.")  # fmt: skip
        if values["bigunet_handover"] != HANDOVER_VERSION:
            _bad(f"this release reads hand-overs of version {HANDOVER_VERSION}",
                 values["bigunet_handover"],
                 "Delete the file and run the earlier notebook again.")  # fmt: skip
        given = {k: v for k, v in values.items() if k != "bigunet_handover"}
        known = {"origin", "scene", "window", "spec", "train"}
        if set(given) != known or not all(isinstance(given[k], Mapping) for k in ("spec", "train")):
            _bad(f"a hand-over has the fields {', '.join(sorted(known))}",
                 ", ".join(map(str, given)), "Run the earlier notebook again.")  # fmt: skip
        try:
            return cls(
                scene=str(given["scene"]),
                window=tuple(given["window"]),
                spec=UNetSpec.from_dict(given["spec"]),
                train=TrainSpec.from_dict(given["train"]),
                plan=plan,
                origin=str(given["origin"]),
            )
        except PlanError:
            raise
        except BigUNetError as error:
            raise PlanError(f"a hand-over's parts are valid: {error}") from error
        except TypeError as error:
            raise PlanError("a hand-over's fields have their types", str(error)) from error


def narrow_plan(
    plan: Plan, classes: int, shape_BCHW: tuple[int, int, int, int], **changes: Any
) -> Plan:
    """A plan's very cuts, for the narrow network and images of another shape.

    `changes` are further fields, such as `micro_batches`, `tiles` and `scene_shape`.

    Raises
    ------
    PlanError : for what is no plan.
    """
    spec = Handover(spec=plan.spec).narrow(classes)
    return dataclasses.replace(plan, spec=spec, shape_BCHW=shape_BCHW, **changes)


def _check_name(notebook: str) -> None:
    if notebook not in COURSE:
        _bad(f"the course's notebooks are {', '.join(COURSE)}", notebook, "Use one of these names.")


def take_up(notebook: str, folder: str | Path = WORK) -> Handover:
    """What the nearest earlier notebook handed on, or the defaults where none did.

    Raises
    ------
    PlanError : for a name that is not in `COURSE`, or a file that is damaged or of another version.
    """
    _check_name(notebook)
    for earlier in reversed(COURSE[: COURSE.index(notebook)]):
        path = Path(folder) / f"{earlier}.yaml"
        if path.is_file():
            return _load(path)
    return Handover()


def hand_on(notebook: str, course: Handover, folder: str | Path = WORK) -> Path:
    """Write `folder/<notebook>.yaml` and, with a plan, `<notebook>.plan.yaml`; returns the latter.

    Without a plan, the hand-over's own path is returned.

    Raises
    ------
    PlanError : for a name that is not in `COURSE`, or a folder that cannot be written to.
    """
    _check_name(notebook)
    path = Path(folder) / f"{notebook}.yaml"
    plan_path = path.with_suffix(".plan.yaml")
    text = yaml.safe_dump(course.replace(origin=notebook).to_dict(), sort_keys=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if course.plan is None:
            plan_path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(
            "the folder of the hand-overs can be written to",
            error,
            "Copy the notebooks to a folder of your own: bigunet lab --copy-to FOLDER.",
        ) from error
    if course.plan is None:
        return path
    course.plan.save(plan_path)
    return plan_path


def _load(path: Path) -> Handover:
    remedy = "Delete the file: the notebook then starts from the defaults."
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise PlanError("a hand-over can be read as YAML", f"{path}: {reason}", remedy) from error
    plan_path = path.with_suffix(".plan.yaml")
    return Handover.from_dict(values, Plan.load(plan_path) if plan_path.is_file() else None)
