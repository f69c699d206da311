"""Released agent frameworks, from PyPI, in front of the model proxy: the oracle behind it must score the maximum.

Each plays rows of tool_call and multineedle with its own loop, the tools and the verdict asked of the resources
servers, the model of the proxy, which asks a policy endpoint in turn. The reward of each row and what each of its
tools answered must be what an episode gives here. So that this can fail, the same is asked of a policy that says
nothing, whose rewards must be 0.

Each framework has a venv of its own, made here. Exits with 1 where one gives something else.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from foreign import Broken, Score, Told, made, ran, told_of

from gymsdk import load, model, play
from gymsdk.rollouts import folder as lines
from gymsdk.rollouts.jobs import Job, build_input_row, compute_seed

NAMES, SKIPPED, ROWS = ("tool_call", "multineedle"), 1, 2
"""Each environment's rows; the first of tool_call needs no tool."""

CLIENTS = Path(__file__).parent / "clients"
CHAT, RESPONSES = {"responses_api": False}, {"responses_api": True}
WHOLE, STREAMED = {"streaming": False}, {"streaming": True}
# For what may be longer, Anthropic's SDK streams or refuses.
SHORT = {"max_tokens": 4096}


@dataclass(frozen=True)
class Framework:
    """A framework of *packages*, which the script *client* plays with as each of its *asks* says."""

    name: str
    packages: tuple[str, ...]
    client: str
    asks: Mapping[str, Mapping[str, Any]]


FRAMEWORKS = (
    Framework(
        "inspect_ai 0.3.285",
        ("inspect_ai==0.3.285", "openai==3.52.0", "anthropic==2.11.0"),
        "inspect_agent.py",
        {
            "openai, chat": {"model": "openai/policy", "words": CHAT | WHOLE},
            "openai, chat streamed": {"model": "openai/policy", "words": CHAT | STREAMED},
            "openai, responses": {"model": "openai/policy", "words": RESPONSES | WHOLE},
            "openai, responses streamed": {"model": "openai/policy", "words": RESPONSES | STREAMED},
            "anthropic": {"model": "anthropic/policy", "words": WHOLE, "config": SHORT},
            "anthropic streamed": {"model": "anthropic/policy", "words": STREAMED},
        },
    ),
    Framework(
        "openai-agents 0.24.0",
        ("openai-agents==0.24.0", "openai==3.52.0", "httpx==0.28.1"),
        "openai_agents.py",
        {"chat streamed": {"model": "chat"}, "responses streamed": {"model": "responses"}},
    ),
    Framework(
        "pydantic-ai 2.68.0",
        ("pydantic-ai-slim[openai,anthropic]==2.68.0", "openai==3.52.0", "anthropic==2.11.0", "httpx==0.28.1"),
        "pydantic_agent.py",
        {
            "chat streamed": {"model": "chat"},
            "responses streamed": {"model": "responses"},
            "messages streamed": {"model": "messages"},
        },
    ),
)

UPSTREAMS = {"chat": ("endpoint", "chat"), "responses": ("endpoint", "responses"), "vllm": ("vllm", "chat")}
"""How the proxy asks the policy endpoint."""


@asynccontextmanager
async def running(folder: Path, *words: object) -> AsyncIterator[dict[str, Any]]:
    """Run a command of ours that serves until it is stopped; gives the line it prints when it is ready."""
    with (folder / "server.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "gymsdk", *map(str, words), "--port", "0", "--json"],
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None, "it is a pipe"
    try:
        line = await process.stdout.readline()
        if not line:
            raise Broken((folder / "server.log").read_text()[-1500:])
        yield json.loads(line)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def proxied(folder: Path, policy: Sequence[str], upstream: str) -> AsyncIterator[dict[str, str]]:
    """Serve a policy endpoint, and in front of it the environments and the proxy; gives the servers' URLs."""
    provider, api = UPSTREAMS[upstream]
    async with AsyncExitStack() as stack:
        behind = await stack.enter_async_context(running(folder, "policy", "serve", *policy))
        at = ["--model", f"{provider}/policy", "--base-url", behind["url"], "--api", api]
        told = await stack.enter_async_context(running(folder, "serve", *NAMES, *at))
        yield {name: each["url"] for name, each in told["servers"].items()}


async def played_here(folder: Path, policy: str) -> Told:
    """Play the rows in this process, and write them to *folder*."""
    told, rows = [], []
    for name in NAMES:
        async with load(name) as found:
            for number, task in enumerate(islice(found.tasks("validation"), SKIPPED, SKIPPED + ROWS)):
                row = build_input_row(task.row(), environment=name, task=number, sampling={})
                rollout = await play(found, model(policy), row, seed=compute_seed(0, Job(name, number, 0, row)))
                told.append(told_of(lines.build_scored_line(rollout, (number, 0))))
                row["responses_create_params"]["tools"] = [tool.schema for tool in found.tools.values()]
                rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return told


async def by(framework: Framework, ask: str, venv: Path, folder: Path, urls: dict[str, str]) -> Told:
    """Have *framework* play the rows as one of its asks says."""
    words = framework.asks[ask]
    proxy = urls["policy_model"]
    # The SDK of Anthropic adds the version to the path itself, that of OpenAI does not.
    base = proxy if words["model"].startswith(("anthropic", "messages")) else f"{proxy}/v1"
    plan = {"rows": str(folder / "rows.jsonl"), "resources": urls, "asks": {ask: {**words, "base_url": base}}}
    (folder / "plan.json").write_text(json.dumps(plan))
    out = await ran(venv / "bin" / "python", CLIENTS / framework.client, folder / "plan.json", folder=folder)
    answers = [json.loads(line.removeprefix("LINE ")) for line in out.splitlines() if line.startswith("LINE ")]
    if errors := [each["error"] for each in answers if "error" in each]:
        raise Broken(errors[0][-1500:])
    return [(each["reward"], each["outputs"]) for each in answers]


async def asked(score: Score, framework: Framework, folder: Path) -> None:
    """Ask *framework* in each of its ways, the oracle asked in each of ours; then a policy that says nothing."""
    venv = await made(sys.executable, folder / framework.client.removesuffix(".py"), *framework.packages)
    oracle = ["oracle", *(word for name in NAMES for word in ("--env", name))]
    for number, upstream in enumerate(UPSTREAMS):
        async with proxied(folder, oracle, upstream) as urls:
            # Each ask meets one upstream: any two of a framework's ways go through the same code behind the proxy.
            for ask in [*framework.asks][number :: len(UPSTREAMS)]:
                name = f"{framework.name}, {ask}, before {upstream}"
                await score.same(name, by(framework, ask, venv, folder, urls))
    if framework is FRAMEWORKS[0]:
        async with proxied(folder, ["null"], "chat") as urls:
            nothing: Told = [(0.0, [])] * len(score.expected)
            control = Score(nothing)
            for ask in framework.asks:
                await control.same(f"  control: {ask}, nothing said, rewards 0", by(framework, ask, venv, folder, urls))
            score.kept &= control.kept


async def main() -> int:
    """Ask each framework; gives 1 where one gives something else."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        score = Score(await played_here(folder, "scripted/oracle"))
        calls = sum(len(outputs) for _, outputs in score.expected)
        score.kept = all(reward == 1.0 for reward, _ in score.expected)
        print(
            f"here: {len(score.expected)} rows, {calls} calls of tools, {'all' if score.kept else 'NOT all'} rewarded 1"
        )
        for framework in FRAMEWORKS:
            try:
                await asked(score, framework, folder)
            except Broken as error:
                score.kept = False
                print(f"{framework.name} could not be set up: {error}  WRONG")
    return 0 if score.kept else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
