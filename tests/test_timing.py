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
from bigunet.timing import this_machine, time_layers, time_link

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


def test_this_machine_has_rates_and_a_link() -> None:
    link = time_link(sizes_bytes=(2**12, 2**20), rounds=3)
    assert 1e6 < link.bytes_per_second < 1e12
    assert 0 <= link.latency_seconds < 1
    machine = this_machine(2, link=link)
    assert machine.link(0, 1) == link
    assert 1e8 < machine.processor.peak("fp32") < 1e14
    # One more device than the machine has would be on another node.
    assert machine.link(0, 0).bytes_per_second > link.bytes_per_second
