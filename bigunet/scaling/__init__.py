"""What one more GPU buys: steps on many GPUs, predicted term by term, and the best way to use them.

`predict` for one strategy, `best` of all of them, `phase_map` for where each of them wins, and
`paper_exhibit` for the paper's findings held against the model.
"""

from __future__ import annotations

from bigunet.scaling.best import Candidate, Choice, Space, best, candidates
from bigunet.scaling.collective import LINKS
from bigunet.scaling.exhibit import paper_exhibit
from bigunet.scaling.phase import map_space, phase_map
from bigunet.scaling.predict import predict
from bigunet.scaling.setting import STRATEGIES, TERMS

__all__ = [
    "LINKS",
    "STRATEGIES",
    "TERMS",
    "Candidate",
    "Choice",
    "Space",
    "best",
    "candidates",
    "map_space",
    "paper_exhibit",
    "phase_map",
    "predict",
]
