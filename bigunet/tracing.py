"""One training step, run for its memory: real, or under fake tensors that allocate nothing.

`StepRunner` is the step that `bigunet.memory` predicts. `trace_peak` runs it under fake tensors
and PyTorch's memory tracker, both private interfaces of torch, used here only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed._tools import mem_tracker
from torch.nn import functional as F

from bigunet.layers import Shape
from bigunet.losses import Objective
from bigunet.model import UNet
from bigunet.optimisers import optimiser
from bigunet.recompute import run_recomputed
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tiles import Tile

__all__ = ["StepRunner", "saved_bytes", "trace_peak"]


class StepRunner:
    """A network with its optimiser, and one step of training on random pixels.

    Parameters are as in `bigunet.memory.memory`. `foreach`: SGD updates all parameters at
    once, which is torch's choice on CUDA.
    """

    def __init__(
        self,
        spec: UNetSpec,
        shape_BCHW: Shape,
        train: TrainSpec,
        *,
        tile: Tile | None = None,
        stages: Sequence[int] | None = None,
        device: str = "cpu",
        foreach: bool = False,
    ) -> None:
        self.train, self.tile, self.stages, self.device = train, tile, stages, device
        dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                self.model = UNet(spec)
        finally:
            torch.set_default_dtype(default)
        if train.freeze_norm:
            for module in self.model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        self.optimiser = optimiser(self.model, train)
        for group in self.optimiser.param_groups:
            if not group.get("fused"):
                group["foreach"] = foreach
        batch, _, height, width = shape_BCHW
        if tile is not None:
            height, width = tile.out.shape
        self.x = torch.rand(shape_BCHW, dtype=dtype, device=device)
        self.y = torch.zeros(batch, height, width, dtype=torch.int64, device=device)
        self.objective = Objective(spec.classes, loss=train.loss)

    def loss(self) -> Tensor:
        """Forward pass and loss."""
        train = self.train
        with torch.autocast(
            self.device, torch.bfloat16, enabled=train.precision == "bf16-autocast"
        ):
            return self._loss(
                run_recomputed(self.model, self.x, self.tile, train.recompute, stages=self.stages)
            )

    def _loss(self, logits: Tensor) -> Tensor:
        """As `bigunet.losses` forms it, its constant factors left out."""
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        loss = logits.new_zeros(())
        if "cross_entropy" in self.train.loss:
            loss = loss + F.cross_entropy(logits, self.y, reduction="sum")
        if "dice" in self.train.loss:
            overlap, predicted = self.objective.sums(logits, self.y)
            loss = loss - overlap.sum() + predicted.sum()
        return loss

    def step(self) -> None:
        """Gradients to none, forward, backward, update."""
        self.optimiser.zero_grad(set_to_none=True)
        self.loss().backward()
        self.optimiser.step()


def trace_peak(
    spec: UNetSpec,
    shape_BCHW: Shape,
    train: TrainSpec,
    *,
    tile: Tile | None = None,
    stages: Sequence[int] | None = None,
    cuda: bool = False,
) -> dict[str, int]:
    """Bytes by category at the highest point of the second step, "total" among them.

    Nothing is allocated. `cuda` pretends: sizes are rounded up to 512 bytes and the optimiser
    updates all parameters at once, as on CUDA; the tensors are fake CPU tensors all the same, as
    a torch built without CUDA cannot differentiate fake CUDA tensors.
    """
    with FakeTensorMode():
        runner = StepRunner(spec, shape_BCHW, train, tile=tile, stages=stages, foreach=cuda)
        runner.step()
        tracker = mem_tracker.MemTracker()
        tracker.track_external(runner.model, runner.optimiser, runner.x, runner.y)
        runner.optimiser.zero_grad(set_to_none=True)
        with tracker:
            runner.step()
        snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(getattr(key, "value", key)).lower(): int(v) for key, v in snapshot.items()}


def saved_bytes(runner: StepRunner) -> int:
    """Bytes that the forward pass keeps for the backward pass, each storage once.

    Parameters, buffers, image and labels are not counted: they are there anyway.
    """
    known = {t.untyped_storage().data_ptr() for t in (runner.x, runner.y)}
    for tensor in (*runner.model.parameters(), *runner.model.buffers()):
        known.add(tensor.untyped_storage().data_ptr())
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in known and tensor.untyped_storage().nbytes():
            kept[place] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = runner.loss()
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del loss
    return total
