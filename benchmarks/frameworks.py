"""Check released agent frameworks from PyPI against the model proxy and the resources servers.

Each framework plays rows of tool_call and multineedle with its own agent loop. The framework calls the tools and the
verifier of the resources servers, and the model proxy, which forwards to a policy endpoint with the oracle policy. The
reward and the tool outputs of each row must equal those of an episode in this process, and every reward must be the
maximum. As a negative control, the first framework also plays with a policy that returns no output; its rewards must
be 0.

The script creates one virtual environment per framework. The exit status is 1 if any result differs.
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

from foreign import CommandError, Results, Score, create_venv, row_result, run_command

from gymsdk import load, model, play
from gymsdk.line import build_line, compute_seed
from gymsdk.rollouts.jobs import build_input_row

NAMES, SKIPPED, ROWS = ("tool_call", "multineedle"), 1, 2
"""The environments, and the rows of each: skip the first row, because that of tool_call needs no tool."""

CLIENTS = Path(__file__).parent / "clients"
CHAT, RESPONSES = {"responses_api": False}, {"responses_api": True}
WHOLE, STREAMED = {"streaming": False}, {"streaming": True}
# The Anthropic SDK rejects larger limits for requests without streaming.
SHORT = {"max_tokens": 4096}


@dataclass(frozen=True)
class Framework:
    """A framework, the *packages* to install, its *client* script, and the variants to test with their options."""

    name: str
    packages: tuple[str, ...]
    client: str
    variants: Mapping[str, Mapping[str, Any]]


FRAMEWORKS = (
    Framework(
        "inspect_ai 0.3.285",
        ("inspect_ai==0.3.285", "openai==3.52.0", "anthropic==2.11.0"),
        "inspect_agent.py",
        {
            "openai, chat": {"model": "openai/policy", "model_args": CHAT | WHOLE},
            "openai, chat streamed": {"model": "openai/policy", "model_args": CHAT | STREAMED},
            "openai, responses": {"model": "openai/policy", "model_args": RESPONSES | WHOLE},
            "openai, responses streamed": {"model": "openai/policy", "model_args": RESPONSES | STREAMED},
            "anthropic": {"model": "anthropic/policy", "model_args": WHOLE, "config": SHORT},
            "anthropic streamed": {"model": "anthropic/policy", "model_args": STREAMED},
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
"""The provider and the API that the proxy uses for the policy endpoint."""


@asynccontextmanager
async def run_server(folder: Path, *options: object) -> AsyncIterator[dict[str, Any]]:
    """Run a `gymsdk` server command until the context exits; yield its ready message."""
    with (folder / "server.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "gymsdk", *map(str, options), "--port", "0", "--json"],
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None, "stdout is a pipe"
    try:
        line = await process.stdout.readline()
        if not line:
            raise CommandError((folder / "server.log").read_text()[-1500:])
        yield json.loads(line)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def serve_proxy(folder: Path, policy: Sequence[str], upstream: str) -> AsyncIterator[dict[str, str]]:
    """Serve a policy endpoint, and the environments with a proxy to it; yield the URL of each server by name."""
    provider, api = UPSTREAMS[upstream]
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(run_server(folder, "policy", "serve", *policy))
        model_options = ["--model", f"{provider}/policy", "--base-url", endpoint["url"], "--api", api]
        ready = await stack.enter_async_context(run_server(folder, "serve", *NAMES, *model_options))
        yield {name: server["url"] for name, server in ready["servers"].items()}


async def play_in_process(folder: Path, policy: str) -> Results:
    """Play the rows in this process and write them to *folder*."""
    ready, rows = [], []
    for name in NAMES:
        async with load(name) as found:
            for number, task in enumerate(islice(found.tasks("validation"), SKIPPED, SKIPPED + ROWS)):
                row = build_input_row(task.row(), environment=name, task=number, sampling={})
                rollout = await play(found, model(policy), row, seed=compute_seed(0, name, number))
                ready.append(row_result(build_line(rollout, (number, 0))))
                row["responses_create_params"]["tools"] = [tool.schema for tool in found.tools.values()]
                rows.append(row)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ready


async def play_variant(framework: Framework, variant: str, venv: Path, folder: Path, urls: dict[str, str]) -> Results:
    """Run one variant of *framework* on the rows."""
    options = framework.variants[variant]
    proxy = urls["policy_model"]
    # The Anthropic SDK adds the version to the path. The OpenAI SDK does not.
    base = proxy if options["model"].startswith(("anthropic", "messages")) else f"{proxy}/v1"
    plan = {"rows": str(folder / "rows.jsonl"), "resources": urls, "variants": {variant: {**options, "base_url": base}}}
    (folder / "plan.json").write_text(json.dumps(plan))
    out = await run_command(venv / "bin" / "python", CLIENTS / framework.client, folder / "plan.json", folder=folder)
    answers = [json.loads(line.removeprefix("LINE ")) for line in out.splitlines() if line.startswith("LINE ")]
    if errors := [answer["error"] for answer in answers if "error" in answer]:
        raise CommandError(errors[0][-1500:])
    return [(answer["reward"], answer["outputs"]) for answer in answers]


async def check_framework(score: Score, framework: Framework, folder: Path) -> None:
    """Check each variant of *framework* with the oracle, and the first framework with a policy without output."""
    venv = await create_venv(sys.executable, folder / framework.client.removesuffix(".py"), *framework.packages)
    oracle = ["oracle", *(word for name in NAMES for word in ("--env", name))]
    for number, upstream in enumerate(UPSTREAMS):
        async with serve_proxy(folder, oracle, upstream) as urls:
            # One upstream per variant is enough: the code behind the proxy does not depend on the variant.
            for variant in [*framework.variants][number :: len(UPSTREAMS)]:
                name = f"{framework.name}, {variant}, upstream {upstream}"
                await score.check_equal(name, play_variant(framework, variant, venv, folder, urls))
    if framework is FRAMEWORKS[0]:
        async with serve_proxy(folder, ["null"], "chat") as urls:
            nothing: Results = [(0.0, [])] * len(score.expected)
            control = Score(nothing)
            for variant in framework.variants:
                await control.check_equal(
                    f"  control: {variant}, no output, rewards 0", play_variant(framework, variant, venv, folder, urls)
                )
            score.passed &= control.passed


async def main() -> int:
    """Check each framework; return 1 if any result differs."""
    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        score = Score(await play_in_process(folder, "scripted/oracle"))
        calls = sum(len(outputs) for _, outputs in score.expected)
        score.passed = all(reward == 1.0 for reward, _ in score.expected)
        print(
            f"here: {len(score.expected)} rows, {calls} tool calls, {'all' if score.passed else 'NOT all'} rewarded 1"
        )
        for framework in FRAMEWORKS:
            try:
                await check_framework(score, framework, folder)
            except CommandError as error:
                score.passed = False
                print(f"{framework.name} could not be set up: {error}  WRONG")
    return 0 if score.passed else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
