"""The token interfaces of inference engines: requests that contain or return token ids instead of messages and text.

The fields are those of vLLM 0.32: `/tokenize`, `/detokenize`, `/v1/completions`, and the three steps of a chat
completion, `/v1/chat/completions/render`, `/inference/v1/generate` and `/v1/chat/completions/derender`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, TypeAlias

from gymsdk import responses
from gymsdk.convert import api, chat_inbound, completions, content
from gymsdk.convert.api import InboundApi, InvalidRequest
from gymsdk.convert.tokens import TOKEN_ID_PREFIX
from gymsdk.errors import UsageError
from gymsdk.testing.engine import (
    LIMIT_FIELDS,
    Engine,
    EngineKind,
    Generation,
    Prompt,
    build_chat_prompt,
    build_prompt,
    get_max_tokens,
)
from gymsdk.testing.faults import RequestFault
from gymsdk.tokens.chatml import THINK_START, parse_output
from gymsdk.types import Item

TokenEndpoint: TypeAlias = Callable[[Item, RequestFault], Awaitable[Item]]
"""Answers a request body. Raises `InvalidRequest` or `Failed`."""

DEFAULT_CONTEXT = 131_072
"""The context length that an endpoint without a limit reports."""

DEFAULT_COMPLETION_TOKENS = 16
"""The number of tokens of a completion whose request sets no maximum."""


STREAMED_APIS: MappingProxyType[str, InboundApi] = MappingProxyType({"/v1/completions": completions.COMPLETIONS_API})
"""The APIs with streamed answers, by path."""

GENERATING_PATHS = frozenset({"/v1/completions", "/inference/v1/generate"})
"""The paths at which the policy generates."""


def build_endpoints(engine: Engine) -> dict[str, TokenEndpoint]:
    """Return the token interfaces of *engine* by path."""
    endpoints: dict[str, TokenEndpoint] = {
        "/tokenize": partial(_tokenize, engine),
        "/detokenize": partial(_detokenize, engine),
    }
    completing: dict[str, TokenEndpoint] = {"/v1/completions": partial(_complete, engine)}
    scale_out: dict[str, TokenEndpoint] = {
        "/v1/chat/completions/render": partial(_render, engine),
        "/inference/v1/generate": partial(_generate, engine),
        "/v1/chat/completions/derender": partial(_derender, engine),
    }
    by_kind: dict[EngineKind, dict[str, TokenEndpoint]] = {
        "vllm": endpoints | completing | scale_out,
        "vllm-completions": endpoints | completing,
        "nemo-rl": endpoints,
        "sglang": {"/generate": partial(_score, engine)},
        "plain": {},
    }
    return by_kind[engine.kind]


async def _tokenize(engine: Engine, body: Item, _: RequestFault) -> Item:
    """Return the token ids of the `prompt` or the `messages` in *body*."""
    ids = _encode_prompt(engine, body)
    token_texts = [engine.tokenizer.decode([token]) for token in ids] if body.get("return_token_strs") else None
    return {
        "count": len(ids),
        "max_model_len": engine.faults.context or DEFAULT_CONTEXT,
        "tokens": ids,
        "token_strs": token_texts,
    }


async def _detokenize(engine: Engine, body: Item, _: RequestFault) -> Item:
    """Return the text of the `tokens` in *body*."""
    return {"prompt": _decode(engine, _check_ids(body.get("tokens"), "tokens"))}


async def _complete(engine: Engine, body: Item, fault: RequestFault) -> Item:
    """Return the completion of a prompt, or of several: texts, or lists of token ids."""
    completions.parse_request(body)
    if body.get("suffix"):
        raise InvalidRequest("suffix is not currently supported", "suffix")
    limit = get_max_tokens(body, LIMIT_FIELDS["completions"]) or DEFAULT_COMPLETION_TOKENS
    choices: list[Item] = []
    prompt_tokens = completion_tokens = 0
    for prompt in _list_prompts(body.get("prompt")):
        ids = engine.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        prompt_tokens += len(ids)
        for _ in range(body.get("n") or 1):
            generated = await _continue_prompt(engine, ids, limit, fault, body)
            completion_tokens += len(generated.get_token_ids())
            choices.append({"index": len(choices), **_build_choice(engine, prompt, ids, generated, body)})
    return {
        "id": responses.generate_id("cmpl"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": engine.name,
        "choices": choices,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _list_prompts(prompt: Any) -> list[str | list[int]]:
    """Return the prompts in a valid *prompt* of a request."""
    if isinstance(prompt, list) and not isinstance(prompt[0], int):
        return prompt
    return [prompt]


def _build_choice(engine: Engine, prompt: str | list[int], ids: list[int], generated: Generation, body: Item) -> Item:
    token_ids = generated.get_token_ids()
    text = engine.tokenizer.decode(token_ids, skip_special_tokens=True)
    if body.get("echo"):
        text = (prompt if isinstance(prompt, str) else _decode(engine, ids)) + text
    choice: Item = {
        "text": text,
        "finish_reason": _get_finish_reason(generated),
        "stop_reason": None,
        "logprobs": None,
    }
    if body.get("return_token_ids"):
        choice |= {"token_ids": token_ids, "prompt_token_ids": ids}
    if body.get("logprobs") is not None:
        choice["logprobs"] = _build_logprobs(engine, ids, token_ids, body)
    if body.get("prompt_logprobs") is not None:
        pairs = zip(ids[1:], _compute_logprobs(engine, ids[:1], ids[1:]), strict=True)
        choice["prompt_logprobs"] = [None, *({str(token): {"logprob": logprob}} for token, logprob in pairs)]
    return choice


def _build_logprobs(engine: Engine, ids: list[int], token_ids: list[int], body: Item) -> Item:
    """Return the log-probabilities of *token_ids* after the prompt *ids*, with `echo` also those of the prompt."""
    token_sequence, logprobs = token_ids, [*_compute_logprobs(engine, ids, token_ids)]
    values: list[float | None] = [*logprobs]
    if body.get("echo"):
        token_sequence, values = [*ids, *token_ids], [None, *_compute_logprobs(engine, ids[:1], ids[1:]), *logprobs]
    texts = [engine.tokenizer.decode([token]) for token in token_sequence]
    names = (
        [f"{TOKEN_ID_PREFIX}{token}" for token in token_sequence] if body.get("return_tokens_as_token_ids") else texts
    )
    has_top = bool(body["logprobs"])
    top = [{name: value} if has_top and value is not None else None for name, value in zip(names, values, strict=True)]
    offsets = [*accumulate(map(len, texts), initial=0)][:-1]
    return {"tokens": names, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


async def _score(engine: Engine, body: Item, _: RequestFault) -> Item:
    """Return the log-probabilities of `input_ids`, as SGLang's own interface does."""
    ids = _check_ids(body.get("input_ids"), "input_ids")
    logprobs = [None, *_compute_logprobs(engine, ids[:1], ids[1:])]
    entries = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)]
    return {"text": "", "meta_info": {"input_token_logprobs": entries if body.get("return_logprob") else []}}


async def _render(engine: Engine, body: Item, _: RequestFault) -> Item:
    """Return the generate request of a chat request."""
    request = chat_inbound.CHAT_API.parse_request(body)
    _check_arguments(body["messages"])
    prompt, size = build_prompt(chat_inbound.CHAT_API, body, request, engine.tokenizer)
    limit = engine.compute_max_tokens(get_max_tokens(body, LIMIT_FIELDS["chat/completions"]), size)
    parameters = {key: body[key] for key in ("temperature", "top_p", "seed", "stop") if body.get(key) is not None}
    is_strict = any((tool.get("function") or {}).get("strict") for tool in body.get("tools") or [])
    if body.get("tools") and (is_strict or body.get("parallel_tool_calls") is False):
        # With a tool parser, vLLM decodes the calls under a grammar.
        parameters["structured_outputs"] = {"structural_tag": "{}"}
    return {
        "request_id": responses.generate_id("chatcmpl"),
        "token_ids": prompt.get_token_ids(add_generation_prompt=body.get("add_generation_prompt") is not False),
        "features": None,
        "sampling_params": parameters | {"max_tokens": limit, "logprobs": 0 if body.get("logprobs") else None},
        "model": engine.name,
        "stream": False,
    }


async def _generate(engine: Engine, body: Item, fault: RequestFault) -> Item:
    """Return the ids that the policy generates after the ids of the prompt."""
    ids = _check_ids(body.get("token_ids"), "token_ids")
    parameters = api.get_object(body, "sampling_params")
    limit = get_max_tokens(parameters, LIMIT_FIELDS["completions"], "sampling_params")
    generated = await _continue_prompt(engine, ids, limit, fault, parameters)
    token_ids = generated.get_token_ids()
    choice: Item = {
        "index": 0,
        "finish_reason": _get_finish_reason(generated),
        "stop_reason": None,
        "token_ids": token_ids,
        "logprobs": None,
    }
    if parameters.get("logprobs") is not None:
        logprobs = _compute_logprobs(engine, ids, token_ids)
        entries = zip(token_ids, logprobs, strict=True)
        choice["logprobs"] = {"content": [{"token_id": token, "logprob": logprob} for token, logprob in entries]}
    return {
        "request_id": body.get("request_id"),
        "model": engine.name,
        "output_mode": "tokens",
        "prompt_token_ids": ids if body.get("return_token_ids") else None,
        "choices": [choice],
        "usage": _build_usage(ids, token_ids),
    }


async def _derender(engine: Engine, body: Item, _: RequestFault) -> Item:
    """Return the chat completion of generated ids, with tool calls and reasoning parsed.

    As vLLM with a parser, it keeps the texts of special tokens, and refuses an empty list of ids.
    """
    answer, request = api.get_object(body, "generate_response"), api.get_object(body, "chat_request")
    choices = api.check_objects(answer.get("choices"), "generate_response.choices")
    if not choices:
        raise api.build_invalid_field("generate_response.choices", "a list with a choice")
    choice = choices[0]
    ids = _check_ids(choice.get("token_ids"), "generate_response.choices.0.token_ids")
    if not ids:
        raise InvalidRequest("choice 0 has empty or null token_ids", "generate_response")
    text = _decode(engine, ids)
    prompt_ids = _check_ids(body.get("prompt_token_ids") or [], "prompt_token_ids")
    opens_reasoning = _decode(engine, prompt_ids).rstrip().endswith(THINK_START)
    parsed = parse_output(text, thinking=opens_reasoning)
    written, reasoning = parsed.text, parsed.reasoning
    if not request.get("tools"):
        # Without tools, vLLM parses no calls: they remain in the text.
        reasoning, written = content.split_think_blocks(f"{THINK_START}{text}" if opens_reasoning else text)
    message: Item = {"role": "assistant", "content": written or None, "reasoning": "\n".join(reasoning)}
    finish_reason = choice.get("finish_reason")
    if parsed.calls and request.get("tools"):
        message["tool_calls"] = [
            {
                "id": responses.generate_id("call"),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.calls
        ]
        finish_reason = "tool_calls" if finish_reason == "stop" else finish_reason
    return {
        "id": answer.get("request_id"),
        "object": "chat.completion",
        "model": engine.name,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "stop_reason": None}],
        "usage": answer.get("usage"),
    }


async def _continue_prompt(
    engine: Engine, ids: list[int], limit: int | None, fault: RequestFault, settings: Item
) -> Generation:
    """Return what the policy generates after the prompt *ids*, which are parsed back into a conversation."""
    max_tokens = engine.compute_max_tokens(limit, len(ids))
    try:
        messages, tools = engine.tokenizer.parse_conversation(ids)
    except (UsageError, ValueError) as error:
        raise InvalidRequest(str(error), "prompt") from error
    if not messages:
        # A text without a conversation.
        messages = [{"role": "user", "content": _decode(engine, ids)}]
    request = chat_inbound.CHAT_API.parse_request({"model": engine.name, "messages": messages, "tools": tools})
    request |= {key: settings[key] for key in ("temperature", "allowed_token_ids") if settings.get(key) is not None}
    prompt = Prompt(messages, tools, engine.tokenizer, ids)
    _, generation = await engine.generate(request, prompt, max_tokens, fault)
    return generation


def _encode_prompt(engine: Engine, body: Item) -> list[int]:
    if "messages" not in body:
        if not isinstance(body.get("prompt"), str):
            raise InvalidRequest("the body needs a 'prompt', which is a string, or 'messages'", "prompt")
        return engine.tokenizer.encode(body["prompt"])
    # Parsed like a chat request, so that both refuse the same malformed messages.
    chat_inbound.parse_request({"messages": body["messages"], "tools": body.get("tools")})
    _check_arguments(body["messages"])
    continues_message = bool(body.get("continue_final_message"))
    add_generation_prompt = not continues_message and body.get("add_generation_prompt") is not False
    try:
        ids = build_chat_prompt(body, engine.tokenizer).get_token_ids(add_generation_prompt=add_generation_prompt)
    except UsageError as error:
        raise InvalidRequest(str(error), "messages") from error
    # Without the end-of-turn marker and the text after it, the policy continues the last message.
    return ids[: engine.tokenizer.find_open_end(ids)] if continues_message else ids


def _check_arguments(messages: list[Item]) -> None:
    """Raise `InvalidRequest` if the arguments of a call are no text, as vLLM does."""
    for message in messages:
        for call in message.get("tool_calls") or []:
            if not isinstance(call["function"].get("arguments"), str):
                raise InvalidRequest("the arguments of a tool call must be a string", "messages")


def _check_ids(ids: object, field: str) -> list[int]:
    if not isinstance(ids, list) or not {*map(type, ids)} <= {int}:
        raise InvalidRequest(f"{field!r} must be a list of token ids", field)
    return ids


def _decode(engine: Engine, ids: list[int], *, skip_special_tokens: bool = False) -> str:
    try:
        return engine.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    except UsageError as error:
        raise InvalidRequest(str(error), "tokens") from error


def _compute_logprobs(engine: Engine, prompt: list[int], ids: list[int]) -> list[float]:
    return engine.tokenizer.language_model.compute_logprobs(prompt, ids)


def _get_finish_reason(generated: Generation) -> str:
    return "stop" if generated.is_complete else "length"


def _build_usage(prompt: list[int], generated: list[int]) -> Item:
    total = len(prompt) + len(generated)
    return {"prompt_tokens": len(prompt), "completion_tokens": len(generated), "total_tokens": total}
