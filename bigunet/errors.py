"""Errors that say the rule, the value seen and the remedy.

Every error that bigunet raises on purpose is a `BigUNetError`, so that a caller (the command line,
a notebook) can tell a bad input from a defect.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = [
    "BigUNetError",
    "CheckpointError",
    "ExactnessError",
    "LaunchError",
    "MemoryBudgetError",
    "OutputError",
    "PlanError",
    "SceneError",
    "ShapeError",
    "SpecError",
    "fail",
]


class BigUNetError(ValueError):
    """Base of all errors raised on purpose; `rule`, `got` and `remedy` are kept as attributes."""

    def __init__(self, rule: str, got: Any = None, remedy: str = "") -> None:
        self.rule, self.got, self.remedy = rule, got, remedy
        text = rule if got is None else f"{rule}; got {got}"
        super().__init__(f"{text}. {remedy}" if remedy else f"{text}.")

    def __reduce__(self) -> tuple[type[BigUNetError], tuple[str, Any, str]]:
        # Exceptions cross process borders (ranks report theirs), so all three parts are pickled.
        return type(self), (self.rule, self.got, self.remedy)


class SpecError(BigUNetError):
    """A network or training specification that breaks a rule."""


class ShapeError(BigUNetError):
    """An image, tile or halo of a size that the network cannot take."""


class ExactnessError(BigUNetError):
    """An exact run was asked for where exactness cannot hold."""


class SceneError(BigUNetError):
    """A scene or its labels that cannot be read or do not belong together."""


class OutputError(BigUNetError):
    """An output that cannot be written, or belongs to another run."""


class CheckpointError(BigUNetError):
    """A checkpoint that is damaged or belongs to another network or run."""


class MemoryBudgetError(BigUNetError):
    """Nothing fits in the memory that was allowed."""


class PlanError(BigUNetError):
    """A pipeline plan or schedule that cannot run."""


class LaunchError(BigUNetError):
    """A rank that could not be started, or that failed; carries the first rank's traceback."""


def fail(error: type[BigUNetError], *, rule: str, got: Any = None, remedy: str = "") -> NoReturn:
    """Raise `error` with the rule that was broken, the value that was seen, and what to do."""
    raise error(rule, got, remedy)
