"""A tokenizer: what writes a conversation as the ids a policy sees, and reads the ids it gives."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence, Sized
from functools import lru_cache
from itertools import chain, groupby
from numbers import Integral
from typing import Protocol, runtime_checkable

from gymsdk.errors import UsageError
from gymsdk.tokens import chatml
from gymsdk.tokens.chatml import SpecialToken
from gymsdk.types import Item


@runtime_checkable
class Tokenizer(Protocol):
    """Anything with these three, as the tokenizers of transformers have.

    Where it has them, `eos_token_id`, `added_tokens_decoder`, and its size by `len()` or `vocab_size` are used.
    """

    def apply_chat_template(
        self, messages: list[Item], /, *, tools: list[Item] | None = None, add_generation_prompt: bool = False
    ) -> object:
        """Give the ids of a conversation: a list, or a mapping with a list as its `input_ids`."""

    def encode(self, text: str, /, *, add_special_tokens: bool = False) -> list[int]:
        """Give the ids of *text*."""

    def decode(self, ids: list[int], /) -> str:
        """Give the text of *ids*."""


def load_tokenizer(given: Tokenizer | str | None = None) -> Tokenizer:
    """Give the tokenizer that is *given*, that of the model with this name or folder, or the built-in one of bytes."""
    if given is None:
        return ByteTokenizer()
    found = _loaded(given) if isinstance(given, str) else given
    if not isinstance(found, Tokenizer):
        raise UsageError(
            f"{type(given).__name__} is no tokenizer: it needs apply_chat_template, encode and decode;"
            " give one, the name of a model, or nothing for the built-in one of bytes"
        )
    return found


def render_messages(
    tokenizer: Tokenizer, messages: list[Item], *, tools: list[Item] | None = None, add_generation_prompt: bool = False
) -> list[int]:
    """Give the ids of *messages* by the tokenizer's chat template; raises `UsageError` where it cannot write them."""
    try:
        given = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    except UsageError:
        raise
    except Exception as error:  # a chat template is a program of its own, and raises what it likes
        raise UsageError(f"the tokenizer's chat template cannot write these messages: {error}") from error
    found = given.get("input_ids") if isinstance(given, Mapping) else given
    if not isinstance(found, Sequence) or isinstance(found, str) or not _are_whole(found):
        raise UsageError(f"the tokenizer's chat template gave {type(found).__name__}, not a list of token ids")
    return [*map(int, found)]


def get_vocab_size(tokenizer: Tokenizer) -> int | None:
    """Give how many ids there are, where the tokenizer tells."""
    # The `vocab_size` of transformers leaves out the tokens that were added, the special ones among them.
    found = len(tokenizer) if isinstance(tokenizer, Sized) else getattr(tokenizer, "vocab_size", None)
    return found if isinstance(found, int) else None


def get_eos_id(tokenizer: Tokenizer) -> int | None:
    """Give the id that ends a text, where the tokenizer tells."""
    found = getattr(tokenizer, "eos_token_id", None)
    return found if isinstance(found, int) else None


def get_special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Give the special tokens that text can spell, by id, where the tokenizer tells."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {number: token.content for number, token in added.items() if token.special}


def _are_whole(found: Sequence[object]) -> bool:
    # A prompt is long, and asking each of its ids what it is takes longer than writing it.
    return all(issubclass(kind, Integral) for kind in set(map(type, found)))


@lru_cache(maxsize=8)
def _loaded(name: str) -> object:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            f"the tokenizer of {name!r} is read with transformers, which is missing; run `pip install transformers`"
        ) from error
    try:
        found: object = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise UsageError(
            f"no tokenizer could be loaded from {name!r}; give a model's name or a folder with its tokenizer: {why}"
        ) from error
    return found


SPECIAL_TOKENS_BY_ID = {256 + number: mark for number, mark in enumerate(SpecialToken)}
"""The ids beyond those of the bytes."""

SPECIAL_TOKEN_IDS = {mark: token for token, mark in SPECIAL_TOKENS_BY_ID.items()}


class ByteTokenizer:
    """Ids 0 to 255 are bytes, those from 256 marks.

    Only the chat template writes marks: words that spell one stay words, whoever wrote them.
    """

    eos_token_id = SPECIAL_TOKEN_IDS[SpecialToken.END]
    pad_token_id = SPECIAL_TOKEN_IDS[SpecialToken.TEXT_END]
    vocab_size = 256 + len(SPECIAL_TOKENS_BY_ID)

    def __len__(self) -> int:
        """Give how many ids there are."""
        return self.vocab_size

    def apply_chat_template(
        self, messages: Iterable[Item], /, *, tools: Iterable[Item] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Give the ids of *messages* in ChatML, tools and calls in the Hermes form."""
        pieces = chatml.render_pieces(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        written = (
            [SPECIAL_TOKEN_IDS[piece]] if isinstance(piece, SpecialToken) else self.encode(piece) for piece in pieces
        )
        return [*chain.from_iterable(written)]

    def encode(self, text: str, /, *, add_special_tokens: bool = False) -> list[int]:  # noqa: ARG002  # it adds none
        """Give the bytes of *text*; half a surrogate pair, which has none, becomes a question mark."""
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int], /) -> str:
        """Give the text of *ids*; bytes that are no UTF-8 become U+FFFD."""
        if wrong := next((token for token in ids if not 0 <= token < self.vocab_size), None):
            raise UsageError(f"{wrong} is no token id; they go from 0 to {self.vocab_size - 1}")
        runs = groupby(ids, key=SPECIAL_TOKENS_BY_ID.get)
        return "".join(mark * len([*run]) if mark else bytes(run).decode("utf-8", "replace") for mark, run in runs)
