"""The course's exercises, which check an answer and say what is amiss without giving it away.

    check("01.1", None)   # the question
    check("01.1", 564)    # a verdict, which a notebook shows as text

The right answer is computed by the library, not stored, wherever there is something to compute.
"""

from __future__ import annotations

# In this order: importing them fills EXERCISES.
from bigunet.exercises import on_one_device as on_one_device
from bigunet.exercises import over_devices as over_devices
from bigunet.exercises.verdict import EXERCISES, Exercise, Verdict, check

__all__ = ["EXERCISES", "Exercise", "Verdict", "check"]
