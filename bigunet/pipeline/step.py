"""One trained step of a plan: every parameter's gradient of the whole batch's mean loss.

The mean is over all labelled pixels of all micro-batches, passes and pipelines, weighted by
class, however unequally the labels are spread. Labels are counted first; each micro-batch then
contributes its sum over the total, and gradients are added up, never averaged.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from bigunet.errors import BigUNetError, PlanError, SpecError, fail
from bigunet.losses import Objective, Totals
from bigunet.model import UNet
from bigunet.pipeline.distributed import Distributed
from bigunet.pipeline.fairscale_pipe import FairscalePipe
from bigunet.pipeline.feed import Feed, Images
from bigunet.pipeline.protocol import Engine, EngineName, Places, Stepped
from bigunet.pipeline.reference import Reference
from bigunet.plan import Plan
from bigunet.sample_parallel import narrowed

__all__ = ["Pipeline", "check_objective"]

_ENGINES = {"reference": Reference, "fairscale_pipe": FairscalePipe, "distributed": Distributed}


def check_objective(objective: Objective) -> None:
    """Raise `SpecError` for a loss whose gradient needs two passes."""
    if objective.two_passes:
        fail(
            SpecError,
            rule="a pipelined step has a loss that is a sum over pixels: cross_entropy",
            got=f"{objective.loss}, whose gradient needs the sums of a first pass over all pixels",
            remedy="Use loss=cross_entropy, or train sample-parallel (bigunet.train.fit).",
        )


class Pipeline:
    """A network bound to a plan and an engine; its own stages' layers are trained here.

    Parameters
    ----------
    plan : what runs where; `plan.train` gives precision and recomputation.
    model : the network of the plan. Every rank makes it whole, with the same weights; a rank then
        keeps and trains the layers of its own stages, `named_parameters`.
    objective : the loss; cross-entropy.
    engine : "reference", "fairscale_pipe" or "distributed".
    options : the engine's own (`devices` of fairscale_pipe, `mesh` of distributed).

    Raises
    ------
    PlanError : a plan for another network, number of ranks or engine. SpecError : a Dice loss, or
    weights that do not fit the precision.
    """

    def __init__(
        self,
        plan: Plan,
        model: UNet,
        objective: Objective,
        *,
        engine: EngineName = "distributed",
        **options: object,
    ) -> None:
        if engine not in _ENGINES:
            fail(
                PlanError,
                rule=f"an engine is one of {', '.join(_ENGINES)}",
                got=engine,
                remedy="Choose one.",
            )
        plan.check_run(model.spec, plan.num_ranks)
        check_objective(objective)
        _check_weights(model, plan)
        self.plan, self.objective = plan, objective
        narrow = plan.train.precision == "bf16"
        worker = narrowed(model) if narrow else model
        layers = {name: worker.layers[name] for name in (row.name for row in model.rows)}
        build: type[Engine] = _ENGINES[engine]
        self.engine: Engine = build(plan, layers, **options)  # type: ignore[call-arg]
        own = self.engine.layers
        # The layers that are optimised: the model's own, in fp32 where those that run are bf16.
        self.layers = nn.ModuleDict({name: model.layers[name] for name in own})
        if narrow:
            self.layers.to(self.engine.places.all.device)
        self._wide: dict[str, Tensor] = {}
        if narrow:
            self._widen(own)

    @property
    def places(self) -> Places:
        """Where this rank stands."""
        return self.engine.places

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by the model's names."""
        return {f"layers.{n}": p for n, p in self.layers.named_parameters()}

    def step_images(
        self, x_BCHW: Tensor | None, labels_BHW: Tensor | None, *, keep_logits: bool = False
    ) -> Stepped:
        """`step` for one pass over whole images, see `bigunet.pipeline.feed.Images`.

        The logits are those of the images' own pixels.
        """
        feed = Images(x_BCHW, labels_BHW, self.plan.spec.stride, self.objective.ignore)
        done = self.step([feed], keep_logits=keep_logits)
        height, width = self.plan.shape_BCHW[2:]
        return done._replace(logits=tuple(x[..., :height, :width] for x in done.logits))

    def step(self, feeds: Sequence[Feed], *, keep_logits: bool = False) -> Stepped:
        """Set `.grad` of this rank's parameters to the gradient of the mean over all feeds.

        Every rank calls it, with the feeds of its own pipeline; pipelines may have different
        numbers of them, none included.

        Raises
        ------
        PlanError : a feed that is not what the plan runs, on any rank: then on every rank, before
        work. SceneError : labels outside the classes, or nothing labelled.
        """
        began = time.perf_counter()
        places = self.engine.places
        counts = self._count(feeds)
        self.objective.check(counts)
        zeros = torch.zeros(self.objective.classes, dtype=torch.float64)
        totals = Totals(torch.from_numpy(counts[:-1]).double(), zeros, zeros)
        entropy = torch.zeros(1, dtype=torch.float64)

        def loss(logits: Tensor, labels: Tensor) -> Tensor:
            part, value = self.objective.part(logits, labels, totals)
            entropy.add_(value.double().cpu())
            return part

        running = list(self.engine.layers.parameters())
        for parameter in running:
            parameter.grad = None
        kept = []
        for feed in feeds:
            logits = self.engine.run(feed, loss, keep_logits=keep_logits)
            if logits is not None:
                kept.append(logits)
        self._finish()
        places.all.sum_(entropy)
        return Stepped(
            float(entropy), int(counts[:-1].sum()), time.perf_counter() - began, tuple(kept)
        )

    def refresh(self) -> None:
        """Bring bf16 layers up to the fp32 weights after an optimiser step."""
        if self._wide:
            # In place, and rounded: both have the same names.
            self.engine.layers.load_state_dict(self.layers.state_dict())

    def _count(self, feeds: Sequence[Feed]) -> np.ndarray:
        """Labelled pixels of each class on all ranks, after a check that all can begin.

        A fault of one rank must not leave the others waiting in a pipeline: it is summed too.
        """
        engine, classes = self.engine, self.objective.classes
        counts = np.zeros(classes + 2, np.int64)
        fault: BigUNetError | None = None
        try:
            for feed in feeds:
                feed.check(self.plan, engine.dtype, first=engine.has_first, last=engine.has_last)
                if engine.has_last:
                    counts[:-1] += self.objective.count(feed.labels().numpy(force=True))
        except BigUNetError as error:
            fault = error
            counts[-1] = 1
        engine.places.all.sum_(torch.from_numpy(counts))
        if fault is not None:
            raise fault
        if counts[-1]:
            fail(
                PlanError,
                rule="every rank can begin the step",
                got=f"{int(counts[-1])} other ranks that cannot; their error says why",
                remedy="See there.",
            )
        return counts[:-1]

    def _widen(self, running: nn.ModuleDict) -> None:
        """Add up gradients in fp32: a micro-batch's goes into the sum as soon as it is there."""
        for name, parameter in running.named_parameters():
            total = torch.zeros_like(parameter, dtype=torch.float32)
            self._wide[name] = total

            def add(p: Tensor, total: Tensor = total) -> None:
                assert p.grad is not None
                total.add_(p.grad)
                p.grad = None

            parameter.register_post_accumulate_grad_hook(add)

    def _finish(self) -> None:
        """Sum over the stage's replicas; parameters that nothing reached get zeros."""
        running = dict(self.engine.layers.named_parameters())
        gradients = []
        for name, parameter in self.layers.named_parameters():
            if self._wide:
                parameter.grad = self._wide[name].clone()
                self._wide[name].zero_()
            elif running[name].grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        self.engine.places.replicas.sum_all_(gradients)  # type: ignore[arg-type]


def _check_weights(model: UNet, plan: Plan) -> None:
    types = {p.dtype for p in model.parameters()}
    allowed = {torch.float32} if plan.train.precision != "fp32" else {torch.float32, torch.float64}
    if len(types) != 1 or not types <= allowed:
        fail(
            SpecError,
            rule=f"for precision {plan.train.precision} all weights are "
            + " or ".join(sorted(map(str, allowed))),
            got=", ".join(sorted(map(str, types))),
            remedy="Convert the network with .float() (bf16 copies are made here).",
        )
