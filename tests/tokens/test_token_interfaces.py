"""The probe finds out how an engine takes and returns token ids, and conversations that cannot continue are marked."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import gymsdk
from gymsdk import responses
from gymsdk.convert import chat_inbound
from gymsdk.errors import Failed, UsageError
from gymsdk.responses import BROKEN_FIELD, CONSTRAINED_FIELD, DIGEST_FIELD, TOKEN_FIELDS, TokenInterface
from gymsdk.testing import build_app, serve
from gymsdk.testing.engine import REASONING_FIELDS, EngineKind
from gymsdk.testing.faults import Faults
from gymsdk.testing.templates import TEMPLATES, TemplateTokenizer
from gymsdk.tokens.history import drop_ids_after_break
from gymsdk.types import Item, extract_text

from .conversations import TALK, TOOLS, Turn, TurnPolicy, play
from .engine_transport import build_upstream

VLLM: tuple[TokenInterface, ...] = ("vllm-generate", "vllm-completions")
ALL: tuple[TokenInterface, ...] = (*VLLM, "sglang", "nemo-rl", "chat")
OPENING: list[Item] = [{"role": "user", "content": "Please look in there."}]


def answer_call(output: list[Item]) -> list[Item]:
    """Return a conversation with this first turn and the output of its call."""
    return [*OPENING, *output, responses.build_function_call_output(output[-1]["call_id"], "there")]


@pytest.mark.parametrize(
    ("kind", "found"),
    [("vllm", "vllm-generate"), ("vllm-completions", "vllm-completions"), ("nemo-rl", "nemo-rl"), ("sglang", "sglang")],
)
async def test_the_probe_finds_the_interface_of_a_served_engine(kind: EngineKind, found: TokenInterface) -> None:
    policy = TurnPolicy([TALK[1]] * 3)
    tokenizer = TemplateTokenizer(TEMPLATES["gemma"], pairs=True)
    async with serve(build_app(policy, kind=kind, template="gemma", pairs=True)) as url:
        options = {"tokenizer": tokenizer} if kind == "sglang" else {}
        model: Any = gymsdk.model(f"vllm/policy@{url}", tokens=True, **options)
        assert await model.check_tokens() == found
        policy.turns, policy.number = TALK, 0
        played = await play(model, TALK)
    played.check_fields()
    assert (played.count_violations(), played.count_broken()) == (0, 0)


async def test_an_engine_that_renders_each_call_again_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = build_upstream(TurnPolicy([TALK[1]] * 9), None, kind="sglang")
    assert await model.check_tokens() == "chat"
    assert "renders the conversation again for each call" in caplog.text


async def test_training_refuses_an_engine_without_token_ids() -> None:
    async with serve(build_app(TurnPolicy([TALK[1]] * 3), kind="plain")) as url:
        model = gymsdk.model(f"vllm/policy@{url}", tokens=True)
        with pytest.raises(Failed, match=r"policy returns no token ids; .* leave out --token-ids") as caught:
            await model.respond({"input": OPENING})
        assert (caught.value.kind, caught.value.retryable) == ("model_no_token_ids", False)
        evaluated = await gymsdk.model(f"vllm/policy@{url}").respond({"input": OPENING})
    assert TOKEN_FIELDS[1] not in evaluated["output"][-1]


@pytest.mark.parametrize("interface", [None, *VLLM])
@pytest.mark.parametrize("status", [401, 500, 503])
async def test_a_probe_or_rendering_that_fails_is_repeated_by_the_next_call(
    status: int, interface: TokenInterface | None
) -> None:
    model, transport = build_upstream(TurnPolicy([TALK[1]] * 9), interface)
    transport.status = status
    with pytest.raises(Failed, match=str(status)) as caught:
        await model.respond({"input": OPENING})
    assert caught.value.retryable is (status != 401)
    transport.status = 200
    response = await model.respond({"input": OPENING})
    assert response["output"][-1][TOKEN_FIELDS[1]]


@pytest.mark.parametrize("interface", ALL[:3])
async def test_an_engine_that_changes_the_prompt_is_an_error(interface: TokenInterface) -> None:
    model, transport = build_upstream(TurnPolicy(TALK), interface)
    transport.change_prompt = True
    with pytest.raises(Failed, match="the engine used another prompt than it was sent") as caught:
        await model.respond({"input": OPENING})
    assert caught.value.kind == "model_bad_tokens"


@pytest.mark.parametrize("interface", ["vllm-generate", "vllm-completions", "nemo-rl"])
@pytest.mark.parametrize("answer", [{}, [], {"choices": []}, {"token_ids": [1], "tokens": [1], "choices": [{}]}, None])
async def test_an_answer_without_the_expected_fields_is_the_engines_fault(
    interface: TokenInterface, answer: object
) -> None:
    model, transport = build_upstream(TurnPolicy(TALK), interface)
    transport.fixed_answer = answer
    with pytest.raises(Failed) as caught:
        await model.respond({"input": OPENING})
    assert caught.value.kind in {"model_bad_answer", "model_bad_tokens", "model_no_token_ids"}


EDITS: dict[str, Callable[[list[Item]], Item]] = {
    "text": lambda items: {"input": [{"role": "user", "content": "Please look elsewhere."}, *items[1:]]},
    "first messages": lambda items: {"input": items[1:]},
    "call": lambda items: {
        "input": [item | {"arguments": "{}"} if item.get("type") == "function_call" else item for item in items]
    },
    "tools": lambda items: {"input": items, "tools": TOOLS[:1]},
}
"""Requests that continue another conversation than the one of the call before."""


@pytest.mark.parametrize("edit", EDITS)
async def test_a_conversation_that_was_edited_starts_anew_and_is_marked(edit: str) -> None:
    model, _ = build_upstream(TurnPolicy(TALK), "vllm-completions", template="chatml")
    items = answer_call((await model.respond({"input": OPENING, "tools": TOOLS}))["output"])
    second = await model.respond({"tools": TOOLS} | EDITS[edit](items))
    assert second["output"][-1][BROKEN_FIELD] is True
    third = await model.respond({"input": items, "tools": TOOLS})
    assert BROKEN_FIELD not in third["output"][-1]


async def test_a_client_may_drop_reasoning_and_extra_fields() -> None:
    model, _ = build_upstream(TurnPolicy(TALK), "vllm-completions")
    first = (await model.respond({"input": OPENING, "tools": TOOLS}))["output"]
    without = [item for item in first if item["type"] != "reasoning"]
    kept = [{key: item[key] for key in item if key not in {"id", "status", DIGEST_FIELD}} for item in without]
    [*_, carrier] = (await model.respond({"input": answer_call(kept), "tools": TOOLS}))["output"]
    prompt = first[-1][TOKEN_FIELDS[0]] + first[-1][TOKEN_FIELDS[1]]
    assert carrier[TOKEN_FIELDS[0]][: len(prompt)] == prompt
    assert BROKEN_FIELD not in carrier


@pytest.mark.parametrize("reasoning", REASONING_FIELDS.values(), ids=REASONING_FIELDS.keys())
async def test_a_chat_client_that_returns_messages_keeps_the_prefix(reasoning: Item) -> None:
    """The way of an agent that speaks Chat Completions with the model server."""
    model, _ = build_upstream(TurnPolicy(TALK), "vllm-completions")
    tools = [{"type": "function", "function": {key: tool[key] for key in tool if key != "type"}} for tool in TOOLS]
    messages: list[Item] = [{"role": "user", "content": "Please look in there."}]
    ids: list[int] = []
    for turn in TALK:
        body = {"messages": messages, "tools": tools, "return_token_ids": True, "logprobs": True, **reasoning}
        response = await model.respond(chat_inbound.parse_request(body))
        message = chat_inbound.build_answer(response, body)["choices"][0]["message"]
        assert message[TOKEN_FIELDS[0]][: len(ids)] == ids
        assert BROKEN_FIELD not in message
        ids = message[TOKEN_FIELDS[0]] + message[TOKEN_FIELDS[1]]
        outputs = [
            {"role": "tool", "tool_call_id": call["id"], "content": text}
            for call, text in zip(message.get("tool_calls") or [], turn.outputs, strict=False)
        ]
        messages = [*messages, message, *(outputs or [{"role": "user", "content": turn.outputs[0]}])]


@pytest.mark.parametrize("interface", ["vllm-generate", "vllm-completions", "nemo-rl", "chat"])
async def test_every_key_that_constrains_the_decoding_marks_the_call(interface: TokenInterface) -> None:
    schema = {"type": "json_schema", "name": "answer", "schema": {"type": "object"}}
    bodies = [
        *({key: "a+"} for key in ("regex", "ebnf", "grammar", "json_schema", "structural_tag", "guided_of_tomorrow")),
        {"structured_outputs": {"choice": ["a"]}},
        {"response_format": {"type": "text"}},
        {"regex": None},
    ]
    requests = [{"metadata": {"extra_body": json.dumps(body)}} for body in bodies]
    for request in ({"text": {"format": schema}}, *requests, {}):
        model, _ = build_upstream(TurnPolicy(TALK), interface)
        response = await model.respond({"input": OPENING, **request})
        is_free = request in (*requests[-2:], {})
        assert response["output"][-1].get(CONSTRAINED_FIELD, False) is not is_free, request


@pytest.mark.parametrize("interface", ALL)
async def test_strict_tools_do_not_constrain_the_decoding(interface: TokenInterface) -> None:
    model, transport = build_upstream(TurnPolicy(TALK), interface)
    request = {"input": OPENING, "tools": [tool | {"strict": True} for tool in TOOLS]}
    first = (await model.respond(request))["output"]
    second = await model.respond(request | {"input": answer_call(first)})
    sent = [tool["function"] for _, body in transport.requests for tool in body.get("tools") or []]
    assert sent
    assert all("strict" not in function for function in sent)
    assert not any(CONSTRAINED_FIELD in item for item in [*first, *second["output"]])
    assert (BROKEN_FIELD in second["output"][-1]) == (interface == "chat")
    assert all(tool["strict"] for tool in [*request["tools"], *second["tools"]])


async def test_a_grammar_that_the_engine_adds_by_itself_is_left_out() -> None:
    """vLLM adds one for strict tools, and for `parallel_tool_calls: false`."""
    model, transport = build_upstream(TurnPolicy(TALK), "vllm-generate")
    request = {"input": OPENING, "tools": TOOLS, "parallel_tool_calls": False}
    response = await model.respond(request)
    assert CONSTRAINED_FIELD not in response["output"][-1]
    forced = await model.respond(request | {"tool_choice": "required"})
    assert forced["output"][-1][CONSTRAINED_FIELD] is True
    sent = [body["sampling_params"] for path, body in transport.requests if path == "/inference/v1/generate"]
    assert ["structured_outputs" in parameters for parameters in sent[-2:]] == [False, True]


async def test_a_tokenizer_that_does_not_take_a_variable_of_the_template_is_named() -> None:
    """SGLang takes ids, so that it would ignore the variable."""
    model, _ = build_upstream(TurnPolicy(TALK), "sglang")
    request = {"input": OPENING, "metadata": {"chat_template_kwargs": json.dumps({"enable_thinking": False})}}
    with pytest.raises(Failed, match="enable_thinking") as refused:
        await model.respond(request)
    assert refused.value.kind == "model_bad_request"


@pytest.mark.parametrize("interface", ALL)
async def test_a_grammar_that_cannot_be_left_out_is_marked(interface: TokenInterface) -> None:
    """Over Chat Completions, vLLM adds one for `parallel_tool_calls: false` if the request has tools."""
    one = {"parallel_tool_calls": False}
    for more, is_constrained in (
        ({"tools": TOOLS, **one}, interface == "chat"),
        ({"tools": TOOLS}, False),
        ({"tools": TOOLS, "tool_choice": "none", **one}, False),
        (one, False),
    ):
        model, _ = build_upstream(TurnPolicy(TALK), interface)
        response = await model.respond({"input": OPENING, **more})
        assert (CONSTRAINED_FIELD in response["output"][-1]) is is_constrained, more


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("interface", ALL)
@pytest.mark.parametrize("tools", [[], TOOLS])
async def test_the_token_that_ends_a_turn_is_not_in_its_text(
    interface: TokenInterface, template: str, tools: list[Item]
) -> None:
    turns = [Turn("", "the answer is in there", (), ("go on", "", "")), Turn("", "", (), ("", "", ""))]
    model, _ = build_upstream(TurnPolicy(turns), interface, template=template)
    for text in ("the answer is in there", ""):
        response = await model.respond({"input": OPENING, "tools": tools})
        message = response["output"][-1]
        assert extract_text(message.get("content") or "").strip() == text
        ids = message[TOKEN_FIELDS[1]]
        assert TemplateTokenizer(TEMPLATES[template], pairs=True).decode(ids[-1:]) == TEMPLATES[template].eos


SPANS = [{"version": "7", "start": 0, "end": 5}, {"version": "8", "start": 5, "end": 9}]


@pytest.mark.parametrize("interface", ALL)
async def test_the_versions_of_the_weights_are_known_for_each_token(interface: TokenInterface) -> None:
    model, transport = build_upstream(TurnPolicy([TALK[1]] * 9), interface)
    transport.weight_versions = SPANS
    response = await model.respond({"input": OPENING})
    assert (response["output"][-1]["weight_versions"], response["output"][-1]["weight_version"]) == (SPANS, "8")
    assert responses.get_weight_versions(response) == ["7", "8"]
    for wrong in ([SPANS[1]], [{**SPANS[0], "end": 0}], [SPANS[0], SPANS[0]], [{"version": "7"}], ["7"], "7", 7):
        transport.weight_versions = wrong
        with pytest.raises(Failed, match="'weight_versions' do not follow each other"):
            await model.respond({"input": OPENING})


async def test_a_forced_tool_call_needs_an_engine_that_renders_and_a_list_of_allowed_tools_forces_none() -> None:
    model, _ = build_upstream(TurnPolicy(TALK), "vllm-completions")
    request = {"input": OPENING, "tools": TOOLS}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    response = await model.respond(request | {"tool_choice": allowed})
    assert CONSTRAINED_FIELD not in response["output"][-1]
    for choice in ("required", allowed | {"mode": "required"}):
        with pytest.raises(Failed, match="cannot force a tool call; use tool_choice 'auto'") as caught:
            await model.respond(request | {"tool_choice": choice})
        assert caught.value.kind == "model_bad_request"


@pytest.mark.parametrize("interface", ALL[:3])
async def test_images_are_refused(interface: TokenInterface) -> None:
    model, _ = build_upstream(TurnPolicy(TALK), interface)
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    with pytest.raises(Failed, match="a part of type 'image_url', and token ids are kept for text only") as caught:
        await model.respond({"input": [{"role": "user", "content": [image]}]})
    assert caught.value.kind == "model_bad_request"


@pytest.mark.parametrize("interface", ALL[:3])
async def test_a_prompt_that_exceeds_the_context_ends_the_turn(interface: TokenInterface) -> None:
    model, _ = build_upstream(TurnPolicy(TALK), interface, faults=Faults(context=300))
    response = await model.respond({"input": [{"role": "user", "content": "then " * 400}]})
    assert response["status"] == "incomplete"
    assert "maximum context length is 300 tokens" in response["incomplete_details"]["message"]


@pytest.mark.parametrize("interface", ALL)
async def test_sampling_parameters_do_not_come_from_the_files_of_the_model(interface: TokenInterface) -> None:
    model, transport = build_upstream(TurnPolicy(TALK), interface)
    await model.respond({"input": OPENING})
    await model.respond({"input": OPENING, "temperature": 0.5, "top_k": 20})
    path = {"vllm-generate": "chat/completions/render", "vllm-completions": "completions"}.get(
        interface, "chat/completions"
    )
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    first, second = ([body.get(key) for key in keys] for sent, body in transport.requests if sent == path)
    pinned = [None] * 3 if interface in {"nemo-rl", "chat"} else [-1, 0.0, 1.0]
    assert first == [1.0, 1.0, *pinned]
    assert second == [0.5, 1.0, 20, *pinned[1:]]


@pytest.mark.parametrize("interface", VLLM)
@pytest.mark.parametrize(("pairs", "renderings"), [(False, 1), (True, 2)])
async def test_a_turn_renders_the_conversation_twice_only_if_the_policy_chose_other_ids(
    pairs: bool, renderings: int, interface: TokenInterface
) -> None:
    turns = [Turn("", f"answer {number} is in there", ("look",), ("there", "", "")) for number in range(60)]
    model, transport = build_upstream(TurnPolicy(turns), interface, pairs=pairs)
    played = await play(model, turns)
    assert played.count_violations() == played.count_broken() == 0
    rendered = [body for path, body in transport.requests if path in {"/tokenize", "chat/completions/render"}]
    # The first turns also learn how the template ends a turn and starts the next.
    assert (renderings - 1) * len(turns) < len(rendered) <= renderings * len(turns) + 16


def test_ids_after_a_broken_chain_are_left_out_for_trainers() -> None:
    tokens = dict(zip(TOKEN_FIELDS, ([1], [2], [-0.5]), strict=True))
    whole = [{"type": "message", **tokens}, {"type": "message", **tokens}]
    assert drop_ids_after_break(whole) is None
    broken = [whole[0], whole[1] | {BROKEN_FIELD: True}, whole[1]]
    assert drop_ids_after_break(broken) == [whole[0], {"type": "message", BROKEN_FIELD: True}, {"type": "message"}]


async def test_without_tools_a_sampled_call_remains_in_the_text() -> None:
    turn = Turn("think", "there", ["look"], ["in"])
    for interface in ("vllm-generate", "vllm-completions"):
        upstream, _ = build_upstream(TurnPolicy([turn]), interface)
        response = await upstream.respond({"input": "hello"})
        assert "<tool_call>" in extract_text(response["output"][-1]["content"])


def test_options_without_effect_are_refused() -> None:
    for options, message in (
        ({"token_interface": "vllm-generate"}, "has no effect without tokens; add --token-ids"),
        ({"tokens": True, "token_interface": "sglang"}, "name the model's tokenizer with --tokenizer"),
    ):
        with pytest.raises(UsageError, match=message):
            gymsdk.model("vllm/policy@http://127.0.0.1:1/v1", **options)
