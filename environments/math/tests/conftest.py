from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest


@pytest.fixture(scope="session")
def library() -> Iterator[ProcessPoolExecutor]:
    """A separate process for math-verify, because it sets signal handlers and emits warnings."""
    with _start_process() as pool:
        yield pool


def _start_process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
