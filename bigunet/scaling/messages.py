"""What the ranks of sample-parallel training sum in one step, message by message."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from bigunet.layers import layer_table
from bigunet.memory.causes import parameter_counts
from bigunet.spec import TrainSpec, UNetSpec

__all__ = [
    "DDP_BUCKET_BYTES",
    "DDP_FIRST_BUCKET_BYTES",
    "ddp_buckets",
    "gradient_buckets",
    "message_sizes",
    "small_messages",
    "tensor_sizes",
]

# `bigunet.ranks` sends at most so many elements at once.
_BUCKET_ELEMENTS = 2**24
# Gradients are summed in fp32, whatever the precision of the step.
_ELEMENT_BYTES = 4
DDP_BUCKET_BYTES = 25 * 2**20
DDP_FIRST_BUCKET_BYTES = 2**20
"""Defaults of torch.nn.parallel.DistributedDataParallel: bucket_cap_mb=25, and 1 MiB
(torch.distributed._DEFAULT_FIRST_BUCKET_BYTES) for the bucket that is ready first."""


@lru_cache(maxsize=1024)
def tensor_sizes(spec: UNetSpec) -> tuple[tuple[int, int], ...]:
    """(layer number, elements) of each parameter tensor, in the order of the model's parameters."""
    rows = layer_table(spec, (1, spec.in_channels, spec.stride, spec.stride))
    return tuple((i, n) for i, row in enumerate(rows) for n in parameter_counts(spec, row))


@lru_cache(maxsize=1024)
def gradient_buckets(spec: UNetSpec) -> tuple[int, ...]:
    """Bytes of each message in which `bigunet.sample_parallel.step` sums the gradients."""
    buckets, size = [], 0
    for _, count in tensor_sizes(spec):
        if size and size + count > _BUCKET_ELEMENTS:
            buckets.append(size)
            size = 0
        size += count
    return tuple(_ELEMENT_BYTES * n for n in (*buckets, size))


def message_sizes(num_parameters: int) -> tuple[int, ...]:
    """Bytes of the messages for the gradients of so many parameters, tensors' borders aside."""
    full, rest = divmod(num_parameters, _BUCKET_ELEMENTS)
    return (_ELEMENT_BYTES * _BUCKET_ELEMENTS,) * full + ((_ELEMENT_BYTES * rest,) if rest else ())


def small_messages(spec: UNetSpec, train: TrainSpec, num_tiles: int) -> tuple[int, ...]:
    """Bytes of the other sums of such a step: pixels of each class in each tile, and the loss.

    Dice, whose gradient needs the sums over the image, has one more.
    """
    counts = 8 * num_tiles * (spec.classes + 1)
    return (counts, 8, *((16 * spec.classes,) if "dice" in train.loss else ()))


@lru_cache(maxsize=1024)
def ddp_buckets(spec: UNetSpec) -> tuple[tuple[int, int], ...]:
    """(bytes, first layer) of each of DDP's buckets, in the order in which they get ready.

    Gradients get ready from the last layer to the first; a bucket is closed when it has reached
    its size, and is ready with the gradient of its first layer.
    """
    return tuple(_ddp([(i, _ELEMENT_BYTES * n) for i, n in reversed(tensor_sizes(spec))]))


def _ddp(tensors: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    size, cap = 0, DDP_FIRST_BUCKET_BYTES
    row = 0
    for row, num_bytes in tensors:
        size += num_bytes
        if size >= cap:
            yield size, row
            size, cap = 0, DDP_BUCKET_BYTES
    if size:
        yield size, row
