"""What one more GPU buys: steps on many GPUs, predicted term by term, and the best way to use them.

`predict` for one strategy, `best` of all, `phase_map` for where each of them wins.
"""

from __future__ import annotations

from bigunet.scaling.collective import LINKS
from bigunet.scaling.predict import predict
from bigunet.scaling.setting import STRATEGIES, TERMS

__all__ = ["LINKS", "STRATEGIES", "TERMS", "predict"]
