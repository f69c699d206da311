"""Prompts continue with what a template writes for the whole conversation, or the call is marked.

Each template differs from the others in one way in which templates of published models differ.
"""

from __future__ import annotations

import logging

import pytest

from gymsdk.responses import TokenInterface
from gymsdk.tokens.bridge import Bridge, BridgeError

from .jinja_templates import KINDS, JinjaTokenizer, Kind, Outcome, Step, count_outcomes, play_kind

INTERFACES: tuple[TokenInterface, ...] = ("vllm-generate", "vllm-completions", "sglang")

CALLS = """{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"""
PROMPT = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
SYSTEM = "{% set system = messages[0].content if messages[0].role in ['system', 'developer'] else '' %}"
TOOLS = "{% if tools %}<|start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
TURN = f"<|start|>{{{{ message.role }}}}\n{{{{ message.content }}}}{CALLS}<|im_end|>\n"


def build_turns(turn: str = TURN, before: str = "", after: str = PROMPT) -> str:
    """Return the source of a template that writes *turn* for each message."""
    return f"{SYSTEM}{TOOLS}{before}{{% for message in messages %}}{turn}{{% endfor %}}{after}"


IS_LAST_USER = "loop.index0 == messages | map(attribute='role') | list | length - 1"
CONTINUED = {
    "plain": build_turns(),
    "switch in the system message": build_turns(
        after="{% if add_generation_prompt %}<|start|>assistant\n"
        "{% if '/no_think' in system %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "switch among the variables": build_turns(
        after="{% if add_generation_prompt %}<|start|>assistant\n"
        "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "another end of the last turn": build_turns(
        f"<|start|>{{{{ message.role }}}}\n{{{{ message.content }}}}{CALLS}"
        "{% if loop.last and message.role == 'assistant' %}<|return|>{% else %}<|im_end|>{% endif %}"
    ),
    "ended by the next turn": build_turns(
        f"<|{{{{ message.role }}}}|>\n{{{{ message.content }}}}{CALLS}",
        after="{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ).replace("tools\n", "tools ")
    + "{#<|user|><|tool|><|system|><|developer|>#}",
    "end only before a message": build_turns(
        "<|start|>{{ message.role }}\n{{ message.content }}{% for call in message.tool_calls or [] %}"
        "<call>{{ call.function | tojson }}{% if not loop.last or true %}{% endif %}</call>{% endfor %}"
        "{% if not (loop.last and message.role == 'assistant') %}\n<|im_end|>\n{% endif %}"
    ),
    "always a prompt": build_turns(after="<|start|>assistant\n<|think|>"),
    "text closed by a token": build_turns(
        f"<|start|>{{{{ message.role }}}}<|text|>{{{{ message.content }}}}<|/text|>{CALLS}<|im_end|>\n"
    ),
    "two ends": build_turns(
        f"<|start|>{{{{ message.role }}}}\n{{{{ message.content }}}}{CALLS}\n<|im_end|>"
        "{% if message.role == 'assistant' %}\n<|im_end|>{% endif %}"
    ),
    "earlier reasoning left out": build_turns(
        "{% if message.role == 'assistant' and message.reasoning_content and loop.last %}"
        "<|start|>assistant\n<think>\n{{ message.reasoning_content }}\n</think>\n{{ message.content }}"
        f"{CALLS}<|im_end|>\n{{% else %}}{TURN}{{% endif %}}"
    ),
}
"""Templates that determine each continuation."""

MESSAGES_READ = "(messages | rejectattr('role', 'equalto', 'assistant') | list | length)"
MARKED = {
    "system text in the last user turn": (
        build_turns(
            f"{{% if message.role == 'system' %}}{{% elif loop.last and message.role == 'user' %}}<|start|>user\n"
            f"{{{{ system }}}}\n{{{{ message.content }}}}<|im_end|>\n{{% else %}}{TURN}{{% endif %}}"
        ),
        "rewrites messages that the policy has read",
    ),
    "tool output ends in another way later": (
        build_turns(
            f"{{% if message.role == 'tool' and not loop.last %}}<|start|>tool\n{{{{ message.content }}}}\n<|im_end|>\n"
            f"{{% else %}}{TURN}{{% endif %}}"
        ),
        "rewrites messages that the policy has read",
    ),
    "earlier turns dropped": (
        build_turns().replace("in messages %}", "in messages[-3:] %}"),
        "rewrites messages that the policy has read",
    ),
    "count of messages in the system block": (
        build_turns(before="<|start|>system\n{{ messages | length }} messages<|im_end|>\n"),
        "rewrites messages that the policy has read",
    ),
    "system block once there are outputs": (
        build_turns().replace(
            SYSTEM,
            f"{SYSTEM}{{% if messages | selectattr('role', 'equalto', 'tool') | list %}}<|start|>system\n"
            "You read outputs.<|im_end|>\n{% endif %}",
        ),
        "rewrites messages that the policy has read",
    ),
    "later system messages moved to the start": (
        build_turns(
            before="{% set found = messages | selectattr('role', 'in', ['system', 'developer']) | list %}"
            "{% set messages = found + messages | rejectattr('role', 'in', ['system', 'developer']) | list %}"
        ),
        "rewrites messages that the policy has read",
    ),
    "note after the first turn of a long conversation": (
        build_turns(
            f"{TURN}{{% if message.role == 'assistant' and loop.index < 4 and {MESSAGES_READ} > 3 %}}<|start|>note\n"
            "This was long ago.<|im_end|>\n{% endif %}"
        ),
        "rewrites messages that the policy has read",
    ),
    "text after the end of earlier turns": (
        build_turns(
            f"<|start|>{{{{ message.role }}}}\n{{{{ message.content }}}}{CALLS}<|im_end|>{{% if message.role =="
            f" 'assistant' %}}{{{{ '..' if {MESSAGES_READ} > 3 else '.' }}}}{{% endif %}}\n"
        ),
        "rewrites messages that the policy has read",
    ),
    "messages that depend on the text of the turn": (
        build_turns(
            "<|start|>{{ message.role }}\n{{ message.content }}"
            "{% if loop.last and messages | length > 1 %} ({{ messages[loop.index0 - 1].content | length }}){% endif %}"
            f"{CALLS}<|im_end|>\n"
        ),
        "in another way after the policy's own turn",
    ),
    "no end of a turn": (
        build_turns("{{ message.role }}: {{ message.content }}\n\n", after="assistant:").replace("<|im_end|>", "\n"),
        "without a special token",
    ),
}
"""Templates that rewrite a part of some conversations, and why those are marked."""


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
    marked = 0
    for kind_name, kind in KINDS.items():
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="gymsdk"):
            outcomes = await play_kind(source, kind, interface)
        counts = count_outcomes(outcomes)
        assert counts["different"] == 0, (kind_name, outcomes)
        marked += counts["marked"]
        messages = [record.getMessage() for record in caplog.records if reason in record.getMessage()]
        assert len(messages) <= 1
    assert marked > 0


def test_the_bridge_takes_the_whole_conversation() -> None:
    """The codec of token ids renders with the tokenizer of this process."""
    tokenizer = JinjaTokenizer(CONTINUED["switch in the system message"])
    opening = [{"role": "system", "content": "/no_think"}, {"role": "user", "content": "hello"}]
    turn, new = {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}
    generated = tokenizer.encode("hi<|im_end|>")
    parts = [tokenizer.apply_chat_template(opening, add_generation_prompt=True)]
    suffix = Bridge(tokenizer).suffix(generated, [new], conversation=[*opening, turn], parts=parts)
    assert tokenizer.decode(suffix) == "\n<|start|>user\nbye<|im_end|>\n<|start|>assistant\n<think>\n\n</think>\n\n"


def test_the_bridge_refuses_what_a_template_rewrites() -> None:
    tokenizer = JinjaTokenizer(MARKED["system text in the last user turn"][0])
    opening = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    turn, new = {"role": "assistant", "content": "hi"}, {"role": "user", "content": "bye"}
    parts = [tokenizer.apply_chat_template(opening, add_generation_prompt=True)]
    with pytest.raises(BridgeError, match="rewrites messages that the policy has read"):
        Bridge(tokenizer).suffix(tokenizer.encode("hi<|im_end|>"), [new], conversation=[*opening, turn], parts=parts)


async def test_an_earlier_turn_without_ids_hides_no_other_text() -> None:
    """The kinds above return all ids; this one starts with an example turn."""
    kind = Kind([Step(), Step(), Step()], "Be kind.")
    outcomes = await play_kind(CONTINUED["plain"], kind, "vllm-generate")
    assert count_outcomes(outcomes) == {"template": 2}
