"""The ranks of a run: who am I, and sums over all of us.

A rank is one process. `init` reads what `torchrun` puts into the environment; without it there is
one rank and nothing is communicated. gloo carries CPU tensors, NCCL those of GPUs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors.error_handler import ErrorHandler

from bigunet.errors import LaunchError, fail

__all__ = ["Ranks", "current", "init"]

_BUCKET_ELEMENTS = 2**24


@dataclass(frozen=True, slots=True)
class Ranks:
    """`rank` of `size`, the device it computes on, and the group it speaks to (None: all)."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    group: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this rank is the one that writes files and shows progress."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """`tensor`, replaced by its sum over the ranks; moved to the device and back if need be."""
        if self.size > 1:
            moved = tensor.to(self.device)
            dist.all_reduce(moved, group=self.group)
            if moved is not tensor:
                tensor.copy_(moved)
        return tensor

    def sum_all_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the ranks, many tensors a message (buckets of 16 Mi elements)."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            self.sum_(flat)
            for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; every rank gets the same answer."""
        if self.size == 1:
            return flag
        return bool(self.sum_(torch.tensor(int(flag))).item())

    def share(self, value: object) -> object:
        """The first rank's `value`, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group, device=self.device)
        return box[0]

    def wait(self) -> None:
        """Return once every rank has come here."""
        if self.size > 1:
            self.sum_(torch.zeros(1))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        other = bucket and bucket[0].dtype != tensor.dtype
        if bucket and (other or size + tensor.numel() > _BUCKET_ELEMENTS):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def current() -> Ranks:
    """The ranks of the initialised default process group, or one rank where there is none."""
    if not (dist.is_available() and dist.is_initialized()):
        return Ranks(device=_device(0))
    return Ranks(dist.get_rank(), dist.get_world_size(), _device(_local_rank()))


@contextmanager
def init(*, timeout_seconds: float = 1800.0) -> Iterator[Ranks]:
    """The ranks that `torchrun` started, or one rank; leaves the process group on exit.

    An exception is recorded where torchrun looks for it, so that the launcher can show the first
    failing rank's traceback.

    Raises
    ------
    LaunchError : where the environment names ranks that cannot be joined.
    """
    _end_with_the_agent()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_available() and dist.is_initialized():
        yield current()
        return
    try:
        if size > 1:
            device = _device(_local_rank())
            if device.type == "cuda":
                torch.cuda.set_device(device)
            try:
                dist.init_process_group(
                    "nccl" if device.type == "cuda" else "gloo",
                    timeout=timedelta(seconds=timeout_seconds),
                )
            except (RuntimeError, ValueError) as error:
                fail(
                    LaunchError,
                    rule=f"{size} ranks join one process group",
                    got=str(error).splitlines()[0],
                    remedy="Start them with torchrun or bigunet.launch.",
                )
        yield current()
    except Exception as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:
            ErrorHandler().record_exception(error)
        raise
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _end_with_the_agent() -> None:
    """Have the kernel send SIGTERM to this rank once torchrun's agent, its parent, is gone.

    Ranks that outlive a killed agent would write into the folder of the run that replaces them.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG, see prctl(2)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def _device(local_rank: int) -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    return torch.device("cpu")
