"""Hypothesis strategies for model outputs and client requests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from gymsdk import responses
from gymsdk.responses import build_usage
from gymsdk.types import Item

TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3, 4], "generation_log_probs": [-0.5, 0.0]}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "auto"}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}

words = st.text(alphabet='ab é"\\\n<\u2028\U0001f600', min_size=1, max_size=12)
reasoning_texts = words.map(str.strip).filter(bool)
texts = words.filter(str.strip)
arguments = st.sampled_from(["{}", '{"a": 1}', '{"a": "é\\n"}', '{"a":'])
names = st.sampled_from(["add", "look"])
usages = st.one_of(
    st.none(),
    st.builds(
        build_usage,
        st.integers(0, 9),
        st.integers(0, 9),
        cached_tokens=st.none() | st.integers(0, 9),
        reasoning_tokens=st.none() | st.integers(0, 9),
    ),
)


def refusal(text: str) -> Item:
    return responses.build_message("") | {"content": [{"type": "refusal", "refusal": text}]}


@st.composite
def build_turns(draw: st.DrawFn, *, tokens: bool = True, calls: int = 3, refusals: bool = True) -> list[Item]:
    """Draw one policy turn: optional reasoning, text and refusal, then calls; the last item may have token fields."""
    items = [responses.build_reasoning(draw(reasoning_texts))] if draw(st.booleans()) else []
    items += [responses.build_message(draw(texts))] if draw(st.booleans()) else []
    items += [refusal(draw(reasoning_texts))] if refusals and draw(st.booleans()) else []
    count = draw(st.integers(0, calls))
    items += [
        responses.build_function_call(draw(names), draw(arguments), f"c{draw(st.integers(0, 10**9))}_{n}")
        for n in range(count)
    ]
    items = items or [responses.build_message("")]
    if tokens and draw(st.booleans()):
        items[-1] |= TOKENS
    return items


@st.composite
def build_responses(draw: st.DrawFn) -> Item:
    """Draw a Response with one turn, complete or incomplete."""
    reason = draw(st.sampled_from([None, "max_output_tokens", "content_filter"]))
    status: responses.ResponseStatus = "incomplete" if reason else "completed"
    return responses.build_response(draw(build_turns()), model="m", usage=draw(usages), status=status, reason=reason)


@st.composite
def build_requests(draw: st.DrawFn) -> Item:
    """Draw a Responses request that Chat Completions can express: see `test_round_trips`."""
    items = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        content = st.one_of(texts, texts.map(lambda text: [{"type": "input_text", "text": text}, IMAGE]))
        items.append({"role": "user", "content": draw(content)})
        turn = draw(build_turns(refusals=False))
        items += turn
        calls = [item["call_id"] for item in turn if item["type"] == "function_call"]
        items += [responses.build_function_call_output(call, draw(words)) for call in calls]
    return {"input": [*items, {"role": "user", "content": draw(texts)}]} | draw(options)


TOOLS = [{"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}]
CHOICES: list[Any] = [
    "auto",
    "required",
    {"type": "function", "name": "add"},
    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "add"}]},
]
options = st.builds(
    lambda fields, tools: fields | tools,
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
