"""If a template rejects the placeholder turn, the turns of the rendered conversation are counted."""

from __future__ import annotations

from typing import Any

import pytest

from gymsdk.errors import UsageError
from gymsdk.responses import BROKEN_FIELD, TOKEN_FIELDS
from gymsdk.testing.templates import TEMPLATES, TemplateTokenizer
from gymsdk.tokens.bridge import BridgeError, Decoding, TemplateBridge
from gymsdk.types import Item

from .conversations import Turn, TurnPolicy, play
from .engine_transport import build_upstream

TOKENIZER = TemplateTokenizer(TEMPLATES["chatml"], pairs=True)
MESSAGES: list[Item] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "first"},
    {"role": "user", "content": "then?"},
    {"role": "assistant", "content": "then another one"},
]
NEW: list[Item] = [{"role": "user", "content": "go on"}]


def run(steps: Any, tokenizer: Any = TOKENIZER) -> Any:
    result: object = None
    while True:
        try:
            request = steps.send(result)
        except StopIteration as stop:
            return stop.value
        if isinstance(request, Decoding):
            result = tokenizer.decode(request.ids)
        else:
            result = tokenizer.apply_chat_template(
                request.messages, add_generation_prompt=request.add_generation_prompt
            )


@pytest.mark.parametrize("name", ["chatml", "gemma", "mistral", "eos-only"])
@pytest.mark.parametrize("truncated", [False, True])
def test_counting_gives_the_same_ids_as_the_placeholder(name: str, truncated: bool) -> None:
    tokenizer = TemplateTokenizer(TEMPLATES[name], pairs=True)
    bridge = TemplateBridge([tokenizer.eos_token_id])
    generated = [*tokenizer.encode("other words"), *([] if truncated else [tokenizer.eos_token_id])]
    expected = run(bridge.compute_suffix(generated, NEW), tokenizer)
    assert run(bridge.count_suffix(generated, MESSAGES, NEW), tokenizer) == expected


def test_without_known_special_tokens_the_last_generated_id_ends_the_turn() -> None:
    generated = [*TOKENIZER.encode("other words"), TOKENIZER.eos_token_id]
    expected = run(TemplateBridge([TOKENIZER.eos_token_id]).compute_suffix(generated, NEW))
    assert run(TemplateBridge().count_suffix(generated, MESSAGES, NEW)) == expected
    with pytest.raises(BridgeError, match="without a special token"):
        run(TemplateBridge().count_suffix(generated[:-1], MESSAGES, NEW))


def test_a_turn_that_the_template_writes_in_another_way_later_is_not_counted() -> None:
    tokenizer = TemplateTokenizer(TEMPLATES["qwen"])
    with pytest.raises(BridgeError, match="in another way"):
        run(TemplateBridge([tokenizer.eos_token_id]).count_suffix([65, 258], MESSAGES, NEW), tokenizer)


def reject_placeholders(messages: list[Item]) -> None:
    if any(message.get("content") == "question" for message in messages):
        raise UsageError("no placeholders, please")


@pytest.mark.parametrize("countable", [True, False])
async def test_a_conversation_continues_by_counting_or_is_marked(
    countable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template that rejects the placeholder; without a countable turn, the conversation starts anew."""
    original = TemplateTokenizer.apply_chat_template

    def render(self: TemplateTokenizer, messages: list[Item], /, **options: Any) -> list[int]:
        reject_placeholders(messages)
        if not countable and options.get("add_generation_prompt") is False:
            raise UsageError("no open end, please")
        return original(self, messages, **options)

    monkeypatch.setattr(TemplateTokenizer, "apply_chat_template", render)
    turns = [Turn("", "then another one", (), ("in there", "", "")), Turn("", "done", (), ("", "", ""))]
    model, _ = build_upstream(TurnPolicy(turns), "vllm-generate", template="chatml")
    played = await play(model, turns)
    assert played.count_violations() == played.count_broken() == (0 if countable else 1)
    assert bool(played.carriers[1].get(BROKEN_FIELD)) is not countable
    assert played.carriers[1][TOKEN_FIELDS[1]]
