"""What the ranks of the pipeline benchmarks run, and the U-Nets they run on."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from bigunet.losses import Objective
from bigunet.model import UNet
from bigunet.pipeline import Pipeline
from bigunet.plan import Plan
from bigunet.ranks import current
from bigunet.spec import UNetSpec

#: (name, network, side of the images): from wide and shallow to narrow and deep.
NETS = (
    ("4 levels x 16", UNetSpec(levels=4, channels=16, classes=6), 256),
    ("5 levels x 16", UNetSpec(levels=5, channels=16, classes=6), 256),
    ("3 levels x 32", UNetSpec(levels=3, channels=32, classes=6), 192),
    ("batch norm", UNetSpec(levels=4, channels=16, norm="batch", classes=6), 256),
    ("bilinear", UNetSpec(levels=4, channels=16, up="bilinear", classes=6), 256),
    ("3 convolutions", UNetSpec(levels=4, channels=16, convs=3, classes=6), 192),
    ("5 x 5 kernels", UNetSpec(levels=3, channels=16, kernel=5, classes=6), 192),
    ("torchgpipe (2, 8)", UNetSpec.torchgpipe(2, 8, depth=4).replace(classes=6), 256),
)


def network(spec: UNetSpec) -> UNet:
    torch.manual_seed(0)
    model = UNet(spec).train()
    model.to(memory_format=torch.channels_last)
    return model


def batch(plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    num, _, height, width = plan.shape_BCHW
    x = torch.randn(plan.shape_BCHW, generator=generator)
    return x, torch.randint(0, plan.spec.classes, (num, height, width), generator=generator)


def steps(plans: list[str], rounds: int) -> list[list[float]]:
    """Seconds of `rounds` steps of each plan (YAML), the slowest rank's; plans alternate."""
    ranks = current()
    engine = "distributed" if ranks.size > 1 else "reference"
    lines = []
    for text in plans:
        plan = Plan.from_yaml(text)
        objective = Objective(plan.spec.classes)
        lines.append((Pipeline(plan, network(plan.spec), objective, engine=engine), batch(plan)))
    seconds: list[list[float]] = [[] for _ in plans]
    for number in range(rounds + 1):
        for (pipeline, (x, labels)), times in zip(lines, seconds, strict=True):
            ranks.wait()
            began = time.perf_counter()
            pipeline.step_images(x, labels)
            spent = torch.tensor([time.perf_counter() - began])
            if ranks.size > 1:
                dist.all_reduce(spent, dist.ReduceOp.MAX)
            if number:  # the first one warms up
                times.append(float(spent))
    return seconds


def one_process(plan_text: str, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of steps in this process, alternating: the batch whole, and by micro-batches."""
    plan = Plan.from_yaml(plan_text)
    model, (x, labels) = network(plan.spec), batch(plan)
    x = x.contiguous(memory_format=torch.channels_last)
    whole, parts = [], []
    for _ in range(rounds + 1):
        for times, size in ((whole, len(x)), (parts, plan.micro_batch)):
            model.zero_grad()
            began = time.perf_counter()
            for pixels, truth in zip(x.split(size), labels.split(size), strict=True):
                loss = torch.nn.functional.cross_entropy(model(pixels), truth)
                (loss * (len(pixels) / len(x))).backward()
            times.append(time.perf_counter() - began)
    return whole[1:], parts[1:]
