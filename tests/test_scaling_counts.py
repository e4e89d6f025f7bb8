"""What scaling predicts by kinds of tiles and groups of ranks, against each tile and each rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from bigunet.cost import RooflineCost
from bigunet.layers import layer_table
from bigunet.machines import MACHINES, Machine
from bigunet.model import UNet
from bigunet.ranks import Ranks
from bigunet.sample_parallel import deal_tiles, exact_step
from bigunet.scaling import LINKS, TERMS, predict
from bigunet.scaling.axis import tile_kinds
from bigunet.scaling.collective import members_of, sum_over
from bigunet.scaling.deal import deal_kinds
from bigunet.scaling.messages import (
    DDP_BUCKET_BYTES,
    DDP_FIRST_BUCKET_BYTES,
    ddp_buckets,
    gradient_buckets,
    small_messages,
)
from bigunet.scaling.work import passes
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile, tile_image

SUMMIT = MACHINES["summit"]
COST = RooflineCost(SUMMIT.processor)

SPECS = st.builds(
    UNetSpec,
    levels=st.integers(1, 4),
    convs=st.integers(1, 2),
    channels=st.sampled_from([4, 8]),
    kernel=st.sampled_from([1, 3, 5]),
    up=st.sampled_from(["transpose", "nearest", "bilinear"]),
    norm=st.sampled_from(["none", "batch"]),
    narrowing=st.sampled_from(["up", "block"]),
)


def tile_seconds(spec: UNetSpec, tile: Tile, *, bare: bool = False) -> float:
    """A tile's own layer table, timed."""
    box = tile.core if bare else tile.read
    shape = (1, spec.in_channels, *box.shape)
    costs = COST(layer_table(spec, shape, tile=None if bare else tile))
    return float(costs.forward_seconds.sum() + costs.backward_seconds.sum())


@settings(max_examples=25, deadline=None)
@given(
    spec=SPECS,
    sides=st.tuples(st.integers(16, 260), st.integers(16, 260)),
    core=st.integers(1, 12),
    halo=st.none() | st.integers(0, 40),
    cropped=st.booleans(),
    num_ranks=st.integers(1, 9),
)
def test_kinds_and_shares_are_those_of_the_actual_tiles(
    spec: UNetSpec,
    sides: tuple[int, int],
    core: int,
    halo: int | None,
    cropped: bool,
    num_ranks: int,
) -> None:
    side = min(core * spec.stride, min(sides) // spec.stride * spec.stride)
    tiles = tile_image(sides, side, spec, halo=halo, cropped=cropped)
    kinds = tile_kinds(spec, sides, side, halo=halo, cropped=cropped)
    assert kinds.num_tiles == len(tiles) == kinds.count.sum()
    assert kinds.read_pixels @ kinds.count == sum(t.read.area for t in tiles)
    assert kinds.write_pixels.sum() == sides[0] * sides[1]
    inside = sum((min(t.read.y1, sides[0]) - t.read.y0) * (min(t.read.x1, sides[1]) - t.read.x0)
                 for t in tiles)  # fmt: skip
    assert kinds.inside_pixels.sum() == inside

    train = TrainSpec()
    full, bare = passes(spec, COST, kinds), passes(spec, COST, kinds, bare=True)
    each = [tile_seconds(spec, t) for t in tiles]
    np.testing.assert_allclose(full.total(train)[kinds.grid.ravel()], each, rtol=1e-12)
    alone = [tile_seconds(spec, t, bare=True) for t in tiles]
    np.testing.assert_allclose(bare.total(train)[kinds.grid.ravel()], alone, rtol=1e-12)

    shares = deal_kinds(
        kinds.read_pixels.tolist(),
        kinds.count.tolist(),
        num_ranks,
        lambda: kinds.grid.ravel().tolist(),
    )
    dealt = deal_tiles(tiles, num_ranks)
    grid = kinds.grid.ravel()
    theirs = Counter(
        tuple(np.bincount(grid[list(share)], minlength=len(kinds.count)).tolist())
        for share in dealt
    )
    assert shares.num_ranks == num_ranks
    merged: Counter[tuple[int, ...]] = Counter()
    for row, n in zip(shares.tiles.tolist(), shares.ranks, strict=True):
        merged[tuple(row)] += int(n)
    assert merged == theirs


@pytest.mark.parametrize(
    ("shape", "tile", "gpus"), [((700, 520), 128, 5), ((512, 512), 64, 12), ((300, 900), 96, 32)]
)
@pytest.mark.parametrize("cropped", [True, False])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_redundancy_and_imbalance_equal_a_count_over_tiles_and_ranks(
    shape: tuple[int, int], tile: int, gpus: int, cropped: bool, recompute: str
) -> None:
    spec = UNetSpec(levels=4, channels=16)
    train = TrainSpec(tile=tile, recompute=recompute)
    found = predict(spec, shape, train, SUMMIT, gpus, "sample-parallel", cropped=cropped)
    tiles = tile_image(shape, tile, spec, cropped=cropped)

    def seconds(tile: Tile, bare: bool) -> float:
        again = 0.0
        if recompute == "block":
            box = tile.core if bare else tile.read
            rows = layer_table(spec, (1, 3, *box.shape), tile=None if bare else tile)
            again = float(COST(rows).forward_seconds.sum())
        return tile_seconds(spec, tile, bare=bare) + again

    dealt = deal_tiles(tiles, gpus)
    ranks = [sum(seconds(tiles[i], False) for i in share) for share in dealt]
    bare = sum(seconds(t, True) for t in tiles) / gpus
    mean = sum(ranks) / gpus
    terms = found.seconds.sel(gpus=gpus)
    assert float(terms.sel(term="compute")) == pytest.approx(bare, rel=1e-12)
    assert float(terms.sel(term="halo redundancy")) == pytest.approx(mean - bare, rel=1e-9)
    assert float(terms.sel(term="imbalance")) == pytest.approx(
        max(ranks) - mean, rel=1e-9, abs=1e-12 * mean
    )
    assert float(found.step_seconds[0]) == pytest.approx(
        max(ranks) + sum(float(terms.sel(term=t)) for t in ("update", "all-reduce", "reading")),
        rel=1e-12,
    )
    assert int(found.idle_gpus[0]) == sum(not share for share in dealt)
    assert int(found.read_pixels[0]) == sum(t.read.area for t in tiles)


def test_stacks_of_tiles_are_those_that_a_step_would_run() -> None:
    """With a batch above 1 only tiles of one geometry run together."""
    spec, shape, gpus = UNetSpec(levels=3, channels=8), (300, 420), 3
    train = TrainSpec(tile=64, batch=4)
    found = predict(spec, shape, train, SUMMIT, gpus, "sample-parallel")
    tiles = tile_image(shape, 64, spec)
    ranks = []
    for share in deal_tiles(tiles, gpus):
        groups: Counter[object] = Counter()
        one: dict[object, Tile] = {}
        for i in share:
            key = (tiles[i].read.shape, tiles[i].crops, tiles[i].out)
            groups[key] += 1
            one[key] = tiles[i]
        total = 0.0
        for key, number in groups.items():
            for batch in [4] * (number // 4) + ([number % 4] if number % 4 else []):
                rows = layer_table(spec, (batch, 3, *one[key].read.shape), tile=one[key])
                costs = COST(rows)
                total += float(costs.forward_seconds.sum() + costs.backward_seconds.sum())
        ranks.append(total)
    terms = found.seconds.isel(gpus=0)
    ours = float(terms.sel(term=["compute", "halo redundancy", "imbalance"]).sum())
    assert ours == pytest.approx(max(ranks), rel=1e-12)


# Messages -----------------------------------------------------------------------------------------


class Listening(Ranks):
    """Two ranks of which only the first is there; notes what it is asked to sum."""

    sizes: list[int]

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        SENT.append(tensor.numel() * tensor.element_size())
        return tensor


SENT: list[int] = []


@pytest.mark.parametrize("loss", ["cross_entropy", "cross_entropy+dice"])
def test_messages_are_those_of_a_real_step(loss: str) -> None:
    spec = UNetSpec(levels=2, convs=1, channels=4, classes=3)
    model = UNet(spec).eval()
    image, labels = torch.rand(3, 48, 48), torch.randint(0, 3, (48, 48))
    tiles = tile_image((48, 48), 16, spec)
    SENT.clear()
    exact_step(model, image, labels, tiles, loss=loss, ranks=Listening(0, 2))  # type: ignore[arg-type]
    train = TrainSpec(loss=loss)  # type: ignore[arg-type]
    ours = (*small_messages(spec, train, len(tiles)), *gradient_buckets(spec))
    assert sorted(SENT) == sorted(ours)


def test_gradients_are_cut_as_ranks_cut_them() -> None:
    spec = UNetSpec(channels=128)
    with torch.device("meta"):
        tensors = list(UNet(spec).parameters())
    buckets, size = [], 0
    for tensor in tensors:
        if size and size + tensor.numel() > 2**24:
            buckets.append(4 * size)
            size = 0
        size += tensor.numel()
    assert gradient_buckets(spec) == (*buckets, 4 * size)
    assert len(buckets) > 1


@pytest.mark.parametrize("channels", [8, 32, 96])
def test_buckets_are_those_that_torch_makes(channels: int) -> None:
    spec = UNetSpec(channels=channels, norm="batch")
    with torch.device("meta"):
        names, tensors = zip(*reversed(list(UNet(spec).named_parameters())), strict=True)
    limits = [DDP_FIRST_BUCKET_BYTES, DDP_BUCKET_BYTES]
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == DDP_FIRST_BUCKET_BYTES
    real = [torch.empty(t.shape) for t in tensors]
    indices, _ = dist._compute_bucket_assignment_by_size(real, limits)
    rows = [row.name for row in layer_table(spec, (1, 3, 16, 16))]
    theirs = [
        (
            sum(4 * tensors[i].numel() for i in bucket),
            min(rows.index(names[i].split(".")[-2]) for i in bucket),
        )
        for bucket in sorted(indices)
    ]
    assert list(ddp_buckets(spec)) == theirs


# Sums ---------------------------------------------------------------------------------------------


def kind_of(machine: Machine, a: int, b: int) -> str:
    if a // machine.num_devices != b // machine.num_devices:
        return "network"
    here, there = (r % machine.num_devices // machine.per_socket for r in (a, b))
    return "inside" if here == there else "across"


@pytest.mark.parametrize("gpus", [2, 3, 5, 6, 12, 14, 18])
@pytest.mark.parametrize("name", ["summit", "perlmutter", "frontier"])
def test_a_ring_run_chunk_by_chunk_sends_as_many_bytes_and_sums(name: str, gpus: int) -> None:
    machine = MACHINES[name]
    size = 4 * gpus * 8
    data = np.arange(gpus * gpus * 8, dtype=np.int64).reshape(gpus, gpus, 8)
    expected = data.sum(axis=0)
    sent: Counter[str] = Counter()
    per_rank: Counter[int] = Counter()
    for phase in range(2 * (gpus - 1)):
        moves = []
        for rank in range(gpus):
            offset = 0 if phase < gpus - 1 else 1
            chunk = (rank - phase % (gpus - 1) + offset) % gpus
            moves.append((rank, (rank + 1) % gpus, chunk, data[rank, chunk].copy()))
        for source, target, chunk, values in moves:
            if phase < gpus - 1:
                data[target, chunk] += values
            else:
                data[target, chunk] = values
            sent[kind_of(machine, source, target)] += 4 * values.size
            per_rank[source] += 4 * values.size
    assert (data == expected).all()
    assert set(per_rank.values()) == {2 * (gpus - 1) * size // gpus}
    members = members_of(gpus, machine.num_devices, machine.per_socket)
    found = sum_over(members, machine, size, "ring")
    assert found.link_bytes == pytest.approx([sent[k] for k in LINKS], rel=1e-12)
    # Whatever the way, so many bytes are sent in all.
    for way in ("tree", "hierarchical", "auto"):
        other = sum_over(members, machine, size, way)  # type: ignore[arg-type]
        assert sum(other.link_bytes) == pytest.approx(2 * (gpus - 1) * size, rel=1e-12)
    assert sum_over(members, machine, size).seconds == min(
        sum_over(members, machine, size, way).seconds  # type: ignore[arg-type]
        for way in ("ring", "tree", "hierarchical")
    )


@pytest.mark.parametrize("gpus", [2, 6, 24, 96])
def test_all_reduce_bytes_of_a_step_are_those_of_its_messages(gpus: int) -> None:
    spec, train = UNetSpec(channels=32), TrainSpec(tile=256)
    found = predict(spec, (2000, 1500), train, SUMMIT, gpus, "sample-parallel", algorithm="ring")
    num_tiles = len(tile_image((2000, 1500), 256, spec))
    size = sum(small_messages(spec, train, num_tiles)) + 4 * sum(
        p.numel() for p in UNet(spec).parameters()
    )
    per_rank = 2 * (gpus - 1) / gpus * size
    ids = range(gpus)
    by_link = Counter(kind_of(SUMMIT, i, (i + 1) % gpus) for i in ids)
    expected = [per_rank * by_link[k] for k in LINKS]
    assert found.link_bytes.values[:, 0] == pytest.approx(expected, rel=1e-12)


def test_overlapped_sums_follow_the_backward_pass() -> None:
    """One equal tile a rank: bucket by bucket, each after its gradients and the one before."""
    spec = UNetSpec(channels=32)
    slow = replace(SUMMIT, inside=replace(SUMMIT.inside, bytes_per_second=1e9))
    train = TrainSpec(tile=512, halo=0)
    for machine in (SUMMIT, slow):
        found = predict(
            spec, (512, 1024), train, machine, 2, "sample-parallel", all_reduce="overlapped"
        )
        end = predict(spec, (512, 1024), train, machine, 2, "sample-parallel")
        members = members_of(2, 6, 3)
        costs = COST(layer_table(spec, (1, 3, 512, 512)))
        now = total = float(costs.backward_seconds.sum())
        done = 0.0
        small = sum(sum_over(members, machine, s).seconds for s in small_messages(spec, train, 2))
        ready = {}
        for row in reversed(range(len(costs.backward_seconds))):
            ready[row] = total - now + float(costs.backward_seconds[row])
            now -= float(costs.backward_seconds[row])
        for size, row in ddp_buckets(spec):
            done = max(done, ready[row]) + sum_over(members, machine, size).seconds
        exposed = float(found.seconds.sel(term="all-reduce", gpus=2))
        assert exposed == pytest.approx(done - total + small, rel=1e-9)
        assert exposed < float(end.seconds.sel(term="all-reduce", gpus=2))


def test_terms_add_up_and_have_units() -> None:
    spec, train = UNetSpec(channels=16), TrainSpec(tile=256)
    for strategy in ("sample-parallel", "halo-exchange", "pipeline", "tiles-x-stages"):
        found = predict(spec, (1000, 1200), train, SUMMIT, [1, 4, 12], strategy)
        assert list(found.term.values) == list(TERMS)
        np.testing.assert_allclose(found.seconds.sum("term"), found.step_seconds, rtol=1e-12)
        assert (found.seconds > -1e-9 * found.step_seconds).all()
        numbers = [v for v in found.data_vars if found[v].dtype.kind in "if"]
        assert all("units" in found[v].attrs for v in numbers)
        assert "doi" in found.attrs["assumptions"]
