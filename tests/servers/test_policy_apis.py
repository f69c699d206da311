"""A served policy in every API, streamed and not, as SDKs read it, with the token ids that trainers need."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gymsdk import responses
from gymsdk.convert.tokens import parse_token_fields
from gymsdk.models.scripted import build
from gymsdk.responses import build_usage
from gymsdk.tokens.tokenizer import ByteTokenizer
from gymsdk.types import Episode, Item

from .engines import CALLS, FLAT, HELLO, THOUGHT, TOOL, FixedModel, endpoint_client, openai, root

TURN = (THOUGHT, responses.build_message("let me see"), *CALLS)
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {}}}


async def test_a_chat_contains_reasoning_as_the_engine_is_configured():
    model = FixedModel(responses.build_reasoning("hm"), responses.build_message("hello"))
    for reasoning, content, field in (
        ("field", "hello", "hm"),
        ("tags", "<think>\nhm\n</think>\n\nhello", None),
        ("none", "hello", None),
    ):
        async with endpoint_client(model, reasoning=reasoning) as client:
            [choice] = (await client.post("chat/completions", json=HELLO)).json()["choices"]
        message = choice["message"]
        found = (message["content"], message.get("reasoning_content"), choice["finish_reason"])
        assert found == (content, field, "stop")


async def test_calls_are_sequential_if_parallel_calls_are_disabled():
    async with openai(FixedModel(*TURN)) as client:
        chat = await client.chat.completions.create(model="any", tools=[TOOL], parallel_tool_calls=False, **HELLO)
        whole = await client.responses.create(model="any", input="hi", tools=[FLAT], parallel_tool_calls=False)
    assert [call.id for call in chat.choices[0].message.tool_calls or []] == ["c1"]
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]


async def test_each_api_has_its_own_form_of_errors_and_an_engine_reports_its_health():
    async with endpoint_client(FixedModel()) as client:
        for path, body, form in (
            ("chat/completions", {}, {"error"}),
            ("responses", {}, {"error"}),
            ("messages", {"max_tokens": 5}, {"type", "error"}),
            ("messages/count_tokens", {"messages": 7}, {"type", "error"}),
        ):
            answer = await client.post(path, json=body)
            assert (answer.status_code, bool(answer.json()["error"]["message"])) == (400, True), path
            assert form <= answer.json().keys()
        assert (await client.get(root(client, "/health"))).status_code == 200
        assert (await client.get(root(client, "/version"))).json()["version"]
        [model] = (await client.get("models")).json()["data"]
    assert (model["id"], model["max_model_len"]) == ("stub", None)


TOKEN_OPTIONS = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
TURNS = [
    [THOUGHT, responses.build_message("let me see"), *CALLS],
    [*CALLS[:1]],
    [responses.build_message("")],
    [responses.build_reasoning("nearly"), responses.build_message("déjà <|im_end|> vu")],
    [responses.build_message("done")],
]


class TurnModel:
    """A model that returns its turns in order, according to the conversation so far."""

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        turn = sum("said by the user" in str(item.get("content")) for item in request["input"]) - 1
        return responses.build_response(TURNS[turn], model="talks", usage=build_usage(0, 0), request=request)


async def play_turns(client: httpx.AsyncClient, extra: Item) -> list[Item]:
    """Return the completions of a conversation that a client continues with the returned messages."""
    completions, messages = [], [{"role": "system", "content": "Be kind."}]
    for number in range(len(TURNS)):
        messages = [*messages, {"role": "user", "content": f"{number} said by the user"}]
        body = {"messages": messages, "tools": [TOOL], **TOKEN_OPTIONS, **extra}
        completion = (await client.post("chat/completions", json=body)).json()
        message = completion["choices"][0]["message"]
        completions.append(completion)
        outputs = [
            {"role": "tool", "tool_call_id": call["id"], "content": "3"} for call in message.get("tool_calls") or []
        ]
        messages = [*messages, message, *outputs]
    return completions


@pytest.mark.parametrize("reasoning", ["field", "tags", "none"])
async def test_each_prompt_begins_with_the_previous_prompt_and_response(reasoning):
    kind, extra = ("nemo-rl", {"return_tokens_as_token_ids": True}) if reasoning == "tags" else ("vllm", {})
    async with endpoint_client(TurnModel(), reasoning=reasoning, kind=kind) as client:
        completions = await play_turns(client, extra)
    token_ids: list[int] = []
    for completion in completions:
        prompt, ids = completion["prompt_token_ids"], completion["choices"][0]["token_ids"]
        assert prompt[: len(token_ids)] == token_ids
        token_ids = prompt + ids
    assert len(token_ids) > 300


async def test_the_token_ids_decode_to_the_text_and_the_end_of_the_turn():
    async with endpoint_client(FixedModel(THOUGHT, responses.build_message("so be it"))) as client:
        completion = (await client.post("chat/completions", json=HELLO | TOKEN_OPTIONS)).json()
    ids = completion["choices"][0]["token_ids"]
    assert ByteTokenizer().decode(ids) == "<think>\ntwo sums, then\n</think>\n\nso be it<|im_end|>"
    assert completion["usage"]["prompt_tokens"] == len(completion["prompt_token_ids"])
    assert completion["usage"]["completion_tokens"] == len(ids)


async def test_each_token_id_has_one_finite_negative_log_probability():
    async with openai(FixedModel(responses.build_message("Zürich"))) as client:
        completion = await client.chat.completions.create(model="any", logprobs=True, top_logprobs=1, **HELLO)
    content = completion.choices[0].logprobs.content or []
    assert [token.bytes for token in content[:-1]] == [[byte] for byte in "Zürich".encode()]
    assert all(-2 < token.logprob < 0 and token.top_logprobs[0].logprob == token.logprob for token in content)


async def test_the_message_has_the_token_fields_if_ids_and_log_probabilities_are_requested():
    request = HELLO | TOKEN_OPTIONS | {"return_tokens_as_token_ids": True}
    async with endpoint_client(FixedModel(), kind="nemo-rl") as client:
        body = (await client.post("chat/completions", json=request)).json()
        plain = (await client.post("chat/completions", json=HELLO)).json()
    async with endpoint_client(FixedModel()) as client:
        [choice] = (await client.post("chat/completions", json=request)).json()["choices"]
    message = body["choices"][0]["message"]
    assert message["prompt_token_ids"] == body["prompt_token_ids"]
    assert message["generation_token_ids"] == body["choices"][0]["token_ids"]
    assert parse_token_fields(body) == {key: message[key] for key in responses.TOKEN_FIELDS}
    assert not {*responses.TOKEN_FIELDS} & plain["choices"][0]["message"].keys()
    # The ids replace the tokens in the log-probabilities.
    replaced = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert replaced == [f"token_id:{token}" for token in choice["token_ids"]]


async def test_a_stream_has_the_same_token_ids():
    async with openai(FixedModel()) as client:
        request: Any = {"model": "any", "extra_body": {"return_token_ids": True}, "logprobs": True, **HELLO}
        plain = await client.chat.completions.create(**request)
        chunks = [chunk.model_dump() async for chunk in await client.chat.completions.create(stream=True, **request)]
    prompts = [chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids") or []]
    tokens = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content") or []]
    assert prompts == [plain.model_dump()["prompt_token_ids"]]
    assert ids == plain.model_dump()["choices"][0]["token_ids"]
    assert len(tokens) == len(ids)


async def test_tokenize_returns_the_prompt_token_ids_of_a_completion():
    chat = HELLO | {"tools": [TOOL]}
    async with endpoint_client(build("echo")) as client:
        completion = (await client.post("chat/completions", json=chat | {"return_token_ids": True})).json()
        body = (await client.post(root(client, "/tokenize"), json=chat)).json()
        text = (await client.post(root(client, "/detokenize"), json={"tokens": body["tokens"]})).json()["prompt"]
        open_ended = {"messages": [*HELLO["messages"], {"role": "assistant", "content": "well"}]}
        continued = await client.post(root(client, "/tokenize"), json=open_ended | {"continue_final_message": True})
    assert body["tokens"] == completion["prompt_token_ids"]
    assert body["count"] == completion["usage"]["prompt_tokens"]
    assert text.endswith("<|im_start|>assistant\n")
    assert ByteTokenizer().decode(continued.json()["tokens"]).endswith("<|im_start|>assistant\nwell")


async def test_text_tokenizes_and_detokenizes_and_unsupported_content_is_rejected():
    async with endpoint_client(FixedModel()) as client:
        body = (await client.post(root(client, "/tokenize"), json={"prompt": "hé", "return_token_strs": True})).json()
        back = (await client.post(root(client, "/detokenize"), json={"tokens": body["tokens"]})).json()
        assert (body["count"], body["token_strs"][0], back) == (3, "h", {"prompt": "hé"})
        for path, wrong in (
            ("/tokenize", {}),
            ("/tokenize", {"prompt": 7}),
            ("/tokenize", {"messages": [7]}),
            ("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}),
            ("/detokenize", {"tokens": "x"}),
            ("/detokenize", {"tokens": [9999]}),
        ):
            answer = await client.post(root(client, path), json=wrong)
            assert (answer.status_code, bool(answer.json()["error"]["message"])) == (400, True), wrong
