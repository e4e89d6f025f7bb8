"""The engine on torch.distributed.pipelining: one rank a stage, gloo on CPU or NCCL on GPUs.

Ranks form a mesh (tiles, stages): a row is a pipeline, a column the replicas of a stage. Shapes
on the wire are known from the plan, so no metadata is exchanged and no layer runs twice.

Two things differ from the plan's list of actions, and change no result: torch's GPipe takes the
micro-batches backward in the order of the forward passes, not in reverse, and a stage that is
recomputed is so inside its backward pass, once the gradient has come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from bigunet.errors import BigUNetError, LaunchError, PlanError, fail
from bigunet.pipeline.feed import Feed
from bigunet.pipeline.protocol import Loss, Places
from bigunet.pipeline.stage import Stage, wire_tensors
from bigunet.plan import Plan
from bigunet.ranks import Ranks, current

__all__ = ["Distributed", "check_distributed"]


def check_distributed(plan: Plan) -> None:
    """Raise `PlanError` for what this engine does not run."""
    if plan.placement != "straight":
        fail(
            PlanError,
            rule="the engine `distributed` runs one stage on each rank (placement straight)",
            got=f"stages on devices {plan.devices}",
            remedy="Plan straight; folded plans run on the engine `fairscale_pipe`.",
        )
    far = [pair for pair in plan.skip_pairs() if pair[1] > pair[0] + 1]
    if plan.skips == "direct" and far:
        fail(
            PlanError,
            rule="the engine `distributed` passes skips on from stage to stage (skips: hop)",
            got=f"direct ones from stage to stage {far}",
            remedy="Plan with skips=hop.",
        )
    if plan.schedule == "1f1b" and plan.micro_batches < plan.num_stages:
        fail(
            PlanError,
            rule="1f1b has at least as many micro-batches as stages",
            got=f"{plan.micro_batches} micro-batches, {plan.num_stages} stages",
            remedy="Use more micro-batches, or schedule gpipe.",
        )


class Distributed:
    """This rank's stage of this rank's pipeline.

    `mesh` : a mesh (tiles, stages) to use instead of a new one over all ranks.

    Raises
    ------
    PlanError : see `check_distributed`, or for another number of ranks than the plan has places.
    LaunchError : where no ranks have been started.
    """

    def __init__(
        self, plan: Plan, layers: Mapping[str, nn.Module], mesh: DeviceMesh | None = None
    ) -> None:
        check_distributed(plan)
        if not dist.is_initialized():
            fail(
                LaunchError,
                rule=f"the engine `distributed` runs on {plan.num_ranks} ranks",
                got="one process without a process group",
                remedy="Start it with bigunet.launch or torchrun, inside bigunet.ranks.init().",
            )
        ranks = current()
        plan.check_run(plan.spec, ranks.size)
        if mesh is None:
            mesh = init_device_mesh(
                ranks.device.type,
                (plan.tiles, plan.num_devices),
                mesh_dim_names=("tiles", "stages"),
            )
        self.plan, self.mesh = plan, mesh
        pipeline, device = mesh.get_coordinate() or (0, 0)
        self.places = Places(
            ranks,
            _along(mesh, "stages", ranks.device),
            _along(mesh, "tiles", ranks.device),
            pipeline,
            plan.tiles,
        )
        self.stage = Stage(plan, device, layers)
        self.stage.to(ranks.device)
        self.layers = self.stage.layers
        self.has_first, self.has_last = device == 0, device == plan.num_stages - 1
        weights = [p for layer in layers.values() for p in layer.parameters() if p.ndim == 4]
        self.dtype = weights[0].dtype
        # All stages must agree on it, so it is read off the whole network.
        self.channels_last = any(
            w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous()
            for w in weights
        )
        self.stage.channels_last = self.channels_last
        self._check_same()
        #: (stage, micro-batch, kind, start, end) of each pass since it was last cleared, by
        #: `time.perf_counter`; the newest ones.
        self.events: deque[tuple[int, int, str, float, float]] = deque(
            maxlen=4 * plan.micro_batches
        )
        self._schedules: dict[bool, tuple[_Stage, Any]] = {}
        self._loss: Loss | None = None

    def _check_same(self) -> None:
        """A difference between ranks would end in messages of the wrong size, or none."""
        ranks = self.places.all
        mine = {**self.plan.to_dict(), "weights": str(self.dtype), "layout": self.channels_last}
        theirs = ranks.share(mine)
        assert isinstance(theirs, dict)
        differing = [key for key, value in mine.items() if theirs[key] != value]
        if ranks.any(bool(differing)):
            fail(
                PlanError,
                rule="all ranks run one plan, with weights of one type",
                got=", ".join(f"{k}={mine[k]!r} ({theirs[k]!r} on rank 0)" for k in differing)
                or "other values on another rank",
                remedy="Give every rank the same plan and network.",
            )

    def run(self, feed: Feed, loss: Loss, *, keep_logits: bool = False) -> Tensor | None:
        """See `Engine`. Every rank of the pipeline calls it.

        Raises
        ------
        LaunchError : where a neighbour ended; the first rank to end holds the cause.
        """
        self._loss = loss
        self.stage.rewind(feed.tiles)
        inputs: tuple[Tensor, ...] = ()
        if self.has_first:
            x = feed.pixels(self.dtype).to(self.places.all.device)
            if self.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            inputs = (x,)
        target = feed.labels().to(self.places.all.device) if self.has_last else None
        stage, schedule = self._schedule(feed)
        try:
            logits = schedule.step(*inputs, target=target, return_outputs=keep_logits)
            stage.finish()
        except RuntimeError as error:
            if isinstance(error.__cause__, BigUNetError):  # torch wraps what a stage raises
                raise error.__cause__ from error
            _explain(error, self.places, self.stage.index)
            raise
        finally:
            self._loss = None
        return logits.detach() if keep_logits and self.has_last else None

    def _schedule(self, feed: Feed) -> tuple[_Stage, Any]:
        cropped = feed.tiles is not None
        if cropped not in self._schedules:
            self._schedules[cropped] = self._build(feed.tiles[0] if feed.tiles else None)
        return self._schedules[cropped]

    def _build(self, tile: Any) -> tuple[_Stage, Any]:
        plan, index = self.plan, self.stage.index
        arriving, leaving = (
            wire_tensors(plan, i, self.dtype, tile=tile, channels_last=self.channels_last)
            for i in (index, index + 1)
        )
        stage = _Stage(
            self.events,
            self.stage,
            index,
            plan.num_stages,
            self.places.all.device,
            input_args=arriving,
            output_args=leaving,
            group=self.mesh["stages"].get_group(),
        )
        kind = ScheduleGPipe if plan.schedule == "gpipe" else Schedule1F1B
        # The losses are parts of one mean already: nothing is divided by the micro-batches.
        return stage, kind(stage, plan.micro_batches, loss_fn=self._part, scale_grads=False)

    def _part(self, logits: Tensor, labels: Tensor) -> Tensor:
        assert self._loss is not None
        loss = self._loss(logits, labels)
        # The last stage's forward pass ends with its loss.
        stage, micro_batch, kind, began, _ = self.events.pop()
        self.events.append((stage, micro_batch, kind, began, time.perf_counter()))
        return loss


class _Stage(PipelineStage):
    """torch's stage, which notes when its passes begin and end, and on CPUs moves its own messages.

    torch posts a receive when its schedule comes to it, and gloo moves nothing before: the data
    then travel while the receiver waits. Here all of a step's receives are posted at its start,
    into the buffers that torch has made for them, and sends go off as soon as a pass has ended;
    so messages travel beside the work. With NCCL, where a receive posted early would hold up
    what comes behind it on the same stream, torch's own way stays.
    """

    def __init__(
        self, events: deque[tuple[int, int, str, float, float]], *args: Any, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        self._events = events
        self._early = self.device.type == "cpu"
        self._arriving: dict[tuple[str, int], list[dist.Work]] = {}
        self._leaving: deque[list[dist.Work]] = deque()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._await("forward", fwd_chunk_id)
        began = time.perf_counter()
        result = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        ended = time.perf_counter()
        self._events.append((self.stage_index, fwd_chunk_id, "forward", began, ended))
        return result

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._await("backward", bwd_chunk_id)
        began = time.perf_counter()
        result = super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        ended = time.perf_counter()
        self._events.append((self.stage_index, bwd_chunk_id, "backward", began, ended))
        return result

    # What the schedule asks for, and gets to start and to wait for itself: nothing, on CPUs.

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if not self._early:
            return super().get_fwd_recv_ops(fwd_chunk_id)
        if fwd_chunk_id == 0:
            chunks = range(self.chunks or 0)
            for kind, ops in (
                ("forward", super().get_fwd_recv_ops),
                ("backward", super().get_bwd_recv_ops),
            ):
                self._arriving |= {(kind, i): _post(ops(i)) for i in chunks}
        return []

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return [] if self._early else super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._send(super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if not self._early:
            return ops
        self._leaving.append(_post(ops))
        # Each work holds what it sends; the other side waits for it already.
        while len(self._leaving) > _MOST_LEAVING:
            _wait(self._leaving.popleft())
        return []

    def _await(self, kind: str, chunk: int) -> None:
        _wait(self._arriving.pop((kind, chunk), []))

    def finish(self) -> None:
        """Wait until everything sent in this step has arrived."""
        while self._leaving:
            _wait(self._leaving.popleft())


# Messages under way from one rank before it waits for the oldest.
_MOST_LEAVING = 4


def _post(ops: list[dist.P2POp]) -> list[dist.Work]:
    works = []
    for op in ops:
        peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
        works.append(op.op(op.tensor, group=op.group, tag=op.tag, **peer))
    return works


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


def _along(mesh: DeviceMesh, axis: str, device: torch.device) -> Ranks:
    group = mesh[axis].get_group()
    return Ranks(dist.get_rank(group), dist.get_world_size(group), device, group)


_LOST = ("connection closed", "connection reset", "timed out", "broken pipe", "connection refused")


def _explain(error: RuntimeError, places: Places, stage: int) -> None:
    """Say it in words where the error only shows that another rank has gone."""
    mark = next((m for m in _LOST if m in str(error).lower()), None)
    if mark is not None and error.__cause__ is None:
        fail(
            LaunchError,
            rule="every rank of a pipeline stays until the step ends",
            got=f"rank {places.all.rank} (pipeline {places.index}, stage {stage}) lost a "
            f"neighbour ({mark})",
            remedy="Look for the cause in the rank that ended first; the last checkpoint is whole.",
        )
