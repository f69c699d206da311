"""The token ids and log-probabilities of a served policy meet the requirements of trainers."""

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
@pytest.mark.parametrize("extra", [{}, {"return_tokens_as_token_ids": True}])
async def test_each_prompt_begins_with_the_previous_prompt_and_response(reasoning: str, extra: Item) -> None:
    async with endpoint_client(TurnModel(), reasoning=reasoning, kind="nemo-rl" if extra else "vllm") as client:
        completions = await play_turns(client, extra)
    token_ids: list[int] = []
    for completion in completions:
        prompt, ids = completion["prompt_token_ids"], completion["choices"][0]["token_ids"]
        assert prompt[: len(token_ids)] == token_ids
        token_ids = prompt + ids
    assert len(token_ids) > 300


async def test_each_prompt_of_responses_begins_with_the_previous_prompt_and_response() -> None:
    items: list[Item] = []
    token_ids: list[int] = []
    async with endpoint_client(TurnModel()) as client:
        for number in range(len(TURNS)):
            items.append({"role": "user", "content": f"{number} said by the user"})
            body = {"input": items, "tools": [FLAT], "instructions": "Be kind.", "return_token_ids": True}
            output = (await client.post("responses", json=body)).json()["output"]
            assert output[-1]["prompt_token_ids"][: len(token_ids)] == token_ids
            token_ids = output[-1]["prompt_token_ids"] + output[-1]["generation_token_ids"]
            calls = [item for item in output if item["type"] == "function_call"]
            items += [*output, *(responses.build_function_call_output(call["call_id"], "3") for call in calls)]
    assert len(token_ids) > 300


async def test_the_token_ids_decode_to_the_text_and_the_end_of_the_turn() -> None:
    async with endpoint_client(FixedModel(THOUGHT, responses.build_message("so be it"))) as client:
        completion = (await client.post("chat/completions", json=HELLO | TOKEN_OPTIONS)).json()
    ids = completion["choices"][0]["token_ids"]
    assert ByteTokenizer().decode(ids) == "<think>\ntwo sums, then\n</think>\n\nso be it<|im_end|>"
    assert completion["usage"]["prompt_tokens"] == len(completion["prompt_token_ids"])
    assert completion["usage"]["completion_tokens"] == len(ids)


async def test_each_token_id_has_one_finite_negative_log_probability() -> None:
    async with openai(FixedModel(responses.build_message("Zürich"))) as client:
        completion = await client.chat.completions.create(model="any", logprobs=True, top_logprobs=1, **HELLO)
    content = completion.choices[0].logprobs.content or []
    assert [token.bytes for token in content[:-1]] == [[byte] for byte in "Zürich".encode()]
    assert all(-2 < token.logprob < 0 and token.top_logprobs[0].logprob == token.logprob for token in content)


async def test_token_ids_replace_tokens_in_the_log_probabilities_on_request() -> None:
    async with endpoint_client(FixedModel()) as client:
        completion = await client.post(
            "chat/completions", json=HELLO | TOKEN_OPTIONS | {"return_tokens_as_token_ids": True}
        )
    choice = completion.json()["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]


async def test_the_message_has_the_token_fields_if_ids_and_log_probabilities_are_requested() -> None:
    request = HELLO | TOKEN_OPTIONS | {"return_tokens_as_token_ids": True}
    async with endpoint_client(FixedModel(), kind="nemo-rl") as client:
        body = (await client.post("chat/completions", json=request)).json()
        plain = (await client.post("chat/completions", json=HELLO)).json()
    message = body["choices"][0]["message"]
    assert message["prompt_token_ids"] == body["prompt_token_ids"]
    assert message["generation_token_ids"] == body["choices"][0]["token_ids"]
    assert parse_token_fields(body) == {key: message[key] for key in responses.TOKEN_FIELDS}
    assert not {*responses.TOKEN_FIELDS} & plain["choices"][0]["message"].keys()


async def test_a_stream_has_the_same_token_ids() -> None:
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


async def test_tokenize_returns_the_prompt_token_ids_of_a_completion() -> None:
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


async def test_text_tokenizes_and_detokenizes() -> None:
    async with endpoint_client(FixedModel()) as client:
        body = (await client.post(root(client, "/tokenize"), json={"prompt": "hé", "return_token_strs": True})).json()
        back = (await client.post(root(client, "/detokenize"), json={"tokens": body["tokens"]})).json()
    assert (body["count"], body["token_strs"][0], back) == (3, "h", {"prompt": "hé"})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 7}),
        ("/tokenize", {"messages": [7]}),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {"tokens": [9999]}),
    ],
)
async def test_unsupported_content_is_rejected_by_tokenize(path: str, body: Item) -> None:
    async with endpoint_client(FixedModel()) as client:
        completion = await client.post(root(client, path), json=body)
    assert completion.status_code == 400
    assert completion.json()["error"]["message"]
