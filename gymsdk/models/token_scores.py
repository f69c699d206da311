"""Let an engine compute the log-probabilities of given token ids, for checks of the values that it reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymsdk.convert import tokens as token_fields
from gymsdk.models.token_calls import UNSUPPORTED_STATUSES, EngineRefusal, TokenCall
from gymsdk.types import Item


async def score(call: TokenCall, ids: Sequence[int]) -> list[float] | None:
    """Return the log-probabilities of *ids* from the second on, each after all ids before it.

    Args:
        call: A call of the model.
        ids: The ids, of a prompt and its generation together.

    Returns:
        The log-probabilities; `None` if the engine gives no log-probabilities of prompts.

    Raises:
        Failed: The engine scored other ids.
    """
    body = {"model": call.body.get("model"), "prompt": [*ids], "max_tokens": 1, "temperature": 1.0}
    # With 0, vLLM returns the values of the ids of the prompt only, and no alternatives.
    completion = await post_or_none(call, "completions", body | {"prompt_logprobs": 0, "add_special_tokens": False})
    entries = _get(_get_first(_get(completion, "choices")), "prompt_logprobs")
    if isinstance(entries, list):
        return _read([_find_value(entry, token) for entry, token in zip(entries, ids, strict=False)], entries, ids)
    sampling = {"max_new_tokens": 1, "temperature": 1.0}
    # Without a start, SGLang leaves out the prompt.
    sglang_body = {"input_ids": [*ids], "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    generated = await post_or_none(call, "/generate", sglang_body)
    entries = _get(_get(generated, "meta_info"), "input_token_logprobs")
    if isinstance(entries, list):
        values = [entry[0] if entry[1] == token else None for entry, token in zip(entries, ids, strict=False)]
        return _read(values, entries, ids)
    return None


async def post_or_none(call: TokenCall, path: str, body: Item) -> Any:
    """Return the JSON answer, `None` if the engine does not support the request."""
    try:
        return await call.post(path, body)
    except EngineRefusal as error:
        if error.answer.status in UNSUPPORTED_STATUSES:
            return None
        raise


def _read(values: list[float | None], entries: list[Any], ids: Sequence[int]) -> list[float]:
    kept = [value for value in values[1:] if value is not None]
    if len(entries) != len(ids) or len(kept) != len(ids) - 1:
        raise token_fields.build_bad_tokens_error("the engine scored other ids than it was sent")
    return kept


def _find_value(entry: Any, token: int) -> float | None:
    """Return the log-probability of *token* in vLLM's *entry* of one position."""
    value: float | None = _get(_get(entry, str(token)), "logprob")
    return value


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _get_first(values: Any) -> Any:
    return values[0] if isinstance(values, list) and values else None
