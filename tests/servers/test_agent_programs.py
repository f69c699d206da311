"""Agent programs in front of the model server: what they send works, or they get an error that they understand."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import anthropic
import httpx
import openai
import pytest
from aiohttp import web

from gymsdk import Failed, model, responses, testing
from gymsdk.config import load_config
from gymsdk.responses import TOKEN_FIELDS
from gymsdk.servers import model as server
from gymsdk.servers.capture import TokenCapturingModel
from gymsdk.tokens.capture import TokenCaptureFolder
from gymsdk.types import Item, extract_text

from .app_helpers import serve_app, serve_handler

OVERFLOW = "This model's maximum context length is 40960 tokens. However, your request has 50000 input tokens."
HI: list[Any] = [{"role": "user", "content": "hi"}]
NAMES = {"chat/completions": "messages", "responses": "input", "messages": "messages"}


class Engine:
    """An engine that records the bodies of its requests and gives one answer, or an error."""

    def __init__(self, status: int = 200, error: str = OVERFLOW) -> None:
        self.bodies: list[Item] = []
        self.status = status
        self.error = error

    async def answer(self, request: web.Request) -> web.Response:
        """Answer a request."""
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.json_response({"error": {"message": self.error}}, status=self.status)
        choice = {"index": 0, "message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}
        used = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        return web.json_response({"id": "c", "created": 1, "model": "m", "choices": [choice], "usage": used})


@asynccontextmanager
async def serve(engine: Engine, **options: Any) -> AsyncIterator[str]:
    """Serve a model server in front of *engine* and yield its base URL."""
    async with serve_handler(engine.answer) as url:
        policy = model("vllm/m", base_url=f"{url}/v1", wait=0.01, **options)
        async with serve_app(server.create_app(policy)) as proxy:
            yield proxy


async def post(url: str, path: str, **fields: Any) -> httpx.Response:
    """Return the answer of the API at *path* to a short request."""
    async with httpx.AsyncClient() as client:
        return await client.post(f"{url}/v1/{path}", json={"model": "m", "max_tokens": 50, NAMES[path]: HI, **fields})


@pytest.mark.parametrize("configured", [None, True, False])
async def test_a_long_prompt_is_an_error_where_the_rollout_or_the_server_or_the_api_asks_for_it(configured):
    engine = Engine(400)
    async with serve(engine, propagate_context_overflow_errors=configured) as url:
        for path, asked, stream in product(NAMES, (None, "true", "false"), (False, True)):
            metadata = {} if asked is None else {"metadata": {"propagate_context_overflow_errors": asked}}
            engine.bodies.clear()
            answer = await post(url, path, stream=stream, **metadata)
            expected = {"true": True, "false": False}.get(asked or "", configured)
            if expected is None:
                expected = path == "messages"
            assert (answer.status_code, len(engine.bodies)) == (400 if expected else 200, 1), (path, asked, stream)
            if expected:
                error = answer.json()["error"]
                assert OVERFLOW.rstrip(".") in error["message"]
                assert error["type"] == "invalid_request_error"
                assert error["message"].startswith("prompt is too long" if path == "messages" else "This model's max")
                assert path == "messages" or error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("propagates", [True, False])
async def test_our_agents_end_by_tokens_in_both_cases(api, propagates):
    async with serve(Engine(400), propagate_context_overflow_errors=propagates) as url:
        response = await model("endpoint/m", base_url=f"{url}/v1", api=api).respond({"input": "hi"})
    text = "".join(extract_text(item["content"]) for item in response["output"])
    assert (response["status"], text) == ("incomplete", "")
    assert response["incomplete_details"]["reason"] == "max_output_tokens"


BLOCKS = {
    "vllm_model": {"base_url": "http://127.0.0.1:9/v1", "api_key": "x", "model": "m"},
    "openai_model": {"openai_base_url": "http://127.0.0.1:9/v1", "openai_api_key": "x", "openai_model": "m"},
    "gymsdk_model": {"base_url": "http://127.0.0.1:9/v1", "api_key": "x", "model": "vllm/m"},
}


def test_the_setting_of_nemo_gym_is_read(tmp_path):
    file, key = tmp_path / "model.yaml", "propagate_context_overflow_errors"
    for implementation, fields in BLOCKS.items():
        for value in (True, False):
            block = fields | {"entrypoint": "app.py", key: value}
            file.write_text(json.dumps({"policy_model": {"responses_api_models": {implementation: block}}}))
            deployment = load_config([str(file)])
            assert deployment.servers[0].kind_settings.options[key] is value
            assert not any("propagate" in note for note in deployment.notes)


async def test_a_tool_that_is_loaded_later_is_defined_where_it_is_loaded():
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    fetch = {"name": "WebFetch", "description": "Fetch a page.", "input_schema": {"type": "object"}}
    conversation: list[Any] = [
        *HI,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "ToolSearch", "input": {}}]},
    ]
    parts = [{"type": "tool_reference", "tool_name": "WebFetch"}, {"type": "tool_reference", "tool_name": "Other"}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": parts}]}
    engine = Engine()
    async with serve(engine) as url:
        before = await post(url, "messages", tools=[search])
        assert before.json()["content"][0]["text"] == "Done."
        answer = await post(
            url, "messages", tools=[search, fetch | {"defer_loading": True}], messages=[*conversation, result]
        )
        forced = await post(
            url, "messages", tools=[fetch | {"defer_loading": True}], tool_choice={"type": "tool", "name": "WebFetch"}
        )
    assert (answer.status_code, forced.status_code) == (200, 200)
    first, second, third = engine.bodies
    # The beginning of the prompt is the same.
    assert second["tools"] == first["tools"]
    assert [tool["function"]["name"] for tool in third["tools"]] == ["WebFetch"]
    output = second["messages"][-1]["content"]
    texts = [part["text"] for part in output]
    defined = {"name": "WebFetch", "description": "Fetch a page.", "parameters": {"type": "object"}}
    assert json.loads(texts[0]) == {"type": "function", "function": defined}
    assert texts[1] == "Other"


async def test_a_malformed_part_of_a_tool_result_is_refused_and_a_websocket_told_to_use_post():
    headers = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    async with serve(Engine()) as url, httpx.AsyncClient() as client:
        for reference in ({"type": "tool_reference"}, {"type": "tool_reference", "tool_name": 4}, {"type": "picture"}):
            parts = [{"type": "tool_result", "tool_use_id": "c1", "content": [reference]}]
            answer = await post(url, "messages", messages=[{"role": "user", "content": parts}])
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), reference
        answer = await client.get(f"{url}/v1/responses", headers=headers)
        plain = await client.get(f"{url}/v1/responses")
    assert (answer.status_code, plain.status_code) == (426, 405)
    assert "send requests with POST" in answer.json()["error"]["message"]


@pytest.mark.parametrize("retries", [0, 2])
async def test_the_retries_of_a_program_do_not_multiply_those_of_the_model(retries):
    engine = Engine(500, "no")
    async with (
        serve(engine, retries=retries) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=1) as openai_client,
        anthropic.AsyncAnthropic(base_url=url, api_key="x", max_retries=1) as anthropic_client,
    ):
        with pytest.raises(openai.InternalServerError):
            await openai_client.chat.completions.create(model="m", messages=HI)
        with pytest.raises(anthropic.APIStatusError):
            await anthropic_client.messages.create(model="m", max_tokens=9, messages=HI)
    # Without retries of the model, the programs try again.
    assert len(engine.bodies) == (2 * 2 if retries == 0 else 2 * (retries + 1))


async def test_a_captured_call_returns_token_ids_to_programs_that_ask_for_them(tmp_path):
    class Policy:
        """A model that returns token ids."""

        name = "m"

        async def respond(self, request: Item, **_: Any) -> Item:
            tokens = dict(zip(TOKEN_FIELDS, ([1, 2], [3], [-0.5]), strict=True))
            items = [responses.build_message("hello") | tokens]
            return responses.build_response(items, model="m", usage=None, request=request)

    capturing = TokenCapturingModel(Policy(), TokenCaptureFolder(tmp_path))
    async with serve_app(server.create_app(capturing)) as url, httpx.AsyncClient() as client:
        for number, (path, asks) in enumerate(product(NAMES, (False, True))):
            body = {"model": "m", "max_tokens": 50, NAMES[path]: HI} | ({"return_token_ids": True} if asks else {})
            captured = await client.post(f"{url}/ng-rollout/r{number}/training-token-capture/v1/{path}", json=body)
            plain = await client.post(f"{url}/v1/{path}", json=body)
            assert (TOKEN_FIELDS[0] in captured.text) == (asks or path == "responses"), path
            assert TOKEN_FIELDS[0] in plain.text
            (line,) = (tmp_path / f"r{number}.tokens.jsonl").read_text().splitlines()
            assert json.loads(line)[TOKEN_FIELDS[1]] == [3]


async def test_a_capture_that_is_not_written_is_warned_about(caplog):
    async with serve(Engine()) as url, httpx.AsyncClient() as client:
        server.once.warnings.clear()
        body = {"model": "m", "input": "hi"}
        for _ in range(2):
            await client.post(f"{url}/ng-rollout/r1/training-token-capture/v1/responses", json=body)
    said = [record.getMessage() for record in caplog.records if "--token-capture-dir" in record.getMessage()]
    assert len(said) == 1


async def test_a_prefill_is_refused_with_token_ids_where_the_api_has_it():
    engine = Engine()
    messages = [*HI, {"role": "assistant", "content": "The answer is"}]
    async with serve(engine, tokens=True, token_interface="chat") as url, serve(engine) as plain:
        refused = await post(url, "messages", messages=messages)
        answered = await post(plain, "messages", messages=messages)
    assert (refused.status_code, answered.status_code) == (400, 200)
    assert "cannot begin with given text (a prefill)" in refused.json()["error"]["message"]


@pytest.mark.parametrize(("status", "kind"), [(404, "model_not_found"), (401, "model_unauthorized"), (200, None)])
async def test_a_wrong_address_or_key_is_not_taken_for_an_engine_without_token_ids(status, kind):
    engine = Engine(status, "no")
    app = web.Application()
    app.router.add_post("/chat/completions", engine.answer)
    async with testing.serve(app) as url:
        with pytest.raises(Failed) as caught:
            await model("vllm/m", base_url=url.removesuffix("/v1"), tokens=True, retries=0).respond({"input": "hi"})
    assert caught.value.kind == (kind or "model_no_token_ids")
