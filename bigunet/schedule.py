"""Who does what when: schedules as plain lists of actions, one list for each device.

A device works through its list in order. Sends are asynchronous: the device goes on while the
data travel. A receive waits until its data are there. With whole-stage recomputation (`train.
recompute` "stage" or "except_last") a "recompute" action stands before the gradient's receive,
so that it fills the wait, as in torchgpipe and fairscale ("checkpointing with preceding
recomputation"); recomputation by blocks happens inside the backward pass.

Sources: GPipe, Huang et al. 2019 (arXiv 1811.06965); 1F1B, Narayanan et al. 2019 (doi
10.1145/3341301.3359646); interleaved 1F1B, Narayanan et al. 2021 (doi 10.1145/3458817.3476209).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from bigunet.errors import PlanError, fail
from bigunet.plan import Plan, Schedule, place
from bigunet.spec import Recompute

__all__ = [
    "Action",
    "ActionKind",
    "DeviceLists",
    "actions",
    "bubble_fraction",
    "device_actions",
    "in_flight",
]

ActionKind = Literal["forward", "recompute", "backward", "send", "receive", "reduce"]

_LETTERS = {"forward": "F", "recompute": "C", "backward": "B", "reduce": "A"}


@dataclass(frozen=True, slots=True)
class Action:
    """One step of a device: `kind` for a stage and a micro-batch.

    A send goes from `stage` to the stage `peer`, a receive takes from `peer` into `stage`: an
    activation (and skips) where the receiving stage is the later one, a gradient otherwise. A
    "reduce" sums the stage's gradients over the pipelines; its micro-batch is -1.
    """

    kind: ActionKind
    stage: int
    micro_batch: int
    peer: int | None = None

    def __str__(self) -> str:
        if self.kind == "send":
            return f"s{self.stage}>{self.peer}.{self.micro_batch}"
        if self.kind == "receive":
            return f"r{self.peer}>{self.stage}.{self.micro_batch}"
        mark = f"{_LETTERS[self.kind]}{self.stage}"
        return mark if self.micro_batch < 0 else f"{mark}.{self.micro_batch}"

    @property
    def carries(self) -> Literal["activation", "gradient"] | None:
        """What a send or a receive carries."""
        if self.peer is None:
            return None
        source, target = (self.stage, self.peer) if self.kind == "send" else (self.peer, self.stage)
        return "activation" if source < target else "gradient"


DeviceLists = tuple[tuple[Action, ...], ...]
Compute = tuple[Literal["forward", "backward"], int, int]


def actions(plan: Plan) -> DeviceLists:
    """The lists of the devices of one pipeline, device 0 first."""
    pairs = plan.skip_pairs() if plan.skips == "direct" else ()
    return device_actions(
        plan.devices,
        plan.micro_batches,
        plan.schedule,
        recompute=plan.train.recompute,
        skip_pairs=pairs,
        reduce=plan.tiles > 1,
    )


@lru_cache(maxsize=256)
def device_actions(
    devices: tuple[int, ...],
    micro_batches: int,
    schedule: Schedule,
    *,
    recompute: Recompute = "none",
    skip_pairs: tuple[tuple[int, int], ...] = (),
    reduce: bool = False,
) -> DeviceLists:
    """The lists for stages on `devices`, without a plan.

    `skip_pairs` are the (source, joining) stages of skips that go direct; those of neighbouring
    stages travel with the activation.
    """
    num_stages, num_devices = len(devices), max(devices) + 1
    placement = place(devices)
    if schedule == "gpipe":
        computes = _gpipe(devices, micro_batches)
    elif placement == "straight":
        computes = [list(_one_f_one_b(s, num_stages, micro_batches)) for s in range(num_stages)]
    elif placement == "interleaved":
        computes = [
            list(_interleaved(d, num_devices, num_stages // num_devices, micro_batches))
            for d in range(num_devices)
        ]
    else:
        computes = _greedy(devices, micro_batches)
    far = [(s, t) for s, t in skip_pairs if t > s + 1 and devices[s] != devices[t]]
    lists = []
    for device, order in enumerate(computes):
        line = [
            action
            for kind, stage, mb in order
            for action in _dressed(kind, stage, mb, devices, far, recompute, micro_batches)
        ]
        if reduce:
            stages = [s for s in range(num_stages) if devices[s] == device]
            # The latest stage's gradients are complete first.
            line += [Action("reduce", s, -1) for s in reversed(stages)]
        lists.append(tuple(line))
    return tuple(lists)


def _dressed(
    kind: str,
    stage: int,
    mb: int,
    devices: Sequence[int],
    far: Sequence[tuple[int, int]],
    recompute: Recompute,
    micro_batches: int,
) -> Iterator[Action]:
    """A pass with its receives before and its sends behind it."""
    last = len(devices) - 1
    before = [stage - 1] if stage and devices[stage - 1] != devices[stage] else []
    after = [stage + 1] if stage < last and devices[stage + 1] != devices[stage] else []
    before += [s for s, t in far if t == stage]
    after += [t for s, t in far if s == stage]
    if kind == "forward":
        yield from (Action("receive", stage, mb, peer) for peer in before)
        yield Action("forward", stage, mb)
        yield from (Action("send", stage, mb, peer) for peer in after)
        return
    if recompute == "stage" or (recompute == "except_last" and mb < micro_batches - 1):
        yield Action("recompute", stage, mb)
    yield from (Action("receive", stage, mb, peer) for peer in after)
    yield Action("backward", stage, mb)
    yield from (Action("send", stage, mb, peer) for peer in before)


def _gpipe(devices: Sequence[int], micro_batches: int) -> list[list[Compute]]:
    """All forward passes, then all backward passes in the opposite order.

    Clock tick t runs stage s on micro-batch t - s, lower stages first, as fairscale does.
    """
    forward: list[list[Compute]] = [[] for _ in range(max(devices) + 1)]
    for tick in range(micro_batches + len(devices) - 1):
        for stage, device in enumerate(devices):
            if 0 <= tick - stage < micro_batches:
                forward[device].append(("forward", stage, tick - stage))
    return [line + [("backward", s, m) for _, s, m in reversed(line)] for line in forward]


def _one_f_one_b(stage: int, num_stages: int, micro_batches: int) -> Iterator[Compute]:
    """Fill with K - 1 - stage forward passes, then one forward, one backward in turn."""
    fill = min(micro_batches, num_stages - 1 - stage)
    for mb in range(fill):
        yield "forward", stage, mb
    for mb in range(micro_batches):
        if mb + fill < micro_batches:
            yield "forward", stage, mb + fill
        yield "backward", stage, mb


def _interleaved(
    device: int, num_devices: int, chunks: int, micro_batches: int
) -> Iterator[Compute]:
    """1F1B over `chunks` stages a device, micro-batches in groups of `num_devices`."""
    if micro_batches % num_devices:
        fail(
            PlanError,
            rule=f"interleaved 1f1b takes micro-batches in groups of {num_devices} devices",
            got=micro_batches,
            remedy=f"Use a multiple of {num_devices}.",
        )
    total = chunks * micro_batches

    def step(index: int, backward: bool) -> Compute:
        group, inner = divmod(index, num_devices * chunks)
        chunk, offset = divmod(inner, num_devices)
        if backward:
            chunk = chunks - 1 - chunk
        stage, mb = chunk * num_devices + device, group * num_devices + offset
        return ("backward" if backward else "forward"), stage, mb

    fill = min(total, 2 * (num_devices - device - 1) + (chunks - 1) * num_devices)
    for i in range(fill):
        yield step(i, False)
    for i in range(total):
        if i + fill < total:
            yield step(i + fill, False)
        yield step(i, True)


def _greedy(devices: Sequence[int], micro_batches: int) -> list[list[Compute]]:
    """1F1B for any placement: each free device takes what is ready, backward passes first.

    Simulated with equal stages, a backward pass twice as long as a forward pass; of two passes of
    one kind the later stage's goes first. Stage s holds at most K - s micro-batches, as in 1F1B.
    """
    num_stages = len(devices)
    ends: dict[Compute, int] = {}
    next_forward, next_backward = [0] * num_stages, [0] * num_stages
    free = [0] * (max(devices) + 1)
    lists: list[list[Compute]] = [[] for _ in free]

    def ready(stage: int, backward: bool, now: int) -> Compute | None:
        if backward:
            mb = next_backward[stage]
            if mb >= next_forward[stage]:
                return None
            deps: list[Compute] = [("forward", stage, mb)]
            if stage < num_stages - 1:
                deps.append(("backward", stage + 1, mb))
        else:
            mb = next_forward[stage]
            if mb >= micro_batches or mb - next_backward[stage] >= num_stages - stage:
                return None
            deps = [("forward", stage - 1, mb)] if stage else []
        # What has not ended has no time here yet, and is then not ready.
        if any(ends.get(dep, now + 1) > now for dep in deps):
            return None
        return ("backward" if backward else "forward"), stage, mb

    now = 0
    while sum(next_backward) < num_stages * micro_batches:
        for device in range(len(free)):
            if free[device] > now:
                continue
            stages = [s for s in reversed(range(num_stages)) if devices[s] == device]
            found = next(
                (c for back in (True, False) for s in stages if (c := ready(s, back, now))), None
            )
            if found is None:
                continue
            kind, stage, _ = found
            (next_backward if kind == "backward" else next_forward)[stage] += 1
            free[device] = ends[found] = now + (2 if kind == "backward" else 1)
            lists[device].append(found)
        now += 1
    return lists


def in_flight(lists: DeviceLists, num_stages: int) -> tuple[int, ...]:
    """Most micro-batches that each stage holds between their forward and backward passes."""
    held, peak = [0] * num_stages, [0] * num_stages
    for line in lists:
        for action in line:
            if action.kind == "forward":
                held[action.stage] += 1
                peak[action.stage] = max(peak[action.stage], held[action.stage])
            elif action.kind == "backward":
                held[action.stage] -= 1
    return tuple(peak)


def bubble_fraction(num_devices: int, micro_batches: int, *, chunks: int = 1) -> float:
    """Idle share of a step of equal stages without transfers: (K - 1) / (chunks M + K - 1).

    For GPipe and 1F1B with one stage a device, and for interleaved 1F1B with `chunks` of them.
    """
    return (num_devices - 1) / (chunks * micro_batches + num_devices - 1)
