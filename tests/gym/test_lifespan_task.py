"""An environment's lifespan is entered and left in one task, as clients built on anyio require."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from gymsdk import Environment, Verdict, hookimpl
from gymsdk.gym.env import Env
from gymsdk.gym.vector import VectorEnv


class ClientEnvironment:
    """An environment with a client, built on a task group, in its lifespan. With `fails`, the client breaks."""

    def __init__(self, *, fails: bool = False) -> None:
        self.left = 0
        self._fails = fails

    @hookimpl
    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[str]:
        async with anyio.create_task_group() as group:
            group.start_soon(self._serve)
            yield "connected"
            group.cancel_scope.cancel()
        self.left += 1

    async def _serve(self) -> None:
        if self._fails:
            raise ConnectionError("the server is gone")
        await anyio.sleep_forever()

    @hookimpl
    def verify(self, shared: Any) -> Verdict:
        return Verdict(reward=float(shared == "connected"))


@pytest.mark.parametrize("kind", ["one", "many"])
def test_an_anyio_client_is_left_in_the_task_that_entered_it(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    client = ClientEnvironment()
    environment = Environment("client", client)
    rows = [{"responses_create_params": {"input": "go"}}]
    env: Any = Env(environment, tasks=rows) if kind == "one" else VectorEnv(environment, num_envs=2, tasks=rows)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            env.reset()
            _, reward, *_ = env.step("hello" if kind == "one" else ["hello", "hello"])
            assert (reward == 1.0) if kind == "one" else (reward == 1.0).all()
            env.close()
    assert (client.left, caplog.text) == (2, "")


def test_a_broken_client_fails_the_episodes_after_it(caplog: pytest.LogCaptureFixture) -> None:
    env = Env(
        Environment("client", ClientEnvironment(fails=True)), tasks=[{"responses_create_params": {"input": "go"}}]
    )
    kinds = []
    # The client breaks in the background, so a few episodes may start before it does.
    while "lifespan_ended" not in kinds and len(kinds) < 1000:
        _, info = env.reset()
        kinds.append(info.get("failure", {}).get("kind"))
    assert kinds[-1] == "lifespan_ended"
    env.close()
    assert "hook 'lifespan' failed when it ended" in caplog.text
