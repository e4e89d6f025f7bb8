"""The rules that lists of actions keep, and where one is broken: the grid with the step marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from bigunet.errors import PlanError, fail
from bigunet.plan import Plan
from bigunet.schedule import Action, DeviceLists, actions
from bigunet.timeline import grid, topological

__all__ = ["check_actions", "check_plan"]


class _Checker:
    """Walks through the lists once per rule; the first broken rule raises."""

    def __init__(self, lists: DeviceLists, devices: Sequence[int], micro_batches: int) -> None:
        self.lists, self.devices, self.micro_batches = lists, devices, micro_batches
        self.num_stages = len(devices)
        self.where = {
            (device, action): i
            for device, line in enumerate(lists)
            for i, action in reversed(list(enumerate(line)))
        }

    def broken(self, rule: str, device: int, index: int, got: str = "") -> NoReturn:
        action = self.lists[device][index] if index < len(self.lists[device]) else "the end"
        fail(
            PlanError,
            rule=rule,
            got=f"{got or action} (device {device}, position {index})\n"
            f"{grid(self.lists, (device, index))}\n",
            remedy="Mend the marked action, or let `schedule.actions` make the lists.",
        )

    def position(self, action: Action) -> int | None:
        return self.where.get((self.devices[action.stage], action))

    def known(self) -> None:
        if len(self.lists) != max(self.devices) + 1:
            fail(
                PlanError,
                rule=f"{max(self.devices) + 1} devices have one list each",
                got=len(self.lists),
                remedy="Give each device its list, empty or not.",
            )
        for device, line in enumerate(self.lists):
            for i, a in enumerate(line):
                if not 0 <= a.stage < self.num_stages or self.devices[a.stage] != device:
                    self.broken("a device runs its own stages only", device, i)
                if a.kind != "reduce" and not 0 <= a.micro_batch < self.micro_batches:
                    self.broken(f"micro-batches are 0 to {self.micro_batches - 1}", device, i)
                if (a.peer is not None) != (a.kind in ("send", "receive")) or (
                    a.peer is not None
                    and (not 0 <= a.peer < self.num_stages or self.devices[a.peer] == device)
                ):
                    self.broken(
                        "a send and a receive, and nothing else, name a stage on another device",
                        device,
                        i,
                    )
            for action, count in Counter(line).items():
                if count > 1:
                    second = [i for i, a in enumerate(line) if a == action][1]
                    self.broken("an action happens once", device, second)

    def passes(self) -> None:
        for stage, device in enumerate(self.devices):
            for mb in range(self.micro_batches):
                forward = self.position(Action("forward", stage, mb))
                backward = self.position(Action("backward", stage, mb))
                for what, index in (("forward", forward), ("backward", backward)):
                    if index is None:
                        self.broken(
                            "each stage runs each micro-batch forward and backward",
                            device,
                            len(self.lists[device]),
                            f"no {what} pass of stage {stage}, micro-batch {mb}",
                        )
                assert forward is not None
                assert backward is not None
                if backward < forward:
                    self.broken("a forward pass comes before its backward pass", device, backward)
                again = self.position(Action("recompute", stage, mb))
                if again is not None and not forward < again < backward:
                    self.broken(
                        "a recomputation comes between the forward and the backward pass",
                        device,
                        again,
                    )

    def inputs(self) -> None:
        """What a pass needs is made on the device before, or received before."""
        for stage, device in enumerate(self.devices):
            for mb in range(self.micro_batches):
                for kind, source in (("forward", stage - 1), ("backward", stage + 1)):
                    if not 0 <= source < self.num_stages:
                        continue
                    index = self.position(Action(kind, stage, mb))  # type: ignore[arg-type]
                    need = (
                        Action(kind, source, mb)  # type: ignore[arg-type]
                        if self.devices[source] == device
                        else Action("receive", stage, mb, source)
                    )
                    have = self.where.get((device, need))
                    assert index is not None
                    if have is None or have > index:
                        self.broken(
                            f"{need} comes before {self.lists[device][index]}", device, index
                        )

    def transfers(self) -> None:
        for device, line in enumerate(self.lists):
            for i, a in enumerate(line):
                if a.peer is None:
                    continue
                other = "receive" if a.kind == "send" else "send"
                pair = Action(other, a.peer, a.micro_batch, a.stage)  # type: ignore[arg-type]
                if self.position(pair) is None:
                    self.broken(f"every {a.kind} has its {other}", device, i)
                kind = "forward" if a.carries == "activation" else "backward"
                own = self.where[(device, Action(kind, a.stage, a.micro_batch))]  # type: ignore[arg-type]
                if (own > i) == (a.kind == "send"):
                    self.broken(
                        "a send comes after the pass that makes its data, a receive before the "
                        "pass that takes them",
                        device,
                        i,
                    )

    def limits(self, most: Sequence[int]) -> None:
        for device, line in enumerate(self.lists):
            held: Counter[int] = Counter()
            for i, a in enumerate(line):
                if a.kind == "forward":
                    held[a.stage] += 1
                    if held[a.stage] > most[a.stage]:
                        self.broken(
                            f"stage {a.stage} holds at most {most[a.stage]} micro-batches",
                            device,
                            i,
                        )
                elif a.kind == "backward":
                    held[a.stage] -= 1


def check_actions(
    lists: DeviceLists,
    devices: Sequence[int],
    micro_batches: int,
    *,
    most_in_flight: Sequence[int] | None = None,
) -> None:
    """Raise unless the lists train every stage on every micro-batch and come to an end.

    Parameters
    ----------
    devices : the device of each stage.
    most_in_flight : bound on the micro-batches each stage holds, or None for no bound.

    Raises
    ------
    PlanError : with the rule, and the grid with the failing step marked >like this<.
    """
    checker = _Checker(lists, devices, micro_batches)
    checker.known()
    checker.passes()
    checker.inputs()
    checker.transfers()
    if most_in_flight is not None:
        checker.limits(most_in_flight)
    topological(lists)


def check_plan(plan: Plan) -> DeviceLists:
    """The checked lists of a plan; 1F1B stages hold no more micro-batches than 1F1B allows."""
    lists = actions(plan)
    most = None
    if plan.schedule == "1f1b" and plan.placement != "interleaved":
        most = [plan.num_stages - stage for stage in range(plan.num_stages)]
    check_actions(lists, plan.devices, plan.micro_batches, most_in_flight=most)
    return lists
