"""The published memory of torchgpipe's U-Nets, beside what is predicted for them.

The published figure is what the allocator of each P40 held, summed. The prediction is of tensors
and of the transformed filters of Winograd convolutions, which cuDNN holds in work space where it
chooses that algorithm: for small maps of many channels, as here, it commonly does on GPUs without
tensor cores, but the publication does not say. `tensors_gib` is the prediction without that.

In fairness: work space was added to the model after tensors alone had fallen short of the figures
(ratios 1.041, 0.894, 0.984 and 0.839). Its size, 36/9 of the weights for tiles of F(4 x 4, 3 x 3)
(Lavin and Gray, arXiv 1509.09308), comes from the algorithm and not from the figures; that it is
the right explanation is likely, not shown. The last row, pipeline-8, was compared only afterwards:
1.002 with work space, 0.868 without.
"""

from __future__ import annotations

import csv
from importlib.resources import files
from typing import NamedTuple

from bigunet.layers import count_parameters
from bigunet.memory.predict import peak_bytes
from bigunet.spec import TrainSpec, UNetSpec

__all__ = ["Published", "published_memory", "published_rows"]

_SHAPE = (32, 3, 192, 192)


class Published(NamedTuple):
    """One row. Figures in millions and GiB; `predicted` and `tensors` are ours."""

    experiment: str
    convs: int
    channels: int
    chunks: int
    stages: tuple[int, ...] | None
    parameters_millions: float
    memory_gib: float
    predicted_millions: float
    predicted_gib: float
    tensors_gib: float
    ratio: float


def published_rows(name: str) -> list[dict[str, str]]:
    """Rows of a table of published figures ("torchgpipe_unet_memory", "..._speed")."""
    text = files("bigunet").joinpath("data", "published", f"{name}.csv").read_text("utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def published_memory() -> tuple[Published, ...]:
    """Each published row with its prediction: fp32, SGD without momentum, gradients kept between
    steps, recomputation except in the last micro-batch wherever pipelined."""
    found = []
    for row in published_rows("torchgpipe_unet_memory"):
        convs, channels = int(row["num_convs_B"]), int(row["base_channels_C"])
        spec = UNetSpec.torchgpipe(convs, channels)
        balance = row["balance_in_flat_layers"]
        stages = tuple(int(n) for n in balance.split(";")) if balance else None
        chunks = int(row["chunks"] or 1)
        train = TrainSpec(
            optimiser="sgd",
            weight_decay=0.0,
            recompute="none" if stages is None else "except_last",
            batch=_SHAPE[0],
        )
        gib = [
            sum(
                peak_bytes(
                    spec,
                    _SHAPE,
                    train,
                    stages=stages,
                    chunks=chunks,
                    keep_gradients=True,
                    device="P40",
                    workspace=workspace,
                )
            )
            / 2**30
            for workspace in (True, False)
        ]
        published = float(row["memory_gib"])
        found.append(
            Published(
                row["experiment"],
                convs,
                channels,
                chunks,
                stages,
                float(row["parameters_millions"]),
                published,
                count_parameters(spec) / 1e6,
                gib[0],
                gib[1],
                gib[0] / published,
            )
        )
    return tuple(found)
