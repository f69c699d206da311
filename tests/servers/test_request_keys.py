"""The keys of requests: the engine gets them, or they are ignored or refused, and none vanishes without a word."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from gymsdk import model, responses
from gymsdk.convert import anthropic, chat_inbound, request_keys
from gymsdk.convert.request_keys import CHAT_KEYS, REQUEST_KEYS, RESPONSES_KEYS, KeyUse
from gymsdk.servers.model import create_app
from gymsdk.types import Item

from .app_helpers import app_client, serve_handler
from .engines import BODIES

DOCS = Path(__file__).parents[2] / "docs" / "models.md"
CLIENTS = pytest.mark.parametrize("client", BODIES)
TRANSLATED: dict[str, frozenset[str]] = {
    "responses": frozenset({"background", "stream", "stream_options"}),
    "chat/completions": chat_inbound.TRANSLATED_FIELDS,
    "messages": anthropic.TRANSLATED_FIELDS,
}
"""The keys that each API of clients translates or checks itself."""

ANSWER: Item = {
    "id": "c",
    "model": "m",
    "choices": [{"message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop", "stop_reason": "END"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    "system_fingerprint": "fp_1",
    "service_tier": "flex",
    "prompt_logprobs": [None, {"7": {"logprob": -0.5}}],
}
ENGINE_FIELDS = {"system_fingerprint": "fp_1", "service_tier": "flex", "prompt_logprobs": ANSWER["prompt_logprobs"]}


def list_keys(use: KeyUse, client: str) -> list[str]:
    return [key.name for key in REQUEST_KEYS.values() if key.use == use and key.name not in TRANSLATED[client]]


@asynccontextmanager
async def serve_model(provider: str = "vllm", **options: Any) -> AsyncIterator[tuple[httpx.AsyncClient, list[Item]]]:
    """Yield a client of a model server, and the bodies that the engine behind it received."""
    bodies: list[Item] = []

    async def answer(request: web.Request) -> web.Response:
        bodies.append(await request.json())
        output = {"output": [responses.build_message("hello")]}
        return web.json_response(output if request.path.endswith("responses") else ANSWER)

    async with serve_handler(answer) as url:
        policy = model(f"{provider}/m", base_url=f"{url}/v1", api_key="k", **options)
        async with app_client(create_app(policy)) as client:
            yield client, bodies


async def post(client: httpx.AsyncClient, path: str, **keys: object) -> httpx.Response:
    return await client.post(f"/v1/{path}", json=BODIES[path] | keys)


@CLIENTS
@pytest.mark.parametrize("provider", ["vllm", "endpoint"])
async def test_sampling_and_decoding_keys_reach_the_engine(client, provider):
    names = [name for name in [*list_keys("engine", client), "guided_of_tomorrow"] if name not in {"model", "n"}]
    async with serve_model(provider) as (http, bodies):
        for name in names:
            value: object = {"a": 1} if name == "chat_template_kwargs" else 1.5
            assert (await post(http, client, **{name: value})).status_code == 200, name
            assert bodies[-1].get(name) == value, name


@CLIENTS
async def test_keys_of_identity_caching_and_telemetry_are_accepted_and_ignored(client, caplog):
    async with serve_model("endpoint") as (http, bodies):
        for name in [*list_keys("ignored", client), "metadata"]:
            value: object = {"id": "x"} if name.endswith(("metadata", "management", "config")) else ["x"]
            assert (await post(http, client, **{name: value})).status_code == 200, name
            assert (name in bodies[-1]) == (name in CHAT_KEYS), name
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@CLIENTS
@pytest.mark.parametrize("use", ["refused", "configuration"])
@pytest.mark.parametrize("provider", ["vllm", "endpoint", "openai"])
async def test_keys_that_the_engine_lacks_or_must_not_get_are_named_in_a_400(client, use, provider):
    async with serve_model(provider, api="chat") as (http, bodies):
        for name in list_keys(use, client):
            answer = await post(http, client, **{name: {"a": 1}})
            assert (answer.status_code, f"'{name}'" in answer.text) == (400, True), name
            key = REQUEST_KEYS[name]
            for value in (None, *key.neutral) if use == "refused" else (None,):
                assert (await post(http, client, **{name: value})).status_code == 200, name
            bodies_with_key = [body for body in bodies if name in body]
            assert bodies_with_key == []


@CLIENTS
async def test_a_value_of_false_that_changes_the_answer_is_refused_and_a_pin_of_null_removes_a_key(client):
    async with serve_model(pinned={"best_of": None, "truncation": None, "vllm_xargs": None}) as (http, bodies):
        answer = await post(http, client, enable_thinking=False)
        assert (answer.status_code, "'enable_thinking'" in answer.text, bodies) == (400, True, [])
        answer = await post(http, client, best_of=3, truncation="auto", vllm_xargs={"a": 1})
        assert answer.status_code == 200


async def test_a_sampling_method_reaches_the_engine_with_its_settings():
    async with serve_model("endpoint") as (http, bodies):
        for names in (
            ("dry_multiplier", "dry_base"),
            ("xtc_probability", "xtc_threshold"),
            ("mirostat", "mirostat_tau"),
        ):
            keys = dict.fromkeys(names, 0.5)
            assert (await post(http, "responses", **keys)).status_code == 200
            assert bodies[-1].items() >= keys.items()


@CLIENTS
async def test_what_reaches_into_the_engine_comes_from_the_configuration_only(client):
    extra = {"kv_transfer_params": {"do_remote_decode": True}, "vllm_xargs": {"a": 1}}
    async with serve_model(extra_body=extra) as (http, bodies):
        assert (await post(http, client)).status_code == 200
        assert bodies[-1].items() >= extra.items()
        for name in list_keys("configuration", client):
            refused = await post(http, client, metadata={"extra_body": f'{{"{name}": {{"b": 2}}}}'})
            assert (refused.status_code, f"'{name}'" in refused.text) == (400, True), name
        assert len(bodies) == 1


@CLIENTS
async def test_an_unknown_key_is_passed_on_to_vllm_and_ignored_with_one_line_elsewhere(client, caplog, monkeypatch):
    monkeypatch.setattr(request_keys._once, "warnings", set())
    for provider, api, is_passed in [("vllm", "chat", True), ("vllm", "responses", True), ("endpoint", "chat", False)]:
        async with serve_model(provider, api=api) as (http, bodies):
            for _ in range(2):
                assert (await post(http, client, knob_of_tomorrow=2)).status_code == 200
            assert [body.get("knob_of_tomorrow") for body in bodies] == [2 if is_passed else None] * 2
    assert sum("knob_of_tomorrow" in message for message in caplog.messages) == 1


async def test_a_responses_server_gets_all_keys_of_its_api():
    async with serve_model("endpoint", api="responses") as (http, bodies):
        keys: Item = {"previous_response_id": "r", "truncation": "auto", "store": True, "client_metadata": {"a": 1}}
        assert (await post(http, "responses", **keys)).status_code == 200
        assert (await post(http, "responses", suffix="x")).status_code == 400
    assert {key for key in bodies[0] if key in keys} == {"previous_response_id", "truncation", "store"}


@CLIENTS
async def test_what_the_engine_says_beside_its_message_reaches_the_client(client):
    async with serve_model() as (http, _):
        streamed = await post(http, client, stream=True)
        body = (await post(http, client)).json()
    assert streamed.status_code == 200
    for part in ('"fp_1"', '"flex"', '"prompt_logprobs":[null', '"END"'):
        assert part in streamed.text.replace(": ", ":")
    assert body.items() >= ENGINE_FIELDS.items()
    if client == "messages":
        assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "END")
    else:
        assert (body["choices"][0] if "choices" in body else body)["stop_reason"] == "END"


def test_the_table_in_the_docs_is_the_table_of_the_code():
    assert set(REQUEST_KEYS) >= RESPONSES_KEYS | CHAT_KEYS
    rows = re.findall(r"^\| (\w+) \| ([\w ]+) \| (`.*`) \|$", DOCS.read_text(encoding="utf-8"), re.MULTILINE)
    documented = {(use, effect): set(re.findall(r"`(\w+)`", names)) for use, effect, names in rows}
    declared: dict[tuple[str, str], set[str]] = {}
    for key in REQUEST_KEYS.values():
        declared.setdefault((key.use, key.effect), set()).add(key.name)
    assert documented == declared
