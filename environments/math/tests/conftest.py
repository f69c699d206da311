from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="session")
def library() -> Iterator[ProcessPoolExecutor]:
    """One process for math-verify, whose timeouts are signals and whose warnings are its own business."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool
