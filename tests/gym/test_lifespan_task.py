"""An environment's lifespan is entered and left in one task, as clients built on anyio demand."""

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


class Client:
    """An environment whose lifespan holds a client with a task group, which fails if it is told to."""

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


@pytest.mark.parametrize("face", ["one", "many"])
def test_a_client_of_anyio_is_left_in_the_task_that_entered_it(face: str, caplog: pytest.LogCaptureFixture) -> None:
    client = Client()
    made = Environment("client", client)
    rows = [{"responses_create_params": {"input": "go"}}]
    env: Any = Env(made, tasks=rows) if face == "one" else VectorEnv(made, num_envs=2, tasks=rows)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            env.reset()
            _, reward, *_ = env.step("hello" if face == "one" else ["hello", "hello"])
            assert (reward == 1.0) if face == "one" else (reward == 1.0).all()
            env.close()
    assert (client.left, caplog.text) == (2, "")


def test_a_client_that_broke_fails_the_episodes_after_it(caplog: pytest.LogCaptureFixture) -> None:
    env = Env(Environment("client", Client(fails=True)), tasks=[{"responses_create_params": {"input": "go"}}])
    kinds = []
    # The client breaks in the background, so that a few episodes may be opened before.
    while "lifespan_ended" not in kinds and len(kinds) < 1000:
        _, info = env.reset()
        kinds.append(info.get("failure", {}).get("kind"))
    assert kinds[-1] == "lifespan_ended"
    env.close()
    assert "hook 'lifespan' failed when it ended" in caplog.text
