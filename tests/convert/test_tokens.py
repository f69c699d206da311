"""Parse and validate the token fields of completions."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gymsdk.convert import tokens
from gymsdk.errors import Failed
from gymsdk.types import Item

MESSAGE = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.5, -1]}


def logprobs_of(*texts: str) -> Item:
    return {"content": [{"token": word, "logprob": logprob} for word, logprob in zip(texts, (-0.5, -1), strict=False)]}


def completion(message: Item | None = None, choice: Item | None = None, **fields: Any) -> Item:
    return {"choices": [{"message": {"content": "x"} | (message or {})} | (choice or {})]} | fields


IDS_IN_LOGPROBS = {"logprobs": logprobs_of("token_id:3", "token_id:4")}
IDS_IN_CHOICE = {"token_ids": [3, 4], "logprobs": logprobs_of("a", "b")}


@pytest.mark.parametrize(
    "body",
    [
        completion(MESSAGE),
        completion(MESSAGE, IDS_IN_LOGPROBS),
        completion(None, IDS_IN_CHOICE, prompt_token_ids=[1, 2]),
        completion(None, IDS_IN_CHOICE | {"prompt_token_ids": [1, 2]}),
        completion(None, IDS_IN_CHOICE | IDS_IN_LOGPROBS, prompt_token_ids=[1, 2]),
        completion(None, IDS_IN_LOGPROBS, prompt_token_ids=[1, 2]),
    ],
)
def test_each_format_gives_all_three_token_fields(body: Item) -> None:
    assert tokens.parse_token_fields(body) == MESSAGE


@pytest.mark.parametrize("choice", [{}, {"logprobs": None}, {"logprobs": logprobs_of("a")}, {"token_ids": None}])
def test_a_completion_without_ids_has_no_token_fields(choice: Item) -> None:
    assert tokens.parse_token_fields(completion(None, choice, prompt_token_ids=None)) == {}


def test_an_empty_completion_has_empty_token_fields() -> None:
    nothing = completion(None, {"token_ids": [], "logprobs": {"content": []}}, prompt_token_ids=[1])
    assert tokens.parse_token_fields(nothing) == dict(zip(MESSAGE, ([1], [], []), strict=True))


def test_routed_experts_are_kept_with_the_token_fields() -> None:
    assert tokens.parse_token_fields(completion(MESSAGE | {"routed_experts": [[7]]}))["routed_experts"] == [[7]]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            completion(MESSAGE, IDS_IN_CHOICE | {"token_ids": [3, 5]}),
            "the ids of the message differ from the ids of the choice",
        ),
        (
            completion(None, IDS_IN_CHOICE | {"logprobs": logprobs_of("token_id:3", "token_id:5")}),
            "token_ids differ from the ids in logprobs",
        ),
        (
            completion(None, {"logprobs": logprobs_of("token_id:3", "b")}, prompt_token_ids=[1]),
            "some tokens in logprobs are ids and some are texts",
        ),
        (
            completion(None, {"logprobs": logprobs_of("token_id:3", "4")}, prompt_token_ids=[1]),
            "1 token ids, but 2 log",
        ),
        (completion({"prompt_token_ids": [1]}), "generation_token_ids is missing"),
        (completion(MESSAGE | {"generation_log_probs": [-0.5]}), "2 token ids, but 1 log-probabilities"),
        (completion(MESSAGE | {"generation_log_probs": [-0.5, None]}), "log-probabilities finite numbers"),
        (completion(MESSAGE | {"generation_log_probs": "no"}), "must be lists"),
        (completion(MESSAGE | {"generation_token_ids": [3, "4"]}), "token ids must be integers"),
        (completion(MESSAGE | {"prompt_token_ids": [1.5]}), "token ids must be integers"),
        (completion(None, IDS_IN_CHOICE), "prompt_token_ids is missing"),
        (completion(None, {"token_ids": [3, 4]}, prompt_token_ids=[1]), "2 token ids, but 0 log-probabilities"),
    ],
)
def test_inconsistent_token_fields_are_reported(body: Item, message: str) -> None:
    with pytest.raises(Failed, match=message) as caught:
        tokens.parse_token_fields(body)
    assert caught.value.kind == "model_bad_tokens"


@pytest.mark.slow
def test_a_long_completion_is_parsed_in_linear_time() -> None:
    content = [{"token": f"token_id:{n}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for n in range(65_536)]
    choice = {"token_ids": list(range(65_536)), "logprobs": {"content": content}}
    started = time.process_time()
    found = tokens.parse_token_fields(completion(None, choice, prompt_token_ids=[1] * 1000))
    assert time.process_time() - started < 1
    assert len(found["generation_log_probs"]) == 65_536
