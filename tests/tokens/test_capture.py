"""The model server writes token ids to files, for trainers with agents that keep only messages."""

from __future__ import annotations

import asyncio
import hashlib
import json
import signal
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from servers.app_helpers import serve_app

import gymsdk
from gymsdk import responses
from gymsdk.errors import Failed, UsageError
from gymsdk.responses import BROKEN_FIELD, TOKEN_FIELDS, TokenInterface
from gymsdk.servers import model as model_server
from gymsdk.servers.capture import TokenCapturingModel
from gymsdk.tokens.capture import Lineage, TokenCaptureFolder, build_entry
from gymsdk.types import Episode, Item, Model

from .conversations import TOOLS, Turn, TurnPolicy, conversations
from .engine_transport import build_upstream

CHAT_TOOLS = [{"type": "function", "function": {key: tool[key] for key in ("name", "parameters")}} for tool in TOOLS]


@dataclass
class Harness:
    """An agent that keeps only messages, as agents over Chat Completions do, and writes arguments in its own form."""

    url: str
    messages: list[Any] = field(default_factory=lambda: [{"role": "user", "content": "Please look in there."}])
    carriers: list[Item] = field(default_factory=list)
    """The token fields of each answer, which the agent does not return."""
    marked: list[bool] = field(default_factory=list)
    """Whether each answer says that its chain is broken."""

    async def play(self, turns: Sequence[Turn]) -> None:
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=self.url, api_key="none", max_retries=0) as client:
            for turn in turns:
                await self._play_turn(client, turn)

    async def _play_turn(self, client: Any, turn: Turn) -> None:
        extra: dict[str, Any] = {"max_tokens": turn.max_tokens} if turn.max_tokens else {}
        answer = await client.chat.completions.create(
            model="policy", messages=self.messages, tools=CHAT_TOOLS, extra_body={"return_token_ids": True}, **extra
        )
        message = answer.choices[0].message.model_dump(exclude_none=True)
        self.carriers.append({key: message[key] for key in TOKEN_FIELDS})
        self.marked.append(message.get(BROKEN_FIELD, False))
        calls = message.get("tool_calls", [])
        for call in calls:
            with suppress(ValueError):
                with_spaces = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
                call["function"] = call["function"] | {"arguments": with_spaces}
        kept = {key: message[key] for key in ("role", "content", "tool_calls") if key in message}
        self.messages.append({"content": ""} | kept)
        self.messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(calls, [*turn.outputs, *turn.outputs], strict=False)
        ] or [{"role": "user", "content": turn.outputs[0]}]

    def count_violations(self) -> int:
        prompts = [carrier[TOKEN_FIELDS[0]] for carrier in self.carriers]
        kept = [carrier[TOKEN_FIELDS[0]] + carrier[TOKEN_FIELDS[1]] for carrier in self.carriers]
        return sum(prompt[: len(ids)] != ids for ids, prompt in zip(kept, prompts[1:], strict=False))


@asynccontextmanager
async def serve(
    folder: Path, turns: Sequence[Turn], template: str = "qwen", interface: TokenInterface = "vllm-completions"
) -> AsyncIterator[str]:
    """Serve a policy that plays *turns*, and yield the server's URL."""
    async with serve_model(build_upstream(TurnPolicy(turns), interface, template=template)[0], folder) as url:
        yield url


def serve_model(model: Model, folder: Path) -> AbstractAsyncContextManager[str]:
    return serve_app(model_server.create_app(TokenCapturingModel(model, TokenCaptureFolder(folder))))


def build_url(url: str, rollout: str, *, captured: bool = True) -> str:
    return f"{url}/ng-rollout/{rollout}{'/training-token-capture' if captured else ''}/v1"


def read_entries(folder: Path, rollout: str) -> list[Item]:
    return [json.loads(line) for line in (folder / f"{rollout}.tokens.jsonl").read_text().splitlines()]


def read_intents(folder: Path, rollout: str) -> list[str]:
    return (folder / f"{rollout}.tokens.intents").read_text().split()


def check_chain(entries: Sequence[Item]) -> None:
    """Check that each entry continues the one before, by its ids, and that its digests are right."""
    for entry in entries:
        ids = entry[TOKEN_FIELDS[0]] + entry[TOKEN_FIELDS[1]]
        packed = struct.pack(f">BQ{len(ids)}Q", 1, len(ids), *ids)
        assert entry["digest"] == hashlib.sha256(b"nemo-gym-tokens" + packed).hexdigest()
        assert entry["cum_len"] == len(ids)
        assert entry["output_items"][entry["token_item_index"]].keys().isdisjoint(TOKEN_FIELDS)
    assert [entry["parent_resolution"] for entry in entries] == ["root", *["resolved"] * (len(entries) - 1)]
    for before, after in pairwise(entries):
        assert after["parent_call_id"] == before["model_call_id"]
        assert after[TOKEN_FIELDS[0]][: before["cum_len"]] == before[TOKEN_FIELDS[0]] + before[TOKEN_FIELDS[1]]


TURNS = [
    Turn("think then answer", "then another one", ["look"], ["in there"]),
    Turn("", "the other", ["look", "open_door"], ["then", "there"]),
    Turn("hm", "the end", [], ["and then"]),
    Turn("", "there", [], ["thanks"]),
]


@pytest.mark.parametrize("template", ["qwen", "mistral"])
async def test_an_agent_without_token_ids_continues_on_exact_tokens(tmp_path: Path, template: str) -> None:
    async with serve(tmp_path, TURNS, template) as url:
        harness = Harness(build_url(url, "7-0"))
        await harness.play(TURNS)
    async with serve(tmp_path / "other", TURNS, template) as url:
        control = Harness(build_url(url, "7-0", captured=False))
        await control.play(TURNS)
    assert (harness.count_violations(), control.count_violations() > 0) == (0, True)
    entries = read_entries(tmp_path, "7-0")
    check_chain(entries)
    assert [{key: entry[key] for key in TOKEN_FIELDS} for entry in entries] == harness.carriers
    assert read_intents(tmp_path, "7-0") == [entry["model_call_id"] for entry in entries]
    assert not [path for path in (tmp_path / "other").iterdir() if "tokens" in path.name]


EMPTY_REPLY = [Turn("hm", "first", (), [""]), Turn("hm", "", (), ["go on"]), Turn("", "last", (), ["end"])]
"""An empty reply to an empty message has the text of the call before."""

EXAMPLES = [{"role": "assistant", "content": "2"}, {"role": "user", "content": "2 + 2"}]


@settings(deadline=None, max_examples=15)
@given(turns=conversations, after=st.sampled_from([[], EXAMPLES]))
@example(turns=EMPTY_REPLY, after=[])
@example(turns=TURNS[:3], after=EXAMPLES)
async def test_any_conversation_continues_on_exact_tokens(
    tmp_path_factory: pytest.TempPathFactory, turns: list[Turn], after: list[Item]
) -> None:
    """Examples in the first prompt are no turns of the rollout."""
    folder = tmp_path_factory.mktemp("capture")
    async with serve(folder, turns) as url:
        harness = Harness(build_url(url, "r"))
        harness.messages += after
        await harness.play(turns)
    assert harness.count_violations() == 0
    check_chain(read_entries(folder, "r"))


async def test_a_conversation_that_is_rewritten_or_replaced_by_a_summary_has_no_parent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent changes its first message, and later drops all turns of the policy; it keeps the tools."""
    turns = [*TURNS[:3], *TURNS[2:]]
    async with serve(tmp_path, turns) as url:
        harness = Harness(build_url(url, "r"))
        await harness.play(turns[:2])
        harness.messages[0] = {"role": "user", "content": "summary of the conversation"}
        await harness.play(turns[2:3])
        harness.messages = [{"role": "user", "content": "Summary: I looked, and opened the door. Go on."}]
        await harness.play(turns[3:])
    entries = read_entries(tmp_path, "r")
    kinds = ["root", "resolved", "unresolved", "unresolved", "resolved"]
    assert [entry["parent_resolution"] for entry in entries] == kinds
    assert [entry["parent_call_id"] is not None for entry in entries] == [kind == "resolved" for kind in kinds]
    assert harness.marked == [False, False, True, True, False]
    assert sum("the agent edited the conversation" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("system", ["You are the assistant's assistant.", ""])
async def test_another_agent_and_a_repeated_request_start_unmarked(tmp_path: Path, system: str) -> None:
    """The other agent has its own system message; the repeated request is the first one again."""
    async with serve(tmp_path, TURNS) as url:
        harness = Harness(build_url(url, "r"))
        opening = [*harness.messages]
        await harness.play(TURNS[:2])
        harness.messages = [{"role": "system", "content": system}, *opening] if system else opening
        await harness.play(TURNS[2:3])
    assert [entry["parent_resolution"] for entry in read_entries(tmp_path, "r")] == ["root", "resolved", "root"]
    assert not any(harness.marked)


async def test_a_failed_call_is_not_a_missing_call(tmp_path: Path) -> None:
    from openai import BadRequestError

    upstream, transport = build_upstream(TurnPolicy(TURNS), "vllm-completions", template="qwen")
    async with serve_model(upstream, tmp_path) as url:
        harness = Harness(build_url(url, "r"))
        await harness.play(TURNS[:1])
        transport.status = 400
        with pytest.raises(BadRequestError):
            await harness.play(TURNS[1:2])
        transport.status = 200
        await harness.play(TURNS[1:3])
    entries = read_entries(tmp_path, "r")
    check_chain(entries)
    assert read_intents(tmp_path, "r") == [entry["model_call_id"] for entry in entries]


async def test_a_model_without_token_ids_makes_the_rollout_incomplete(tmp_path: Path) -> None:
    async with serve_model(gymsdk.model("scripted/echo"), tmp_path) as url, httpx.AsyncClient() as client:
        answer = await client.post(f"{build_url(url, 'r')}/responses", json={"input": "hi"})
    assert answer.json()["output"][0]["content"][0]["text"] == "hi"
    state = json.loads((tmp_path / "r.tokens.state.json").read_text())
    assert (state["incomplete"], state["version"]) == (True, 1)
    assert not (tmp_path / "r.tokens.jsonl").exists()


async def test_a_rollout_that_was_read_takes_no_more_calls(tmp_path: Path) -> None:
    from openai import UnprocessableEntityError

    async with serve(tmp_path, TURNS) as url:
        harness = Harness(build_url(url, "r"))
        await harness.play(TURNS[:1])
        (tmp_path / "r.tokens.state.json").write_text(json.dumps({"frozen": True, "version": 3}))
        with pytest.raises(UnprocessableEntityError, match="use another id for a new rollout"):
            await harness.play(TURNS[1:2])
    assert len(read_entries(tmp_path, "r")) == 1


async def test_replicas_find_each_others_calls(tmp_path: Path) -> None:
    upstream, _ = build_upstream(TurnPolicy(TURNS), "vllm-completions", template="qwen")
    async with serve_model(upstream, tmp_path) as first, serve_model(upstream, tmp_path) as second:
        harness = Harness(build_url(first, "r"))
        for turn, url in zip(TURNS, (first, second, first, second), strict=True):
            harness.url = build_url(url, "r")
            await harness.play([turn])
    assert harness.count_violations() == 0
    check_chain(read_entries(tmp_path, "r"))


@pytest.mark.slow
async def test_rollouts_in_parallel_keep_their_own_tokens(tmp_path: Path) -> None:
    class Threads(TurnPolicy):
        async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
            self.number = sum(item.get("role") == "user" for item in request["input"]) - 1
            return await super().respond(request, episode=episode)

    turns = [Turn("", text, [], [text]) for text in ("then", "there", "other", "in the end")]
    upstream, _ = build_upstream(Threads(turns), "vllm-completions", template="qwen")
    async with serve_model(upstream, tmp_path) as url:
        harnesses = [Harness(build_url(url, f"r{number}")) for number in range(40)]
        await asyncio.gather(*(harness.play(turns) for harness in harnesses))
    for number, harness in enumerate(harnesses):
        assert harness.count_violations() == 0
        check_chain(read_entries(tmp_path, f"r{number}"))


def build_stored(call: str, ids: list[int]) -> Item:
    tokens = dict(zip(TOKEN_FIELDS, (ids[:2], ids[2:], [-0.5] * len(ids[2:])), strict=True))
    response = {"id": "resp_1", "output": [responses.build_message("there", id="msg_1") | tokens]}
    entry = build_entry("r", call, response, Lineage("root"), "d")
    assert entry is not None
    # The same entry again has the same time.
    return entry | {"created_at": 0.5}


def test_an_entry_is_written_once(tmp_path: Path) -> None:
    folder = TokenCaptureFolder(tmp_path)
    folder.put(build_stored("a", [1, 2, 3]))
    TokenCaptureFolder(tmp_path).put(build_stored("a", [1, 2, 3]))
    with pytest.raises(Failed, match="other tokens"):
        folder.put(build_stored("a", [1, 2, 4]))
    assert len(read_entries(tmp_path, "r")) == 1


def test_calls_with_one_text_and_other_tokens_are_ambiguous(tmp_path: Path) -> None:
    folder = TokenCaptureFolder(tmp_path)
    folder.put(build_stored("b", [1, 2, 3]))
    folder.put(build_stored("a", [1, 2, 3]))
    lineage = folder.begin_call("r", "next", "d")
    assert lineage.parent is not None
    assert (lineage.parent.call_id, *lineage.parent.tokens.values()) == ("a", [1, 2], [3], [-0.5])
    folder.put(build_stored("c", [1, 2, 4]))
    assert folder.begin_call("r", "next", "d") == Lineage("unresolved", reason="ambiguous")


def test_a_line_that_a_killed_process_left_is_removed_and_a_rollout_whose_files_were_deleted_begins_again(
    tmp_path: Path,
) -> None:
    TokenCaptureFolder(tmp_path).put(build_stored("a", [1, 2, 3]))
    with (tmp_path / "r.tokens.jsonl").open("a") as file:
        file.write('{"model_call_id": "b", "prompt_tok')
    folder = TokenCaptureFolder(tmp_path)
    folder.put(build_stored("c", [1, 2, 5]))
    assert [entry["model_call_id"] for entry in read_entries(tmp_path, "r")] == ["a", "c"]
    for path in tmp_path.iterdir():
        path.unlink()
    assert folder.begin_call("r", "next", "d") == Lineage("root")
    folder.put(build_stored("a", [1, 2, 9]))
    assert [entry["generation_token_ids"] for entry in read_entries(tmp_path, "r")] == [[9]]


def test_a_file_that_was_rewritten_is_read_again(tmp_path: Path) -> None:
    folder = TokenCaptureFolder(tmp_path)
    for call in ("a", "b", "c"):
        folder.put(build_stored(call, [1, 2, 3]))
    path = tmp_path / "r.tokens.jsonl"
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + second.replace(b"[3]", b"[4]").replace(b'"b"', b'"d"') + third)
    changed = json.loads(path.read_text().splitlines()[1])
    with pytest.raises(Failed, match="captured with other tokens"):
        folder.put(changed | {"response_id": "another"})
    folder.put(build_stored("b", [1, 2, 3]))
    assert [entry["model_call_id"] for entry in read_entries(tmp_path, "r")] == ["a", "d", "c", "b"]


def test_a_damaged_file_is_named_and_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.tokens.jsonl").write_text("{garbage\n")
    with pytest.raises(Failed, match=r"r\.tokens\.jsonl has a line that is not JSON .*; delete the files") as raised:
        TokenCaptureFolder(tmp_path).put(build_stored("a", [1, 2, 3]))
    assert not raised.value.retryable
    for folder in (tmp_path / "r.tokens.jsonl", Path("/proc/tokens")):
        with pytest.raises(UsageError, match="token ids cannot be written there"):
            TokenCaptureFolder(folder)


async def test_an_invalid_rollout_id_is_explained(tmp_path: Path) -> None:
    async with serve(tmp_path, TURNS) as url, httpx.AsyncClient() as client:
        for rollout in ("a b", "a:b", ".hidden", "-rf", "x" * 201):
            answer = await client.post(f"{build_url(url, rollout)}/responses", json={"input": "hi"})
            assert answer.status_code == 404
            assert "ID has at most 200 letters, digits" in answer.text


@pytest.mark.slow
def test_a_killed_server_leaves_a_call_without_an_entry(tmp_path: Path) -> None:
    policy = [sys.executable, "-m", "gymsdk", "policy", "serve", "echo", "--latency", "60", "--port", "0", "--json"]
    with subprocess.Popen(policy, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        name = f"vllm/policy@{json.loads(engine.stdout.readline())['url']}"
        flags = ["--model", name, "--token-ids", "--token-interface", "chat", "--token-capture-dir", str(tmp_path)]
        command = [sys.executable, "-m", "gymsdk", "serve", "--role", "model", *flags, "--port", "0", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["servers"]["policy_model"]["url"]
            request = httpx.Request("POST", f"{build_url(url, 'r')}/responses", json={"input": "hi"})
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(httpx.Client(timeout=60).send, request)
                wait_until((tmp_path / "r.tokens.intents").exists)
                server.send_signal(signal.SIGKILL)
                assert isinstance(answer.exception(), httpx.TransportError)
        engine.kill()
    assert len(read_intents(tmp_path, "r")) == 1
    assert not (tmp_path / "r.tokens.jsonl").exists()


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError(condition)
