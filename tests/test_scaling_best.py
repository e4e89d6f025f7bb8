"""`best` against a search of its own, the phase map against `best`, and the paper's exhibit."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from bigunet.cli import app
from bigunet.errors import MemoryBudgetError, PlanError, SpecError
from bigunet.machines import MACHINES, Machine
from bigunet.scaling import (
    STRATEGIES,
    TERMS,
    Space,
    best,
    map_space,
    paper_exhibit,
    phase_map,
    predict,
)
from bigunet.spec import TrainSpec, UNetSpec

SPACE = Space(tiles=(64, 128, 256, 512), stages=(2, 3, 6), micro_batches=(1, 4))
SUMMIT = MACHINES["summit"]


def with_memory(machine: Machine, gib: float) -> Machine:
    processor = replace(machine.processor, memory_bytes=int(gib * 2**30))
    return replace(machine, processor=processor)


def search(
    spec: UNetSpec, size: int, train: TrainSpec, machine: Machine, gpus: int, images: int
) -> tuple[float, tuple[Any, ...]] | None:
    """Plain loops over everything that the space allows."""
    shape = (size, size)
    found: list[tuple[float, tuple[Any, ...]]] = []

    def note(what: tuple[Any, ...], **how: Any) -> None:
        table = predict(spec, shape, train, machine, gpus, what[0], images=images, **how)
        if bool(table.feasible[0]):
            found.append((float(table.step_seconds[0]), what))

    for strategy in STRATEGIES:
        if strategy == "halo-exchange":
            note((strategy, None, None, None))
        for tile in SPACE.tiles:
            if tile > -(-size // spec.stride) * spec.stride or strategy == "halo-exchange":
                continue
            if strategy == "sample-parallel":
                note((strategy, tile, None, None), tile=tile)
                continue
            num_tiles = (-(-size // tile)) ** 2 * images
            for stages in SPACE.stages:
                pipelines = gpus // stages
                if pipelines < (1 if strategy == "pipeline" else 2):
                    continue
                if strategy == "pipeline" and stages != gpus:
                    continue
                share = -(-num_tiles // pipelines)
                for count in sorted({min(m * stages, share) for m in SPACE.micro_batches}):
                    note(
                        (strategy, tile, stages, count),
                        tile=tile, stages=stages, micro_batches=count,
                    )  # fmt: skip
    return min(found, key=lambda entry: entry[0]) if found else None


SETTINGS = [
    *itertools.product([8, 48], [300, 700, 1500], [1, 2, 6, 13], ["summit", "perlmutter"], [16.0]),
    *itertools.product([64], [600], [2, 6, 24], ["summit", "h200"], [0.2, 0.5, 1.0, 2.0]),
]


@pytest.mark.parametrize("part", range(6))
def test_best_is_the_best_of_its_space(part: int) -> None:
    assert len(SETTINGS) >= 50
    winners = set()
    for channels, size, gpus, name, gib in SETTINGS[part::6]:
        spec = UNetSpec(levels=4, channels=channels)
        machine = with_memory(MACHINES[name], gib)
        train = TrainSpec()
        expected = search(spec, size, train, machine, gpus, 1)
        if expected is None:
            with pytest.raises(MemoryBudgetError, match="GiB"):
                best(spec, (size, size), train, machine, gpus, space=SPACE)
            continue
        choice = best(spec, (size, size), train, machine, gpus, space=SPACE)
        assert choice.seconds == pytest.approx(expected[0], rel=1e-12)
        assert tuple(choice.best) == expected[1]
        winners.add(choice.strategy)
        if choice.runner_up_outcome is not None:
            assert choice.runner_up_outcome.seconds >= choice.seconds
    assert winners


def test_the_runner_up_is_of_another_strategy_and_the_reason_a_term() -> None:
    choice = best(UNetSpec(), (10_000, 10_000), TrainSpec(), SUMMIT, 6, space=SPACE)
    assert choice.runner_up is not None
    assert choice.runner_up.strategy != choice.strategy
    assert choice.runner_up_outcome is not None
    losses = np.subtract(choice.runner_up_outcome.terms, choice.outcome.terms)
    assert f"what decides is {TERMS[int(losses.argmax())]}," in choice.why
    plain = choice.to_dict()
    assert plain["best"]["strategy"] == choice.strategy
    assert sum(plain["best"]["terms"].values()) == pytest.approx(choice.seconds)


@settings(max_examples=20, deadline=None)
@given(
    channels=st.sampled_from([16, 64]),
    size=st.integers(200, 1200),
    gpus=st.sampled_from([1, 2, 6, 12, 24]),
    gib=st.floats(0.3, 4.0),
    more=st.floats(1.0, 8.0),
    faster=st.floats(1.0, 50.0),
    link=st.sampled_from(["inside", "across", "network"]),
)
def test_more_memory_or_bandwidth_is_never_slower(
    channels: int, size: int, gpus: int, gib: float, more: float, faster: float, link: str
) -> None:
    spec, train = UNetSpec(levels=4, channels=channels), TrainSpec()
    machine = with_memory(SUMMIT, gib)

    def seconds(machine: Machine) -> float:
        try:
            return best(spec, (size, size), train, machine, gpus, space=SPACE).seconds
        except MemoryBudgetError:
            return np.inf

    before = seconds(machine)
    wider = getattr(machine, link)
    wider = replace(wider, bytes_per_second=wider.bytes_per_second * faster)
    assert seconds(with_memory(machine, gib * more)) <= before * (1 + 1e-12)
    assert seconds(replace(machine, **{link: wider})) <= before * (1 + 1e-12)


def test_spaces_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="tiles, stages and micro-batches >= 1"):
        Space(tiles=(0,))
    with pytest.raises(PlanError, match="a strategy is one of"):
        Space(strategies=("magic",))  # type: ignore[arg-type]
    only = Space(strategies=("pipeline",), stages=(5,))
    with pytest.raises(PlanError, match="at least one candidate"):
        best(UNetSpec(), (512, 512), TrainSpec(), SUMMIT, 6, space=only)


def test_the_command_line_says_what_best_answers() -> None:
    run = CliRunner()
    options = ["best", "--gpus", "1,6", "--height", "2000", "--width", "2000", "--channels", "32"]
    done = run.invoke(app, [*options, "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)["choices"]
    for entry, gpus in zip(told, (1, 6), strict=True):
        choice = best(UNetSpec(channels=32), (2000, 2000), TrainSpec(), SUMMIT, gpus)
        assert entry == json.loads(json.dumps(choice.to_dict()))
    plain = run.invoke(app, options)
    assert "what decides is" in plain.output
    wrong = run.invoke(app, ["best", "--gpus", "six"])
    assert isinstance(wrong.exception, SpecError)


# Maps ---------------------------------------------------------------------------------------------


def test_a_map_s_points_are_what_best_answers_there() -> None:
    spec, train = UNetSpec(levels=4), TrainSpec()
    machine = with_memory(SUMMIT, 1.0)
    images, widths = [4, 400, 1000, 3000], [8, 64, 256]
    found = phase_map(spec, train, machine, x=images, y=widths, gpus=12, search=True)
    assert found.winner.dims == ("channels", "image")
    assert (found.winner.sel(image=4) == -1).all()
    for size, width in itertools.product(images[1:], widths):
        at = found.sel(image=size, channels=width)
        wide = spec.replace(channels=width)
        try:
            choice = best(wide, (size, size), train, machine, 12, space=map_space(machine))
        except MemoryBudgetError:
            assert int(at.winner) == -1
            assert np.isnan(float(at.step_seconds))
            continue
        assert STRATEGIES[int(at.winner)] == choice.strategy
        assert float(at.step_seconds) == pytest.approx(choice.seconds, rel=1e-12)
        assert int(at.tile) == (choice.best.tile or 0)
    along = phase_map(spec, train, SUMMIT, x=[1, 8], y=[500], along=("gpus", "image"))
    assert along.winner.shape == (1, 2)


def test_a_map_needs_two_axes() -> None:
    for along in (("image", "image"), ("image", "tiles")):
        with pytest.raises(PlanError, match="a map lies along two of"):
            phase_map(UNetSpec(), TrainSpec(), SUMMIT, x=[1], y=[1], along=along)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="values along image"):
        phase_map(UNetSpec(), TrainSpec(), SUMMIT, x=[-1], y=[1])
    with pytest.raises(PlanError, match="GPUs are 1 to"):
        phase_map(UNetSpec(), TrainSpec(), SUMMIT, x=[512], y=[8], gpus=10**6)


@pytest.mark.alone
@pytest.mark.parametrize("along", [("image", "channels"), ("gpus", "image")])
def test_a_map_of_1600_points_takes_less_than_5_seconds(along: tuple[Any, Any]) -> None:
    images = [int(v) for v in np.geomspace(512, 40_000, 40)]
    values = {
        "image": images,
        "channels": list(range(8, 328, 8)),
        "gpus": list(range(1, 1601, 40)),
    }
    began = time.perf_counter()
    found = phase_map(
        UNetSpec(), TrainSpec(), SUMMIT, x=values[along[0]], y=values[along[1]], along=along
    )
    taken = time.perf_counter() - began
    assert found.winner.shape == (40, 40)
    assert taken < 5.0, taken


# The paper ----------------------------------------------------------------------------------------


def test_the_exhibit_states_where_the_model_agrees_and_where_it_stops() -> None:
    found = paper_exhibit(tiles=(256, 2048), channels=(32, 64))
    # One tile a GPU leaves nothing to balance with: far from linear at 1536 GPUs.
    assert not found.near_linear.sel(tile=2048).any()
    assert found.near_linear.sel(tile=256).all()
    for width, tile in itertools.product((32, 64), (256, 2048)):
        spec = UNetSpec(channels=width)
        direct = predict(
            spec, (10_000, 10_000), TrainSpec(), SUMMIT, 1536, "sample-parallel", tile=tile,
            images=64,
        )  # fmt: skip
        at = found.sel(channels=width, tile=tile)
        assert float(at.efficiency_1536) == pytest.approx(float(direct.efficiency[0]), rel=1e-12)
        assert float(at.efficiency.sel(gpus=1536)) == float(at.efficiency_1536)
        piped = predict(
            spec, (10_000, 10_000), TrainSpec(), SUMMIT, 6, "pipeline", tile=tile, images=64,
            micro_batches=24,
        )  # fmt: skip
        one = predict(
            spec, (10_000, 10_000), TrainSpec(), SUMMIT, 1, "pipeline", tile=tile, images=64,
            micro_batches=1,
        )  # fmt: skip
        expected = float(one.step_seconds[0] / piped.step_seconds[0])
        assert float(at.speedup_6) == pytest.approx(expected, rel=1e-12)
    assert "no tile, data set or parameter count" in found.attrs["claims"]
    with pytest.raises(PlanError, match="near_linear is in"):
        paper_exhibit(near_linear=1.5)
