"""The keys of a request: which the APIs know, which engines know beside them, and which nobody does."""

from __future__ import annotations

import logging
from collections.abc import Collection

from gymsdk.transcript import Item

log = logging.getLogger("gymsdk")

ENGINE = frozenset(
    {
        "add_generation_prompt",
        "allowed_token_ids",
        "bad_words",
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "frequency_penalty",
        "guided_choice",
        "guided_grammar",
        "guided_json",
        "guided_regex",
        "ignore_eos",
        "include_reasoning",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "logprobs",
        "min_p",
        "min_tokens",
        "mm_processor_kwargs",
        "presence_penalty",
        "priority",
        "prompt_logprobs",
        "repetition_penalty",
        "required_prefix_token_ids",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "seed",
        "separate_reasoning",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "structured_outputs",
        "top_k",
        "truncate_prompt_tokens",
    }
)
"""What Chat Completions and the engines that speak it take beside what Responses has a place for."""

RESPONSES = frozenset(
    {
        "background",
        "context_management",
        "conversation",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "model",
        "parallel_tool_calls",
        "previous_response_id",
        "prompt",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "truncation",
        "user",
    }
)
"""What a Responses request may say."""

MOST = 1000
"""Strange keys that are told of: whoever makes them up does not fill the log, or the memory."""

_told: set[tuple[str, str]] = set()


def known(body: Item, keys: Collection[str], *, where: str) -> Item:
    """Give *body* without the keys that are neither among *keys* nor an engine's; of each a log tells once."""
    kept = {key: value for key, value in body.items() if key in keys or key in ENGINE}
    if len(kept) == len(body):
        return body
    for key in body:
        if key not in kept and (where, key) not in _told and len(_told) < MOST:
            _told.add((where, key))
            log.warning(
                "%s has no key %r; it is ignored (metadata.extra_body passes on what an engine takes)", where, key
            )
    return kept
