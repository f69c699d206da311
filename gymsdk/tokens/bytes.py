"""The tokenizer of bytes: an id for each byte of UTF-8 and one for each mark of ChatML; it needs nothing installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, groupby

from gymsdk.errors import UsageError
from gymsdk.transcript import Item

from . import chatml
from .chatml import Mark

MARKS = {256 + number: mark for number, mark in enumerate(Mark)}
"""The ids beyond those of the bytes."""

IDS = {mark: token for token, mark in MARKS.items()}


class Bytes:
    """Ids 0 to 255 are bytes, those from 256 marks.

    Only the chat template writes marks: words that spell one stay words, whoever wrote them.
    """

    eos_token_id = IDS[Mark.END]
    pad_token_id = IDS[Mark.TEXT_END]
    vocab_size = 256 + len(MARKS)

    def __len__(self) -> int:
        """Give how many ids there are."""
        return self.vocab_size

    def apply_chat_template(
        self, messages: Iterable[Item], /, *, tools: Iterable[Item] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Give the ids of *messages* in ChatML, tools and calls in the Hermes form."""
        pieces = chatml.pieces(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        written = ([IDS[piece]] if isinstance(piece, Mark) else self.encode(piece) for piece in pieces)
        return [*chain.from_iterable(written)]

    def encode(self, text: str, /, *, add_special_tokens: bool = False) -> list[int]:  # noqa: ARG002  # it adds none
        """Give the bytes of *text*; half a surrogate pair, which has none, becomes a question mark."""
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int], /) -> str:
        """Give the text of *ids*; bytes that are no UTF-8 become U+FFFD."""
        if wrong := next((token for token in ids if not 0 <= token < self.vocab_size), None):
            raise UsageError(f"{wrong} is no token id; they go from 0 to {self.vocab_size - 1}")
        runs = groupby(ids, key=MARKS.get)
        return "".join(mark * len([*run]) if mark else bytes(run).decode("utf-8", "replace") for mark, run in runs)
