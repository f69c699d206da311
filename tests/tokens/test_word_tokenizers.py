"""Tokenizers of words: the placeholder words are those that the tokenizer knows."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

import pytest

from gymsdk.errors import UsageError
from gymsdk.gym.codecs import Tokens, once
from gymsdk.tokens.bridge import Bridge, BridgeError, TemplateBridge
from gymsdk.types import Item

from .test_count_suffix import run

MARKS = ("<end>", "<start>")
QUESTION: Item = {"role": "user", "content": "see door"}
NEW: Item = {"role": "user", "content": "door see"}


class WordTokenizer:
    """A tokenizer with words as ids; id 0 is any other word. Its chat template writes a turn between two marks."""

    def __init__(self, words: Sequence[str], *, has_vocabulary: bool = True) -> None:
        self.words = ["<unk>", *MARKS, *words]
        self.eos_token_id = 1
        if has_vocabulary:
            self.get_vocab = lambda: {word: number for number, word in enumerate(self.words)}

    def apply_chat_template(
        self, messages: list[Item], /, *, tools: list[Item] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        text = "".join(f"<start> {each['role']} {each['content']} <end> " for each in messages)
        return self.encode(text + ("<start> assistant" if add_generation_prompt else ""))

    def encode(self, text: str, /, *, add_special_tokens: bool = False) -> list[int]:
        return [self.words.index(word) if word in self.words else 0 for word in re.findall(r"\S+", text)]

    def decode(self, ids: list[int], /) -> str:
        return " ".join(self.words[number] for number in ids)


KNOWN = ("user", "assistant", "see", "door", "gold", "map")


def continue_turn(tokenizer: Any, turn: str) -> str:
    generated = tokenizer.encode(f"{turn} <end>")
    conversation = [QUESTION, {"role": "assistant", "content": turn}]
    return str(tokenizer.decode(Bridge(tokenizer).suffix(generated, [NEW], conversation=conversation)))


@pytest.mark.parametrize(("has_vocabulary", "turn"), [(True, "gold"), (False, "gold map")])
def test_words_come_from_the_vocabulary_or_else_from_the_conversation(has_vocabulary: bool, turn: str) -> None:
    tokenizer = WordTokenizer(KNOWN, has_vocabulary=has_vocabulary)
    assert continue_turn(tokenizer, turn) == "<start> user door see <end> <start> assistant"
    assert not has_vocabulary or Bridge(tokenizer).terminator == tokenizer.eos_token_id


def test_an_engine_with_such_a_tokenizer_continues() -> None:
    tokenizer = WordTokenizer(KNOWN, has_vocabulary=False)
    turn = {"role": "assistant", "content": "gold map"}
    steps = TemplateBridge().compute_suffix(tokenizer.encode("gold map <end>"), [NEW], conversation=[QUESTION, turn])
    suffix = run(steps, tokenizer)
    assert tokenizer.decode(suffix) == "<start> user door see <end> <start> assistant"


def test_a_tokenizer_that_knows_no_words_is_explained_once(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = WordTokenizer(())
    with pytest.raises(BridgeError, match=r"turns different words .* use a tokenizer whose vocabulary covers"):
        continue_turn(tokenizer, "gold")
    once.warnings.clear()
    with caplog.at_level(logging.WARNING, logger="gymsdk"):
        for _ in range(3):
            codec = Tokens(tokenizer)
            codec.encode_opening([QUESTION], [])
            # A turn that was cut off: what follows it is not there as it was generated.
            codec.parse_action([0], turn=0)
            with pytest.raises(UsageError, match="turns different words"):
                codec.encode_reply([NEW], over=False)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "episodes of several turns may fail with this tokenizer" in said[0]
