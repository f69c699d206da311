"""Responses for those who speak Responses: what may be sent, and what a server's answer must hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymsdk import responses, types
from gymsdk import types as counts
from gymsdk.convert import api, chat, tokens
from gymsdk.convert import content as parts
from gymsdk.convert.api import InboundApi, InvalidRequest, build_error
from gymsdk.convert.chat import RESPONSES_FIELDS, drop_unknown_fields, expand_metadata_extras
from gymsdk.convert.responses_stream import build_error_frames, stream_events
from gymsdk.convert.sse import HEARTBEAT_FRAME
from gymsdk.errors import Failed
from gymsdk.responses import is_policy_item
from gymsdk.types import Item, extract_text, is_object_list, is_reply

RESPONSES_PATH = "responses"
USAGE_DETAIL_FIELDS = ("input_tokens_details", "output_tokens_details")


def build_body(request: Item) -> Item:
    """Give the body to send: *request* written out, and never streamed."""
    known = chat.drop_unknown_fields(request, chat.RESPONSES_FIELDS, where="a Responses request")
    if not request.get("tools"):
        parts.check_tool_choice(request.get("tool_choice"))
    return {
        key: value for key, value in expand_metadata_extras(known).items() if key not in {"stream", "stream_options"}
    }


def parse_answer(answer: Any, request: Item, *, strict: bool = False) -> Item:
    """Give the *answer* to *request* as a whole Response; raises `Failed` where it is none, or says that it failed.

    Thoughts that stand in a text become items of their own. The items' tokens pass as they are; *strict* holds them to
    their form.
    """
    if not isinstance(answer, dict) or not is_object_list(answer.get("output")):
        message = f"the model's answer is no Response: {answer}"
        raise Failed(message, kind="model_bad_answer", retryable=True)
    if answer.get("error") or not responses.is_finished(answer):
        told = answer.get("error") or f"its answer is {answer['status']!r}"
        raise Failed(f"the model failed: {told}", kind="model_error", retryable=True)
    if strict:
        for item in answer["output"]:
            tokens.check_token_fields(item)
    whole = responses.build_response([], model=str(request.get("model", "")), request=request)
    return whole | answer | {"output": list(_thought_through(answer["output"])), "usage": _usage(answer)}


def _thought_through(output: list[Item]) -> Iterator[Item]:
    """The items of *output*, each text after the thoughts that a server has left in it."""
    for item in output:
        if is_reply(item) and _is_tagged(item.get("content")):
            yield from _apart(item)
        else:
            yield item


def _is_tagged(content: object) -> bool:
    if isinstance(content, str):
        return parts.THINK_START in content or parts.THINK_END in content
    return is_object_list(content) and any(_is_tagged(part.get("text")) for part in content)


def _apart(item: Item) -> Iterator[Item]:
    """The thoughts of a tagged *item*, and what is left of it; what carries the tokens is the last."""
    content = item["content"]
    given = [{"type": "output_text", "text": content, "annotations": []}] if isinstance(content, str) else content
    read = [(part, *parts.split_think_blocks(parts.read_text(part.get("text")))) for part in given]
    thoughts = [thought for _, found, _ in read for thought in found]
    left = [part | {"text": text} if "text" in part else part for part, _, text in read]
    said: list[Item] = [responses.build_reasoning(*thoughts)] if thoughts else []
    if not thoughts or extract_text(left).strip() or any(part.get("refusal") for part in left):
        said.append(item | {"content": left})
    said[-1] |= {key: item[key] for key in tokens.CARRIED_FIELDS if key in item}
    yield from said


def _usage(answer: Item) -> Item | None:
    """The usage of an *answer*, its counts made numbers, and null where nothing readable was reported."""
    reported = answer.get("usage")
    if not isinstance(reported, dict) or not reported:
        return None
    counted = counts.usage_to_item(counts.parse_usage(answer))
    details = {key: reported[key] | counted[key] for key in USAGE_DETAIL_FIELDS if isinstance(reported.get(key), dict)}
    return reported | counted | details


OBJECT_FIELDS = ("metadata", "reasoning", "stream_options", "text")
STREAM_FIELDS = ("stream", "stream_options")
REQUIRED_RESPONSE_FIELDS = frozenset(
    {"created_at", "id", "model", "object", "parallel_tool_calls", "status", "tool_choice", "tools"}
)
ITEM_CONTENT_FIELDS = {"reasoning": "summary", "function_call_output": "output"}
ID_PREFIXES = {"message": "msg", "function_call": "fc", "reasoning": "rs"}


def parse_request(body: Item) -> Item:
    """Give the Responses request in *body*; raises `Malformed`."""
    given = body.get("input")
    if not isinstance(given, str) and not _are_items(given):
        raise InvalidRequest("'input' must be a string or a list of items", "input")
    if body.get("tools") is not None and not is_object_list(body["tools"]):
        raise InvalidRequest("'tools' must be a list of tools", "tools")
    if not isinstance(body.get("instructions"), str | None):
        raise InvalidRequest("'instructions' must be a string", "instructions")
    if not isinstance(body.get("include"), list | None):
        raise InvalidRequest("'include' must be a list", "include")
    for key in OBJECT_FIELDS:
        api.get_object(body, key)
    if form := api.get_object(api.get_object(body, "text"), "format", "text"):
        api.get_text(form, "type", "text.format")
    if body.get("background"):
        raise InvalidRequest("this server answers while its client waits; leave 'background' out", "background")
    return {
        key: value
        for key, value in drop_unknown_fields(body, RESPONSES_FIELDS, where="Responses").items()
        if key not in STREAM_FIELDS
    }


def build_answer(response: Item, asked: Item) -> Item:
    """Give *response* with all that OpenAI's types ask for: ids, types, and numbers where a count is not known."""
    if not response.keys() >= REQUIRED_RESPONSE_FIELDS:
        response = responses.build_response([], model=str(asked.get("model") or ""), request=asked) | response
    return types.fill_usage_details(response | {"output": [_whole(item) for item in response["output"]]})


def _whole(item: Item) -> Item:
    kind, content = item.get("type") or "message", item.get("content")
    if item.get("id") and item.get("type") and not isinstance(content, str):
        return item
    made = {"id": item.get("id") or responses.generate_id(ID_PREFIXES.get(kind, kind)), "type": kind}
    if isinstance(content, str):
        made["content"] = [{"type": "output_text", "text": content, "annotations": []}]
    return item | made


def _are_items(value: object) -> bool:
    return isinstance(value, list) and responses.is_response({"output": value}) and all(map(_is_said, value))


def _is_said(item: Item) -> bool:
    """Whether *item* says in a form that is read what it is there to say."""
    key = ITEM_CONTENT_FIELDS.get(item.get("type", "message"))
    told = item.get(key) if key else None
    return told is None or is_object_list(told) or (key == "output" and isinstance(told, str))


RESPONSES_API = InboundApi(
    path="responses",
    parse_request=parse_request,
    build_answer=build_answer,
    stream_events=stream_events,
    build_error=build_error,
    build_error_frames=build_error_frames,
    heartbeat=HEARTBEAT_FRAME,
)


MAX_REMEMBERED_IDS = 65_536
"""How many ids of thoughts are remembered: about eight megabytes of them."""


class ReasoningFilter:
    """Responses for a model that takes no thoughts but its own: those it encrypted, and those its provider keeps."""

    def __init__(self, most: int = MAX_REMEMBERED_IDS) -> None:
        self._most = most
        self._kept: dict[str, None] = {}

    def build_body(self, request: Item) -> Item:
        """Give the body to send, without the thoughts of others."""
        given = request.get("input")
        return build_body(request | {"input": list(self._shown(given))} if isinstance(given, list) else request)

    def parse_answer(self, answer: Any, request: Item, *, strict: bool = False) -> Item:
        """Give the *answer* to *request* as a whole Response, and remember the thoughts in it."""
        response = parse_answer(answer, request, strict=strict)
        # What a provider does not store it does not know by its id.
        if response.get("store", request.get("store")) is not False:
            self._remember(answer["output"])
        return response

    def _shown(self, items: list[Item]) -> Iterator[Item]:
        orphaned = False
        for item in items:
            if item.get("type") == "reasoning":
                orphaned = not (item.get("encrypted_content") or str(item.get("id")) in self._kept)
                if not orphaned:
                    yield item
                continue
            orphaned = orphaned and is_policy_item(item)
            # Under its id a provider asks for the thought that went before it.
            yield {key: value for key, value in item.items() if key != "id"} if orphaned else item

    def _remember(self, output: list[Item]) -> None:
        self._kept |= {str(item["id"]): None for item in output if item.get("type") == "reasoning" and item.get("id")}
        while len(self._kept) > self._most:
            self._kept.pop(next(iter(self._kept)), None)
