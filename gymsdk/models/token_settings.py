"""The effect of the fields of a request on token ids and log-probabilities: a field is delivered, marked or refused.

A trainer computes importance ratios from the log-probabilities that the engine reports, and trains on the ids that it
returns. A field that changes the distribution that is sampled is marked, and a field that changes the prompt, or asks
for something that an answer with token ids does not have, is refused.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from gymsdk.convert import tokens as token_fields
from gymsdk.convert.chat import LOGPROBS_INCLUDE
from gymsdk.errors import Failed
from gymsdk.responses import TOKEN_FIELDS, TokenInterface
from gymsdk.types import Item

_NO_PREFILL = (
    "a turn of the policy cannot begin with given text (a prefill), because the policy did not sample its tokens"
)
_CHANGES_PROMPT = "it would change the prompt without a trace in the conversation"
_ONE_ANSWER = "a call returns the tokens of one sampled answer"
_NOT_RETURNED = "an answer with token ids returns the log-probabilities of the sampled tokens only"

REFUSED_FIELDS = MappingProxyType(
    {
        "add_special_tokens": _CHANGES_PROMPT,
        "beam_width": _ONE_ANSWER,
        "best_of": _ONE_ANSWER,
        "continue_final_message": _NO_PREFILL,
        "echo": "the ids of the prompt are returned in any case",
        "input_embeds": _CHANGES_PROMPT,
        "input_ids": _CHANGES_PROMPT,
        "logprob_token_ids": _NOT_RETURNED,
        "prompt": _CHANGES_PROMPT,
        "prompt_embeds": _CHANGES_PROMPT,
        "prompt_logprobs": _NOT_RETURNED,
        "suffix": _CHANGES_PROMPT,
        "top_logprobs": _NOT_RETURNED,
        "truncate_prompt_tokens": _CHANGES_PROMPT,
        "use_beam_search": _ONE_ANSWER,
    }
)
"""The fields that are refused with token ids unless they have no effect, and why."""

EFFECTIVE_ZEROS = frozenset({"prompt_logprobs", "truncate_prompt_tokens"})
"""The refused fields that have an effect if they are 0: the log-probabilities of the prompt, or an empty prompt."""

REFUSED_IF_FALSE = MappingProxyType(
    {"add_generation_prompt": _NO_PREFILL, "detokenize": "without text there is no message"}
)
"""The fields that are refused with token ids if they are false."""

NEUTRAL_VALUES: MappingProxyType[str, tuple[Any, ...]] = MappingProxyType(
    {
        "allowed_token_ids": ([],),
        "bad_words": ([],),
        "custom_logit_processor": (),
        "frequency_penalty": (0,),
        "length_penalty": (1,),
        "logit_bias": ({},),
        "logits_processors": ([],),
        "min_new_tokens": (0,),
        "min_p": (0,),
        "min_tokens": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "temperature": (1,),
        "thinking_token_budget": (),
        "top_a": (0,),
        "top_k": (-1, 0),
        "top_p": (1,),
        "typical_p": (1,),
        "vllm_xargs": ({},),
    }
)
"""The fields that change the distribution that is sampled, with the values that do not."""

DELIVERED_FIELDS = frozenset(
    {
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "documents",
        "ignore_eos",
        "include_reasoning",
        "include_stop_str_in_output",
        "logprobs",
        "mm_processor_kwargs",
        "priority",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "seed",
        "separate_reasoning",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
    }
)
"""The fields that work as without token ids, or that gymsdk sets itself."""

PREFIX_FIELD = "required_prefix_token_ids"
"""The field with which NeMo RL's server takes the ids of a conversation. Other engines ignore it."""


def check_fields(body: Item) -> None:
    """Raise `Failed` if a field of a chat request has no meaning with token ids, except fields that gymsdk adds."""
    for key, reason in REFUSED_FIELDS.items():
        value = body.get(key)
        is_set = value is not None and value is not False if key in EFFECTIVE_ZEROS else bool(value)
        if is_set and not (key == "best_of" and value == 1):
            raise _build_refusal(key, reason)
    for key, reason in REFUSED_IF_FALSE.items():
        if body.get(key) is False:
            raise _build_refusal(key, reason)


def check_prefix(body: Item, interface: TokenInterface) -> None:
    """Raise `Failed` if a request has NeMo RL's field for the ids of the conversation, and the engine ignores it."""
    if body.get(PREFIX_FIELD) is not None and interface not in {"nemo-rl", "chat"}:
        raise _build_refusal(PREFIX_FIELD, "the ids of earlier turns come from the conversation")


def get_sampling_settings(body: Item) -> Item:
    """Return the fields of a request because of which the engine samples from another distribution."""
    return {
        key: body[key]
        for key, neutral in NEUTRAL_VALUES.items()
        if body.get(key) is not None and body[key] not in neutral
    }


def add_logprobs(completion: Item, request: Item) -> None:
    """Add the log-probabilities to a *completion* without them, if the *request* asks for those of the text."""
    choice = completion["choices"][0]
    is_wanted = request.get("logprobs") or LOGPROBS_INCLUDE in (request.get("include") or ())
    if not is_wanted or choice.get("logprobs") is not None or TOKEN_FIELDS[1] not in choice["message"]:
        return
    pairs = zip(choice["message"][TOKEN_FIELDS[1]], choice["message"][TOKEN_FIELDS[2]], strict=True)
    choice["logprobs"] = {
        "content": [
            {"token": f"{token_fields.TOKEN_ID_PREFIX}{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in pairs
        ]
    }


def _build_refusal(key: str, reason: str) -> Failed:
    message = f"{key!r} cannot be used with token ids: {reason}; leave it out, or leave out --token-ids"
    return Failed(message, kind="model_bad_request")
