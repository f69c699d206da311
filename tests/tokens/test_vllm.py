"""Conversations with a real vLLM on the CPU: every prompt continues the ids of the call before.

`bash tests/tokens/vllm/run` installs vLLM and runs these tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from checks.lying_engine import LIES, TOKENIZES_AGAIN, serve_lying_proxy
from openai import AsyncOpenAI, BadRequestError
from servers.app_helpers import serve_app

import gymsdk
from gymsdk import responses, tracing
from gymsdk.checks.engine import check_engine
from gymsdk.http import client
from gymsdk.models import endpoint
from gymsdk.responses import CONSTRAINED_FIELD, TOKEN_FIELDS, TokenInterface
from gymsdk.servers.capture import TokenCapturingModel
from gymsdk.servers.model import create_app
from gymsdk.tokens.capture import TokenCaptureFolder
from gymsdk.tracing import LogContext
from gymsdk.types import Episode, Item, Model

from .conversations import TEXTS, TOOLS, Played, Turn, play

PYTHON = os.environ.get("GYMSDK_VLLM_PYTHON")
RETRY = client.DEFAULT_RETRY
PROGRAMS = Path(__file__).with_name("vllm")
START_SECONDS = 600
CONVERSATIONS = 60
"""The number of conversations per interface and kind of output; each has four turns."""

TOOL_CALL = (
    r"(<think>\n[a-z ]{3,20}\n</think>\n\n)?"
    r'<tool_call>\n\{"name": "look", "arguments": \{"at": "[a-z ]{3,12}"\}\}\n</tool_call>'
)
"""The form of the tool calls that the random model is made to write."""

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(PYTHON is None, reason="vLLM is not installed; run `bash tests/tokens/vllm/run`"),
]


@contextmanager
def run_vllm(folder: Path, *flags: str) -> Iterator[str]:
    """Start vLLM with the model in *folder* and yield its base URL."""
    assert PYTHON is not None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny"),
        *("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--generation-config", "vllm"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *flags,
    ]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    log = folder.parent / f"vllm-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_up(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"vLLM did not start: {log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert PYTHON is not None
    path = tmp_path_factory.mktemp("vllm") / "tiny"
    subprocess.run([PYTHON, PROGRAMS / "build_tiny_model.py", path], check=True, capture_output=True)
    return path


TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def scaled_out(folder: Path) -> Iterator[str]:
    """A vLLM with render, generate and derender, and its own parsers."""
    with run_vllm(folder, "--enable-scale-out", *TOOL_FLAGS) as url:
        yield url


def build_turns(rng: random.Random) -> list[Turn]:
    limits = (80, 80, 80, 12, None)
    return [
        Turn("", "", (), [rng.choice(TEXTS) or "go on" for _ in range(3)], max_tokens=rng.choice(limits) or 200)
        for _ in range(4)
    ]


class Shaped:
    """Adds vLLM's structured outputs to every request of a model."""

    def __init__(self, model: Any, pattern: str | None) -> None:
        self.model = model
        self.extra = {"structured_outputs": {"regex": pattern}} if pattern else {}

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        # Without a seed: vLLM for CPUs stops when it splits the prompt of a seeded request.
        metadata = {"extra_body": json.dumps(self.extra)}
        return await self.model.respond(request | {"metadata": metadata})


async def play_many(
    url: str,
    interface: TokenInterface | None,
    pattern: str | None,
    *,
    keep_ids: bool = True,
    capture: Path | None = None,
) -> list[Played]:
    model: Model = Shaped(gymsdk.model(f"vllm/tiny@{url}", tokens=True, token_interface=interface), pattern)
    if capture is not None:
        model = TokenCapturingModel(model, TokenCaptureFolder(capture))
    rng = random.Random(7)
    slots = asyncio.Semaphore(16)

    async def play_one(number: int, turns: list[Turn]) -> Played:
        async with slots:
            tracing.set_log_context(LogContext(captured_rollout=f"r{number}"))
            return await play(model, turns, keep_ids=keep_ids)

    return await asyncio.gather(*(play_one(number, build_turns(rng)) for number in range(CONVERSATIONS)))


def report(capsys: pytest.CaptureFixture[str], label: str, played: list[Played]) -> tuple[int, int, int]:
    transitions = sum(len(conversation.carriers) - 1 for conversation in played)
    violations = sum(conversation.count_violations() for conversation in played)
    broken = sum(conversation.count_broken() for conversation in played)
    calls = sum(
        item["type"] == "function_call" for conversation in played for output in conversation.outputs for item in output
    )
    with capsys.disabled():
        sys.stdout.write(
            f"\n{label}: {violations} violations, {broken} broken of {transitions} transitions; {calls} tool calls"
        )
    return transitions, violations, broken


@pytest.mark.parametrize("pattern", [TOOL_CALL, None], ids=["tool calls", "free text"])
@pytest.mark.parametrize("interface", ["vllm-generate", "vllm-completions"])
async def test_every_prompt_continues_the_ids_of_the_call_before(
    scaled_out: str, interface: TokenInterface, pattern: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    played = await play_many(scaled_out, interface, pattern)
    for conversation in played:
        conversation.check_fields()
    transitions, violations, broken = report(capsys, f"{interface}, {'tools' if pattern else 'text'}", played)
    assert (transitions, violations, broken) == (3 * CONVERSATIONS, 0, 0)


@pytest.mark.parametrize("pattern", [TOOL_CALL, None], ids=["tool calls", "free text"])
async def test_chat_completions_break_the_prefix_and_say_so(
    scaled_out: str, pattern: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """What happens without exact tokens: the property above can fail."""
    played = await play_many(scaled_out, "chat", pattern)
    transitions, violations, broken = report(capsys, f"chat, {'tools' if pattern else 'text'}", played)
    assert violations > transitions / 2
    assert broken == violations


async def test_a_client_that_drops_the_ids_breaks_the_prefix(
    scaled_out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    played = await play_many(scaled_out, "vllm-completions", TOOL_CALL, keep_ids=False)
    transitions, violations, _ = report(capsys, "vllm-completions, ids dropped by the client", played)
    assert violations > transitions / 4


async def test_captured_ids_keep_the_prefix_for_a_client_that_drops_them(
    scaled_out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for pattern in (TOOL_CALL, None):
        folder = tmp_path / ("tools" if pattern else "text")
        played = await play_many(scaled_out, "vllm-completions", pattern, keep_ids=False, capture=folder)
        label = f"captured, ids dropped by the client, {folder.name}"
        assert report(capsys, label, played) == (3 * CONVERSATIONS, 0, 0)
        for number, conversation in enumerate(played):
            lines = (folder / f"r{number}.tokens.jsonl").read_text().splitlines()
            entries = [json.loads(line) for line in lines]
            assert [entry[TOKEN_FIELDS[1]] for entry in entries] == [
                item[TOKEN_FIELDS[1]] for item in conversation.carriers
            ]
            assert [entry["parent_resolution"] for entry in entries] == ["root", *["resolved"] * 3]


async def check_logprobs(folder: Path, lines: list[str]) -> dict[str, Any]:
    """Compare log-probabilities with those that transformers computes for the same tokens."""
    assert PYTHON is not None
    command = [PYTHON, PROGRAMS / "check_logprobs.py", folder]
    checked = await asyncio.to_thread(
        subprocess.run, command, input="\n".join(lines), capture_output=True, text=True, check=True
    )
    result: dict[str, Any] = json.loads(checked.stdout.splitlines()[-1])
    return result


STRICT_TOOL = {
    "type": "function",
    "name": "look",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"at": {"type": "string"}},
        "required": ["at"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("parallel", [None, False])
@pytest.mark.parametrize("is_control", [False, True], ids=["as sent", "control"])
async def test_strict_tools_leave_the_log_probabilities_those_of_the_policy(
    scaled_out: str,
    folder: Path,
    is_control: bool,
    parallel: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The control sends the tools as they are, and vLLM then decodes the calls under a grammar."""
    if is_control:
        monkeypatch.setattr(endpoint, "relax_tools", lambda body: body)
    interface: TokenInterface = "chat" if is_control else "vllm-generate"
    model: Any = gymsdk.model(f"vllm/tiny@{scaled_out}", tokens=True, token_interface=interface)
    root = scaled_out.removesuffix("/v1")
    answer = await client.post(
        f"{root}/tokenize", {"model": "tiny", "prompt": "<tool_call>"}, timeout=60, retry=client.DEFAULT_RETRY
    )
    [opening] = answer.json()["tokens"]
    # The random policy opens a call in nearly all turns. A bias changes what is sampled, not what is reported.
    metadata = {"extra_body": json.dumps({"logit_bias": {str(opening): 6.0}})}
    request = {"input": "hello", "tools": [STRICT_TOOL], "max_output_tokens": 60, "metadata": metadata}
    request |= {} if parallel is None else {"parallel_tool_calls": parallel}
    slots = asyncio.Semaphore(8)

    async def ask() -> Item:
        async with slots:
            return (await model.respond(request))["output"][-1]

    carriers = await asyncio.gather(*(ask() for _ in range(60)))
    assert sum(opening in carrier[TOKEN_FIELDS[1]] for carrier in carriers) > 20
    differences = (await check_logprobs(folder, [*map(build_sequence, carriers)]))["by_sequence"]
    off = sum(difference > 1e-3 for difference in differences)
    with capsys.disabled():
        label = f"strict tools, {interface}, parallel_tool_calls {parallel}"
        sys.stdout.write(f"\n{label}: {off} of {len(carriers)} calls off, at most {max(differences):.1e}")
    assert (off > 5) is is_control
    # The control does not say that it sends strict tools.
    is_marked = is_control and parallel is False
    assert all(carrier.get(CONSTRAINED_FIELD, False) is is_marked for carrier in carriers)


@pytest.mark.parametrize("interface", ["vllm-generate", "vllm-completions", "chat"])
async def test_the_end_token_is_not_in_the_text_beside_a_tool_parser(
    scaled_out: str, interface: TokenInterface, capsys: pytest.CaptureFixture[str]
) -> None:
    model = gymsdk.model(f"vllm/tiny@{scaled_out}", tokens=True, token_interface=interface)
    for more in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        request = {"input": "hi", "max_output_tokens": 200, **more}
        answers = [
            answer for _ in range(4) for answer in await asyncio.gather(*(model.respond(request) for _ in range(15)))
        ]
        complete = [answer for answer in answers if answer["status"] == "completed"]
        texts = [json.dumps(answer["output"]) for answer in complete]
        with capsys.disabled():
            sys.stdout.write(f"\n{interface}, {more.keys()}: {len(complete)} complete replies")
        assert len(complete) > 5
        assert not any("<|im_end|>" in text for text in texts)


async def test_the_versions_of_the_weights_are_known_for_each_token(scaled_out: str) -> None:
    root = scaled_out.removesuffix("/v1")
    model = gymsdk.model(f"vllm/tiny@{scaled_out}", tokens=True, token_interface="vllm-generate")
    for version in ("7", "8"):
        answer = await client.post(
            f"{root}/update_weight_version", {"new_version": version}, timeout=60, retry=client.DEFAULT_RETRY
        )
        assert answer.ok, answer.text
        item = (await model.respond({"input": "hi", "max_output_tokens": 20}))["output"][-1]
        assert item["weight_versions"] == [{"version": version, "start": 0, "end": len(item[TOKEN_FIELDS[1]])}]
        assert item["weight_version"] == version


def build_sequence(carrier: Item) -> str:
    prompt, generated, logprobs = (carrier[key] for key in TOKEN_FIELDS)
    return json.dumps({"ids": prompt + generated, "generations": [(len(prompt), logprobs)]})


async def test_the_log_probabilities_are_those_of_the_model(
    scaled_out: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P6: over the merged sequence of a conversation, without constraints."""
    lines = []
    for interface in ("vllm-generate", "vllm-completions"):
        for conversation in (await play_many(scaled_out, interface, None))[:20]:
            ids = conversation.carriers[-1][TOKEN_FIELDS[0]] + conversation.carriers[-1][TOKEN_FIELDS[1]]
            generations = [(len(item[TOKEN_FIELDS[0]]), item[TOKEN_FIELDS[2]]) for item in conversation.carriers]
            lines.append(json.dumps({"ids": ids, "generations": generations}))
    result = await check_logprobs(folder, lines)
    with capsys.disabled():
        sys.stdout.write(f"\nlog-probabilities: {result['tokens']} tokens, largest difference {result['largest']:.1e}")
    assert result["tokens"] > 1000
    assert result["largest"] < 1e-4


async def test_the_new_text_is_that_of_the_chat_template(scaled_out: str) -> None:
    """P5: between two generations stands exactly what the template writes for the tool outputs."""
    [played, *_] = await play_many(scaled_out, "vllm-completions", TOOL_CALL)
    for number, suffix in enumerate(played.get_suffixes()):
        answer = await client.post(
            f"{scaled_out.removesuffix('/v1')}/detokenize",
            {"model": "tiny", "tokens": suffix},
            timeout=60,
            retry=client.DEFAULT_RETRY,
        )
        text = answer.json()["prompt"]
        outputs = [item for item in played.new_items[number] if item.get("type") == "function_call_output"]
        if outputs:
            assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
            for item in outputs:
                assert f"<tool_response>\n{item['output']}\n</tool_response>" in text


async def test_the_probe_finds_both_interfaces(scaled_out: str, folder: Path) -> None:
    model: Any = gymsdk.model(f"vllm/tiny@{scaled_out}", tokens=True)
    assert await model.check_tokens() == "vllm-generate"
    with run_vllm(folder, *TOOL_FLAGS, "--reasoning-parser", "qwen3") as url:
        model = gymsdk.model(f"vllm/tiny@{url}", tokens=True)
        assert await model.check_tokens() == "vllm-completions"
        response = await model.respond({"input": "hello", "tools": TOOLS, "max_output_tokens": 20})
    assert len(response["output"][-1][TOKEN_FIELDS[1]]) <= 20


async def test_a_prompt_that_exceeds_the_context_ends_the_turn(scaled_out: str) -> None:
    for interface in ("vllm-generate", "vllm-completions"):
        model = gymsdk.model(f"vllm/tiny@{scaled_out}", tokens=True, token_interface=interface)
        response = await model.respond({"input": [{"role": "user", "content": "then " * 5000}]})
        assert responses.is_incomplete_response(response)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "8-bit integers"])
def precise(folder: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A vLLM that computes in the precision of the parameter."""
    assert PYTHON is not None
    if request.param == "8-bit integers":
        model = folder.with_name("quantized")
        subprocess.run([PYTHON, PROGRAMS / "quantize.py", folder, model], check=True, capture_output=True)
        flags = ("--dtype", "bfloat16")
    else:
        model, flags = folder, ("--dtype", request.param)
    with run_vllm(model, "--enable-scale-out", *flags) as url:
        yield url


@pytest.mark.parametrize("interface", ["vllm-generate", "vllm-completions", "chat"])
async def test_the_checks_of_an_engine_believe_vllm_in_any_precision(precise: str, interface: TokenInterface) -> None:
    results = await check_engine(gymsdk.model(f"vllm/tiny@{precise}", tokens=True, token_interface=interface))
    assert {result.name: result.detail for result in results if result.outcome != "passed"} == {}


@pytest.mark.parametrize("lie", [*LIES, TOKENIZES_AGAIN])
async def test_the_checks_of_an_engine_find_each_lie_of_vllm(precise: str, lie: str) -> None:
    async with serve_lying_proxy(precise, lie) as url:
        results = await check_engine(gymsdk.model(f"vllm/tiny@{url}", tokens=True, token_interface="vllm-completions"))
    assert [result for result in results if result.outcome == "failed"], results


async def test_openais_sdk_gets_from_the_model_server_what_vllm_answers(scaled_out: str) -> None:
    app = create_app(gymsdk.model("vllm/tiny", base_url=scaled_out))
    async with (
        serve_app(app) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as openai,
        AsyncOpenAI(base_url=scaled_out, api_key="x", max_retries=0) as engine,
    ):
        options: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0.0, "echo": True, "logprobs": 1}
        ids = (
            await client.post(
                scaled_out.replace("/v1", "/tokenize"), {"model": "tiny", "prompt": "Look"}, retry=client.DEFAULT_RETRY
            )
        ).json()
        for prompt in ("Look", ["Look", "at"], ids["tokens"], [ids["tokens"]]):
            forwarded = await openai.completions.create(prompt=prompt, **options)
            direct = await engine.completions.create(prompt=prompt, **options)
            assert forwarded.choices == direct.choices
            assert forwarded.usage == direct.usage
        stream = await openai.completions.create(prompt=["Look", "at"], **options, stream=True)
        streamed = {choice.index: choice.text async for chunk in stream for choice in chunk.choices}
        whole = await engine.completions.create(prompt=["Look", "at"], **options)
        assert streamed == {choice.index: choice.text for choice in whole.choices}
        several = await openai.completions.create(prompt="Look", model="tiny", n=3, temperature=1.0)
        assert [choice.index for choice in several.choices] == [0, 1, 2]
        with pytest.raises(BadRequestError, match="suffix"):
            await openai.completions.create(prompt="Look", suffix="x", **options)
        with pytest.raises(BadRequestError, match="context") as caught:
            await openai.completions.create(prompt="Look " * 6000, model="tiny")
        assert caught.value.code == "context_length_exceeded"
        conversation: Any = [{"role": "user", "content": "Look at it."}]
        counted = await openai.responses.input_tokens.count(model="tiny", input=conversation)
        chat = await openai.chat.completions.create(model="tiny", messages=conversation, n=3, max_tokens=12)
        assert [choice.index for choice in chat.choices] == [0, 1, 2]
        assert len({choice.message.content for choice in chat.choices}) == 3
        assert chat.usage is not None
        assert chat.usage.prompt_tokens == counted.input_tokens
