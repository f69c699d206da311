"""With token ids, each prompt continues the ids of the call before, for every token interface and chat template."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from hypothesis import HealthCheck, example, given, settings

from gymsdk.convert import chat
from gymsdk.models.endpoint import Upstream
from gymsdk.responses import TOKEN_FIELDS, TokenInterface
from gymsdk.testing.templates import TEMPLATES, TemplateTokenizer

from .conversations import TALK, TURNS, Played, Turn, TurnPolicy, conversations, play
from .engine_transport import build_upstream

EXACT_INTERFACES: tuple[TokenInterface, ...] = ("vllm-generate", "vllm-completions", "sglang", "nemo-rl")
"""The interfaces that continue conversations on their ids; `chat` does not."""

CONVERSATIONS = int(os.environ.get("GYMSDK_TEST_CONVERSATIONS", "20"))
"""How many conversations each interface plays with each template; `.ci/long` plays 200."""


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One event loop for all conversations; a new one for each takes longer than the conversation."""
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@cache
def build_model(interface: TokenInterface, template: str) -> tuple[TurnPolicy, Upstream]:
    """Return a policy and the model that plays it; the conversations share what the model learns of a template."""
    policy = TurnPolicy(())
    model, _ = build_upstream(policy, interface, template=template)
    return policy, model


def play_with(
    loop: asyncio.AbstractEventLoop, interface: TokenInterface, template: str, turns: Sequence[Turn], **options: bool
) -> Played:
    policy, model = build_model(interface, template)
    policy.turns, policy.number = turns, 0
    return loop.run_until_complete(play(model, turns, **options))


def render_new_text(tokenizer: TemplateTokenizer, played: Played, number: int) -> str:
    """Return what the template writes between a turn and the next: the end-of-turn token, unless the policy wrote it
    itself, the new messages, and the start of the policy's next turn."""
    names = [item["name"] for item in played.outputs[number] if item["type"] == "function_call"]
    calls = [{"function": {"name": name, "arguments": '{"at": "ENDING"}'}} for name in names]
    turn = {"role": "assistant", "content": "ENDING", **({"tool_calls": calls} if calls else {})}
    new = chat.build_messages({"input": played.new_items[number]})
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "question"}, turn, *new], add_generation_prompt=True
    )
    rendered = tokenizer.decode(ids)
    _, end, following = rendered[rendered.rindex("ENDING") :].partition(tokenizer.template.eos)
    is_complete = played.carriers[number][TOKEN_FIELDS[1]][-1] == tokenizer.eos_token_id
    return following if is_complete else end + following


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("interface", EXACT_INTERFACES)
@settings(deadline=None, max_examples=CONVERSATIONS, suppress_health_check=list(HealthCheck))
@given(turns=conversations)
# An empty message, then a turn that is cut off, then the same message: with `mistral` the rendering has the end of a
# turn and the empty message twice.
@example(turns=[TURNS[number] for number in (124, 161, 176, 66)])
@example(turns=[TURNS[number] for number in (200, 271, 383, 393)])
def test_every_prompt_continues_the_ids_of_the_call_before(
    loop: asyncio.AbstractEventLoop, interface: TokenInterface, template: str, turns: list[Turn]
) -> None:
    played = play_with(loop, interface, template, turns)
    played.check_fields()
    assert played.count_violations() == 0
    assert played.count_broken() == 0
    tokenizer = TemplateTokenizer(TEMPLATES[template], pairs=True)
    for number, suffix in enumerate(played.get_suffixes()):
        assert tokenizer.decode(suffix) == render_new_text(tokenizer, played, number)


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_prefix_breaks_without_the_ids_and_over_chat_completions_which_say_so(
    loop: asyncio.AbstractEventLoop, template: str
) -> None:
    """The property above can fail."""
    assert play_with(loop, "vllm-generate", template, TALK, keep_ids=False).count_violations() > 0
    played = play_with(loop, "chat", template, TALK)
    assert played.count_broken() >= played.count_violations() > 0
