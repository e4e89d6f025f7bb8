"""The best way to use so many GPUs: all candidates of a stated space, the fastest that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from bigunet.cost import CostModel
from bigunet.errors import MemoryBudgetError, PlanError, fail
from bigunet.geometry import padded_size
from bigunet.machines import Machine
from bigunet.plan import Schedule
from bigunet.scaling.collective import Algorithm
from bigunet.scaling.evaluate import check_strategy, evaluate
from bigunet.scaling.setting import STRATEGIES, TERMS, AllReduce, Outcome, Setting, Strategy
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import count_tiles

__all__ = ["Candidate", "Choice", "Space", "best", "candidates", "choose"]


@dataclass(frozen=True, kw_only=True)
class Space:
    """What `best` chooses from.

    Parameters
    ----------
    strategies : those of `bigunet.scaling.STRATEGIES` that are tried.
    tiles : sides of tiles in pixels, those that are multiples of the stride and no larger than
        the image; where none is, one that is.
    stages : stages of a pipeline.
    micro_batches : micro-batches of a pass, for each stage.
    """

    strategies: tuple[Strategy, ...] = STRATEGIES
    tiles: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    stages: tuple[int, ...] = (2, 3, 4, 6, 8)
    micro_batches: tuple[int, ...] = (1, 4)

    def __post_init__(self) -> None:
        for strategy in self.strategies:
            check_strategy(strategy)
        numbers = (*self.tiles, *self.stages, *self.micro_batches)
        if not self.strategies or not all(type(n) is int and n >= 1 for n in numbers):
            fail(
                PlanError,
                rule="a space has at least one strategy, and tiles, stages and micro-batches >= 1",
                got=self,
                remedy="Change it.",
            )

    def tiles_for(self, spec: UNetSpec, shape: tuple[int, int]) -> tuple[int, ...]:
        """The tiles that this image can be cut into."""
        most = min(padded_size(n, spec.stride) for n in shape)
        fitting = tuple(t for t in self.tiles if t % spec.stride == 0 and t <= most)
        return fitting or (most,)


class Candidate(NamedTuple):
    """A strategy with what it leaves open; fields that do not apply are None."""

    strategy: Strategy
    tile: int | None = None
    stages: int | None = None
    micro_batches: int | None = None

    def __str__(self) -> str:
        text: str = self.strategy
        if self.tile is not None:
            text += f", tiles of {self.tile}"
        if self.stages is not None:
            text += f", {self.stages} stages, {self.micro_batches} micro-batches"
        return text


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest candidate, the fastest of another strategy, and what tells them apart.

    `runner_up` is None where nothing else fits; where only one strategy does, it is that
    strategy's second best. `why` names the term that decides. `considered` and `fitting` count
    the candidates.
    """

    gpus: int
    best: Candidate
    outcome: Outcome
    runner_up: Candidate | None
    runner_up_outcome: Outcome | None
    why: str
    considered: int
    fitting: int

    @property
    def strategy(self) -> Strategy:
        return self.best.strategy

    @property
    def seconds(self) -> float:
        """Seconds of the best candidate's step."""
        return self.outcome.seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""

        def part(candidate: Candidate, outcome: Outcome) -> dict[str, Any]:
            return {
                **candidate._asdict(),
                "seconds": outcome.seconds,
                "terms": dict(zip(TERMS, outcome.terms, strict=True)),
                "memory_bytes": outcome.memory_bytes,
                "pipelines": outcome.pipelines,
                "idle_gpus": outcome.idle_gpus,
            }

        second = None
        if self.runner_up is not None and self.runner_up_outcome is not None:
            second = part(self.runner_up, self.runner_up_outcome)
        return {
            "gpus": self.gpus,
            "best": part(self.best, self.outcome),
            "runner_up": second,
            "why": self.why,
            "considered": self.considered,
            "fitting": self.fitting,
        }


def candidates(setting: Setting, gpus: int, space: Space) -> Iterator[Candidate]:
    """All candidates, in the order in which the first of equally fast ones wins.

    A pipeline takes all GPUs as its stages, where the space has as many; tiles x stages leaves
    at least two pipelines.
    """
    tiles = space.tiles_for(setting.spec, setting.shape)
    images = setting.num_images(gpus)
    for strategy in space.strategies:
        if strategy == "halo-exchange":
            yield Candidate(strategy)
            continue
        for tile in tiles:
            if strategy == "sample-parallel":
                yield Candidate(strategy, tile)
                continue
            num_tiles = count_tiles(setting.shape, tile, setting.spec) * images
            for num in space.stages:
                if (num == gpus) if strategy == "pipeline" else (2 * num <= gpus and num > 1):
                    share = -(-num_tiles // (gpus // num))
                    batches = -(-share // setting.train.batch)
                    counts = {max(1, min(m * num, batches)) for m in space.micro_batches}
                    for count in sorted(counts):
                        yield Candidate(strategy, tile, num, count)


def run_candidate(setting: Setting, gpus: int, candidate: Candidate) -> Outcome:
    """The prediction of a candidate."""
    return evaluate(
        setting,
        candidate.strategy,
        gpus,
        tile=candidate.tile,
        num_stages=candidate.stages,
        micro_batches=candidate.micro_batches,
        only_fitting=True,
    )


def choose(setting: Setting, gpus: int, space: Space) -> Choice | None:
    """The best of the space, or None where nothing fits."""
    found = [(c, run_candidate(setting, gpus, c)) for c in candidates(setting, gpus, space)]
    fitting = sorted(
        ((o.seconds, i) for i, (_, o) in enumerate(found) if o.feasible), key=lambda pair: pair
    )
    if not fitting:
        return None
    first, outcome = found[fitting[0][1]]
    others = [found[i] for _, i in fitting[1:]]
    second = next((o for o in others if o[0].strategy != first.strategy), None)
    second = second or (others[0] if others else None)
    if second is None:
        why = "nothing else fits"
    else:
        why = _why(first, outcome, *second)
    other = second or (None, None)
    return Choice(gpus, first, outcome, other[0], other[1], why, len(found), len(fitting))


def _why(first: Candidate, outcome: Outcome, second: Candidate, other: Outcome) -> str:
    """The term in which the runner-up loses most."""
    losses = [b - a for a, b in zip(outcome.terms, other.terms, strict=True)]
    most = max(range(len(TERMS)), key=lambda i: losses[i])
    factor = other.seconds / outcome.seconds if outcome.seconds else 1.0
    if losses[most] <= 0:
        return f"{first} and {second} take the same time"
    return (
        f"{second} takes {factor:.2f} times as long; what decides is {TERMS[most]}, "
        f"{_time(other.terms[most])} against {_time(outcome.terms[most])}"
    )


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def best(
    spec: UNetSpec,
    scene_shape: tuple[int, int],
    train: TrainSpec,
    machine: Machine,
    gpus: int,
    *,
    space: Space | None = None,
    images: int = 1,
    weak: bool = False,
    cropped: bool = True,
    schedule: Schedule = "gpipe",
    cost: CostModel | None = None,
    all_reduce: AllReduce = "end",
    algorithm: Algorithm = "auto",
    pixel_bytes: float = 1.0,
    search: bool = True,
) -> Choice:
    """The fastest way to run a step on `gpus` GPUs that fits their memory.

    Every candidate of `space` is predicted, so the answer is the best of it; arguments as for
    `bigunet.scaling.predict`. Only the first of equally fast ones counts.

    Raises
    ------
    MemoryBudgetError : nothing fits; says what comes nearest.
    PlanError, ShapeError : as `bigunet.scaling.predict` does.
    """
    setting = Setting.of(
        spec, scene_shape, train, machine, cost=cost, images=images, weak=weak, cropped=cropped,
        schedule=schedule, all_reduce=all_reduce, algorithm=algorithm, pixel_bytes=pixel_bytes,
        search=search,
    )  # fmt: skip
    setting.check_gpus(gpus)
    space = space or Space()
    choice = choose(setting, gpus, space)
    if choice is None:
        _nothing_fits(setting, gpus, space)
    return choice


def _nothing_fits(setting: Setting, gpus: int, space: Space) -> NoReturn:
    tried = [(c, run_candidate(setting, gpus, c)) for c in candidates(setting, gpus, space)]
    formed = [(c, o) for c, o in tried if o.memory_bytes]
    have = setting.machine.processor.memory_bytes / 2**30
    if not formed:
        fail(
            PlanError,
            rule="at least one candidate can be formed",
            got=tried[0][1].reason if tried else "a space without candidates for these GPUs",
            remedy="Widen the space.",
        )
    nearest, outcome = min(formed, key=lambda pair: pair[1].memory_bytes)
    fail(
        MemoryBudgetError,
        rule=f"a GPU of {setting.machine.name} has {have:.1f} GiB",
        got=f"at least {outcome.memory_bytes / 2**30:.1f} GiB ({nearest})",
        remedy="Use smaller tiles, more stages, recomputation, bf16 or a smaller network.",
    )
