"""What memory is spent on, and the parts of it that do not depend on the order of the work.

Bytes are those of tensors' storages. `Format` holds what precision and device decide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bigunet.layers import LayerRow
from bigunet.spec import TrainSpec, UNetSpec

__all__ = [
    "ACTIVATIONS",
    "AVERAGE",
    "BUFFERS",
    "CASTS",
    "CAUSES",
    "GRADIENTS",
    "INPUT",
    "OPTIMISER",
    "PARAMETERS",
    "SKIPS",
    "TEMPORARIES",
    "Format",
    "format_of",
    "optimiser_bytes",
    "parameter_counts",
]

CAUSES = (
    "parameters",
    "buffers",
    "gradients",
    "optimiser",
    "average",
    "input",
    "activations",
    "skips",
    "casts",
    "temporaries",
)
"""parameters; buffers: statistics kept by batch norm; gradients: of the parameters; optimiser: its
state; average: the averaged copy of the parameters; input: image and labels; activations: kept for
the backward pass; skips: those of them that wait for the decoder; casts: half-precision copies of
the weights under autocast; temporaries: all else, such as gradients that flow."""

(
    PARAMETERS,
    BUFFERS,
    GRADIENTS,
    OPTIMISER,
    AVERAGE,
    INPUT,
    ACTIVATIONS,
    SKIPS,
    CASTS,
    TEMPORARIES,
) = range(len(CAUSES))

LABEL_BYTES = 8
"""Labels are int64, as torch's losses take them."""


@dataclass(frozen=True, slots=True)
class Format:
    """Bytes of an element, and what the kind of device decides.

    Parameters
    ----------
    weight, value : bytes of a parameter, and of an activation.
    autocast : weights are cast for each convolution.
    cuda : CUDA's choices: sizes rounded up to `quantum`, SGD on all parameters at once. CPU
        autocast also pads in fp32 (reflect and replicate), CUDA's does not.
    quantum : bytes to which each size is rounded up.
    """

    weight: int
    value: int
    autocast: bool
    cuda: bool
    quantum: int


# CUDA's caching allocator hands out multiples of 512 bytes: `kMinBlockSize` in PyTorch's
# c10/cuda/CUDACachingAllocator.
CUDA_QUANTUM = 512


def format_of(train: TrainSpec, cuda: bool = False) -> Format:
    """The format of a run on a CUDA device or a CPU."""
    weight = 2 if train.precision == "bf16" else 4
    value = 4 if train.precision == "fp32" else 2
    autocast = train.precision == "bf16-autocast"
    return Format(weight, value, autocast, cuda, CUDA_QUANTUM if cuda else 1)


def parameter_counts(spec: UNetSpec, row: LayerRow) -> tuple[int, ...]:
    """Elements of each of a layer's parameter tensors: the weight, then the bias."""
    if not row.parameters:
        return ()
    width = row.out_shape[1]
    if row.kind == "norm":
        return width, width
    bias = spec.head_bias if row.kind == "head" else spec.bias
    return (row.parameters - width, width) if bias else (row.parameters,)


def buffer_bytes(row: LayerRow, form: Format) -> int:
    """Running mean and variance, and the int64 count of batches seen."""
    return (row.buffers - 1) * form.weight + 8 if row.buffers else 0


def rounded(sizes: Iterable[int], quantum: int) -> int:
    """Sum of sizes, each rounded up to `quantum`."""
    if quantum == 1:
        return sum(sizes)
    return sum(-(-size // quantum) * quantum for size in sizes)


def optimiser_bytes(train: TrainSpec, counts: Iterable[int], form: Format) -> int:
    """State of the optimiser for parameter tensors of `counts` elements.

    SGD keeps none; momentum one number a weight; Adam and AdamW two, and a step count of 4 bytes
    a tensor (`torch.optim`, fused as `bigunet.optimisers` asks for).
    """
    each = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}[train.optimiser]
    if not each:
        return 0
    counts = tuple(counts)
    state = each * rounded((n * form.weight for n in counts), form.quantum)
    return state + (len(counts) * max(4, form.quantum) if each == 2 else 0)
