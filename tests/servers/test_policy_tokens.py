"""The token ids and log-probabilities of a served policy meet the requirements of trainers."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from gymsdk import responses
from gymsdk.convert.tokens import parse_token_fields
from gymsdk.models.scripted import build
from gymsdk.tokens.tokenizer import ByteTokenizer
from gymsdk.types import Episode, Item

from .engines import CALLS, FLAT, HELLO, THOUGHT, TOOL, FixedModel, endpoint_client, openai, root

ASK = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}
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
        return responses.build_response(TURNS[turn], model="talks", usage=responses.build_usage(0, 0), request=request)


def answers(calls: list[Item], key: str) -> list[Item]:
    return [{"role": "tool", "tool_call_id": call["id"], "content": f"{key} is 3"} for call in calls]


async def play_turns(client: httpx.AsyncClient, extra: Item) -> list[Item]:
    """Return the completions of a conversation that a client continues with the returned messages."""
    found, messages = [], [{"role": "system", "content": "Be kind."}]
    for number in range(len(TURNS)):
        messages = [*messages, {"role": "user", "content": f"{number} said by the user"}]
        body = {"messages": messages, "tools": [TOOL], **ASK, **extra}
        answer = (await client.post("chat/completions", json=body)).json()
        message = answer["choices"][0]["message"]
        found.append(answer)
        messages = [*messages, message, *answers(message.get("tool_calls") or [], "it")]
    return found


@pytest.mark.parametrize("reasoning", ["field", "tags", "none"])
@pytest.mark.parametrize("extra", [{}, {"return_tokens_as_token_ids": True}])
async def test_each_prompt_begins_with_the_previous_prompt_and_response(reasoning: str, extra: Item) -> None:
    async with endpoint_client(TurnModel(), reasoning=reasoning, bundles=bool(extra)) as client:
        found = await play_turns(client, extra)
    so_far: list[int] = []
    for answer in found:
        prompt, ids = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        assert prompt[: len(so_far)] == so_far
        so_far = prompt + ids
    assert len(so_far) > 300


async def test_each_prompt_of_responses_begins_with_the_previous_one_too() -> None:
    items: list[Item] = []
    so_far: list[int] = []
    async with endpoint_client(TurnModel()) as client:
        for number in range(len(TURNS)):
            items.append({"role": "user", "content": f"{number} said by the user"})
            body = {"input": items, "tools": [FLAT], "instructions": "Be kind.", "return_token_ids": True}
            output = (await client.post("responses", json=body)).json()["output"]
            assert output[-1]["prompt_token_ids"][: len(so_far)] == so_far
            so_far = output[-1]["prompt_token_ids"] + output[-1]["generation_token_ids"]
            calls = [item for item in output if item["type"] == "function_call"]
            items += [*output, *(responses.build_function_call_output(call["call_id"], "3") for call in calls)]
    assert len(so_far) > 300


async def test_the_ids_decode_to_the_text_and_end_the_turn() -> None:
    async with endpoint_client(FixedModel(THOUGHT, responses.build_message("so be it"))) as client:
        answer = (await client.post("chat/completions", json=HELLO | ASK)).json()
    ids = answer["choices"][0]["token_ids"]
    assert ByteTokenizer().decode(ids) == "<think>\ntwo sums, then\n</think>\n\nso be it<|im_end|>"
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    assert answer["usage"]["completion_tokens"] == len(ids)


async def test_each_id_has_one_finite_negative_log_probability() -> None:
    async with openai(FixedModel(responses.build_message("Zürich"))) as client:
        answer = await client.chat.completions.create(model="any", logprobs=True, top_logprobs=1, **HELLO)
    content = answer.choices[0].logprobs.content or []
    assert [one.bytes for one in content[:-1]] == [[byte] for byte in "Zürich".encode()]
    assert all(-2 < one.logprob < 0 and one.top_logprobs[0].logprob == one.logprob for one in content)


async def test_ids_can_replace_tokens() -> None:
    async with endpoint_client(FixedModel()) as client:
        answer = await client.post("chat/completions", json=HELLO | ASK | {"return_tokens_as_token_ids": True})
    choice = answer.json()["choices"][0]
    assert [one["token"] for one in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]


async def test_bundles_are_on_the_message_if_both_are_requested() -> None:
    request = HELLO | ASK | {"return_tokens_as_token_ids": True}
    async with endpoint_client(FixedModel(), bundles=True) as client:
        body = (await client.post("chat/completions", json=request)).json()
        plain = (await client.post("chat/completions", json=HELLO)).json()
    message = body["choices"][0]["message"]
    assert message["prompt_token_ids"] == body["prompt_token_ids"]
    assert message["generation_token_ids"] == body["choices"][0]["token_ids"]
    assert parse_token_fields(body) == {key: message[key] for key in responses.TOKEN_FIELDS}
    assert not {*responses.TOKEN_FIELDS} & plain["choices"][0]["message"].keys()


async def test_a_stream_has_the_same_ids() -> None:
    async with openai(FixedModel()) as client:
        request: Any = {"model": "any", "extra_body": {"return_token_ids": True}, "logprobs": True, **HELLO}
        plain = await client.chat.completions.create(**request)
        chunks = [chunk.model_dump() async for chunk in await client.chat.completions.create(stream=True, **request)]
    prompts = [chunk["prompt_token_ids"] for chunk in chunks if chunk.get("prompt_token_ids")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    ids = [token for choice in choices for token in choice.get("token_ids") or []]
    tokens = [one for choice in choices for one in (choice["logprobs"] or {}).get("content") or []]
    assert prompts == [plain.model_dump()["prompt_token_ids"]]
    assert ids == plain.model_dump()["choices"][0]["token_ids"]
    assert len(tokens) == len(ids)


async def test_a_conversation_tokenizes_as_it_does_when_it_is_sent() -> None:
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
        answer = await client.post(root(client, path), json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
