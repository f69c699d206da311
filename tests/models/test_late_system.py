"""System messages after the first messages, for engines whose chat template allows them at the start only."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gymsdk import model
from gymsdk.convert.late_system import merge_late_system
from gymsdk.errors import Failed
from gymsdk.responses import TOKEN_FIELDS, Api, TokenInterface
from gymsdk.testing.endpoint import build_app, serve
from gymsdk.types import Item

REFUSALS = [
    (400, {"error": {"message": "System message must be at the beginning.", "code": 400}}),
    (400, {"error": {"message": "Unexpected message role.", "code": 400}}),
    (422, {"detail": "Only user, assistant and tool roles are supported, got system."}),
    (500, {"error": {"message": "Jinja Exception: System message must be at the beginning.", "code": 500}}),
]
LATE = {"role": "system", "content": "A file changed."}
CONVERSATION: list[Item] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}, LATE]


def is_late(messages: list[Item]) -> bool:
    return any(message.get("role") in {"system", "developer"} for message in messages[1:])


def has_two_users(messages: list[Item]) -> bool:
    roles = [message.get("role") for message in messages]
    return any(first == second == "user" for first, second in itertools.pairwise(roles))


@asynccontextmanager
async def serve_strict(
    refusal: tuple[int, object], refuses: Callable[[list[Item]], bool] = is_late, kind: str = "vllm"
) -> AsyncIterator[tuple[str, list[list[Item]]]]:
    """Serve an engine that refuses some conversations; yield its URL and the conversations that it received."""
    received: list[list[Item]] = []

    @web.middleware
    async def refuse(request: web.Request, handler: Callable[[web.Request], object]) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else {}
        messages = body.get("messages") or body.get("input")
        if isinstance(messages, list):
            received.append(messages)
            if refuses(messages):
                text = refusal[1] if isinstance(refusal[1], str) else json.dumps(refusal[1])
                return web.Response(text=text, status=refusal[0])
        answer = await handler(request)  # type: ignore[misc]  # aiohttp's handlers are coroutines
        assert isinstance(answer, web.StreamResponse)
        return answer

    application = build_app(model("scripted/echo"), kind=kind)  # type: ignore[arg-type]  # one of its literals
    application.middlewares.append(refuse)
    async with serve(application) as url:
        yield url, received


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal[1])[:60])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_a_late_system_message_becomes_part_of_the_users(
    refusal: tuple[int, object], api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve_strict(refusal) as (url, received):
        policy = model("vllm/m", base_url=url, api=api)
        for _ in range(2):
            assert (await policy.respond({"input": CONVERSATION}))["status"] == "completed"
    # The second call does not ask in vain.
    assert len(received) == 3
    assert "A file changed." in json.dumps(received[1])
    assert sum("as user messages" in message for message in caplog.messages) == 1


async def test_templates_that_refuse_two_user_messages_in_a_row_accept_it() -> None:
    items = [*CONVERSATION, {"role": "assistant", "content": "hello"}, LATE, LATE, {"role": "user", "content": "Go."}]
    refusal = (400, {"error": {"message": "Conversation roles must alternate user/assistant/user/assistant/..."}})
    async with serve_strict(refusal, lambda messages: is_late(messages) or has_two_users(messages)) as (url, received):
        assert (await model("endpoint/m", base_url=url).respond({"input": items}))["status"] == "completed"
    assert [message["content"] for message in received[-1] if message["role"] == "user"] == [
        "hi\n\nA file changed.",
        "A file changed.\n\nA file changed.\n\nGo.",
    ]


async def test_a_refusal_for_another_reason_is_final_and_changes_no_later_call() -> None:
    """A template that allows late system messages gets them."""
    refuses = iter([True, True, False])
    refusal = (400, {"error": {"message": "no tool_choice with this chat template"}})
    async with serve_strict(refusal, lambda _: next(refuses)) as (url, received):
        policy = model("vllm/m", base_url=url)
        with pytest.raises(Failed, match="tool_choice"):
            await policy.respond({"input": CONVERSATION})
        await policy.respond({"input": CONVERSATION})
    assert [message["role"] for message in received[2]] == ["system", "user", "system"]


@pytest.mark.parametrize(
    ("status", "answer"),
    [
        (500, {"error": {"message": "internal system error"}}),
        (500, {"error": {"message": "try an alternative endpoint"}}),
        (429, {"error": {"message": "The role of this user has a limit."}}),
        (502, {"error": {"message": "no template"}}),
        (503, {"error": {"message": "no template"}}),
        (500, '<html><main role="alert">Jinja template</main></html>'),
        (502, '<html><main role="alert">Jinja template</main></html>'),
    ],
)
async def test_an_error_of_the_server_or_a_page_of_a_proxy_is_tried_again_without_a_change(
    status: int, answer: object
) -> None:
    refuses = iter([True, False])
    async with serve_strict((status, answer), lambda _: next(refuses)) as (url, received):
        await model("vllm/m", base_url=url, wait=0.001).respond({"input": CONVERSATION})
    assert [message["role"] for message in received[1]] == ["system", "user", "system"]


@pytest.mark.parametrize("interface", ["vllm-generate", "vllm-completions", "nemo-rl"])
async def test_a_conversation_with_late_system_messages_continues_on_its_token_ids(interface: TokenInterface) -> None:
    kind = "vllm" if interface == "vllm-generate" else interface
    items: list[Item] = [{"role": "user", "content": "hi"}]
    async with serve_strict(REFUSALS[0], kind=kind) as (url, _):
        policy = model("vllm/m", base_url=url, tokens=True, token_interface=interface)
        prompts = []
        for turn in range(3):
            output = (await policy.respond({"input": items}))["output"]
            prompts.append([output[-1][TOKEN_FIELDS[0]], output[-1][TOKEN_FIELDS[1]]])
            assert "token_chain_broken" not in output[-1]
            items += [*output, LATE, {"role": "user", "content": f"turn {turn}"}]
    for (prompt, generated), (later, _) in itertools.pairwise(prompts):
        assert later[: len(prompt) + len(generated)] == [*prompt, *generated]


def test_parts_are_kept_when_messages_are_merged() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    merged = merge_late_system([{"role": "user", "content": [image]}, LATE])
    assert merged == [{"role": "user", "content": [image, {"type": "text", "text": "A file changed."}]}]


def test_a_part_of_a_conversation_is_merged_as_the_whole_is() -> None:
    turn = {"role": "assistant", "content": "hello"}
    new = [LATE, LATE, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}, LATE]
    whole = merge_late_system([{"role": "user", "content": "hi"}, turn, *new])
    assert whole[2:] == merge_late_system(new, is_start=False)
