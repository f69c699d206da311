"""`gymsdk tokens check` plays episodes through a served engine and shows the first drift."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from checks.lying_engine import serve_lying_proxy

from cli.conftest import StartServer
from gymsdk.checks.tokens import check_tokens
from gymsdk.cli.tokens import _format_report
from gymsdk.models.registry import model
from gymsdk.plugins import registry
from gymsdk.responses import TOKEN_FIELDS
from gymsdk.rollouts.tasks import read_splits
from gymsdk.testing.local_engine import LocalModel
from gymsdk.testing.templates import TEMPLATES, TemplateTokenizer
from gymsdk.types import Row


@pytest.fixture
def serve_policy(start_server: StartServer) -> Callable[..., str]:
    """Return a function that serves the oracle of `tool_call` in another process, and returns its base URL."""

    def serve(*flags: str) -> str:
        return str(start_server("policy", "serve", "oracle", "--env", "tool_call", *flags)[1]["url"])

    return serve


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gymsdk", "tokens", "check", "tool_call", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def read_rows(count: int) -> list[Row]:
    environment = registry.load("tool_call")
    return [row for _, row in read_splits({"tool_call": environment}, "example", seed=0, limit=count)]


@pytest.mark.parametrize("template", ["qwen", "gemma", "strip"])
async def test_a_scripted_policy_plays_with_any_tokenizer(template: str) -> None:
    policy = LocalModel(model("scripted/oracle"), TemplateTokenizer(TEMPLATES[template], pairs=True))
    report = await check_tokens(registry.load("tool_call"), policy, read_rows(3))
    assert (report.episodes, report.failures, report.broken) == (3, [], [])
    assert report.calls == report.episodes + len(report.continuations) > 5
    assert report.drifting
    difference = report.drifting[0].difference
    assert difference is not None
    assert difference.sampled != difference.rendered
    text = "\n".join(_format_report(report))
    assert f"{len(report.continuations)} of {len(report.continuations)} prompts continue the sampled ids" in text
    assert f"token {difference.position} of the prompt" in text


async def test_without_splits_and_with_a_template_that_keeps_everything_nothing_drifts() -> None:
    policy = LocalModel(model("scripted/oracle"), TemplateTokenizer(TEMPLATES["chatml"]))
    report = await check_tokens(registry.load("tool_call"), policy, read_rows(2))
    assert [len(report.broken), len(report.drifting)] == [0, 0]


@pytest.mark.slow
def test_a_served_model_is_checked_through_its_own_tokenizer(serve_policy: Callable[..., str]) -> None:
    url = serve_policy("--chat-template", "qwen", "--pairs")
    result = run("--model", f"vllm/policy@{url}", "--limit", "3")
    exact = run("--model", f"vllm/policy@{url}", "--limit", "2", "--json")
    assert (result.returncode, result.stderr) == (0, "")
    assert "prompts continue the sampled ids" in result.stdout
    assert "The first drift over Chat Completions: task 0, call 2 at token" in result.stdout
    assert "   (rendered again)" in result.stdout
    report = json.loads(exact.stdout)
    assert report["episodes"] == 2
    assert all(prompt["continued"] and prompt["difference"] for prompt in report["continuations"])


@pytest.mark.slow
def test_a_prompt_that_does_not_continue_is_an_error(serve_policy: Callable[..., str]) -> None:
    url = serve_policy("--chat-template", "qwen", "--pairs")
    result = run("--model", f"vllm/policy@{url}", "--token-interface", "chat", "--limit", "2")
    assert result.returncode == 1
    assert "The first prompt that does not continue: task 0, call 2" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["", "halved"])
async def test_an_engine_that_lies_is_an_error(serve_policy: Callable[..., str], lie: str) -> None:
    url = serve_policy("--engine", "vllm-completions")
    async with serve_lying_proxy(url, lie) as proxy:
        result = await asyncio.to_thread(run, "--model", f"vllm/policy@{proxy}", "--limit", "1", "--json")
    outcomes = {check["name"]: check["outcome"] for check in json.loads(result.stdout)["engine"]}
    assert result.returncode == (1 if lie else 0)
    assert outcomes["samples with the log-probabilities that it reports"] == ("failed" if lie else "passed")


@pytest.mark.slow
def test_an_engine_without_token_ids_is_refused(serve_policy: Callable[..., str]) -> None:
    url = serve_policy("--engine", "plain")
    result = run("--model", f"vllm/policy@{url}")
    assert result.returncode == 2
    assert "policy returns no token ids; training needs them; serve the model with vLLM 0.10" in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--separate",)], ids=["one process", "a process for each server"])
def test_ids_pass_through_model_server_agent_and_rollout_file(
    serve_policy: Callable[..., str], start_server: StartServer, flags: tuple[str, ...], tmp_path: Path
) -> None:
    url = serve_policy("--chat-template", "qwen", "--pairs")
    served = ("serve", "tool_call", "--model", f"vllm/policy@{url}", "--token-ids", *flags)
    head = start_server(*served)[1]["head"]
    command = ["rollout", "tool_call", "--head", head, "--limit", "5", "--output", str(tmp_path / "run")]
    subprocess.run([sys.executable, "-m", "gymsdk", *command], check=True, capture_output=True, timeout=100)
    lines = (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    assert len(lines) == 5
    continued = 0
    for line in map(json.loads, lines):
        ids: list[int] = []
        for item in line["response"]["output"]:
            assert sum(key in item for key in TOKEN_FIELDS) in {0, 3}
            if TOKEN_FIELDS[0] in item:
                assert item[TOKEN_FIELDS[0]][: len(ids)] == ids
                continued += bool(ids)
                ids = item[TOKEN_FIELDS[0]] + item[TOKEN_FIELDS[1]]
        assert ids
        assert "instance_config" not in line
    assert continued > 5


def test_a_server_that_does_not_answer_is_reported_once() -> None:
    result = run("--model", "vllm/policy@http://127.0.0.1:9/v1", "--timeout", "2")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.count("Error:") == 1
