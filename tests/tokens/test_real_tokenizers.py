"""Conversations with the tokenizers that the package mistral-common contains keep their token ids.

Run it with `pip install "mistral-common[sentencepiece]"`; `.ci/long` does.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gymsdk.testing.local_engine import LocalModel
from gymsdk.types import Item

from .conversations import Turn, TurnPolicy, draw_turn, play

mistral_common = pytest.importorskip("mistral_common", reason='pip install "mistral-common[sentencepiece]"')

DATA = Path(mistral_common.__file__).parent / "data"
FILES = sorted(path.name for path in DATA.iterdir() if not path.name.startswith("tokenizer.model.v1"))
"""The tokenizers with tools; the first version has none."""

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class MistralTokenizer:
    """A tokenizer of mistral-common with the methods that gymsdk needs."""

    def __init__(self, name: str) -> None:
        from mistral_common.protocol.instruct.validator import ValidationMode
        from mistral_common.tokens.tokenizers.mistral import MistralTokenizer as Mistral

        # One mode requires that a conversation ends with a turn of the assistant, the other that it does not.
        self._by_end = {
            True: Mistral.from_file(str(DATA / name), mode=ValidationMode.finetuning),
            False: Mistral.from_file(str(DATA / name), mode=ValidationMode.test),
        }
        self._inner = self._by_end[True].instruct_tokenizer.tokenizer
        self.eos_token_id = self._inner.eos_id

    def apply_chat_template(
        self, messages: list[Item], /, *, tools: list[Item] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        request = ChatCompletionRequest.from_openai(messages=[*map(convert_message, messages)], tools=tools)
        tokenizer = self._by_end[messages[-1]["role"] == "assistant"]
        ids: list[int] = tokenizer.encode_chat_completion(request).tokens
        return ids

    def encode(self, text: str, /, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self._inner.encode(text, bos=False, eos=False)
        return ids

    def decode(self, ids: Sequence[int], /) -> str:
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

        text: str = self._inner.decode([*ids], special_token_policy=SpecialTokenPolicy.KEEP)
        return text


def convert_message(message: Item) -> Item:
    """Return *message* in the form that mistral-common accepts: with short ids, and with text or calls."""
    kept = {key: message[key] for key in ("role", "content", "tool_calls", "tool_call_id") if message.get(key)}
    kept.setdefault("content", "")
    if "tool_calls" in kept:
        kept["tool_calls"] = [
            call
            | {"id": shorten(call.get("id")), "type": "function"}
            | {"function": call["function"] | {"arguments": dump(call["function"].get("arguments"))}}
            for call in kept["tool_calls"]
        ]
        kept.pop("content")
    if "tool_call_id" in kept:
        kept["tool_call_id"] = shorten(kept["tool_call_id"])
    return kept


def shorten(id: object) -> str:
    return hashlib.sha256(str(id).encode()).hexdigest()[:9]


def dump(arguments: Any) -> str:
    import json

    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def build_turns(rng: random.Random, max_calls: int) -> list[Turn]:
    """Return turns without empty texts, which these tokenizers reject, and without limits."""
    turns = [draw_turn(rng) for _ in range(4)]
    return [
        Turn("", turn.text.strip() or "well", turn.calls[:max_calls], [text.strip() or "so" for text in turn.outputs])
        for turn in turns
    ]


@pytest.mark.parametrize("name", FILES)
async def test_every_prompt_continues_the_ids_of_the_call_before(name: str) -> None:
    tokenizer = MistralTokenizer(name)
    violations = broken = transitions = drifting = 0
    for seed in range(40):
        # The second version takes one tool output per turn.
        turns = build_turns(random.Random(seed), 1 if name.endswith(".v2") else 3)
        played = await play(LocalModel(TurnPolicy(turns), tokenizer, seed=seed), turns)
        played.check_fields()
        transitions += len(played.carriers) - 1
        violations += played.count_violations()
        broken += played.count_broken()
        again = await play(LocalModel(TurnPolicy(turns), tokenizer, seed=seed), turns, keep_ids=False)
        drifting += again.count_violations()
    assert (violations, broken) == (0, 0)
    assert drifting > transitions / 4
