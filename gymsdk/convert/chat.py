"""Chat Completions for those who speak Responses: a request becomes a chat body, a completion a Response."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator
from itertools import groupby, takewhile
from typing import Any

from gymsdk import responses
from gymsdk import types as counts
from gymsdk.convert import content as parts
from gymsdk.convert import tokens as token_fields
from gymsdk.convert.content import build_untranslatable_error
from gymsdk.errors import Failed
from gymsdk.types import Content, Item, extract_text, is_content, is_reply

log = logging.getLogger("gymsdk")

ENGINE_FIELDS = frozenset(
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

RESPONSES_FIELDS = frozenset(
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

MAX_REPORTED_FIELDS = 1000
"""Strange keys that are told of: whoever makes them up does not fill the log, or the memory."""

_reported_fields: set[tuple[str, str]] = set()


def drop_unknown_fields(body: Item, keys: Collection[str], *, where: str) -> Item:
    """Give *body* without the keys that are neither among *keys* nor an engine's; of each a log tells once."""
    kept = {key: value for key, value in body.items() if key in keys or key in ENGINE_FIELDS}
    if len(kept) == len(body):
        return body
    for key in body:
        if key not in kept and (where, key) not in _reported_fields and len(_reported_fields) < MAX_REPORTED_FIELDS:
            _reported_fields.add((where, key))
            log.warning(
                "%s has no key %r; it is ignored (metadata.extra_body passes on what an engine takes)", where, key
            )
    return kept


EXTRA_BODY_KEY = "extra_body"
CHAT_TEMPLATE_KEY = "chat_template_kwargs"


def parse_metadata_extras(request: Item) -> Item:
    """Give what the request's metadata adds to the body that a server is sent."""
    metadata = request.get("metadata") or {}
    template = _object(metadata, CHAT_TEMPLATE_KEY)
    return _object(metadata, EXTRA_BODY_KEY) | ({CHAT_TEMPLATE_KEY: template} if template else {})


def expand_metadata_extras(request: Item) -> Item:
    """Give the request with what its metadata adds written out, and null values left out."""
    metadata = {
        key: value
        for key, value in (request.get("metadata") or {}).items()
        if key not in {EXTRA_BODY_KEY, CHAT_TEMPLATE_KEY}
    }
    kept = {key: value for key, value in request.items() if value is not None and key != "metadata"}
    return parse_metadata_extras(request) | kept | ({"metadata": metadata} if metadata else {})


def _object(metadata: Item, key: str) -> Item:
    value = metadata.get(key) or {}
    parsed = _parsed(value, key) if isinstance(value, str) else value
    if isinstance(parsed, dict):
        return parsed
    raise Failed(f"metadata.{key} must be a JSON object", kind="model_bad_request")


def _parsed(text: str, key: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise Failed(f"metadata.{key} is not JSON: {error}", kind="model_bad_request") from error


CHAT_PATH = "chat/completions"
UNSUPPORTED_FIELDS = ("conversation", "previous_response_id", "prompt")
TRANSLATED_FIELDS = {
    "input",
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "reasoning",
    "text",
    "tool_choice",
    "tools",
}
IGNORED_FIELDS = {
    "background",
    "context_management",
    "include",
    "max_tool_calls",
    "store",
    "stream",
    "stream_options",
    "truncation",
}
LOGPROBS_INCLUDE = "message.output_text.logprobs"
"""What a request has among `include` where it wants the log-probabilities of a text."""

INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
ABORTED_REASONS = frozenset({"abort", "error"})
"""How an engine says that it gave up an answer, perhaps for new weights: what there is of it is nobody's reply."""

MAX_EXCERPT_CHARS = 500
"""Characters of an unreadable answer that a message shows."""


def build_body(request: Item, *, thoughts: responses.ReasoningFormat = "field", limit: str = "max_tokens") -> Item:
    """Give the chat body that asks what *request* asks; *limit* is its word for `max_output_tokens`."""
    if refused := [key for key in UNSUPPORTED_FIELDS if request.get(key) is not None]:
        raise build_untranslatable_error(f"`{refused[0]}`")
    given = drop_unknown_fields(request, RESPONSES_FIELDS, where="a Responses request")
    kept = {
        key: value
        for key, value in given.items()
        if value is not None and key not in TRANSLATED_FIELDS | IGNORED_FIELDS
    }
    if kept.get("top_logprobs") or _wants_logprobs(request):
        # Chat servers refuse the one without the other.
        kept = {"logprobs": True} | kept
    told = {limit: request.get("max_output_tokens")} | _reasoning(request) | _text(request) | _tools(request)
    said = {"messages": build_messages(request, thoughts=thoughts)}
    return (
        parse_metadata_extras(request) | kept | {key: value for key, value in told.items() if value is not None} | said
    )


def build_messages(request: Item, *, thoughts: responses.ReasoningFormat = "field") -> list[Item]:
    """Give the chat messages of *request*: what the policy did in one turn is one message, and so is the system's."""
    given: Content = request.get("input") or []
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    said: list[Item] = []
    for by_policy, group in groupby(items, _by_policy):
        run = list(group)
        said += [_turn(run, thoughts)] if by_policy else [_message(item) for item in run]
    lead = list(takewhile(lambda message: message["role"] == "system", said))
    words = [text for text in (request.get("instructions"), *(extract_text(one["content"]) for one in lead)) if text]
    return ([{"role": "system", "content": "\n\n".join(words)}] if words else []) + said[len(lead) :]


def parse_completion(completion: Any, request: Item, *, strict: bool = False) -> Item:
    """Give the Response that a chat *completion* of *request* amounts to, its tokens held to the *strict* form."""
    try:
        return _response(completion, request, strict=strict)
    except (LookupError, TypeError, AttributeError) as error:
        message = f"the model's answer is no chat completion: {str(completion)[:MAX_EXCERPT_CHARS]}"
        raise Failed(message, kind="model_bad_answer", retryable=True) from error


def parse_completion_usage(reported: object) -> Item | None:
    """Give the usage of a completion in the words of a Response, null where nothing readable was *reported*."""
    if not isinstance(reported, dict) or not reported:
        return None
    told = {
        "input_tokens": reported.get("prompt_tokens"),
        "input_tokens_details": reported.get("prompt_tokens_details"),
        "output_tokens": reported.get("completion_tokens"),
        "output_tokens_details": reported.get("completion_tokens_details"),
    }
    return counts.usage_to_item(counts.parse_usage({"usage": told}))


def read_token_fields(completion: Item, *, strict: bool) -> Item:
    """Give the token fields of a *completion*; where they are wrong, nothing, or if *strict* a `Failed`."""
    try:
        return token_fields.parse_token_fields(completion)
    except Failed:
        if strict:
            raise
        return {}


def _response(completion: Item, request: Item, *, strict: bool) -> Item:
    choice = completion["choices"][0]
    if choice.get("finish_reason") in ABORTED_REASONS:
        message = f"the server gave up the answer (finish_reason {choice['finish_reason']!r})"
        raise Failed(message, kind="model_error", retryable=True)
    content = choice["message"].get("content")
    if not is_content(content):
        # The server makes this of its model's answer, and would again: another try does not help.
        message = f"the model's answer has the content {repr(content)[:MAX_EXCERPT_CHARS]}, which is neither text nor a list of parts"
        raise Failed(message, kind="model_bad_answer")
    output = list(_output(choice["message"]))
    output[-1] |= read_token_fields(completion, strict=strict)
    if _wants_logprobs(request):
        _with_logprobs(output, choice)
    reason = INCOMPLETE_REASONS.get(choice.get("finish_reason"))
    response = responses.build_response(
        output,
        model=completion.get("model") or request.get("model") or "",
        usage=parse_completion_usage(completion.get("usage")),
        status="incomplete" if reason else "completed",
        reason=reason,
        request=request,
    )
    # Engines tell which of the request's stop sequences ended the answer; Responses have no word for it.
    stop = choice.get("stop_reason")
    return response | {"stop_sequence": stop} if isinstance(stop, str) else response


def _wants_logprobs(request: Item) -> bool:
    return bool(request.get("logprobs")) or LOGPROBS_INCLUDE in (request.get("include") or ())


def _with_logprobs(output: list[Item], choice: Item) -> None:
    """Put the log-probabilities of *choice* where a Response has them: on its text, if it has one."""
    told = (choice.get("logprobs") or {}).get("content")
    texts = [part for item in output if is_reply(item) for part in item["content"] if part["type"] == "output_text"]
    if told and texts:
        texts[0]["logprobs"] = told


def _by_policy(item: Item) -> bool:
    # No set: a client's item may have anything for its type.
    return item.get("type") in ("reasoning", "function_call") or is_reply(item)


def _turn(items: list[Item], thoughts: responses.ReasoningFormat) -> Item:
    """The one assistant message of a turn's *items*."""
    text = "".join(extract_text(parts.to_chat_content(item.get("content"))) for item in items if is_reply(item))
    thought = parts.join_reasoning(items) if thoughts != "drop" else ""
    calls = [_call(item) for item in items if item.get("type") == "function_call"]
    if thoughts == "tags":
        text = parts.prepend_think_block(thought, text)
    message: Item = {"role": "assistant", "content": text or (None if calls else "")}
    if thought and thoughts == "field":
        # Servers are divided over the name of the field.
        message |= {"reasoning_content": thought, "reasoning": thought}
    if calls:
        message["tool_calls"] = calls
    return message | token_fields.get_carried_fields(items)


def _call(item: Item) -> Item:
    function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
    return {"id": item.get("call_id"), "type": "function", "function": function}


def _message(item: Item) -> Item:
    if item.get("type") == "function_call_output":
        content = parts.to_chat_content(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
    if item.get("type", "message") != "message" or "role" not in item:
        raise build_untranslatable_error(f"an input item of type {item.get('type')!r}")
    # Few chat templates know a developer.
    role = "system" if item["role"] == "developer" else item["role"]
    return {"role": role, "content": parts.to_chat_content(item.get("content"))}


def _reasoning(request: Item) -> Item:
    return {"reasoning_effort": (request.get("reasoning") or {}).get("effort")}


def _text(request: Item) -> Item:
    text = request.get("text") or {}
    form = text.get("format") or {"type": "text"}
    if form["type"] == "json_schema":
        schema = {key: value for key, value in form.items() if key != "type"}
        form = {"type": "json_schema", "json_schema": schema}
    return {"response_format": form if form["type"] != "text" else None, "verbosity": text.get("verbosity")}


def _tools(request: Item) -> Item:
    choice = request.get("tool_choice")
    if not request.get("tools"):
        parts.check_tool_choice(choice)
        return {}
    choice = _choice(choice) if isinstance(choice, dict) else choice
    tools = [_tool(tool) for tool in request["tools"]]
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": request.get("parallel_tool_calls")}


def _choice(choice: Item) -> Item:
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        allowed = [_choice(tool) for tool in choice.get("tools") or []]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    return choice


def _tool(tool: Item) -> Item:
    if tool.get("type") != "function":
        raise build_untranslatable_error(f"a tool of type {tool.get('type')!r}")
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}


def _output(message: Item) -> Iterator[Item]:
    """The items of an assistant *message*: thoughts, then the text, then the calls; at least one."""
    told, said = parts.split_content(message.get("content"))
    fields = [parts.read_text(message.get(key)) for key in ("reasoning_content", "reasoning")]
    tagged, text = parts.split_think_blocks(said, told=any(map(str.strip, fields)))
    # Some servers say the same in both fields, and some leave it in the text besides.
    thoughts = list({words: thought for thought in (*tagged, *told, *fields) if (words := thought.strip())}.values())
    if thoughts:
        yield responses.build_reasoning(*thoughts)
    calls = message.get("tool_calls") or []
    refusal = message.get("refusal")
    if text.strip() or not (calls or thoughts or refusal):
        yield responses.build_message(text)
    if refusal:
        yield _refusal(refusal)
    for call in calls:
        function = call["function"]
        yield responses.build_function_call(function["name"], function.get("arguments") or "{}", call.get("id"))


def _refusal(words: str) -> Item:
    return responses.build_message("") | {"content": [{"type": "refusal", "refusal": words}]}
