"""Hypothesis strategies for outputs of models and requests of clients."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from gymsdk import responses
from gymsdk.types import Item

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.5, 0.0]}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}

words = st.text(alphabet='ab é"\\\n<\u2028\U0001f600', min_size=1, max_size=12)
thoughts = words.map(str.strip).filter(bool)
texts = words.filter(str.strip)
arguments = st.sampled_from(["{}", '{"a": 1}', '{"a": "é\\n"}', '{"a":'])
names = st.sampled_from(["add", "look"])
usages = st.one_of(
    st.none(),
    st.builds(
        responses.build_usage,
        st.integers(0, 9),
        st.integers(0, 9),
        cached_tokens=st.none() | st.integers(0, 9),
        reasoning_tokens=st.none() | st.integers(0, 9),
    ),
)


def refusal(text: str) -> Item:
    return responses.build_message("") | {"content": [{"type": "refusal", "refusal": text}]}


@st.composite
def turns(draw: st.DrawFn, *, tokens: bool = True, calls: int = 3, refusals: bool = True) -> list[Item]:
    """One turn of the policy: at most one thought, one text, one refusal, then calls; the last carries tokens."""
    said = [responses.build_reasoning(draw(thoughts))] if draw(st.booleans()) else []
    said += [responses.build_message(draw(texts))] if draw(st.booleans()) else []
    said += [refusal(draw(thoughts))] if refusals and draw(st.booleans()) else []
    count = draw(st.integers(0, calls))
    said += [
        responses.build_function_call(draw(names), draw(arguments), f"c{draw(st.integers(0, 10**9))}_{n}")
        for n in range(count)
    ]
    said = said or [responses.build_message("")]
    if tokens and draw(st.booleans()):
        said[-1] |= TOKENS
    return said


@st.composite
def answers(draw: st.DrawFn) -> Item:
    """A Response of one turn, however it ended."""
    reason = draw(st.sampled_from([None, "max_output_tokens", "content_filter"]))
    status: responses.ResponseStatus = "incomplete" if reason else "completed"
    return responses.build_response(draw(turns()), model="m", usage=draw(usages), status=status, reason=reason)


@st.composite
def asked(draw: st.DrawFn) -> Item:
    """A Responses request as Chat Completions can say it: see `test_round_trips`."""
    given = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        content = st.one_of(texts, texts.map(lambda text: [{"type": "input_text", "text": text}, IMAGE]))
        given.append({"role": "user", "content": draw(content)})
        turn = draw(turns(refusals=False))
        given += turn
        calls = [item["call_id"] for item in turn if item["type"] == "function_call"]
        given += [responses.build_function_call_output(call, draw(words)) for call in calls]
    return {"input": [*given, {"role": "user", "content": draw(texts)}]} | draw(wishes)


TOOLS = [{"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}]
CHOICES: list[Any] = [
    "auto",
    "required",
    {"type": "function", "name": "add"},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
]
wishes = st.builds(
    lambda wished, tools: wished | tools,
    st.fixed_dictionaries(
        {},
        optional={
            "model": st.just("m"),
            "temperature": st.just(0.5),
            "top_p": st.just(0.9),
            "max_output_tokens": st.integers(1, 9),
            "reasoning": st.just({"effort": "low"}),
            "text": st.sampled_from([{"format": SCHEMA}, {"format": {"type": "json_object"}}, {"verbosity": "low"}]),
            "user": st.just("u"),
            "service_tier": st.just("flex"),
            "seed": st.integers(0, 9),
            "stop": st.just(["x"]),
            "top_k": st.just(20),
            "chat_template_kwargs": st.just({"enable_thinking": False}),
        },
    ),
    st.fixed_dictionaries({})
    | st.fixed_dictionaries(
        {"tools": st.just(TOOLS)},
        optional={"tool_choice": st.sampled_from(CHOICES), "parallel_tool_calls": st.booleans()},
    ),
)
