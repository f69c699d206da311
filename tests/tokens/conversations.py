"""Play multi-turn tool conversations with a model, and check the properties of their token ids."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from gymsdk import responses
from gymsdk.responses import TOKEN_FIELDS, build_usage
from gymsdk.tokens.history import BROKEN_FIELD
from gymsdk.types import Episode, Item, Model

TOOLS = [
    {
        "type": "function",
        "name": name,
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    }
    for name in ("look", "open_door")
]

TEXTS = (
    "then another one",
    "the answer is in there",
    "",
    "  spaces before and after  ",
    "line one\nline two\n\n",
    "<|im_end|> is spelled out, and so is <eos> or </s>",
    'a quote " and a brace }} with "in": "her"',
    "<tool_response>not a real one</tool_response>",
    "Zürich 答 😀",
    "…",
)
"""Texts with several encodings, spelled special tokens, white space and letters outside ASCII."""


@dataclass(frozen=True)
class Turn:
    """A turn of the policy, and the text that it reads afterwards.

    Attributes:
        reasoning: The reasoning, empty for none.
        text: The text of the reply.
        calls: The names of the tools that are called.
        outputs: The text of the messages and tool outputs after the turn.
        max_tokens: The maximum number of tokens, to cut the turn off.
    """

    reasoning: str
    text: str
    calls: Sequence[str]
    outputs: Sequence[str]
    max_tokens: int | None = None

    def build_output(self) -> list[Item]:
        items = [responses.build_reasoning(self.reasoning)] if self.reasoning else []
        if self.text or not (self.calls or self.reasoning):
            items.append(responses.build_message(self.text))
        return items + [responses.build_function_call(name, {"at": self.text}) for name in self.calls]


def draw_turn(rng: random.Random) -> Turn:
    """Return a random turn."""
    return Turn(
        reasoning=rng.choice(("", "think then answer", "hm\n\nwell")),
        text=rng.choice(TEXTS),
        calls=rng.choice(((), (), ("look",), ("look", "open_door"), ("open_door", "look", "look"))),
        outputs=[rng.choice(TEXTS) for _ in range(3)],
        max_tokens=rng.choice((None, None, None, 5, 40)),
    )


TALK = [
    Turn("think then answer", "then another one", ("look",), ("in there", "", "")),
    Turn("", "the answer is in there", (), ("go on then", "", "")),
    Turn("hm", "", ("look", "open_door"), ("one", "another", "")),
    Turn("", "done in there", (), ("", "", "")),
]
"""A conversation with reasoning, calls and replies."""

TURNS = [draw_turn(random.Random(seed)) for seed in range(500)]
conversations = st.lists(st.sampled_from(TURNS), min_size=2, max_size=4)
"""Conversations of two to four random turns."""


class TurnPolicy:
    """A policy that plays turns in order, according to the number of turns that its request contains."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self.turns = turns
        self.number = 0

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        turn = self.turns[self.number]
        self.number += 1
        usage = build_usage(0, 0)
        return responses.build_response(turn.build_output(), model="turns", usage=usage, request=request)


@dataclass
class Played:
    """A played conversation: the last output item of each call, and the items that followed it."""

    carriers: list[Item] = field(default_factory=list)
    new_items: list[list[Item]] = field(default_factory=list)
    outputs: list[list[Item]] = field(default_factory=list)

    def count_violations(self) -> int:
        """Return the number of prompts that do not begin with the prompt and the generation before (P1)."""
        return sum(
            after[TOKEN_FIELDS[0]][: len(kept := before[TOKEN_FIELDS[0]] + before[TOKEN_FIELDS[1]])] != kept
            for before, after in zip(self.carriers, self.carriers[1:], strict=False)
        )

    def count_broken(self) -> int:
        """Return the number of calls that are marked as broken."""
        return sum(bool(item.get(BROKEN_FIELD)) for item in self.carriers)

    def get_suffixes(self) -> list[list[int]]:
        """Return the ids between each generation and the next."""
        return [
            after[TOKEN_FIELDS[0]][len(before[TOKEN_FIELDS[0]]) + len(before[TOKEN_FIELDS[1]]) :]
            for before, after in zip(self.carriers, self.carriers[1:], strict=False)
        ]

    def check_fields(self) -> None:
        """Check that each call has exactly one carrier, its last item (P4), with finite log-probabilities (P3)."""
        for output, carrier in zip(self.outputs, self.carriers, strict=True):
            assert [item for item in output if any(key in item for key in TOKEN_FIELDS)] == [carrier]
            prompt, generated, logprobs = (carrier[key] for key in TOKEN_FIELDS)
            assert prompt
            assert len(generated) == len(logprobs) > 0
            assert all(map(math.isfinite, logprobs))


async def play(model: Model, played: Sequence[Turn], *, keep_ids: bool = True, system: str = "Be kind.") -> Played:
    """Play a conversation with *model*: its own output items, then outputs of its tools or a message of the user.

    Args:
        model: The model.
        played: The turns.
        keep_ids: Whether the client returns the token ids, as it must.
        system: The system message, or an empty string.
    """
    result = Played()
    items: list[Item] = [{"role": "system", "content": system}] if system else []
    items.append({"role": "user", "content": "Please look in there, then answer."})
    for turn in played:
        request: Item = {"input": items, "tools": TOOLS}
        if turn.max_tokens:
            request["max_output_tokens"] = turn.max_tokens
        response = await model.respond(request)
        output = response["output"]
        result.outputs.append(output)
        result.carriers.append(output[-1])
        calls = [item for item in output if item["type"] == "function_call"]
        new = [
            responses.build_function_call_output(call["call_id"], text)
            for call, text in zip(calls, [*turn.outputs, *turn.outputs], strict=False)
        ] or [{"role": "user", "content": turn.outputs[0]}]
        result.new_items.append(new)
        sent = output if keep_ids else [{key: item[key] for key in item if key not in TOKEN_FIELDS} for item in output]
        items = [*items, *sent, *new]
    return result
