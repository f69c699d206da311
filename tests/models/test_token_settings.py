"""With token ids each field of a request is delivered, marked or refused; none is dropped or honoured silently."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from tokens.engine_transport import build_upstream

from gymsdk.convert.request_keys import REQUEST_KEYS, RequestKey
from gymsdk.errors import Failed
from gymsdk.models import registry
from gymsdk.models.token_settings import PREFIX_FIELD, get_sampling_settings
from gymsdk.responses import SAMPLING_FIELD, TOKEN_FIELDS, TokenInterface
from gymsdk.types import Item

INTERFACES: tuple[TokenInterface, ...] = ("vllm-generate", "vllm-completions", "nemo-rl", "chat")


async def respond(interface: TokenInterface, extra: Item | None = None, **fields: Any) -> Item:
    upstream, _ = build_upstream(registry.model("scripted/echo"), interface, pairs=False)
    metadata = {"metadata": {"extra_body": json.dumps(extra)}} if extra else {}
    return await upstream.respond({"input": "Say yes."} | fields | metadata)


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize(
    "key",
    [key for key in REQUEST_KEYS.values() if key.effect in {"refused", "refused if false"}],
    ids=lambda key: key.name,
)
async def test_a_field_without_meaning_is_refused_with_its_reason(interface: TokenInterface, key: RequestKey) -> None:
    value = False if key.effect == "refused if false" else 3
    with pytest.raises(Failed, match=key.name) as refused:
        await respond(interface, {key.name: value})
    assert refused.value.kind == "model_bad_request"
    assert key.reason in str(refused.value)
    # A null value leaves the field out.
    assert (await respond(interface, {key.name: None}))["output"]


@pytest.mark.parametrize("field", [key.name for key in REQUEST_KEYS.values() if key.is_zero_effective])
async def test_a_zero_with_an_effect_is_refused(field: str) -> None:
    """vLLM returns the log-probabilities of the prompt's own tokens for `prompt_logprobs: 0`."""
    with pytest.raises(Failed, match=field):
        await respond("vllm-completions", **{field: 0})


async def test_requested_top_logprobs_are_refused_and_not_dropped() -> None:
    with pytest.raises(Failed, match="'top_logprobs' cannot be used with token ids"):
        await respond("vllm-completions", top_logprobs=5)


@pytest.mark.parametrize("interface", INTERFACES[:2])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"continue_final_message": True}, "a turn of the policy cannot begin with given text"),
        ({PREFIX_FIELD: [1, 2]}, PREFIX_FIELD),
    ],
)
async def test_what_the_engine_would_ignore_is_refused_with_its_reason(
    interface: TokenInterface, fields: Item, message: str
) -> None:
    conversation = [{"role": "user", "content": "Say yes."}, {"role": "assistant", "content": "Ye"}]
    with pytest.raises(Failed, match=message):
        await respond(interface, fields, input=conversation)


@pytest.mark.parametrize("interface", INTERFACES)
async def test_requested_log_probabilities_of_the_text_are_those_of_the_ids(interface: TokenInterface) -> None:
    carrier = (await respond(interface, include=["message.output_text.logprobs"]))["output"][-1]
    entries = carrier["content"][0]["logprobs"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in carrier[TOKEN_FIELDS[1]]]
    assert [entry["logprob"] for entry in entries] == carrier[TOKEN_FIELDS[2]]


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20}, {"presence_penalty": 0.5}, {"logit_bias": {"65": 5}}],
    ids=lambda settings: next(iter(settings)),
)
async def test_settings_that_change_the_distribution_are_marked_once(
    interface: TokenInterface, settings: Item, caplog: pytest.LogCaptureFixture
) -> None:
    upstream, _ = build_upstream(registry.model("scripted/echo"), interface, pairs=False)
    with caplog.at_level(logging.WARNING, "gymsdk"):
        outputs = [(await upstream.respond({"input": "yes"} | settings))["output"] for _ in range(2)]
    assert [output[-1][SAMPLING_FIELD] for output in outputs] == [settings, settings]
    warnings = [record.message for record in caplog.records if SAMPLING_FIELD in record.message]
    assert len(warnings) == 1
    assert next(iter(settings)) in warnings[0]


@pytest.mark.parametrize("interface", INTERFACES)
async def test_neutral_settings_leave_no_mark(interface: TokenInterface) -> None:
    neutral = {"temperature": 1, "top_p": 1.0, "presence_penalty": 0.0, "top_k": -1}
    assert SAMPLING_FIELD not in (await respond(interface, **neutral))["output"][-1]
    assert get_sampling_settings({"temperature": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}) == {}
