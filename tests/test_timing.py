"""Times of this machine: complete, positive, and in proportion with the network's own."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch.nn import functional as F

from bigunet.cost import micro_batch_rows
from bigunet.errors import SpecError
from bigunet.layers import layer_table
from bigunet.model import UNet
from bigunet.spec import UNetSpec
from bigunet.tiles import tile_image
from bigunet.timing import time_layers, time_tiles

SPEC = UNetSpec(levels=3, channels=8, classes=3, norm="batch")


def test_every_layer_is_timed() -> None:
    cost = time_layers(SPEC, (32, 32), batches=(2, 1), rounds=2, in_flight=3, threads=1)
    rows = layer_table(SPEC, (8, 3, 32, 32))
    assert cost.batches == (1, 2)
    assert set(cost.forward_seconds) == {row.name for row in rows}
    seconds = cost(micro_batch_rows(rows, 4))
    convolutions = [i for i, row in enumerate(rows) if row.kind == "conv"]
    assert (seconds.forward_seconds[convolutions] > 0).all()
    assert (seconds.backward_seconds[convolutions] > 0).all()


@pytest.mark.alone
def test_layers_add_up_to_the_network() -> None:
    """Measured in turn, so that other work slows both; each layer is also started on its own."""
    spec = UNetSpec(levels=3, channels=16, classes=3)
    torch.set_num_threads(1)
    model = UNet(spec)
    model.to(memory_format=torch.channels_last)
    x, labels = torch.randn(1, 3, 192, 192), torch.zeros(1, 192, 192, dtype=torch.int64)
    x = x.contiguous(memory_format=torch.channels_last)
    ratios = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(3):
            F.cross_entropy(model(x), labels).backward()
        whole = (time.perf_counter() - began) / 3
        cost = time_layers(spec, (192, 192), rounds=2, threads=1)
        parts = (*cost.forward_seconds.values(), *cost.backward_seconds.values())
        total = sum(seconds for (seconds,) in parts)
        ratios.append(total / whole)
    assert 0.6 < statistics.median(ratios) < 1.5


def test_a_size_off_the_stride() -> None:
    with pytest.raises(SpecError, match="multiples of 4"):
        time_layers(SPEC, (30, 32))


def test_tiles_are_timed_by_the_pixels_of_their_maps() -> None:
    """Nine tiles of 3 x 3 are three kinds: at the corners, at the edges and inside."""
    tiles = tile_image((96, 96), 32, SPEC)
    cost = time_tiles(SPEC, tiles, rounds=1, threads=1)
    assert cost.batches == (1, 2, 3, 4)  # edges differ in their direction
    assert cost.pixels is not None
    for tile in tiles:
        rows = layer_table(SPEC, (1, 3, *tile.read.shape), tile=tile)
        sizes = {row.name: row.out_shape[2] * row.out_shape[3] for row in rows}
        assert all(sizes[name] in cost.pixels[name] for name in sizes)
        timed = [i for i, row in enumerate(rows) if row.kind == "conv"]
        assert (cost(rows).forward_seconds[timed] > 0).all()


def test_no_tiles_to_time() -> None:
    with pytest.raises(SpecError, match="at least one tile"):
        time_tiles(SPEC, ())
