"""Read and validate the token ids and log-probabilities of chat completions and Responses.

The token fields are `prompt_token_ids`, `generation_token_ids` and `generation_log_probs`. A turn has all three or
none of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import orjson

from gymsdk.errors import Failed
from gymsdk.responses import (
    BROKEN_FIELD,
    CONSTRAINED_FIELD,
    DIGEST_FIELD,
    SAMPLING_FIELD,
    TOKEN_FIELDS,
    WEIGHT_VERSION_FIELD,
    WEIGHT_VERSIONS_FIELD,
)
from gymsdk.types import Item

TOKEN_ID_PREFIX = "token_id:"  # noqa: S105 - a marker in answers, not a secret
"""The prefix of an id that vLLM returns in place of a token's text."""

TOKEN_REQUEST_FIELDS = MappingProxyType(
    {"logprobs": True, "top_logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
)
"""The fields of a chat request that ask an engine for token ids and log-probabilities."""

PROMPT_FIELDS = (
    "model",
    "messages",
    "tools",
    "add_generation_prompt",
    "chat_template",
    "chat_template_kwargs",
    "continue_final_message",
    "mm_processor_kwargs",
    "required_prefix_token_ids",
)
"""The fields of a chat request that determine the prompt; requests to `/tokenize` have only these."""

ROUTED_EXPERTS = "routed_experts"
"""A further field that the inference servers of some trainers return."""

ENGINE_FIELDS = (*TOKEN_FIELDS, ROUTED_EXPERTS)
"""The fields of a turn's tokens that inference servers return and take."""

CARRIED_FIELDS = (
    *ENGINE_FIELDS,
    BROKEN_FIELD,
    CONSTRAINED_FIELD,
    SAMPLING_FIELD,
    DIGEST_FIELD,
    WEIGHT_VERSION_FIELD,
    WEIGHT_VERSIONS_FIELD,
)
"""The fields that only one item of a turn has, with the values of the whole turn."""


def get_carried_fields(items: Sequence[Item], fields: Sequence[str] = CARRIED_FIELDS) -> Item:
    """Return those *fields* of a turn that the last of its *items* with token ids has."""
    carrier = next((item for item in reversed(items) if item.get(TOKEN_FIELDS[1]) is not None), {})
    return {key: carrier[key] for key in fields if carrier.get(key) is not None}


def drop_token_fields(items: Sequence[Item]) -> list[Item]:
    """Return *items* without token ids, log-probabilities and the digest that belongs to them."""
    dropped = {*ENGINE_FIELDS, DIGEST_FIELD}
    return [{key: item[key] for key in item if key not in dropped} for item in items]


def parse_weight_versions(answer: Item) -> Item:
    """Return the fields with the versions of the weights that sampled the tokens of a chat completion.

    vLLM returns spans of tokens in the choice (`vllm.outputs.WeightVersionSpan`), SGLang one version in `metadata`, and
    the generation servers of trainers one version beside the choices.

    Raises:
        Failed: The spans do not follow each other.
    """
    metadata = answer.get("metadata")
    version = answer.get("weight_version", metadata.get("weight_version") if isinstance(metadata, dict) else None)
    choices = answer.get("choices")
    spans = choices[0].get(WEIGHT_VERSIONS_FIELD) if isinstance(choices, list) and choices else None
    if not spans:
        return {WEIGHT_VERSION_FIELD: version} if isinstance(version, (int, str)) else {}
    try:
        ends = [0, *(span["end"] for span in spans)]
        is_valid = all(
            isinstance(span["version"], (int, str)) and span["start"] == end < span["end"]
            for span, end in zip(spans, ends, strict=False)
        )
    except (LookupError, TypeError):
        is_valid = False
    if not is_valid:
        raise build_bad_tokens_error("the spans in 'weight_versions' do not follow each other")
    return {WEIGHT_VERSION_FIELD: spans[-1]["version"], WEIGHT_VERSIONS_FIELD: spans}


def keep_last_ids(items: Sequence[Item]) -> list[Item]:
    """Return *items* or messages with the token fields of the last turn only, whose prompt contains all others.

    Otherwise a request would contain the ids of the first turns once for each later turn.
    """
    ids = TOKEN_FIELDS[1]
    carriers = [index for index, item in enumerate(items) if item.get(ids) is not None]
    if len(carriers) <= 1:
        return [*items]
    earlier = frozenset(carriers[:-1])
    return [
        {key: value for key, value in item.items() if key not in ENGINE_FIELDS} if index in earlier else item
        for index, item in enumerate(items)
    ]


def wants_tokens(body: Item) -> bool:
    """Whether a chat request asks for both token ids and log-probabilities."""
    return bool(body.get("logprobs")) and bool(body.get("return_token_ids") or body.get("return_tokens_as_token_ids"))


def parse_token_fields(completion: Item) -> Item:
    """Return the token fields of a chat *completion*: all three, or none.

    Fields of the message take precedence over fields of the choice, and these over ids in place of the tokens' texts.

    Raises:
        Failed: The sources disagree, a field is missing, or the numbers of ids and log-probabilities differ.
    """
    choice = completion["choices"][0]
    message, ids = choice["message"], _get_generated_ids(choice)
    fields = {key: message[key] for key in TOKEN_FIELDS if message.get(key) is not None}
    if fields:
        if ids is not None and ids != fields.get(TOKEN_FIELDS[1]):
            raise build_bad_tokens_error("the ids of the message differ from the ids of the choice")
        experts = message.get(ROUTED_EXPERTS)
        return _validate(fields) | ({ROUTED_EXPERTS: experts} if experts is not None else {})
    if ids is None:
        return {}
    logprobs = [entry["logprob"] for entry in _get_logprobs(choice)]
    values = (_get_prompt_ids(completion), ids, logprobs)
    return _validate({key: value for key, value in zip(TOKEN_FIELDS, values, strict=True) if value is not None})


def check_token_fields(item: Item) -> None:
    """Raise an error if the token fields of an output *item* are incomplete or inconsistent.

    Raises:
        Failed: The item has some of the token fields, or fields that do not match.
    """
    fields = {key: item[key] for key in TOKEN_FIELDS if item.get(key) is not None}
    if fields:
        _validate(fields)


def check_ids(ids: object, source: str) -> list[int]:
    """Return *ids*, which *source* returned.

    Raises:
        Failed: They are no list.
    """
    if not isinstance(ids, list):
        raise build_bad_tokens_error(f"{source} returned no list of tokens")
    return ids


def build_bad_tokens_error(reason: str) -> Failed:
    """Return the error for an answer with token fields that cannot be used for training."""
    return Failed(f"the token fields of the model's answer are invalid: {reason}", kind="model_bad_tokens")


def _get_prompt_ids(completion: Item) -> list[int] | None:
    # SGLang returns the ids of the prompt in the choice.
    ids: list[int] | None = completion.get("prompt_token_ids")
    return completion["choices"][0].get("prompt_token_ids") if ids is None else ids


def _get_generated_ids(choice: Item) -> list[int] | None:
    # SGLang calls them response_token_ids.
    ids: list[int] | None = choice.get("token_ids", choice.get("response_token_ids"))
    ids_as_text = parse_ids_as_text([entry.get("token") for entry in _get_logprobs(choice)])
    if ids is not None and ids_as_text is not None and ids != ids_as_text:
        raise build_bad_tokens_error("token_ids differ from the ids in logprobs")
    return ids_as_text if ids is None else ids


def _get_logprobs(choice: Item) -> list[Item]:
    return (choice.get("logprobs") or {}).get("content") or []


def parse_ids_as_text(tokens: Sequence[Any]) -> list[int] | None:
    """Return the ids that an engine wrote in place of the texts of *tokens*, `None` if it wrote texts.

    Raises:
        Failed: Some of them are ids and some are texts.
    """
    if not tokens or not str(tokens[0]).startswith(TOKEN_ID_PREFIX):
        return None
    # Parsing all ids as one JSON list is much faster than parsing each id separately.
    joined = "".join(map(str, tokens))
    try:
        ids: list[int] = orjson.loads(f"[{joined[len(TOKEN_ID_PREFIX) :].replace(TOKEN_ID_PREFIX, ',')}]")
    except orjson.JSONDecodeError:
        raise build_bad_tokens_error("some tokens in logprobs are ids and some are texts") from None
    return ids


def _validate(fields: Item) -> Item:
    """Return *fields*; raises `Failed` if a token field is missing, has a wrong type, or does not match another."""
    if missing := [key for key in TOKEN_FIELDS if key not in fields]:
        raise build_bad_tokens_error(f"{missing[0]} is missing")
    prompt, ids, logprobs = (fields[key] for key in TOKEN_FIELDS)
    if not all(isinstance(value, list) for value in fields.values()):
        raise build_bad_tokens_error("they must be lists")
    if len(ids) != len(logprobs):
        raise build_bad_tokens_error(f"{len(ids)} token ids, but {len(logprobs)} log-probabilities")
    if not (_are_integers(ids) and _are_integers(prompt) and _are_numbers(logprobs)):
        raise build_bad_tokens_error("token ids must be integers, and log-probabilities finite numbers")
    return fields


def _are_integers(values: list[object]) -> bool:
    # `sum` runs in C, and its result is an integer only if all values are integers.
    return isinstance(_sum(values), int)


def _are_numbers(values: list[object]) -> bool:
    total = _sum(values)
    return total is not None and math.isfinite(total)


def _sum(values: list[object]) -> float | None:
    """Return the sum of *values*, `None` if they are not all numbers."""
    try:
        return sum(values)  # type: ignore[arg-type]  # the handler below catches other types
    except TypeError:
        return None
