"""Load tokenizers, render conversations as token ids, and provide a built-in tokenizer of bytes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from functools import lru_cache
from itertools import chain, groupby
from numbers import Integral
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from gymsdk.errors import UsageError
from gymsdk.tokens import chatml
from gymsdk.tokens.chatml import SpecialToken
from gymsdk.types import Item

SPECIAL_TOKENS_BY_ID = {256 + number: token for number, token in enumerate(SpecialToken)}
"""The special tokens of `ByteTokenizer`; its ids 0 to 255 are bytes."""

SPECIAL_TOKEN_IDS = {token: number for number, token in SPECIAL_TOKENS_BY_ID.items()}


@runtime_checkable
class Tokenizer(Protocol):
    """The methods that gymsdk needs of a tokenizer; the tokenizers of transformers have them.

    If present, `eos_token_id`, `added_tokens_decoder` and the vocabulary size (`len()` or `vocab_size`) are used too.
    """

    def apply_chat_template(
        self, messages: list[Item], /, *, tools: list[Item] | None = None, add_generation_prompt: bool = False
    ) -> object:
        """Return the ids of a conversation: a list, or a mapping with a list under `input_ids`."""

    def encode(self, text: str, /, *, add_special_tokens: bool = False) -> list[int]:
        """Return the ids of *text*."""

    def decode(self, ids: list[int], /) -> str:
        """Return the text of *ids*."""


def load_tokenizer(tokenizer: Tokenizer | str | None = None) -> Tokenizer:
    """Return a tokenizer.

    Args:
        tokenizer: A tokenizer, which is returned unchanged; or the name of a model or a folder, whose tokenizer is
            loaded with transformers; or `None` for the built-in tokenizer of bytes.

    Raises:
        UsageError: The tokenizer lacks a method or cannot be loaded, or transformers is not installed.
    """
    if tokenizer is None:
        return ByteTokenizer()
    loaded = _load_pretrained(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if not isinstance(loaded, Tokenizer):
        raise UsageError(
            f"{type(tokenizer).__name__} is not a tokenizer: it lacks apply_chat_template, encode or decode;"
            " pass a tokenizer, the name of a model, or None for the built-in tokenizer of bytes"
        )
    return loaded


def load_token_decoder(name: str) -> Callable[[int], str]:
    """Return a function that returns the text of one token id, for people who look at tokens.

    Args:
        name: A file `tokenizer.json`, which is loaded with tokenizers; the name of a model or a folder, whose tokenizer
            is loaded with transformers; or `bytes` for the built-in tokenizer of bytes.

    Raises:
        UsageError: The tokenizer cannot be loaded, or the package that loads it is not installed.
    """
    if not name.endswith(".json"):
        tokenizer = load_tokenizer(None if name == "bytes" else name)
        return lru_cache(100_000)(lambda token: tokenizer.decode([token]))
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise UsageError(
            f"loading {name} needs tokenizers, which is not installed; run `pip install tokenizers`"
        ) from error
    try:
        loaded = tokenizers.Tokenizer.from_file(name)
    except Exception as error:  # the library raises `Exception` itself
        raise UsageError(f"cannot load a tokenizer from {name}: {error}") from error
    # A part of a character is not a text; the vocabulary's form shows its bytes.
    return lru_cache(100_000)(lambda token: _decode_token(loaded, token))


def _decode_token(tokenizer: Any, token: int) -> str:
    text: str = tokenizer.decode([token], skip_special_tokens=False)
    return (tokenizer.id_to_token(token) or text) if "\ufffd" in text else text


def render_messages(
    tokenizer: Tokenizer,
    messages: list[Item],
    *,
    tools: list[Item] | None = None,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> list[int]:
    """Return the ids of *messages* according to the chat template of *tokenizer*.

    Args:
        tokenizer: The tokenizer.
        messages: The messages of Chat Completions.
        tools: The tools.
        add_generation_prompt: Whether to append the start of the next assistant turn.
        variables: Further variables of the template, such as `enable_thinking`, or another `chat_template`.

    Raises:
        UsageError: The chat template fails, or does not return a list of token ids.
    """
    try:
        rendered = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **variables
        )
    except UsageError:
        raise
    except Exception as error:  # a chat template is a program, which can raise any exception
        raise UsageError(f"the tokenizer's chat template cannot render these messages: {error}") from error
    ids = rendered.get("input_ids") if isinstance(rendered, Mapping) else rendered
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not _are_integers(ids):
        raise UsageError(f"the tokenizer's chat template must return a list of token ids, got {type(ids).__name__}")
    return [*map(int, ids)]


def get_vocab_size(tokenizer: Tokenizer) -> int | None:
    """Return the number of ids, `None` if the tokenizer does not provide it."""
    # `vocab_size` of transformers does not count added tokens, such as the special ones; `len()` does.
    size = len(tokenizer) if isinstance(tokenizer, Sized) else getattr(tokenizer, "vocab_size", None)
    return size if isinstance(size, int) else None


def get_eos_id(tokenizer: Tokenizer) -> int | None:
    """Return the id that ends a text, `None` if the tokenizer does not provide it."""
    eos = getattr(tokenizer, "eos_token_id", None)
    return eos if isinstance(eos, int) else None


def get_special_tokens(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the text of each special token by its id; empty if the tokenizer does not provide them."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    return {number: token.content for number, token in added.items() if token.special}


def _are_integers(values: Sequence[object]) -> bool:
    # Checking the set of types is faster than checking each of the many ids of a prompt.
    return all(issubclass(kind, Integral) for kind in set(map(type, values)))


@lru_cache(maxsize=8)
def _load_pretrained(name: str) -> object:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UsageError(
            f"loading the tokenizer of {name!r} needs transformers, which is not installed;"
            " run `pip install transformers`"
        ) from error
    try:
        loaded: object = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise UsageError(
            f"cannot load a tokenizer from {name!r}; pass the name of a model or a folder with its tokenizer: {why}"
        ) from error
    return loaded


class ByteTokenizer:
    """A tokenizer of UTF-8 bytes that needs no files: ids 0 to 255 are bytes, higher ids are special tokens.

    Only the chat template produces special tokens: text that spells one is encoded as bytes, also in prompts.
    """

    eos_token_id = SPECIAL_TOKEN_IDS[SpecialToken.END]
    pad_token_id = SPECIAL_TOKEN_IDS[SpecialToken.TEXT_END]
    vocab_size = 256 + len(SPECIAL_TOKENS_BY_ID)

    def __len__(self) -> int:
        """Return the number of ids."""
        return self.vocab_size

    def apply_chat_template(
        self, messages: Iterable[Item], /, *, tools: Iterable[Item] | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        """Return the ids of *messages* in ChatML, with tools and calls in the Hermes format."""
        pieces = chatml.render_pieces(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        encoded = (
            [SPECIAL_TOKEN_IDS[piece]] if isinstance(piece, SpecialToken) else self.encode(piece) for piece in pieces
        )
        return [*chain.from_iterable(encoded)]

    def encode(self, text: str, /, *, add_special_tokens: bool = False) -> list[int]:  # noqa: ARG002  # it adds none
        """Return the bytes of *text*; a lone surrogate, which UTF-8 cannot encode, becomes a question mark."""
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of *ids*; invalid UTF-8 becomes U+FFFD.

        Raises:
            UsageError: An id is out of range.
        """
        if wrong := next((token for token in ids if not 0 <= token < self.vocab_size), None):
            raise UsageError(f"token id {wrong} is out of range; token ids go from 0 to {self.vocab_size - 1}")
        runs = groupby(ids, key=SPECIAL_TOKENS_BY_ID.get)
        return "".join(token * len([*run]) if token else bytes(run).decode("utf-8", "replace") for token, run in runs)
