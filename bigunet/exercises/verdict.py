"""An exercise, its verdict on an answer, and the two kinds of answers that most have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bigunet.errors import BigUNetError, SpecError, fail

__all__ = ["EXERCISES", "Exercise", "Verdict", "check", "choice", "exercise", "number"]

_Body = Callable[[Any], "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right (None: not answered yet), and why. A notebook shows the text."""

    right: bool | None
    text: str

    def __repr__(self) -> str:
        word = {True: "Right", False: "Not yet", None: "Not answered yet"}[self.right]
        return f"{word}. {self.text}"


@dataclass(frozen=True)
class Exercise:
    """A question, what an answer looks like, and the check of it.

    `key` is the notebook's number and the exercise's: "01.2".
    """

    key: str
    question: str
    form: str
    body: _Body

    def check(self, answer: Any) -> Verdict:
        """The verdict on an answer; one of the wrong kind is told what kind is meant."""
        if answer is None:
            return Verdict(None, f"{self.question} Set answer to {self.form}.")
        try:
            return self.body(answer)
        except BigUNetError as error:
            return Verdict(False, f"That cannot be: {error}")
        except (TypeError, ValueError, AttributeError, KeyError):
            return Verdict(False, f"An answer here is {self.form}.")


#: All exercises by their key, in the course's order.
EXERCISES: dict[str, Exercise] = {}


def check(key: str, answer: Any) -> Verdict:
    """The verdict on an answer to an exercise of the course; `None` gives the question again.

    Raises
    ------
    SpecError : for a key that is not in `EXERCISES`.
    """
    if key not in EXERCISES:
        fail(
            SpecError,
            rule=f"the exercises are {', '.join(EXERCISES)}",
            got=key,
            remedy="Use one of these.",
        )
    return EXERCISES[key].check(answer)


def exercise(key: str, question: str, form: str) -> Callable[[_Body], _Body]:
    """Put the check below into `EXERCISES`."""

    def add(body: _Body) -> _Body:
        EXERCISES[key] = Exercise(key, question, form, body)
        return body

    return add


def number(
    answer: Any,
    truth: float,
    right: str,
    near: Mapping[Any, str] | None = None,
    tolerance: float = 1e-6,
) -> Verdict:
    """Right within a relative tolerance; `near` has hints for answers that are often given."""
    if isinstance(answer, bool):
        raise TypeError
    given = float(answer)
    if abs(given - truth) <= tolerance * max(1.0, abs(truth)):
        return Verdict(True, right)
    for value, hint in (near or {}).items():
        if abs(given - value) <= tolerance * max(1.0, abs(value)):
            return Verdict(False, hint)
    return Verdict(False, "Too large." if given > truth else "Too small.")


def choice(answer: Any, truth: str, right: str, others: Mapping[str, str]) -> Verdict:
    """One of a few words; `others` has a hint for each wrong one."""
    word = str(answer).strip().lower()
    if word == truth:
        return Verdict(True, right)
    if word in others:
        return Verdict(False, others[word])
    raise ValueError
