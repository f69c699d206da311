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
from gymsdk.rollouts.jobs import Job, build_input_row, compute_seed
from gymsdk.types import Item, Row

POLICIES = ("scripted/oracle:0.7", "scripted/random")
Answers = tuple[list[str], Row]
"""The outputs of an episode's calls, and its verdict."""


@dataclass(frozen=True, slots=True)
class Walk:
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


async def recorded(name: str, count: int) -> list[Walk]:
    """Episodes of the environment *name*, played here by one policy after another."""
    found, policies = load(name), [model(each) for each in POLICIES]
    walks = []
    async with found:
        for number, task in enumerate(islice(found.tasks(found.splits[0], seed=5), count)):
            row = build_input_row(task.row(), environment=name, task=number, sampling={})
            seed = compute_seed(0, Job(name, number, 0, row))
            rollout = await play(found, policies[number % len(policies)], row, seed=seed)
            assert rollout.failure is None, rollout.failure
            walks.append(Walk(name, row, tuple(rollout.response["output"]), rollout.reward or 0.0))
    return walks


async def gone(http: aiohttp.ClientSession, url: str, walk: Walk) -> AsyncIterator[Answers | None]:
    """Replay *walk* at the resources server *url*, one request at a time; the last but one returns the result.

    Its client keeps the cookies of the last answer, and no others.
    """
    cookies: dict[str, str] = {}
    outputs: list[str] = []

    async def post(path: str, body: bytes) -> bytes:
        async with http.post(f"{url}{path}", data=body, cookies=cookies) as answer:
            text = await answer.read()
            assert answer.status == 200, (path, answer.status, text)
            cookies.clear()
            cookies.update({name: each.value for name, each in answer.cookies.items()})
        return text

    await post("/seed_session", orjson.dumps(walk.row))
    yield None
    for call in walk.calls:
        outputs.append((await post(f"/{call['name']}", call["arguments"].encode())).decode())
        yield None
    response: dict[str, Any] = {"id": "resp", "object": "response", "output": list(walk.items)}
    verdict = orjson.loads(await post("/verify", orjson.dumps(walk.row | {"response": response})))
    yield outputs, verdict
    await post("/close_session", b"{}")


async def alone(http: aiohttp.ClientSession, urls: dict[str, str], walks: Sequence[Walk]) -> list[Answers]:
    """What *walks* give one by one."""
    return [told for walk in walks async for told in gone(http, urls[walk.environment], walk) if told is not None]


async def interleaved(
    http: aiohttp.ClientSession, urls: dict[str, str], walks: Sequence[Walk], *, at_once: int = 16, seed: int = 1
) -> list[Answers]:
    """What *walks* give when each next request is that of any of them."""
    rng, found = random.Random(seed), dict[int, Answers]()
    under_way = [(number, gone(http, urls[walk.environment], walk)) for number, walk in enumerate(walks)]

    async def goes() -> None:
        while under_way:
            number, steps = under_way.pop(rng.randrange(len(under_way)))
            try:
                told = await anext(steps)
            except StopAsyncIteration:
                continue
            if told is not None:
                found[number] = told
            under_way.append((number, steps))

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(goes())
    return [found[number] for number in range(len(walks))]
