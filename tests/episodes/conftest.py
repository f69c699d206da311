"""The environment that pays what is noted."""

from __future__ import annotations

import pytest

from .told import Notebook


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()
