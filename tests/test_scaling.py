"""`predict`: closed forms in the limits, monotonicity, bad input, and how fast it answers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from bigunet.cost import CostModel, RooflineCost, RowCosts
from bigunet.errors import PlanError, ShapeError
from bigunet.layers import LayerRow, layer_table
from bigunet.machines import MACHINES, FileSystem, Link, Machine
from bigunet.memory import peak_bytes
from bigunet.scaling import STRATEGIES, predict
from bigunet.schedule import bubble_fraction
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import tile_image

SUMMIT = MACHINES["summit"]
SPEC = UNetSpec(levels=4, channels=16)
FREE = Link("free", math.inf)


def free(machine: Machine) -> Machine:
    """The machine with links and files that cost nothing."""
    return replace(
        machine,
        inside=FREE,
        across=FREE,
        network=FREE,
        injection_bytes_per_second=math.inf,
        file_system=FileSystem("free"),
    )


@dataclass(frozen=True)
class Each:
    """Every layer takes the same time; a pixel costs nothing."""

    forward: float = 1.0
    backward: float = 2.0

    def __call__(self, rows: Sequence[LayerRow]) -> RowCosts:
        return RowCosts(np.full(len(rows), self.forward), np.full(len(rows), self.backward))


def term(found: xr.Dataset, name: str, at: int = 0) -> float:
    return float(found.seconds.sel(term=name)[at])


# Limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [1, 4, 16])
def test_one_tile_a_rank_without_halo_and_links_is_ideal(gpus: int) -> None:
    side = 128 * math.isqrt(gpus)
    train = TrainSpec(tile=128, halo=0)
    found = predict(SPEC, (side, side), train, free(SUMMIT), gpus, "sample-parallel")
    costs = RooflineCost(SUMMIT.processor)(layer_table(SPEC, (1, 3, 128, 128)))
    tile = float(costs.forward_seconds.sum() + costs.backward_seconds.sum())
    update = 28.0 * found.attrs["num_parameters"] / 900e9
    assert float(found.step_seconds[0]) == pytest.approx(tile + update, rel=1e-9)
    assert term(found, "compute") == pytest.approx(tile, rel=1e-9)
    for name in ("halo redundancy", "imbalance", "all-reduce", "reading", "bubble"):
        assert term(found, name) == pytest.approx(0.0, abs=1e-9 * tile)
    ideal = (gpus * tile + update) / (tile + update)
    assert float(found.speedup[0]) == pytest.approx(ideal, rel=1e-9)


def test_weak_scaling_without_links_is_perfect() -> None:
    train = TrainSpec(tile=128)
    found = predict(
        SPEC, (384, 384), train, free(SUMMIT), [1, 7, 60], "sample-parallel", images=2, weak=True
    )
    # Tiles of the images of all ranks are dealt together, so that the mean can be met.
    assert found.images.values.tolist() == [2, 14, 120]
    np.testing.assert_allclose(found.step_seconds, found.step_seconds[0], rtol=0.05)
    np.testing.assert_allclose(
        found.efficiency, found.step_seconds[0] / found.step_seconds, rtol=1e-12
    )


def test_a_sum_over_ranks_is_the_ring_s_closed_form() -> None:
    train = TrainSpec(tile=128)
    found = predict(SPEC, (512, 512), train, SUMMIT, 3, "sample-parallel", algorithm="ring")
    num = found.attrs["num_parameters"]
    link = SUMMIT.inside
    messages = [4 * num, 16 * 3 * 8, 8]
    expected = sum(4 * (link.latency_seconds + s / 3 / link.bytes_per_second) for s in messages)
    assert term(found, "all-reduce") == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 4), (3, 8), (6, 12)])
def test_equal_stages_without_links_give_the_schedule_s_closed_form(
    schedule: Any, stages: int, micro_batches: int
) -> None:
    spec = UNetSpec(levels=3, convs=1, channels=4, norm="batch")
    rows = len(layer_table(spec, (1, 3, 16, 16)))
    assert rows % 6 == 0, "choose a network whose layers six stages can share"
    side = 32 * micro_batches
    found = predict(
        spec, (32, side), TrainSpec(tile=32, halo=0), free(SUMMIT), stages, "pipeline",
        stages=stages, micro_batches=micro_batches, schedule=schedule, cost=Each(),
    )  # fmt: skip
    stage = 3.0 * rows / stages
    step = (micro_batches + stages - 1) * stage
    pure = float(found.step_seconds[0]) - term(found, "update")
    assert pure == pytest.approx(step, rel=1e-9)
    assert term(found, "bubble") / step == pytest.approx(
        bubble_fraction(stages, micro_batches), abs=1e-9
    )
    for name in ("imbalance", "transfers", "halo redundancy"):
        assert term(found, name) == pytest.approx(0.0, abs=1e-9 * step)


def test_one_stage_is_one_gpu_running_equal_tiles() -> None:
    train = TrainSpec(tile=128)
    machine = free(SUMMIT)
    found = predict(SPEC, (512, 512), train, machine, 1, "pipeline", micro_batches=1)
    inner = next(t for t in tile_image((4096, 4096), 128, SPEC) if t.index == (16, 16))
    costs = RooflineCost(SUMMIT.processor)(layer_table(SPEC, (1, 3, *inner.read.shape), tile=inner))
    tile = float(costs.forward_seconds.sum() + costs.backward_seconds.sum())
    expected = 16 * tile + term(found, "update")
    assert float(found.step_seconds[0]) == pytest.approx(expected, rel=1e-9)
    assert term(found, "bubble") == pytest.approx(0.0, abs=1e-9 * tile)


def test_a_halo_exchange_on_one_gpu_is_the_whole_image() -> None:
    found = predict(SPEC, (512, 768), TrainSpec(), SUMMIT, [1, 6], "halo-exchange")
    costs = RooflineCost(SUMMIT.processor)(layer_table(SPEC, (1, 3, 512, 768)))
    whole = float(costs.forward_seconds.sum() + costs.backward_seconds.sum())
    assert term(found, "compute") == pytest.approx(whole, rel=1e-9)
    assert term(found, "halo exchange") == 0.0
    assert (found.seconds.sel(term="halo redundancy") == 0).all()
    # 2 x 3 blocks of 256 x 256: count what crosses, one border after the other.
    expected = 0
    for i, row in enumerate(layer_table(SPEC, (1, 3, 512, 768))):
        if row.kind == "conv":
            border = 2 * (row.out_shape[2] * 2 + row.out_shape[3] * 1) * 4
            expected += border * row.in_shape[1] + (border * row.out_shape[1] if i else 0)
    assert float(found.exchange_bytes[1]) == expected


def test_reading_is_bytes_over_the_slower_of_node_and_file_system() -> None:
    train = TrainSpec(tile=256)
    tiles = tile_image((1024, 1024), 256, SPEC)
    read = sum(3 * t.read.area + 2 * t.write.area for t in tiles)
    for node, total in ((1e6, math.inf), (math.inf, 1e6)):
        machine = replace(SUMMIT, file_system=FileSystem("slow", node, total))
        found = predict(SPEC, (1024, 1024), train, machine, 1, "sample-parallel")
        assert term(found, "reading") == pytest.approx(read / 1e6, rel=1e-9)
        assert float(found.read_bytes[0]) == read


def test_memory_is_that_of_the_memory_model() -> None:
    train = TrainSpec(tile=256)
    found = predict(SPEC, (2048, 2048), train, SUMMIT, [1, 64], "sample-parallel")
    inner = next(t for t in tile_image((2048, 2048), 256, SPEC) if t.index == (3, 3))
    shape = (1, 3, *inner.read.shape)
    peaks = [
        peak_bytes(SPEC, shape, train, tile=inner, keep_gradients=keep, device="V100-16GB")[0]
        for keep in (True, False)
    ]
    assert found.memory_bytes.values.tolist() == peaks


# Monotonicity -------------------------------------------------------------------------------------

MACHINES_TO_TRY = st.sampled_from(["summit", "perlmutter", "frontier", "h200"])
CASES = st.fixed_dictionaries(
    {
        "channels": st.sampled_from([8, 32]),
        "size": st.integers(200, 1500),
        "tile": st.sampled_from([64, 128, 256]),
        "gpus": st.sampled_from([1, 2, 3, 6, 8, 13, 24, 100]),
        "images": st.integers(1, 3),
        "all_reduce": st.sampled_from(["end", "overlapped"]),
    }
)


def scaled(machine: Machine, which: str, factor: float) -> Machine:
    if which == "files":
        files = machine.file_system
        return replace(
            machine,
            file_system=replace(
                files,
                node_bytes_per_second=files.node_bytes_per_second * factor,
                total_bytes_per_second=files.total_bytes_per_second * factor,
            ),
        )
    if which == "injection":
        rate = machine.injection_bytes_per_second * factor
        return replace(machine, injection_bytes_per_second=rate)
    link = getattr(machine, which)
    return replace(
        machine, **{which: replace(link, bytes_per_second=link.bytes_per_second * factor)}
    )


def predicted(case: dict[str, Any], machine: Machine, strategy: Any, **changes: Any) -> xr.Dataset:
    spec = UNetSpec(levels=4, channels=case["channels"])
    train = TrainSpec(tile=case["tile"], halo=changes.pop("halo", None))
    return predict(
        spec, (case["size"], case["size"] // 8 * 8), train, machine,
        changes.pop("gpus", case["gpus"]), strategy, images=case["images"],
        all_reduce=case["all_reduce"], **changes,
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    case=CASES,
    name=MACHINES_TO_TRY,
    which=st.sampled_from(["inside", "across", "network", "injection", "files"]),
    factor=st.floats(1.01, 100),
    strategy=st.sampled_from(["sample-parallel", "halo-exchange", "tiles-x-stages"]),
)
def test_more_bandwidth_is_never_slower(
    case: dict[str, Any], name: str, which: str, factor: float, strategy: str
) -> None:
    machine = MACHINES[name]
    stages = {"stages": min(3, case["gpus"])} if strategy == "tiles-x-stages" else {}
    before = predicted(case, machine, strategy, **stages)
    after = predicted(case, scaled(machine, which, factor), strategy, **stages)
    assert float(after.step_seconds[0]) <= float(before.step_seconds[0]) * (1 + 1e-12)


@settings(max_examples=25, deadline=None)
@given(case=CASES, halos=st.tuples(st.integers(0, 100), st.integers(0, 100)))
def test_a_smaller_halo_is_never_more_work(case: dict[str, Any], halos: tuple[int, int]) -> None:
    """On one GPU not slower; on many the mean of them, since sizes decide who gets which tile."""
    small, large = sorted(halos)
    for gpus in (1, case["gpus"]):
        a = predicted(case, SUMMIT, "sample-parallel", halo=small, gpus=gpus)
        b = predicted(case, SUMMIT, "sample-parallel", halo=large, gpus=gpus)
        assert term(a, "compute") == pytest.approx(term(b, "compute"), rel=1e-9)
        assert term(a, "halo redundancy") <= term(b, "halo redundancy") + 1e-12
        if gpus == 1:
            assert float(a.step_seconds[0]) <= float(b.step_seconds[0]) * (1 + 1e-12)
    a = predicted(case, SUMMIT, "tiles-x-stages", halo=small, stages=1)
    b = predicted(case, SUMMIT, "tiles-x-stages", halo=large, stages=1)
    assert float(a.step_seconds[0]) <= float(b.step_seconds[0]) * (1 + 1e-12)


# Bad input ----------------------------------------------------------------------------------------


def test_bad_input_is_refused_with_its_rule() -> None:
    train = TrainSpec(tile=128)

    def run(strategy: Any = "sample-parallel", gpus: Any = 2, shape: Any = (512, 512), **kw: Any):
        return predict(SPEC, shape, train, SUMMIT, gpus, strategy, **kw)

    for match, call in (
        ("a strategy is one of", lambda: run("magic")),
        ("GPUs are 1 to 27,648 on summit", lambda: run(gpus=30_000)),
        ("GPUs are 1 to", lambda: run(gpus=0)),
        ("at least one number of GPUs", lambda: run(gpus=[])),
        ("images is a whole number", lambda: run(images=0)),
        ("each >= 1, not", lambda: run(shape=(-512, 512))),
        ("tile is a whole number", lambda: run(tile=-64)),
        ("stages is a whole number", lambda: run("pipeline", stages=0)),
        ("all_reduce is one of", lambda: run(all_reduce="never")),
        ("algorithm is one of", lambda: run(algorithm="star")),
        ("pixel_bytes is >= 0", lambda: run(pixel_bytes=-1.0)),
    ):
        with pytest.raises(PlanError, match=match):
            call()
    with pytest.raises(ShapeError, match="multiples of the stride"):
        run(tile=100)
    with pytest.raises(ShapeError, match="no larger than the image"):
        run(tile=1024)


def test_more_gpus_than_tiles_is_said_with_the_idle_share() -> None:
    found = predict(SPEC, (256, 256), TrainSpec(tile=128), SUMMIT, [4, 16], "sample-parallel")
    assert found.idle_share.values.tolist() == [0.0, 0.75]
    assert found.reason.values.tolist() == ["", "12 of 16 GPUs idle (75 %)"]
    assert found.feasible.all()


def test_what_does_not_fit_says_why_and_what_would() -> None:
    spec = UNetSpec(channels=256)
    train = TrainSpec(tile=2048)
    found = predict(spec, (4096, 4096), train, SUMMIT, 4, "sample-parallel")
    assert not found.feasible
    reason = str(found.reason.values[0])
    assert "of 16.0 GiB; most of it activations" in reason
    fits = int(reason.rpartition("a tile of ")[2].split()[0])
    at = predict(spec, (4096, 4096), train, SUMMIT, 4, "sample-parallel", tile=fits)
    over = predict(spec, (4096, 4096), train, SUMMIT, 4, "sample-parallel", tile=fits + spec.stride)
    assert at.feasible
    assert not over.feasible
    piped = predict(
        UNetSpec(channels=64), (4096, 4096), TrainSpec(tile=1024), SUMMIT, 2, "pipeline",
        micro_batches=8,
    )  # fmt: skip
    assert not piped.feasible
    assert str(piped.reason.values[0]).endswith(("stages fit", "micro-batches fit"))
    many = predict(SPEC, (512, 512), TrainSpec(tile=128), SUMMIT, 600, "pipeline")
    assert "fewer layers" in str(many.reason.values[0])
    assert np.isinf(many.step_seconds).all()
    assert "more GPUs" in str(
        predict(spec, (9000, 9000), train, SUMMIT, 2, "halo-exchange").reason.values[0]
    )


def test_a_cost_model_of_one_s_own_is_asked_for_every_kind_of_tile() -> None:
    @dataclass(eq=False)
    class Mine:
        inner: CostModel

        def __call__(self, rows: Sequence[LayerRow]) -> RowCosts:
            return self.inner(rows)

    cost = Mine(RooflineCost(SUMMIT.processor))
    train = TrainSpec(tile=128)
    for strategy in STRATEGIES:
        ours = predict(SPEC, (500, 700), train, SUMMIT, [1, 6], strategy, cost=cost)
        theirs = predict(SPEC, (500, 700), train, SUMMIT, [1, 6], strategy)
        np.testing.assert_allclose(ours.seconds, theirs.seconds, rtol=1e-9, atol=1e-15)


# Speed --------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_prediction_takes_less_than_5_ms(strategy: Any) -> None:
    """The first one of a network on stages looks for its cuts; those after it know them."""
    train = TrainSpec(tile=512)

    def once(gpus: int) -> float:
        began = time.perf_counter()
        predict(UNetSpec(), (10_000, 10_000), train, SUMMIT, gpus, strategy, images=16)
        return time.perf_counter() - began

    once(6)
    taken = (
        [once(n) for n in (6, 5, 4, 6, 3, 6, 2)]
        if strategy == "pipeline"
        else [once(n) for n in (12, 24, 96, 384, 768, 1536, 3072)]
    )
    assert np.median(taken) < 5e-3, [round(1e3 * t, 2) for t in taken]
