"""Recognize the errors of model servers about the context: the prompt is too long, or the output limit too large.

Each server has another message for it, often with the numbers. The patterns come from the sources and the published
errors of vLLM, SGLang, TGI, TensorRT-LLM, llama.cpp, Ollama, OpenAI, Azure, Anthropic, Gemini, Bedrock, xAI, Cohere,
Mistral, Groq, DeepSeek, Kimi, Qwen and OpenRouter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gymsdk.types import Item

REFUSED_STATUSES = frozenset({400, 413, 422})
"""The statuses with which servers refuse a prompt or a limit."""

FIRST_ERROR_STATUS = 400


@dataclass(frozen=True, slots=True)
class LimitRefusal:
    """The refusal of a request because of the model's context.

    Attributes:
        is_prompt: Whether the prompt alone is too long; otherwise the output limit is too large.
        remaining_tokens: The largest output limit that fits beside the prompt, if the server says it.
        message: The server's message.
    """

    is_prompt: bool
    message: str
    remaining_tokens: int | None = None


# Of limited length, so that a message that quotes a long list of numbers takes no quadratic time.
_N = r"(\d[\d,_]{0,20})(?:\.0)?"

_PROMPT_MESSAGE = re.compile(
    r"context.?(length|window|size|limit)|maximum (model|allowed) length|prompt (is )?too long"
    r"|exceeds? (the )?(max_model_len|max length|maximum (input|prompt) length)|maximum prompt length"
    r"|input is too long|input token count|(number of|many) input tokens|input tokens exceed"
    r"|request: (#/(inputText|prompt): )?expected maxLength: \d+, actual"
    r"|inputs?` must have less than|sum of prompt length"
    r"|too many tokens: (size limit|total number|minimal context|multi-hop)|exceeded model token limit"
    r"|range of input length|prompt token count of \d+ exceeds|reduce the length of the (messages|prompt|input)"
    r"|(max_tokens must be at least 1, got|default_max_tokens \() ?(-|0)",
    re.IGNORECASE,
)

# The error type that llama.cpp reports, with any status.
_LLAMA_CPP_OVERFLOW_TYPE = "exceed_context_size_error"

# Servers that validate requests with pydantic quote the request after these words.
_QUOTED_REQUEST = re.compile(r"""['"]input['"]\s*:|input_value\s*=""")

_CONTEXT_SIZE = re.compile(
    rf"maximum context length (?:is|of) {_N}|context limit: \d+ \+ \d+ > {_N}|max_(?:seq_len|num_tokens) \({_N}\)"
    rf"|`max_new_tokens` must be <= {_N}\. Given: \d+ `inputs`",
    re.IGNORECASE,
)

_PROMPT_SIZE = re.compile(
    rf"has {_N} input tokens|{_N} tokens from the input|{_N} (?:tokens )?in the messages|{_N} of text input"
    rf"|context limit: {_N} \+|Given: {_N} `inputs` tokens|prompt length \({_N}\)|contains {_N} input tokens",
    re.IGNORECASE,
)

_OUTPUT_LIMIT = re.compile(
    rf"tokens'? is too large: {_N}|requested {_N} output tokens|{_N} (?:tokens for|in) the (?:completion|output)"
    rf"|context limit: \d+ \+ {_N}|and {_N} `max_new_tokens`|max_tokens \({_N}\)",
    re.IGNORECASE,
)

# All requested tokens: the prompt may consist of more parts than the text, such as the definitions of tools.
_TOTAL_SIZE = re.compile(rf"requested (?:about |a total of )?{_N} tokens", re.IGNORECASE)

# vLLM counts the tokens, or only the characters, of a prompt up to the place where the limit no longer fits.
_COUNTED_IN_PART = re.compile(r"at least|resulting in a maximum input length|upper bound for", re.IGNORECASE)

# Limits of the output alone, whatever the prompt.
_OUTPUT_CAP = re.compile(
    rf"supports at most {_N} (?:completion|output) tokens|tokens: \d+ > {_N}, which is the maximum"
    rf"|max.?(?:new_|completion_|output_)?tokens`? must be (?:less than or equal to|<=|at most) `?{_N}"
    r"(?!\d*\. Given: \d+ `)"
    rf"|tokens you requested exceeds the model limit of {_N}"
    rf"|range of max_(?:completion_)?tokens (?:is|should be) \[1, {_N}\]"
    rf"|maxOutputTokens.{{0,200}} range is from 1 \(inclusive\) to {_N}(?P<exclusive> \(exclusive\))?",
    re.IGNORECASE,
)

# Such a server also refuses a request that fills the context exactly.
_NEEDS_ONE_MORE = re.compile(r"Requested token count exceeds", re.IGNORECASE)


def find_limit_refusal(status: int, body: bytes) -> LimitRefusal | None:
    """Return why a server refused a request, if it did because of the model's context; else `None`."""
    if status < FIRST_ERROR_STATUS:
        return None
    error = _parse_error(body)
    if error is None:
        return None
    texts = [*_iter_error_texts(error)]
    if status not in REFUSED_STATUSES:
        is_llama_cpp = _get_error_type(error) == _LLAMA_CPP_OVERFLOW_TYPE
        return LimitRefusal(is_prompt=True, message=next(iter(texts), "")) if is_llama_cpp else None
    return next(filter(None, (*map(_read_limit, texts), *map(_find_prompt_refusal, texts))), None)


def is_context_overflow(status: int, body: bytes) -> bool:
    """Return whether a server rejected a request because its prompt does not fit the model's context."""
    refusal = find_limit_refusal(status, body)
    return refusal is not None and refusal.is_prompt


def _find_prompt_refusal(text: str) -> LimitRefusal | None:
    return LimitRefusal(is_prompt=True, message=text) if _PROMPT_MESSAGE.search(text) else None


def _read_limit(text: str) -> LimitRefusal | None:
    """Return the refusal in a *text* that names an output limit; `None` if the limit need not be at fault."""
    if cap := _OUTPUT_CAP.search(text):
        remaining_tokens = _parse_number(cap.groups()) - bool(cap["exclusive"])
        return LimitRefusal(is_prompt=False, message=text, remaining_tokens=remaining_tokens)
    # vLLM calls a missing limit one of 0 tokens.
    if not (limit := _find_number(_OUTPUT_LIMIT, text)):
        return None
    context, prompt = _find_number(_CONTEXT_SIZE, text), _find_prompt_size(text, limit)
    if context is not None and prompt is not None:
        remaining_tokens = context - prompt - bool(_NEEDS_ONE_MORE.search(text))
        return LimitRefusal(is_prompt=remaining_tokens <= 0, message=text, remaining_tokens=max(remaining_tokens, 0))
    is_output = _COUNTED_IN_PART.search(text) or (context is not None and limit >= context)
    return LimitRefusal(is_prompt=False, message=text) if is_output else None


def _find_prompt_size(text: str, limit: int) -> int | None:
    total = _find_number(_TOTAL_SIZE, text)
    return total - limit if total is not None and total > limit else _find_number(_PROMPT_SIZE, text)


def _find_number(pattern: re.Pattern[str], text: str) -> int | None:
    match = pattern.search(text)
    return _parse_number(match.groups()) if match else None


def _parse_number(groups: Iterable[str | None]) -> int:
    return int(re.sub("[,_]", "", next(filter(None, groups))))


def _parse_error(body: bytes) -> Item | None:
    try:
        error = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if isinstance(error, list) and len(error) == 1:
        # Gemini's Chat Completions.
        error = error[0]
    return error if isinstance(error, dict) else None


def _get_error_type(body: Item) -> object:
    error = body.get("error")
    return error.get("type") if isinstance(error, dict) else None


def _iter_error_texts(body: Item) -> Iterator[str]:
    """Yield the server's messages in *body*, without the parts of the request that they quote."""
    error = body.get("error")
    messages = [error.get("message"), error.get("code")] if isinstance(error, dict) else [error]
    for message in (*messages, body.get("message"), body.get("detail")):
        if isinstance(message, str):
            yield _QUOTED_REQUEST.split(message)[0]
