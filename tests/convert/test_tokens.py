"""Token fields of completions are read and validated."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gymsdk.convert import tokens
from gymsdk.errors import Failed
from gymsdk.types import Item

MESSAGE = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.5, -1]}


def chances(*words: str) -> Item:
    return {"content": [{"token": word, "logprob": chance} for word, chance in zip(words, (-0.5, -1), strict=False)]}


def completion(message: Item | None = None, choice: Item | None = None, **fields: Any) -> Item:
    return {"choices": [{"message": {"content": "x"} | (message or {})} | (choice or {})]} | fields


SPELLED = {"logprobs": chances("token_id:3", "token_id:4")}
BESIDE = {"token_ids": [3, 4], "logprobs": chances("a", "b")}


@pytest.mark.parametrize(
    "given",
    [
        completion(MESSAGE),
        completion(MESSAGE, SPELLED),
        completion(None, BESIDE, prompt_token_ids=[1, 2]),
        completion(None, BESIDE | {"prompt_token_ids": [1, 2]}),
        completion(None, BESIDE | SPELLED, prompt_token_ids=[1, 2]),
        completion(None, SPELLED, prompt_token_ids=[1, 2]),
    ],
)
def test_each_source_gives_all_three(given: Item) -> None:
    assert tokens.parse_token_fields(given) == MESSAGE


@pytest.mark.parametrize("choice", [{}, {"logprobs": None}, {"logprobs": chances("a")}, {"token_ids": None}])
def test_where_there_are_no_ids_there_is_nothing(choice: Item) -> None:
    assert tokens.parse_token_fields(completion(None, choice, prompt_token_ids=None)) == {}


def test_an_answer_without_token_fields_has_none() -> None:
    nothing = completion(None, {"token_ids": [], "logprobs": {"content": []}}, prompt_token_ids=[1])
    assert tokens.parse_token_fields(nothing) == dict(zip(MESSAGE, ([1], [], []), strict=True))


def test_routed_experts_are_kept_with_the_token_fields() -> None:
    assert tokens.parse_token_fields(completion(MESSAGE | {"routed_experts": [[7]]}))["routed_experts"] == [[7]]


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (
            completion(MESSAGE, BESIDE | {"token_ids": [3, 5]}),
            "the ids of the message differ from the ids of the choice",
        ),
        (
            completion(None, BESIDE | {"logprobs": chances("token_id:3", "token_id:5")}),
            "token_ids differ from the ids in logprobs",
        ),
        (
            completion(None, {"logprobs": chances("token_id:3", "b")}, prompt_token_ids=[1]),
            "some tokens in logprobs are ids and some are texts",
        ),
        (completion(None, {"logprobs": chances("token_id:3", "4")}, prompt_token_ids=[1]), "1 token ids, but 2 log"),
        (completion({"prompt_token_ids": [1]}), "generation_token_ids is missing"),
        (completion(MESSAGE | {"generation_log_probs": [-0.5]}), "2 token ids, but 1 log-probabilities"),
        (completion(MESSAGE | {"generation_log_probs": [-0.5, None]}), "log-probabilities finite numbers"),
        (completion(MESSAGE | {"generation_log_probs": "no"}), "must be lists"),
        (completion(MESSAGE | {"generation_token_ids": [3, "4"]}), "token ids must be integers"),
        (completion(MESSAGE | {"prompt_token_ids": [1.5]}), "token ids must be integers"),
        (completion(None, BESIDE), "prompt_token_ids is missing"),
        (completion(None, {"token_ids": [3, 4]}, prompt_token_ids=[1]), "2 token ids, but 0 log-probabilities"),
    ],
)
def test_inconsistent_token_fields_are_reported(given: Item, what: str) -> None:
    with pytest.raises(Failed, match=what) as caught:
        tokens.parse_token_fields(given)
    assert caught.value.kind == "model_bad_tokens"


def test_only_the_prompt_may_have_to_be_asked_for() -> None:
    assert tokens.lacks_prompt_ids(completion(None, SPELLED))
    assert not tokens.lacks_prompt_ids(completion(None, SPELLED, prompt_token_ids=[1]))
    assert not tokens.lacks_prompt_ids(completion(MESSAGE))
    assert not tokens.lacks_prompt_ids(completion())


def test_a_long_answer_is_read_in_a_few_passes() -> None:
    content = [{"token": f"token_id:{n}", "logprob": -0.5, "bytes": None, "top_logprobs": []} for n in range(65_536)]
    choice = {"token_ids": list(range(65_536)), "logprobs": {"content": content}}
    started = time.process_time()
    found = tokens.parse_token_fields(completion(None, choice, prompt_token_ids=[1] * 1000))
    assert time.process_time() - started < 1
    assert len(found["generation_log_probs"]) == 65_536
