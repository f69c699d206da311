"""Run the floor: one asyncio process that calls the model with aiohttp and grades the answer, without a framework.

usage: python floor.py math|tool_call STUB_URL

The process reads a load as a line of JSON from standard input, `{"rollouts": 1000, "in_flight": 64}`, plays it, and
prints the outcome as a line of JSON. A math answer is graded by math-verify in two warm worker processes, with the
calls of NeMo Gym's math server. A tool_call rollout is two model calls with one tool call between them. With
`"turns": N` in the load, a rollout has N tool calls, and the stub adds a text to each of them.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
from yardstick.rows import Row, build_rows

GRADERS = 2
WARM_UP_CALLS = 8
_compare: Callable[[list[str], list[str]], tuple[float, Any]]


def load_math_verify() -> None:
    """Import math-verify with the targets that NeMo Gym uses."""
    global _compare  # noqa: PLW0603  # a worker process keeps its comparison function between calls
    from math_verify.metric import math_metric
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    _compare = math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )


def grade(gold: str, text: str) -> float:
    """Return the reward of a math answer."""
    from math_verify.errors import TimeoutException

    gold = gold.strip().removeprefix("\\(").removesuffix("\\)").strip()
    try:
        return float(_compare([f"\\boxed{{{gold}}}"], [text])[0])
    except (ArithmeticError, AttributeError, LookupError, TimeoutException, TypeError, ValueError):
        return 0.0


class Floor:
    """Plays rollouts with one HTTP session."""

    def __init__(self, url: str, session: aiohttp.ClientSession, graders: ProcessPoolExecutor) -> None:
        self.url, self.session, self.graders = url, session, graders

    async def call_model(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the model's response."""
        headers = {"content-type": "application/json"}
        async with self.session.post(self.url, data=orjson.dumps(body), headers=headers) as response:
            parsed: dict[str, Any] = orjson.loads(await response.read())
        return parsed

    async def play_math(self, row: dict[str, Any]) -> float:
        """Return the reward of a math rollout."""
        response = await self.call_model(row["responses_create_params"] | {"model": "stub"})
        text = "".join(part["text"] for item in response["output"] for part in item["content"])
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.graders, grade, row["expected_answer"], text)

    async def play_tool_call(self, row: dict[str, Any]) -> float:
        """Return the reward of a tool_call rollout: 1.0 if the last response is a reply after a tool call."""
        body = row["responses_create_params"] | {"model": "stub"}
        called = False
        while True:
            response = await self.call_model(body)
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            if not calls:
                return float(called)
            called = True
            body["input"] += response["output"] + [_answer_call(call) for call in calls]


def _answer_call(call: dict[str, Any]) -> dict[str, Any]:
    city = orjson.loads(call["arguments"])["city"]
    output = orjson.dumps({"city": city, "weather_description": f"The weather in {city} is cold."}).decode()
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


async def play_load(
    environment: str, stub: str, graders: ProcessPoolExecutor, load: dict[str, int]
) -> dict[str, float | int]:
    """Play the rollouts of a load and return the number of wrong rewards and the wall time in seconds."""
    rows: list[Row] = build_rows(environment, load["rollouts"])
    url = stub + (f"/turns{load['turns']}" if "turns" in load else "") + "/v1/responses"
    wrong, remaining, started = 0, iter(rows), time.perf_counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as session:
        floor = Floor(url, session, graders)
        play = {"math": floor.play_math, "tool_call": floor.play_tool_call}[environment]

        async def play_remaining() -> None:
            nonlocal wrong
            for row in remaining:
                wrong += await play(orjson.loads(row.body)) != row.reward

        async with asyncio.TaskGroup() as group:
            for _ in range(load["in_flight"]):
                group.create_task(play_remaining())
    return {"wrong": wrong, "seconds": time.perf_counter() - started}


async def main(environment: str, stub: str) -> None:
    """Play the loads that standard input names."""
    with ProcessPoolExecutor(GRADERS, initializer=load_math_verify) as graders:
        loop = asyncio.get_running_loop()
        if environment == "math":
            warm_up = (loop.run_in_executor(graders, grade, "1", "$\\boxed{1}$") for _ in range(WARM_UP_CALLS))
            await asyncio.gather(*warm_up)
        print(orjson.dumps({"environment": environment}).decode(), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            outcome = await play_load(environment, stub, graders, orjson.loads(line))
            print(orjson.dumps(outcome).decode(), flush=True)


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
