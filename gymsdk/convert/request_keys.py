"""List the keys of requests: those that reach the engine, and their effect on token ids and log-probabilities.

A key of a request is sent to the engine, ignored, or refused, and some keys come only from the configuration of a
model. A trainer computes importance ratios from the log-probabilities that the engine reports, and trains on the ids
that it returns. With token ids, a key that changes the distribution that is sampled or constrains the decoding is
therefore marked, and a key that changes the prompt, or asks for something that an answer with token ids does not have,
is refused.

`docs/models.md` and `docs/tokens.md` describe the table; `tests/servers/test_request_keys.py` compares them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from gymsdk.errors import Failed
from gymsdk.once import OnceLogger
from gymsdk.types import Item

log = logging.getLogger("gymsdk")

KeyUse: TypeAlias = Literal["translated", "engine", "ignored", "refused", "configuration"]
"""What becomes of a key.

`translated`: Chat Completions has another name or form for it. `engine`: the engine gets it. `ignored`: it is about
identity, caching or telemetry, and has no effect on the answer; an engine gets it if its API defines it. `refused`: it
changes the answer, and engines with Chat Completions do not have it. `configuration`: it reaches into the engine, so
only the configuration of a model may set it.
"""

TokenEffect: TypeAlias = Literal["delivered", "marked", "constrains", "refused", "refused if false", "prefix"]
"""The effect of a key with token ids.

`marked`: it changes the distribution that is sampled. `constrains`: it constrains the decoding. `prefix`: NeMo RL's
server takes the ids of a conversation with it, and other engines ignore it.
"""


@dataclass(frozen=True, slots=True)
class RequestKey:
    """A key of a request.

    Attributes:
        name: The key.
        use: What becomes of it.
        effect: Its effect with token ids.
        neutral: The values without an effect.
        reason: Why the key is refused, with token ids or always.
        is_zero_effective: Whether 0 differs from leaving the key out.
        is_false_effective: Whether false differs from leaving the key out.
        is_empty_effective: Whether an empty object differs from leaving the key out.
    """

    name: str
    use: KeyUse = "engine"
    effect: TokenEffect = "delivered"
    neutral: tuple[Any, ...] = ()
    reason: str = ""
    is_zero_effective: bool = False
    is_false_effective: bool = False
    is_empty_effective: bool = False

    def has_effect(self, value: object) -> bool:
        """Whether the *value* of a refused or constraining key differs from leaving the key out."""
        if isinstance(value, bool) and not value:
            return self.is_false_effective
        if value == {}:
            return self.is_empty_effective
        return (self.is_zero_effective and value == 0) or (bool(value) and value not in self.neutral)


NO_PREFILL = (
    "a turn of the policy cannot begin with given text (a prefill), because the policy did not sample its tokens"
)
_CHANGES_PROMPT = "it would change the prompt without a trace in the conversation"
_ONE_ANSWER = "a call returns the tokens of one sampled answer"
_NOT_RETURNED = "an answer with token ids returns the log-probabilities of the sampled tokens only"

_NO_STORE = "a Chat Completions server stores no conversations and prompts; send the whole conversation"
_TEXT_ONLY = "answers are text and tool calls"
_NO_HOSTED_TOOLS = "neither gymsdk nor the engine runs tools; send functions as 'tools'"
_REPLACED_PROMPT = "it would replace the conversation of the request"


def _build_keys(
    names: Iterable[str], use: KeyUse = "engine", effect: TokenEffect = "delivered", reason: str = ""
) -> Iterator[RequestKey]:
    return (RequestKey(name, use, effect, reason=reason) for name in names)


def _build_marked_keys(neutral: Mapping[str, tuple[Any, ...]], use: KeyUse = "engine") -> Iterator[RequestKey]:
    return (RequestKey(name, use, "marked", values) for name, values in neutral.items())


REQUEST_KEYS: Mapping[str, RequestKey] = MappingProxyType(
    {
        key.name: key
        for key in (
            *_build_keys(
                (
                    "input",
                    "instructions",
                    "max_output_tokens",
                    "metadata",
                    "parallel_tool_calls",
                    "reasoning",
                    "text",
                    "tool_choice",
                    "tools",
                ),
                "translated",
            ),
            *_build_keys(
                (
                    "cache_salt",
                    "chat_template",
                    "chat_template_kwargs",
                    "dry_allowed_length",
                    "dry_base",
                    "dry_penalty_last_n",
                    "dry_sequence_breakers",
                    "dynatemp_exponent",
                    "ignore_eos",
                    "include_reasoning",
                    "include_stop_str_in_output",
                    "logprobs",
                    "max_completion_tokens",
                    "max_tokens",
                    "media_io_kwargs",
                    "mirostat_eta",
                    "mirostat_tau",
                    "mm_processor_kwargs",
                    "model",
                    "n",
                    "no_stop_trim",
                    "priority",
                    "reasoning_effort",
                    "repeat_last_n",
                    "repetition_detection",
                    "return_token_ids",
                    "return_tokens_as_token_ids",
                    "seed",
                    "separate_reasoning",
                    "service_tier",
                    "skip_special_tokens",
                    "spaces_between_special_tokens",
                    "stop",
                    "stop_regex",
                    "stop_token_ids",
                    "stream_reasoning",
                    "thinking",
                    "verbosity",
                    "xtc_threshold",
                )
            ),
            *_build_marked_keys(
                {
                    "allowed_token_ids": ([],),
                    "bad_words": ([],),
                    "dry_multiplier": (0,),
                    "dynatemp_range": (0,),
                    "frequency_penalty": (0,),
                    "length_penalty": (1,),
                    "logit_bias": ({},),
                    "min_new_tokens": (0,),
                    "min_p": (0,),
                    "min_tokens": (0,),
                    "mirostat": (0,),
                    "no_repeat_ngram_size": (0,),
                    "presence_penalty": (0,),
                    "repeat_penalty": (1,),
                    "repetition_penalty": (1,),
                    "samplers": (),
                    "temperature": (1,),
                    "thinking_token_budget": (),
                    "top_a": (0,),
                    "top_k": (-1, 0),
                    "top_n_sigma": (-1,),
                    "top_p": (1,),
                    "typical_p": (1,),
                    "watermarking": (False,),
                    "xtc_probability": (0,),
                }
            ),
            *_build_keys(
                (
                    "ebnf",
                    "format",
                    "grammar",
                    "guided_choice",
                    "guided_decoding",
                    "guided_grammar",
                    "guided_json",
                    "guided_json_object",
                    "guided_regex",
                    "json_schema",
                    "regex",
                    "structural_tag",
                    "structured_outputs",
                ),
                effect="constrains",
            ),
            RequestKey("response_format", effect="constrains", neutral=({"type": "text"},)),
            *_build_keys(("guided_decoding_backend", "guided_whitespace_pattern")),
            *_build_keys(
                ("add_special_tokens", "documents", "truncation_side"),
                effect="refused",
                reason=_CHANGES_PROMPT,
            ),
            *_build_keys(("beam_width", "use_beam_search"), effect="refused", reason=_ONE_ANSWER),
            *_build_keys(("logprob_token_ids", "top_logprobs"), effect="refused", reason=_NOT_RETURNED),
            # An empty prompt, and the log-probabilities of the prompt's own tokens.
            RequestKey("truncate_prompt_tokens", effect="refused", reason=_CHANGES_PROMPT, is_zero_effective=True),
            RequestKey("prompt_logprobs", effect="refused", reason=_NOT_RETURNED, is_zero_effective=True),
            RequestKey("continue_final_message", effect="refused", reason=NO_PREFILL),
            RequestKey("echo", effect="refused", reason="the ids of the prompt are returned in any case"),
            RequestKey("add_generation_prompt", effect="refused if false", reason=NO_PREFILL),
            RequestKey("detokenize", effect="refused if false", reason="without text there is no message"),
            RequestKey("required_prefix_token_ids", effect="prefix"),
            *_build_keys(
                (
                    "anthropic_beta",
                    "betas",
                    "cache_control",
                    "client_metadata",
                    "context_management",
                    "include",
                    "inference_geo",
                    "max_tool_calls",
                    "output_config",
                    "prediction",
                    "prompt_cache_key",
                    "prompt_cache_options",
                    "prompt_cache_retention",
                    "request_id",
                    "safety_identifier",
                    "session_id",
                    "store",
                    "stream",
                    "stream_options",
                    "user",
                ),
                "ignored",
            ),
            *_build_keys(("conversation", "previous_response_id"), "refused", "refused", _NO_STORE),
            *_build_keys(("audio",), "refused", "refused", _TEXT_ONLY),
            RequestKey("modalities", "refused", "refused", (["text"],), _TEXT_ONLY),
            *_build_keys(
                ("container", "function_call", "functions", "mcp_servers", "plugins"),
                "refused",
                "refused",
                _NO_HOSTED_TOOLS,
            ),
            RequestKey("web_search_options", "refused", "refused", reason=_NO_HOSTED_TOOLS, is_empty_effective=True),
            *_build_keys(("background",), "refused", "refused", "a request waits for its answer"),
            RequestKey("best_of", "refused", "refused", (1,), _ONE_ANSWER),
            RequestKey(
                "enable_thinking",
                "refused",
                "refused",
                reason="chat templates read it in 'chat_template_kwargs'",
                is_false_effective=True,
            ),
            *_build_keys(
                ("input_embeds", "input_ids", "prompt", "prompt_embeds", "suffix"),
                "refused",
                "refused",
                _REPLACED_PROMPT,
            ),
            RequestKey(
                "truncation",
                "refused",
                "refused",
                ("disabled",),
                "a Chat Completions server leaves no items out of a conversation",
            ),
            *_build_keys(
                (
                    "bootstrap_host",
                    "bootstrap_port",
                    "bootstrap_room",
                    "data_parallel_rank",
                    "disagg_prefill_dp_rank",
                    "disaggregated_params",
                    "ec_transfer_params",
                    "extra_body",
                    "kv_transfer_params",
                    "lora_path",
                    "lora_request",
                    "routed_dp_rank",
                    "session_params",
                ),
                "configuration",
            ),
            *_build_marked_keys(
                {
                    "custom_logit_processor": (),
                    "custom_params": ({},),
                    "logits_processors": ([],),
                    "nvext": ({},),
                    "vllm_xargs": ({},),
                },
                "configuration",
            ),
        )
    }
)
"""The known keys of requests by name."""

GUIDED_PREFIX = "guided_"
"""The prefix of the keys with which vLLM before 0.12, TensorRT-LLM and others constrain the decoding."""

TRANSLATED_KEYS = frozenset(key.name for key in REQUEST_KEYS.values() if key.use == "translated")
"""The keys of a Responses request that Chat Completions has under another name or in another form."""

RESPONSES_KEYS = TRANSLATED_KEYS | {
    "context_management",
    "conversation",
    "include",
    "max_tool_calls",
    "model",
    "previous_response_id",
    "prompt",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream",
    "stream_options",
    "temperature",
    "top_logprobs",
    "top_p",
    "truncation",
    "user",
}
"""The keys that the Responses API defines. A server with this API gets all of them."""

CHAT_KEYS = frozenset({"prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user"})
"""The ignored keys that Chat Completions defines too, in the same form. A server with this API gets them."""

MAX_REPORTED_KEYS = 1000
"""The number of unknown keys to log, so that clients with random keys do not fill the log or the memory."""

_once = OnceLogger(log, MAX_REPORTED_KEYS)


def get_key(name: str) -> RequestKey | None:
    """Return the key called *name*, `None` if it is unknown."""
    key = REQUEST_KEYS.get(name)
    if key is None and name.startswith(GUIDED_PREFIX):
        return RequestKey(name, effect="constrains")
    return key


def select_keys(request: Item, api_keys: AbstractSet[str], *, passes_unknown: bool) -> Item:
    """Return the keys of *request* that the engine gets, without null values and the keys that are translated.

    Args:
        request: The Responses request.
        api_keys: The keys that the API of the engine defines.
        passes_unknown: Whether the engine gets unknown keys, too; else each of them is logged once.

    Raises:
        Failed: A key changes the answer and the engine does not have it, or only the configuration may set it.
    """
    selected: Item = {}
    for name, value in request.items():
        key = get_key(name)
        if value is None:
            continue
        if name in api_keys or (key is not None and key.use == "engine") or (key is None and passes_unknown):
            selected[name] = value
        elif key is None:
            _report_unknown_key(name)
        elif key.use == "refused" and key.has_effect(value):
            raise _build_refusal(key)
        else:
            check_configuration_key(name)
    return selected


def _build_refusal(key: RequestKey) -> Failed:
    in_responses = ", or use a server that supports the Responses API (--api responses)"
    advice = f"leave it out{in_responses if key.name in RESPONSES_KEYS else ''}"
    return build_bad_key_error(key.name, f"the engine has no {key.name!r}: {key.reason}; {advice}")


def check_configuration_key(name: str) -> None:
    """Raise `Failed` if only the configuration of a model may set the key *name*."""
    if (key := get_key(name)) is not None and key.use == "configuration":
        advice = (
            "send its keys in the request itself, or in metadata.extra_body"
            if name == "extra_body"
            else "leave it out of the request, and set it in the extra_body of the model"
        )
        message = f"{name!r} comes only from the configuration of the model, because it reaches into the engine"
        raise build_bad_key_error(name, f"{message}; {advice}")


def build_bad_key_error(name: str, message: str) -> Failed:
    """Return the failure of a request because of its key *name*."""
    error = Failed(message, kind="model_bad_request")
    error.param = name
    return error


def drop_foreign_keys(body: Item, keys: AbstractSet[str], *, where: str) -> Item:
    """Return the *body* of a request without the keys that only Responses has and gymsdk would read as such.

    Args:
        body: The body of a request.
        keys: The keys that the API of the request translates.
        where: The API, for the log message.
    """
    foreign = body.keys() & (TRANSLATED_KEYS - keys)
    for name in sorted(foreign):
        _report_unknown_key(name, f"{where} has no key {name!r}; it is ignored")
    return {name: value for name, value in body.items() if name not in foreign} if foreign else body


def _report_unknown_key(name: str, message: str = "") -> None:
    message = message or (
        f"a request has the key {name!r}, which gymsdk does not know; it is ignored (use metadata.extra_body to send it"
        " to an engine)"
    )
    _once.warn(message)
