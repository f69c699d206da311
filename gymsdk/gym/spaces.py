"""The spaces of observations and actions: chat messages, turns, text, token IDs. Samples are valid values."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from gymnasium import Space

from gymsdk.errors import UsageError
from gymsdk.gym.actions import parse_action
from gymsdk.types import Item

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""The roles of chat messages."""

SAMPLE_WORDS = (
    "yes",
    "no",
    "42",
    "blue",
    "naïve",
    "ответ",
    "你好",
    "答え",
    "😀",
    "👩‍💻",
    "<b>",
    '{"a":1}',
    "\\boxed{7}",
    "\n",
    "\t",
)
"""The words of sampled text: prose, other scripts, emoji, markup, JSON, white space."""

MAX_SAMPLE_WORDS = 12
"""The exclusive upper bound of the words, or the token IDs, in a sample."""


class _Own(Space[Any]):
    """A space without a shape; equal to another of its class with the same traits."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Return `False`: the values are no arrays."""
        return False

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._traits() == other._traits()

    def __hash__(self) -> int:
        return hash((type(self), self._traits()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._traits()))})"

    def _traits(self) -> tuple[Any, ...]:
        return ()

    def _prose(self) -> str:
        count = int(self.np_random.integers(1, MAX_SAMPLE_WORDS))
        return " ".join(SAMPLE_WORDS[index] for index in self.np_random.integers(len(SAMPLE_WORDS), size=count))


class Prose(_Own):
    """Any text."""

    def contains(self, x: Any) -> bool:
        """Return whether *x* is a string."""
        return isinstance(x, str)

    def sample(self, mask: None = None, probability: None = None) -> str:  # noqa: ARG002  # Gymnasium's signature
        """Sample a text."""
        return self._prose()


class Messages(_Own):
    """Lists of chat messages as dicts: a role, and content or tool calls."""

    def contains(self, x: Any) -> bool:
        """Return whether *x* is a list of chat messages."""
        return isinstance(x, list) and all(map(_is_message, x))

    def sample(self, mask: None = None, probability: None = None) -> list[Item]:  # noqa: ARG002  # Gymnasium's signature
        """Sample one message of the user."""
        return [{"role": "user", "content": self._prose()}]


class Turns(_Own):
    """The actions of the codec `chat`: a string, a chat message of the assistant, or a list of Responses items."""

    def contains(self, x: Any) -> bool:
        """Return whether *x* is a valid action."""
        try:
            parse_action(x)
        except UsageError:
            return False
        return True

    def sample(self, mask: None = None, probability: None = None) -> str | Item:  # noqa: ARG002  # Gymnasium's signature
        """Sample a reply, as a string or as a message."""
        text = self._prose()
        return text if self.np_random.integers(2) else {"role": "assistant", "content": text}


class Tokens(_Own):
    """Lists of token IDs from 0 to *size* - 1; *size* is `None` if the size of the vocabulary is unknown."""

    def __init__(self, size: int | None = None, seed: int | np.random.Generator | None = None) -> None:
        self.size = size
        super().__init__(seed)

    def contains(self, x: Any) -> bool:
        """Return whether *x* is a sequence of token IDs: a list, a tuple, an array or a tensor."""
        try:
            self.ids(x)
        except UsageError:
            return False
        return True

    def ids(self, x: Any) -> list[int]:
        """Return the token IDs of *x* as a list of integers; raises `UsageError` if *x* is no sequence of them."""
        listed = x.tolist() if hasattr(x, "tolist") else x
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            raise UsageError(f"an action of codec='tokens' must be a sequence of token IDs, got {type(x).__name__}")
        for token in listed:
            if not self._is_token(token):
                valid = "those of the tokenizer" if self.size is None else f"integers from 0 to {self.size - 1}"
                raise UsageError(f"{token!r} is not a token ID; valid IDs are {valid}")
        return [*map(int, listed)]

    def sample(self, mask: None = None, probability: None = None) -> list[int]:  # noqa: ARG002  # Gymnasium's signature
        """Sample a few token IDs."""
        count = int(self.np_random.integers(1, MAX_SAMPLE_WORDS))
        return [int(token) for token in self.np_random.integers(self.size or 256, size=count)]

    def _is_token(self, token: object) -> bool:
        if isinstance(token, bool) or not isinstance(token, Integral):
            return False
        return int(token) >= 0 and (self.size is None or int(token) < self.size)

    def _traits(self) -> tuple[Any, ...]:
        return (self.size,)


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        return False
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        return False
    return _is_content(content) or (content is None and bool(calls))


def _is_content(content: object) -> bool:
    return isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) for part in content))


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)
