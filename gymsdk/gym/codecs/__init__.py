"""Codecs: peers that put an episode into the words a policy sees, and its actions into output items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

from gymsdk.errors import UsageError, suggestion
from gymsdk.transcript import Item

if TYPE_CHECKING:
    from gymnasium import Space

    from gymsdk.tokens.tokenizer import Tokenizer

Name: TypeAlias = Literal["chat", "text", "tokens"]
"""What a policy sees and says: chat messages, text, token ids."""

NAMES: tuple[Name, ...] = get_args(Name)


class Codec(Protocol):
    """One episode after another in a policy's own words; it remembers what the episode in hand needs.

    Items are those of the Responses API, as everywhere in gymsdk.
    """

    @property
    def observation_space(self) -> Space[Any]:
        """What the policy sees."""

    @property
    def action_space(self) -> Space[Any]:
        """What the policy says."""

    def opened(self, opening: Sequence[Item], tools: Sequence[Item]) -> Any:
        """Give the first observation of a new episode: its *opening* messages, the schemas of its *tools*."""

    def said(self, action: Any, *, turn: int) -> list[Item]:
        """Give the output items of an *action*, the episode's *turn*-th from 0; raises `UsageError` for what is none.

        Whatever a policy wrote is taken: text that looks like a broken tool call becomes a call the environment can
        answer, or stays text.
        """

    def answered(self, items: Sequence[Item], *, over: bool) -> Any:
        """Give the next observation: what the environment answered, outputs of tools and messages.

        *over* says that the episode is: nothing then asks the policy for another turn. Raises `UsageError`, as `opened`
        does, for what cannot be put into the policy's words.
        """


def codec(name: str, tokenizer: Tokenizer | str | None = None) -> Codec:
    """Give a new codec by *name*; *tokenizer* is for `tokens` alone."""
    if name not in NAMES:
        near = suggestion(str(name), NAMES, f"there are {', '.join(NAMES)}")
        raise UsageError(f"no codec named {name!r}{near}")
    if tokenizer is not None and name != "tokens":
        raise UsageError(f"a tokenizer is for codec='tokens'; leave it out, or change codec={name!r}")
    if name == "chat":
        from .chat import Chat

        return Chat()
    if name == "text":
        from .text import Text

        return Text()
    from .tokens import Tokens

    return Tokens(tokenizer)
