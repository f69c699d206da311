"""The requests to model servers, and the handling of their responses."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gymsdk import model, responses
from gymsdk.convert import request_keys
from gymsdk.errors import Failed
from gymsdk.http import errors
from gymsdk.models.endpoint import Endpoint
from gymsdk.models.options import ModelOptions
from gymsdk.responses import Api
from gymsdk.testing.endpoint import serve
from gymsdk.types import Item

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
ASKS = {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
SPELLED = {"logprobs": {"content": [{"token": "token_id:3", "logprob": -0.5}]}}
BOTH = pytest.mark.parametrize("api", ["chat", "responses"])


def completion(message: Item, **choice: object) -> Item:
    return {"model": "m", "choices": [{"message": message, "finish_reason": "stop"} | choice]}


HELLO = completion({"role": "assistant", "content": "hello"})


class Engine:
    """A server with a fixed response per path that records its requests."""

    def __init__(self, **answers: object) -> None:
        self._answers = {"completions": HELLO, "responses": {"output": [responses.build_message("hello")]}} | answers
        self.sent: list[tuple[str, Item]] = []
        self.headers: list[dict[str, str]] = []

    @property
    def body(self) -> Item:
        """The first request body, without the conversation."""
        return {key: value for key, value in self.sent[0][1].items() if key not in {"messages", "input", "model"}}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.sent.append((request.path, await request.json()))
        self.headers.append(dict(request.headers))
        found = self._answers.get(request.path.rpartition("/")[2], (404, {"detail": "Not Found"}))
        status, body = found if isinstance(found, tuple) else (200, found)
        return web.json_response(body, status=status)


@asynccontextmanager
async def serve_engine(engine: Engine) -> AsyncIterator[str]:
    application = web.Application(client_max_size=2**26)
    application.router.add_post("/{path:.*}", engine.answer)
    async with serve(application) as url:
        yield url


async def respond(engine: Engine, request: Item | None = None, name: str = "endpoint/m", **options: object) -> Item:
    async with serve_engine(engine) as url:
        policy = model(name, **({"base_url": url, "wait": 0.001, "retries": 2} | options))
        return await policy.respond({"input": "hi"} | (request or {}))


async def catch_failure(engine: Engine, request: Item | None = None, **options: object) -> Failed:
    with pytest.raises(Failed) as caught:
        await respond(engine, request, **options)
    return caught.value


class TestPins:
    async def test_pinned_options_override_the_request(self) -> None:
        engine = Engine()
        metadata = {"extra_body": '{"top_k": 9, "seed": 1}'}
        pins = {"temperature": 0.5, "top_k": 20, "max_output_tokens": 7, "top_p": None}
        request = {"temperature": 0.9, "top_p": 0.9, "max_output_tokens": 99, "metadata": metadata}
        response = await respond(engine, request, name="vllm/m", pinned=pins)
        assert engine.body == {"temperature": 0.5, "top_k": 20, "max_tokens": 7, "seed": 1}
        assert (response["temperature"], response["max_output_tokens"], "top_p" in response) == (0.5, 7, False)

    @BOTH
    async def test_the_request_overrides_options_except_pinned_ones_and_template_arguments_are_merged(
        self, api: Api
    ) -> None:
        engine = Engine()
        options = {
            "extra_body": {"seed": 1, "top_k": 20, "temperature": 0.1},
            "chat_template_kwargs": {"a": 1, "b": 2},
            "pinned": {"min_p": 0.5},
        }
        metadata = {"extra_body": json.dumps({"top_k": 5}), "chat_template_kwargs": '{"b": 3, "c": 4}'}
        await respond(engine, {"temperature": 0.9, "min_p": 0.1, "metadata": metadata}, api=api, **options)
        template = {"chat_template_kwargs": {"a": 1, "b": 3, "c": 4}}
        assert engine.body == {"seed": 1, "top_k": 5, "temperature": 0.9, "min_p": 0.5} | template

    @BOTH
    async def test_an_unknown_key_is_omitted_with_one_warning(
        self, api: Api, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(request_keys._once, "warnings", set())
        engine = Engine()
        with caplog.at_level(logging.WARNING):
            await respond(engine, {"_rowidx": 3, "min_p": 0.1, "safety_identifier": "s"}, api=api)
            await respond(engine, {"_rowidx": 4}, api=api)
        assert engine.body == {"min_p": 0.1, "safety_identifier": "s"}
        assert [text for text in caplog.messages if "'_rowidx'" in text] == caplog.messages[:1] == caplog.messages

    @BOTH
    async def test_requests_never_ask_for_a_stream(self, api: Api) -> None:
        engine = Engine()
        extra = json.dumps({"stream": True, "stream_options": {}, "n": 1})
        await respond(engine, {"stream": True, "metadata": {"extra_body": extra}}, api=api)
        assert engine.body == {"n": 1}

    @BOTH
    async def test_requests_for_several_answers_or_a_call_without_tools_are_not_sent(self, api: Api) -> None:
        engine = Engine()
        several, without_tools = {"metadata": {"extra_body": '{"n": 2}'}}, {"tool_choice": "required"}
        errors = [await catch_failure(engine, request, api=api) for request in (several, without_tools)]
        assert "the request has no tools" in str(errors[1])
        assert ({error.kind for error in errors}, engine.sent) == ({"model_bad_request"}, [])


class TestTokens:
    async def test_token_fields_are_requested_and_returned_on_the_last_item(self) -> None:
        engine = Engine(completions=completion({"content": "hello", "reasoning": "hmm"} | TOKENS))
        response = await respond(engine, tokens=True, token_interface="chat")
        assert engine.body == ASKS | {"temperature": 1.0, "top_p": 1.0}
        assert {key: response["output"][-1].get(key) for key in TOKENS} == TOKENS
        assert not TOKENS.keys() & response["output"][0].keys()

    async def test_a_request_may_ask_for_token_fields(self) -> None:
        engine = Engine(completions=completion({"content": "x"}, **SPELLED) | {"prompt_token_ids": [1, 2]})
        metadata = {"extra_body": json.dumps({"logprobs": True, "return_tokens_as_token_ids": True})}
        response = await respond(engine, {"metadata": metadata})
        assert response["output"][-1]["prompt_token_ids"] == [1, 2]
        engine = Engine(completions=completion({"content": "x"}, **SPELLED))
        response = await respond(engine)
        assert len(engine.sent) == 1, "the tokenizer is not called"
        assert not TOKENS.keys() & response["output"][-1].keys()

    @pytest.mark.parametrize("tokens", [True, False])
    async def test_inconsistent_tokens_are_a_failure_if_requested(self, tokens: bool) -> None:
        engine = Engine(completions=completion({"content": "x"} | TOKENS | {"generation_log_probs": []}))
        if not tokens:
            assert not TOKENS.keys() & (await respond(engine))["output"][-1].keys()
            return
        error = await catch_failure(engine, tokens=True, token_interface="chat")
        assert "1 token ids, but 0 log-probabilities" in str(error)
        assert (error.kind, error.retryable) == ("model_bad_tokens", False)

    @BOTH
    async def test_a_server_without_token_fields_is_named(self, api: Api) -> None:
        error = await catch_failure(Engine(), api=api, tokens=True)
        assert "m returns no token ids; training needs them; serve the model with vLLM 0.10 or newer" in str(error)
        assert error.kind == "model_no_token_ids"

    async def test_marks_of_a_responses_server_are_those_of_a_chat_server(self) -> None:
        engine = Engine(responses={"output": [responses.build_message("hello") | TOKENS]})
        for request, marks in (
            ({"text": {"format": {"type": "json_object"}}}, {"constrained_decoding": True}),
            ({"temperature": 0.5}, {"sampling_settings": {"temperature": 0.5}}),
            ({"text": {"format": {"type": "text"}}, "regex": None}, {}),
        ):
            [*_, carrier] = (await respond(engine, request, api="responses", tokens=True))["output"]
            found = {key: carrier[key] for key in ("constrained_decoding", "sampling_settings") if key in carrier}
            assert found == marks

    async def test_incomplete_token_fields_are_a_failure_in_responses_too(self) -> None:
        engine = Engine(responses={"output": [responses.build_message("hello") | {"generation_token_ids": [3]}]})
        assert "prompt_token_ids is missing" in str(await catch_failure(engine, api="responses", tokens=True))


class TestServerErrors:
    async def test_a_server_that_rejects_tools_is_named_with_the_required_flag(self) -> None:
        engine = Engine(completions=(500, {"error": {"message": "tools param requires --jinja flag"}}))
        error = await catch_failure(engine, {"tools": [TOOL]})
        assert "start llama-server with --jinja" in str(error)
        assert (error.kind, error.retryable, len(engine.sent)) == ("model_misconfigured", False, 1)

    @BOTH
    async def test_a_server_that_leaves_calls_in_the_text_is_a_failure_not_reward_0(self, api: Api) -> None:
        text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
        output = [responses.build_message(text)]
        engine = Engine(completions=completion({"content": text}), responses={"output": output})
        error = await catch_failure(engine, {"tools": [TOOL]}, api=api)
        assert "--enable-auto-tool-choice --tool-call-parser hermes" in str(error)
        assert (error.kind, error.retryable) == ("model_misconfigured", False)

    async def test_a_base_url_without_v1_is_named(self) -> None:
        engine = Engine(completions=(404, {"detail": "Not Found"}))
        async with serve_engine(engine) as url:
            with pytest.raises(Failed, match=r"the base URL http://127\S+ does not end in /v1") as caught:
                await model("vllm/m", base_url=url.removesuffix("/v1")).respond({"input": "hi"})
        assert caught.value.kind == "model_not_found"


@BOTH
async def test_an_error_contains_the_message_and_parameter_of_the_server(api: Api) -> None:
    error_response = (400, {"error": {"message": "temperature must be below 2.", "param": "temperature", "code": 400}})
    error = await catch_failure(Engine(completions=error_response, responses=error_response), api=api)
    assert str(error).endswith(" answered 400: temperature must be below 2")
    assert isinstance(error, errors.RequestRefused)
    assert error.param == "temperature"


async def test_a_prompt_that_does_not_fit_logs_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    error_response = (400, {"error": {"message": "This model's maximum context length is 8 tokens.", "code": 400}})
    async with serve_engine(Engine(completions=error_response)) as url:
        policy = model("endpoint/m", base_url=url)
        answers = [await policy.respond({"input": "hi"}) for _ in range(3)]
    [warning] = caplog.messages
    assert "a prompt exceeds the context of the model: This model's maximum context length is 8 tokens;" in warning
    assert answers[2]["incomplete_details"]["message"] == "This model's maximum context length is 8 tokens"


async def test_an_engine_that_is_not_running_is_reported() -> None:
    problem = await Endpoint("m", ModelOptions(base_url="http://127.0.0.1:9/v1")).trouble()
    assert problem == (
        "the model's server at 127.0.0.1:9 does not answer yet: nothing listens there; is the server running?"
    )


async def test_an_incomplete_base_url_is_reported() -> None:
    async with serve_engine(Engine()) as url:
        assert await Endpoint("m", ModelOptions(base_url=url)).trouble() is None
        problem = await Endpoint("m", ModelOptions(base_url=url.removesuffix("/v1"))).trouble()
    assert "does not end in /v1, as it does for most servers" in str(problem)
