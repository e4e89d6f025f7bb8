"""Shared by all tests: one thread a worker, fixed seeds, reproducible property tests."""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

# Before anything imports torch or NumPy: parallel workers must not each start a thread per core.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(_name, "1")

import numpy as np
import pytest
from hypothesis import settings

# The same examples in every run; `pytest --hypothesis-profile=explore` looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def _reproducible() -> Iterator[None]:
    """Seeds before each test; torch's global state put back after it, where torch is loaded."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - libraries may draw from the global generator
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    torch.manual_seed(0)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout's top folder."""
    return Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of the browser that the browser tests drive (`.ci/run` installs it)."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    assert path, "the browser tests need Chromium: install your system's chromium package"
    return path
