"""Fixtures: the environment that rewards notes."""

from __future__ import annotations

import pytest

from .environments import Notebook


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()
