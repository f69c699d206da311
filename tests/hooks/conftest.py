"""Fixtures with the environment that records the arguments of its hooks."""

from __future__ import annotations

import pytest

from gymsdk import Environment

from .environments import Recorder


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
async def recorded(recorder):
    async with Environment("recorded", recorder, {"level": 3}) as environment:
        yield environment
