"""Prompts continue with what a template writes for the whole conversation, or the call is marked.

Each template differs from the others in one way in which templates of published models differ.
"""

from __future__ import annotations

import logging

import pytest

from gymsdk.responses import TokenInterface
from gymsdk.tokens.bridge import Bridge, BridgeError

from .jinja_templates import KINDS, JinjaTokenizer, Outcome, count_outcomes, play_kind

INTERFACES: tuple[TokenInterface, ...] = ("vllm-generate", "sglang")
"""An interface that does not say which tokens are special, and one whose tokenizer does."""

CALLS = """{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"""
PROMPT = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
SYSTEM = "{% set system = messages[0].content if messages[0].role in ['system', 'developer'] else '' %}"
TOOLS = "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
START = "<|start|>{{ message.role }}\n{{ message.content }}"
TURN = f"{START}{CALLS}<|im_end|>\n"
NO_PLACEHOLDERS = "{% if message.content == 'question' %}{{ raise_exception('no placeholders') }}{% endif %}"


def build_turns(turn: str = TURN, before: str = "", after: str = PROMPT) -> str:
    """Return the source of a template that writes *turn* for each message."""
    return f"{SYSTEM}{TOOLS}{before}{{% for message in messages %}}{turn}{{% endfor %}}{after}"


def build_switch(condition: str) -> str:
    """Return the start of a turn that has an empty block of reasoning under a *condition*."""
    return PROMPT.replace("\n", f"\n{{% if {condition} %}}<think>\n\n</think>\n\n{{% endif %}}")


CONTINUED = {
    "plain": build_turns(),
    "switch in the system message": build_turns(after=build_switch("'/no_think' in system")),
    "switch among the variables": build_turns(after=build_switch("enable_thinking is false")),
    "another end of the last turn": build_turns(
        f"{START}{CALLS}"
        "{% if loop.last and message.role == 'assistant' %}<|return|>{% else %}<|im_end|>{% endif %}"
    ),
    "ended by the next turn": build_turns(
        f"<|{{{{ message.role }}}}|>\n{{{{ message.content }}}}{CALLS}",
        after=PROMPT.replace("start|>assistant", "assistant|>"),
    ).replace("tools\n", "tools ")
    + "{#<|user|><|tool|><|system|><|developer|>#}",
    "end only before a message": build_turns(
        f"{START}{CALLS}{{% if not (loop.last and message.role == 'assistant') %}}\n<|im_end|>\n{{% endif %}}"
    ),
    "always a prompt": build_turns(after="<|start|>assistant\n<|think|>"),
    "text closed by a token": build_turns(TURN.replace("\n", "<|text|>", 1).replace(CALLS, f"<|/text|>{CALLS}")),
    "two ends": build_turns(
        f"{START}{CALLS}\n<|im_end|>{{% if message.role == 'assistant' %}}\n<|im_end|>{{% endif %}}"
    ),
    "earlier reasoning left out": build_turns(
        "{% if message.role == 'assistant' and message.reasoning_content and loop.last %}"
        "<|start|>assistant\n<think>\n{{ message.reasoning_content }}\n</think>\n{{ message.content }}"
        f"{CALLS}<|im_end|>\n{{% else %}}{TURN}{{% endif %}}"
    ),
    "no placeholders": build_turns(NO_PLACEHOLDERS + TURN),
}
"""Templates that determine each continuation."""

REWRITTEN = "rewrites messages that the policy has read"
MESSAGES_READ = "(messages | rejectattr('role', 'equalto', 'assistant') | list | length)"
REWRITING = {
    "system text in the last user turn": build_turns(
        "{% if message.role == 'system' %}{% elif loop.last and message.role == 'user' %}<|start|>user\n"
        f"{{{{ system }}}}\n{{{{ message.content }}}}<|im_end|>\n{{% else %}}{TURN}{{% endif %}}"
    ),
    "tool output ends in another way later": build_turns(
        f"{{% if message.role == 'tool' and not loop.last %}}{START}\n<|im_end|>\n{{% else %}}{TURN}{{% endif %}}"
    ),
    "earlier turns dropped": build_turns().replace("in messages %}", "in messages[-3:] %}"),
    "count of messages in the system block": build_turns(
        before="<|start|>system\n{{ messages | length }} messages<|im_end|>\n"
    ),
    "system block once there are outputs": build_turns().replace(
        SYSTEM,
        f"{SYSTEM}{{% if messages | selectattr('role', 'equalto', 'tool') | list %}}<|start|>system\n"
        "You read outputs.<|im_end|>\n{% endif %}",
    ),
    "later system messages moved to the start": build_turns(
        before="{% set found = messages | selectattr('role', 'in', ['system', 'developer']) | list %}"
        "{% set messages = found + messages | rejectattr('role', 'in', ['system', 'developer']) | list %}"
    ),
    "note after the first turn of a long conversation": build_turns(
        f"{TURN}{{% if message.role == 'assistant' and loop.index < 4 and {MESSAGES_READ} > 3 %}}<|start|>note\n"
        "This was long ago.<|im_end|>\n{% endif %}"
    ),
    "text after the end of earlier turns": build_turns(
        f"{START}{CALLS}<|im_end|>{{% if message.role == 'assistant' %}}"
        f"{{{{ '..' if {MESSAGES_READ} > 3 else '.' }}}}{{% endif %}}\n"
    ),
}
MARKED = {name: (source, REWRITTEN) for name, source in REWRITING.items()} | {
    "messages that depend on the text of the turn": (
        build_turns(
            f"{START}{{% if loop.last and messages | length > 1 %}}"
            f" ({{{{ messages[loop.index0 - 1].content | length }}}}){{% endif %}}{CALLS}<|im_end|>\n"
        ),
        "in another way after the policy's own turn",
    ),
    "no end of a turn": (
        build_turns("{{ message.role }}: {{ message.content }}\n\n", after="assistant:").replace("<|im_end|>", "\n"),
        "without a special token",
    ),
    "no placeholders, and no open end": (
        build_turns(NO_PLACEHOLDERS + TURN) + "{% if not add_generation_prompt and messages[-1].role == 'assistant' %}"
        "{{ raise_exception('no open end') }}{% endif %}",
        "no open end",
    ),
}
"""Templates that rewrite or do not determine a part of some conversations, and why those are marked."""


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("name", CONTINUED)
async def test_each_call_continues_with_the_text_of_the_template(name: str, interface: TokenInterface) -> None:
    for kind_name, kind in KINDS.items():
        outcomes = await play_kind(CONTINUED[name], kind, interface)
        assert outcomes, kind_name
        # A turn without its end or its text does not show which token ends turns, if the engine does not say it.
        is_shown = interface == "sglang" or kind_name not in {"cut", "empty reply"}
        allowed: set[Outcome] = {"template"} if is_shown else {"template", "marked"}
        assert {outcome for outcome, _ in outcomes} <= allowed, (kind_name, outcomes)


@pytest.mark.parametrize("interface", INTERFACES)
@pytest.mark.parametrize("name", MARKED)
async def test_what_a_template_rewrites_is_marked_and_said_once(
    name: str, interface: TokenInterface, caplog: pytest.LogCaptureFixture
) -> None:
    source, reason = MARKED[name]
    marked = said = 0
    for kind_name, kind in KINDS.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="gymsdk"):
            outcomes = await play_kind(source, kind, interface)
        counts = count_outcomes(outcomes)
        assert counts["different"] == 0, (kind_name, outcomes)
        marked += counts["marked"]
        messages = [record.getMessage() for record in caplog.records if reason in record.getMessage()]
        assert len(messages) <= 1
        said += len(messages)
    assert min(marked, said) > 0


@pytest.mark.parametrize(
    ("name", "system", "start"),
    [
        ("switch in the system message", "/no_think", "<think>\n\n</think>\n\n"),
        ("system text in the last user turn", "Be kind.", None),
    ],
)
def test_the_bridge_takes_the_whole_conversation(name: str, system: str, start: str | None) -> None:
    """The codec of token ids renders with the tokenizer of this process."""
    tokenizer = JinjaTokenizer((CONTINUED | REWRITING)[name])
    opening = [{"role": "system", "content": system}, {"role": "user", "content": "hello"}]
    conversation = [*opening, {"role": "assistant", "content": "hi"}]
    parts = [tokenizer.apply_chat_template(opening, add_generation_prompt=True)]
    arguments = tokenizer.encode("hi<|im_end|>"), [{"role": "user", "content": "bye"}]
    if start is None:
        with pytest.raises(BridgeError, match=REWRITTEN):
            Bridge(tokenizer).suffix(*arguments, conversation=conversation, parts=parts)
    else:
        suffix = Bridge(tokenizer).suffix(*arguments, conversation=conversation, parts=parts)
        assert tokenizer.decode(suffix) == f"\n<|start|>user\nbye<|im_end|>\n<|start|>assistant\n{start}"
