"""The spaces of a policy's words: chat messages, turns, prose, token ids; they hold real text, sample valid values."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
from gymnasium import Space

from gymsdk.errors import UsageError
from gymsdk.gym.actions import spoken
from gymsdk.types import Item

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
"""Who speaks in a chat."""

WORDS = (
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
"""What sampled text is made of: prose, other scripts, emoji, markup, JSON, white space."""

LONGEST = 12
"""Words in a sampled text."""


class _Own(Space[Any]):
    """A space without shape, equal to every other of its kind with the same traits."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Whether it fits an array: it does not."""
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
        count = int(self.np_random.integers(1, LONGEST))
        return " ".join(WORDS[index] for index in self.np_random.integers(len(WORDS), size=count))


class Prose(_Own):
    """Any text at all."""

    def contains(self, x: Any) -> bool:
        """Whether *x* is a string."""
        return isinstance(x, str)

    def sample(self, mask: None = None, probability: None = None) -> str:  # noqa: ARG002  # Gymnasium's signature
        """Give some text."""
        return self._prose()


class Messages(_Own):
    """Lists of chat messages as plain dicts: a role, and content or tool calls."""

    def contains(self, x: Any) -> bool:
        """Whether *x* is a list of chat messages."""
        return isinstance(x, list) and all(map(_is_message, x))

    def sample(self, mask: None = None, probability: None = None) -> list[Item]:  # noqa: ARG002  # Gymnasium's signature
        """Give one message of a user."""
        return [{"role": "user", "content": self._prose()}]


class Turns(_Own):
    """What a policy may say: a string, an assistant's chat message, or a list of Responses items."""

    def contains(self, x: Any) -> bool:
        """Whether *x* is one of the three."""
        try:
            spoken(x)
        except UsageError:
            return False
        return True

    def sample(self, mask: None = None, probability: None = None) -> str | Item:  # noqa: ARG002  # Gymnasium's signature
        """Give a reply, as a string or as a message."""
        text = self._prose()
        return text if self.np_random.integers(2) else {"role": "assistant", "content": text}


class Tokens(_Own):
    """Lists of token ids from 0 to *size* - 1; *size* is `None` where the vocabulary's is not known."""

    def __init__(self, size: int | None = None, seed: int | np.random.Generator | None = None) -> None:
        self.size = size
        super().__init__(seed)

    def contains(self, x: Any) -> bool:
        """Whether *x* is a sequence of token ids: a list, a tuple, an array or a tensor."""
        try:
            self.ids(x)
        except UsageError:
            return False
        return True

    def ids(self, x: Any) -> list[int]:
        """Give the ids of *x* as plain numbers; raises `UsageError` where it is no sequence of them."""
        listed = x.tolist() if hasattr(x, "tolist") else x
        if not isinstance(listed, Sequence) or isinstance(listed, str):
            raise UsageError(f"an action of codec='tokens' is a sequence of token ids, not {type(x).__name__}")
        for token in listed:
            if not self._is_token(token):
                known = "the tokenizer's" if self.size is None else f"whole numbers from 0 to {self.size - 1}"
                raise UsageError(f"{token!r} is no token id; they are {known}")
        return [*map(int, listed)]

    def sample(self, mask: None = None, probability: None = None) -> list[int]:  # noqa: ARG002  # Gymnasium's signature
        """Give a few ids."""
        count = int(self.np_random.integers(1, LONGEST))
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
