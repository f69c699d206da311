"""A policy writes arguments that are no JSON object, to engines that refuse a conversation with such arguments."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
from aiohttp import web

from gymsdk import Task, Transcript, Verdict, hookimpl, model, play, responses
from gymsdk.convert import chat_inbound
from gymsdk.environment import Environment
from gymsdk.responses import Api
from gymsdk.testing.endpoint import serve

BROKEN = {
    "cut off": '{"title": "Emm',
    "a quote inside": '{"title": "the "old" Emma"}',
    "Python": "{'title': 'Emma'}",
    "spaces": "  ",
    "two objects": '{"title": "Emma"}{"title": "Emma"}',
    "a list": '["Emma"]',
    "a text": '"Emma"',
    "null": "null",
    "not a number": '{"title": NaN}',
    "beyond floats": '{"title": 1e999}',
    "half a character": '{"title": "\\ud800"}',
    "deep": '{"title": ' + "[" * 100_000,
    "deep and complete": '{"title": ' + "[" * 1000 + "]" * 1000 + "}",
}


def book(title: str) -> str:
    """Borrow a book."""
    return f"borrowed {title}"


def verify(transcript: Transcript) -> Verdict:
    first, second = transcript.calls("book")
    is_right = transcript.output(first.call_id) != "borrowed Emma" == transcript.output(second.call_id)
    return Verdict(reward=float(is_right))


def build_library() -> Environment:
    plugin = ModuleType("library")
    plugin.tools, plugin.verify = hookimpl(lambda: [book]), hookimpl(verify)  # type: ignore[attr-defined]
    return Environment("library", plugin)


def find_refusal(arguments: object) -> str | None:
    """Return why a strict engine refuses the *arguments* of an earlier call."""
    if not isinstance(arguments, str):
        return "arguments must be text"
    try:
        value = json.loads(arguments, parse_constant=float)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        return str(error)
    return None if isinstance(value, dict) else "arguments must be an object"


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("arguments", BROKEN.values(), ids=BROKEN)
async def test_a_policy_corrects_broken_arguments_and_is_scored(api: Api, arguments: str) -> None:
    seen: list[list[Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if api == "chat":
            calls = [call["function"] for message in body["messages"] for call in message.get("tool_calls", [])]
        else:
            calls = [item for item in body["input"] if item.get("type") == "function_call"]
        seen.append([call["arguments"] for call in calls])
        if refusal := next(filter(None, map(find_refusal, seen[-1])), None):
            return web.json_response({"error": {"message": refusal}}, status=400)
        texts = [arguments, '{"title": "Emma"}']
        call = responses.build_function_call("book", texts[len(calls)], f"c{len(calls)}") if len(calls) < 2 else None
        answer = responses.build_response([call or responses.build_message("Done.")], model=body["model"])
        return web.json_response(chat_inbound.build_answer(answer, {}) if api == "chat" else answer)

    app = web.Application()
    app.router.add_post("/{path:.*}", handle)
    async with serve(app) as url, build_library() as library:
        rollout = await play(
            library, model("endpoint/m", base_url=url, retries=0, api=api), Task.ask("Borrow Emma.").row()
        )
    assert (rollout.outcome, rollout.reward) == ("scored", 1.0), rollout.failure
    # The transcript has the policy's text, and the engine reads it in a form that it accepts.
    assert rollout.response is not None
    assert rollout.response["output"][0]["arguments"] == arguments
    assert json.loads(seen[-1][0]) == {"_arguments": arguments}
    assert seen[-1][1] == '{"title": "Emma"}'
