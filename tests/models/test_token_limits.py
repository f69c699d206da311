"""Errors of model servers about the context: the prompt is too long, or the output limit too large."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from models.test_endpoint import completion, serve_answers

from gymsdk import model
from gymsdk.convert.token_limits import find_limit_refusal
from gymsdk.errors import Failed
from gymsdk.responses import Api, TokenInterface
from gymsdk.testing.endpoint import build_app, serve
from gymsdk.testing.faults import Faults
from gymsdk.types import Item

ROWS = [json.loads(line) for line in Path(__file__).with_name("token_limits.jsonl").read_text().splitlines()]
"""Messages of engines, with whether the prompt is too long, and the largest output limit that fits, if the message says
it. `null`: neither the prompt nor the output limit is refused."""
LARGE_LIMITS = {row["message"]: row["remaining_tokens"] for row in ROWS if row["is_prompt"] is False}


def build_bodies(message: str) -> list[bytes]:
    """Return the *message* in the error bodies of OpenAI, Gemini, Cohere, TGI, vLLM before 0.10, and FastAPI."""
    error = {"error": {"message": message, "type": "BadRequestError", "code": 400}}
    bodies = (error, [error], {"id": "x", "message": message}, {"error": message}, {"detail": message})
    return [json.dumps(body).encode() for body in bodies]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["message"][:40])
def test_a_long_prompt_is_told_from_a_large_output_limit_and_from_other_refusals(row: Item) -> None:
    refusals = [find_limit_refusal(status, body) for body in build_bodies(row["message"]) for status in (400, 422)]
    if row["is_prompt"] is None:
        assert refusals == [None] * 10
        return
    assert [refusal and refusal.is_prompt for refusal in refusals] == [row["is_prompt"]] * 10
    if not row["is_prompt"]:
        assert [refusal and refusal.remaining_tokens for refusal in refusals] == [row["remaining_tokens"]] * 10
    assert find_limit_refusal(500, build_bodies(row["message"])[0]) is None


CONTEXT = 200


@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_an_output_limit_that_does_not_fit_is_clamped(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(build_app(model("scripted/echo"), faults=Faults(context=CONTEXT))) as url:
        policy = model("vllm/m", base_url=url, api=api)
        for _ in range(2):
            response = await policy.respond({"input": "hello", "max_output_tokens": 5000})
            assert response["status"] == "completed"
        too_long = await policy.respond({"input": "x" * CONTEXT, "max_output_tokens": 5000})
    assert too_long["status"] == "incomplete"
    assert "maximum context length" in too_long["incomplete_details"]["message"]
    assert sum("an output limit does not fit" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("interface", ["vllm-generate", "vllm-completions", "nemo-rl"])
async def test_an_output_limit_is_clamped_with_token_ids(interface: TokenInterface) -> None:
    kind = {"vllm-generate": "vllm"}.get(interface, interface)
    application = build_app(model("scripted/echo"), faults=Faults(context=CONTEXT), kind=kind)
    async with serve(application) as url:
        policy = model("vllm/m", base_url=url, tokens=True, token_interface=interface)
        response = await policy.respond({"input": "hello", "max_output_tokens": 5000})
    assert response["status"] == "completed"
    assert response["output"][-1]["generation_token_ids"]


NO_ROOM = "maximum context length is 40 tokens. However, you requested 39 output tokens and at least 2 input"
CAP = "max_tokens: 32000 > 8192, which is the maximum allowed number of output tokens for claude"
CONTEXT_OF_CAP = "input length and `max_tokens` exceed context limit: 199759 + 8192 > 200000, decrease input length"


@pytest.mark.parametrize(
    ("refusals", "limits"),
    [
        *(([message], [200_000, room]) for message, room in LARGE_LIMITS.items() if room),
        # The server does not say what fits, or refuses the limit that it named.
        ([NO_ROOM], [39, None]),
        ([next(iter(LARGE_LIMITS))] * 2, [4000, 3968, None]),
        ([CAP, CONTEXT_OF_CAP], [32000, 8192, 241]),
    ],
)
async def test_the_next_request_has_the_largest_limit_that_fits_or_none(
    refusals: list[str], limits: list[int | None]
) -> None:
    answers: list[tuple[int, Item]] = [(400, {"error": {"message": message}}) for message in refusals]
    async with serve_answers(*answers, (200, completion({"content": "x"}))) as (url, bodies):
        response = await model("endpoint/m", base_url=url).respond({"input": "hi", "max_output_tokens": limits[0]})
    assert response["status"] == "completed"
    assert [body.get("max_tokens") for body in bodies] == limits


async def test_a_server_that_refuses_a_request_without_a_limit_is_a_failure() -> None:
    message = next(iter(LARGE_LIMITS))
    async with serve_answers((400, {"error": {"message": message}})) as (url, bodies):
        with pytest.raises(Failed, match=r"without an output limit, too; serve the model with a longer") as caught:
            await model("vllm/m", base_url=url).respond({"input": "hi", "max_output_tokens": 4000})
    assert (caught.value.kind, caught.value.retryable, len(bodies)) == ("model_bad_request", False, 3)


async def test_a_prompt_that_fits_no_limit_ends_the_turn() -> None:
    context = "However, the model's context length is only 4096 tokens, resulting in a maximum input length of"
    messages = [
        f"You passed 97 input tokens and requested 4000 output tokens. {context} 96 tokens.",
        f"You passed 4097 input tokens and requested 0 output tokens. {context} 4096 tokens.",
    ]
    async with serve_answers(*((400, {"error": {"message": message}}) for message in messages)) as (url, bodies):
        response = await model("vllm/m", base_url=url).respond({"input": "hi", "max_output_tokens": 4000})
    assert response["incomplete_details"]["message"] in messages[1]
    assert [body.get("max_tokens") for body in bodies] == [4000, None]
