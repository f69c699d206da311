"""Episodes recorded in this process and replayed over HTTP, one request at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import aiohttp
import orjson

from gymsdk import load, model, play
from gymsdk.line import compute_seed
from gymsdk.rollouts.jobs import build_input_row
from gymsdk.types import Item, Row

POLICIES = ("scripted/oracle:0.7", "scripted/random")
ReplayResult = tuple[list[str], Row]
"""The outputs of an episode's calls, and its verdict."""


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """An episode of *environment*: its *row*, the items of the policy and its tools, and its reward."""

    environment: str
    row: Row
    items: tuple[Item, ...]
    reward: float

    @property
    def calls(self) -> list[Item]:
        return [item for item in self.items if item["type"] == "function_call"]

    @property
    def outputs(self) -> list[str]:
        return [item["output"] for item in self.items if item["type"] == "function_call_output"]


async def record_episodes(name: str, count: int) -> list[RecordedEpisode]:
    """Play episodes of the environment *name* in this process, with the policies in turn."""
    environment, policies = load(name), [model(policy) for policy in POLICIES]
    episodes = []
    async with environment:
        for number, task in enumerate(islice(environment.tasks(environment.splits[0], seed=5), count)):
            row = build_input_row(task.row(), environment=name, task=number, sampling={})
            seed = compute_seed(0, name, number)
            rollout = await play(environment, policies[number % len(policies)], row, seed=seed)
            assert rollout.failure is None, rollout.failure
            episodes.append(RecordedEpisode(name, row, tuple(rollout.response["output"]), rollout.reward or 0.0))
    return episodes


async def replay(http: aiohttp.ClientSession, url: str, episode: RecordedEpisode) -> AsyncIterator[ReplayResult | None]:
    """Replay *episode* at the resources server *url*, one request at a time; the second-last step yields the result.
    The client keeps only the cookies of the last response.
    """
    cookies: dict[str, str] = {}
    outputs: list[str] = []

    async def post(path: str, body: bytes) -> bytes:
        async with http.post(f"{url}{path}", data=body, cookies=cookies) as answer:
            text = await answer.read()
            assert answer.status == 200, (path, answer.status, text)
            cookies.clear()
            cookies.update({name: policy.value for name, policy in answer.cookies.items()})
        return text

    response: dict[str, Any] = {"id": "resp", "object": "response", "output": list(episode.items)}
    judged = orjson.dumps(episode.row | {"response": response})
    without_session = orjson.loads(await post("/verify", judged))
    cookies.clear()
    await post("/seed_session", orjson.dumps(episode.row))
    yield None
    for call in episode.calls:
        outputs.append((await post(f"/{call['name']}", call["arguments"].encode())).decode())
        yield None
    verdict = orjson.loads(await post("/verify", judged))
    assert verdict == without_session
    yield outputs, verdict
    await post("/close_session", b"{}")


async def replay_interleaved(
    http: aiohttp.ClientSession,
    urls: dict[str, str],
    episodes: Sequence[RecordedEpisode],
    *,
    concurrency: int = 16,
    seed: int = 1,
) -> list[ReplayResult]:
    """Replay *episodes* with their requests interleaved at random and return their results."""
    rng, results = random.Random(seed), dict[int, ReplayResult]()
    running = [(number, replay(http, urls[episode.environment], episode)) for number, episode in enumerate(episodes)]

    async def advance() -> None:
        while running:
            number, steps = running.pop(rng.randrange(len(running)))
            try:
                result = await anext(steps)
            except StopAsyncIteration:
                continue
            if result is not None:
                results[number] = result
            running.append((number, steps))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(advance())
    return [results[number] for number in range(len(episodes))]
