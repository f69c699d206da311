"""Errors of model servers about the context: the prompt is too long, or the output limit too large."""

from __future__ import annotations

import json

import pytest
from models.test_endpoint import completion, serve_answers

from gymsdk import model
from gymsdk.convert.token_limits import find_limit_refusal
from gymsdk.errors import Failed
from gymsdk.responses import Api, TokenInterface
from gymsdk.testing.endpoint import build_app, serve
from gymsdk.testing.faults import Faults
from gymsdk.types import Item

LONG_PROMPTS = [
    "The input (61709 tokens) is longer than the model's context length (40960 tokens).",
    ("Requested token count exceeds the model's maximum context length of 202752 tokens. You requested a total"),
    "Input length (160062 tokens) exceeds the maximum allowed length (59862 tokens).",
    "request (4390 tokens) exceeds the available context size (4096 tokens), try increasing it",
    ("'max_tokens' is too large: 512. This model's maximum context length is 4096 tokens and your request has"),
    "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens",
    "The decoder prompt (length 9) is longer than the maximum model length of 8.",
    "max_tokens must be at least 1, got -27.",
    "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
    "Your input exceeds the context window of this model.",
    "prompt is too long: 208310 tokens > 200000 maximum",
    "The input token count (9000) exceeds the maximum number of tokens allowed (4096).",
    "The input token count exceeds the maximum number of tokens allowed (4096).",
    "Input is too long for requested model.",
    "Input validation error: `inputs` must have less than 1024 tokens. Given: 1532",
    "The sum of prompt length (72417.0), query length (0) should not exceed max_num_tokens (69632)",
    "Prompt length (5000) exceeds maximum input length (4096). Set log level to info and check",
    "This model's maximum prompt length is 131072 but the request contains 150000 tokens.",
    (
        "too many tokens: size limit exceeded by 11326 tokens. Try using shorter or fewer inputs. The "
        "limit for this model is 132000 tokens."
    ),
    "too many tokens: total number of tokens in the prompt cannot exceed 4081 - received 4292.",
    (
        "This model's maximum context length is 32768 tokens. However, you requested 35620 tokens in the "
        "messages, Please reduce the length of the messages."
    ),
    (
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 8344 "
        "tokens (7000 in the messages, 1344 in the functions). Please reduce"
    ),
    (
        "This model's maximum context length is 131072 tokens. However, you requested 671051 tokens "
        "(670951 in the messages, 100 in the completion)."
    ),
    "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length",
    "Invalid request: Your request exceeded model token limit: 262144",
    "Range of input length should be [1, 98304]",
    "Please reduce the length of the messages or completion.",
    "The engine prompt length 4100 exceeds the max_model_len 4096. Please reduce prompt.",
    ("Malformed input request: expected maxLength: 42000, actual: 150180, please reformat your input and try again."),
    "Malformed input request: #/inputText: expected maxLength: 50000, actual: 60000, please reformat your input",
    ("`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 5000 `inputs` tokens and 20 `max_new_tokens`"),
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 10. This model's maximum context length "
        "is 4096 tokens and your request has 4096 input tokens (10 > 4096 - 4096)."
    ),
    "prompt too long; exceeded max context length by 7 tokens",
    "default_max_tokens (-904) must be greater than 0",
    (
        "You passed 4097 input tokens and requested 0 output tokens. However, the model's context length is only 4096 "
        "tokens, resulting in a maximum input length of 4096 tokens. Please reduce the length of the input prompt."
    ),
    (
        "This model's maximum context length is 4096 tokens. However, you requested 0 output tokens and your prompt "
        "contains at least 4097 input tokens, for a total of at least 4097 tokens."
    ),
]

LARGE_LIMITS = {
    (
        "'max_tokens' is too large: 4000. This model's maximum context length is 4096 tokens and your "
        "request has 128 input tokens (4000 > 4096 - 128)."
    ): 3968,
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 32000. This model's maximum context "
        "length is 65536 tokens and your request has 34006 input tokens (32000 > 65536 - 34006)."
    ): 31530,
    (
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested "
        "a total of 4128 tokens: 128 tokens from the input messages and 4000 tokens for the completion."
    ): 3967,
    "input length and `max_tokens` exceed context limit: 199759 + 8192 > 200000, decrease input length": 241,
    (
        "This model's maximum context length is 4096 tokens. However, you requested 4128 tokens (128 in "
        "the messages, 4000 in the completion). Please reduce the length of the messages or completion."
    ): 3968,
    (
        "This endpoint's maximum context length is 128000 tokens. However, you requested about 140000 "
        "tokens (120000 of text input, 20000 in the output)."
    ): 8000,
    (
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 128 `inputs` "
        "tokens and 4000 `max_new_tokens`"
    ): 3968,
    (
        "This model's maximum context length is 4097 tokens. However, you requested 4360 tokens (3335 in the messages, "
        "25 in the functions, and 1000 in the completion). Please reduce the length of the messages, functions, or "
        "completion."
    ): 737,
    (
        "This endpoint's maximum context length is 32768 tokens. However, you requested about 40000 tokens (28000 of "
        "text input, 2000 of tool input, 10000 in the output)."
    ): 2768,
    "`max_new_tokens` must be <= 512. Given: 4000": 512,
    (
        "The sum of prompt length (128) and query length (0) max_tokens (4000) should not exceed max_seq_len (4096)"
    ): 3968,
    (
        "The sum of prompt length (128.0), query length (0), max_tokens (4000) should not exceed max_seq_len (4096)"
    ): 3968,
    (
        "This model's maximum context length is 4096 tokens. However, you requested 4000 output tokens "
        "and your prompt contains at least 97 input tokens, for a total of at least 4097 tokens."
    ): None,
    (
        "You passed 97 input tokens and requested 4000 output tokens. However, the model's context length is only 4096 "
        "tokens, resulting in a maximum input length of 96 tokens. Please reduce the length of the input prompt. "
        "(parameter=input_tokens, value=97)"
    ): None,
    (
        "You passed 9000 input characters and requested 4000 output tokens. However, the model's context length is "
        "only 4096 tokens, resulting in a maximum input length of 96 tokens (at most 960 characters)."
    ): None,
    (
        "This model's maximum context length is 4096 tokens. However, you requested 4000 output tokens and your prompt "
        "contains 9000 characters (more than 960 characters, which is the upper bound for 96 input tokens)."
    ): None,
    (
        "max_tokens is too large: 32000. This model supports at most 16384 completion tokens, whereas "
        "you provided 32000."
    ): 16384,
    (
        "max_tokens: 32000 > 8192, which is the maximum allowed number of output tokens for claude-3-5-haiku-20241022"
    ): 8192,
    (
        "The maximum tokens you requested exceeds the model limit of 10000. Try again with a maximum "
        "tokens value that is lower than 10000."
    ): 10000,
    (
        "too many tokens: max tokens must be less than or equal to 4096, the maximum output for this "
        "model - received 8192."
    ): 4096,
    (
        "`max_tokens` must be less than or equal to `8192`, the maximum value for `max_tokens` is less "
        "than the `context_window` for this model"
    ): 8192,
    "Invalid max_tokens value, the valid range of max_tokens is [1, 8192]": 8192,
    "Range of max_tokens should be [1, 8192]": 8192,
    (
        "Unable to submit request because it has a maxOutputTokens value of 100000 but the supported "
        "range is from 1 (inclusive) to 65537 (exclusive). Update the value and try again."
    ): 65536,
    "maximum context length is 4096 tokens. However, you requested 5005 (5 + 5000 in the completion)": None,
    "This model's maximum context length is 4096 tokens. However, you requested 5000 output tokens": None,
}
"""Messages about an output limit, with the largest limit that fits, if the message says it."""

OTHER_REFUSALS = [
    "Unsupported parameter: 'max_tokens' is not supported with this model.",
    "temperature must be between 0 and 2",
    "Invalid API key",
    "Input should be less than or equal to 1 [top_p]",
    "messages: at least one message is required",
    "this model does not support image input",
    "Malformed input request: #/toolConfig/tools/0/toolSpec/name: expected maxLength: 64, actual: 70, please reformat",
]


def build_bodies(message: str) -> list[bytes]:
    """Return the *message* in the error bodies of OpenAI, Gemini, Cohere, TGI, vLLM before 0.10, and FastAPI."""
    error = {"error": {"message": message, "type": "BadRequestError", "code": 400}}
    bodies = (error, [error], {"id": "x", "message": message}, {"error": message}, {"detail": message})
    return [json.dumps(each).encode() for each in bodies]


@pytest.mark.parametrize("message", LONG_PROMPTS)
def test_a_prompt_that_is_too_long_is_recognized(message: str) -> None:
    refusals = [find_limit_refusal(400, body) for body in build_bodies(message)]
    assert all(refusal is not None and refusal.is_prompt for refusal in refusals)
    assert find_limit_refusal(500, build_bodies(message)[0]) is None


@pytest.mark.parametrize("message", LARGE_LIMITS)
def test_an_output_limit_that_does_not_fit_is_no_overflow(message: str) -> None:
    for body in build_bodies(message):
        refusal = find_limit_refusal(422, body)
        assert refusal is not None
        assert (refusal.is_prompt, refusal.remaining_tokens) == (False, LARGE_LIMITS[message])


@pytest.mark.parametrize("message", OTHER_REFUSALS)
def test_another_refusal_is_neither(message: str) -> None:
    assert [find_limit_refusal(400, body) for body in build_bodies(message)] == [None] * 5


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


@pytest.mark.parametrize(("message", "room"), [(message, room) for message, room in LARGE_LIMITS.items() if room])
async def test_the_second_request_has_the_largest_limit_that_fits(message: str, room: int) -> None:
    answers = ((400, {"error": {"message": message}}), (200, completion({"content": "x"})))
    async with serve_answers(*answers) as (url, bodies):
        response = await model("endpoint/m", base_url=url).respond({"input": "hi", "max_output_tokens": 200_000})
    assert response["status"] == "completed"
    assert [body["max_tokens"] for body in bodies] == [200_000, room]


async def test_a_limit_is_left_out_if_the_server_does_not_say_what_fits() -> None:
    message = "maximum context length is 40 tokens. However, you requested 39 output tokens and at least 2 input"
    answers = ((400, {"error": {"message": message}}), (200, completion({"content": "x"})))
    async with serve_answers(*answers) as (url, bodies):
        await model("vllm/m", base_url=url).respond({"input": "hi", "max_output_tokens": 39})
    assert [body.get("max_tokens") for body in bodies] == [39, None]


async def test_a_limit_that_the_server_named_and_refuses_is_left_out() -> None:
    refusal = (400, {"error": {"message": next(iter(LARGE_LIMITS))}})
    async with serve_answers(refusal, refusal, (200, completion({"content": "x"}))) as (url, bodies):
        await model("vllm/m", base_url=url).respond({"input": "hi", "max_output_tokens": 4000})
    assert [body.get("max_tokens") for body in bodies] == [4000, 3968, None]


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


async def test_the_cap_of_a_model_and_its_context_are_clamped_one_after_the_other() -> None:
    messages = [
        "max_tokens: 32000 > 8192, which is the maximum allowed number of output tokens for claude",
        "input length and `max_tokens` exceed context limit: 199759 + 8192 > 200000, decrease input length",
    ]
    refusals: list[tuple[int, Item]] = [(400, {"error": {"message": message}}) for message in messages]
    async with serve_answers(*refusals, (200, completion({"content": "x"}))) as (url, bodies):
        await model("endpoint/m", base_url=url).respond({"input": "hi", "max_output_tokens": 32000})
    assert [body["max_tokens"] for body in bodies] == [32000, 8192, 241]
