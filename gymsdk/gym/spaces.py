"""Actions and spaces: parse the actions of a policy, and define the spaces of observations and actions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from numbers import Integral
from typing import Any, Self, TypeAlias

import numpy as np
from gymnasium import Space
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from gymsdk import responses
from gymsdk.convert.api import InvalidRequest
from gymsdk.convert.chat_inbound import parse_message, parse_tools
from gymsdk.errors import EpisodeError, UsageError
from gymsdk.types import Item, is_content, is_object_list, is_policy_item


class Turn(list[Item]):
    """The output items of a model's turn.

    A list of items, which also tells the environment what a list cannot: the token usage, whether the model ran out of
    tokens, and whether it failed. A turn with a failure ends its episode as failed.

    Attributes:
        response: The model's Response, if the turn comes from one.
        failure: Why the model gave no turn.
    """

    def __init__(self, response: Item | None = None, *, failure: EpisodeError | None = None) -> None:
        super().__init__(response["output"] if response else ())
        self.response = response
        self.failure = failure

    def deep_copy(self) -> Self:
        """Return a copy of the turn with copied items."""
        copied = type(self)(self.response, failure=self.failure)
        copied[:] = deepcopy(list(self))
        return copied


def build_response(items: list[Item]) -> Item:
    """Return the Response for the parsed *items* of an action; raises the turn's failure if there is one."""
    if not isinstance(items, Turn):
        return responses.build_response(items, model="policy")
    if items.failure:
        raise items.failure
    return (items.response or responses.build_response([], model="policy")) | {"output": list(items)}


def parse_action(action: object) -> list[Item]:
    """Parse a string, a chat message of the assistant, or a list of Responses items.

    Returns:
        The items, with the IDs that the action gives and no others.

    Raises:
        UsageError: The action has none of these forms.
    """
    if isinstance(action, str):
        return [_drop_id(responses.build_message(str(action)))]
    if isinstance(action, Mapping):
        return _parse_message(deepcopy(dict(action)))
    if isinstance(action, (list, tuple)) and all(isinstance(item, Mapping) for item in action):
        return [_check_item(deepcopy(dict(item))) for item in action]
    wrong = [item for item in action if not isinstance(item, Mapping)] if isinstance(action, (list, tuple)) else []
    description = f"a list with {wrong[0]!r} in it" if wrong else type(action).__name__
    raise UsageError(
        f"an action must be a string, a chat message of the assistant or a list of Responses items, got {description}"
    )


def _parse_message(message: Item) -> list[Item]:
    """Parse a chat message into items."""
    if message.setdefault("role", "assistant") != "assistant":
        raise UsageError(f"an action must have the role 'assistant', this message has the role {message['role']!r}")
    _check_content(message.get("content"))
    calls = message.get("tool_calls")
    if calls is not None and not is_object_list(calls):
        raise UsageError(f"the `tool_calls` of an action must be a list of tool calls, got {calls!r}")
    try:
        named = {number for number, call in enumerate(calls or []) if call.get("id")}
        items = parse_message(message)
    except InvalidRequest as error:
        advice = (
            "the text must be a string, and each of the `tool_calls` must have a `function` with `name` and `arguments`"
        )
        raise UsageError(f"the action cannot be read as a chat message; {advice}: {message}") from error
    for number, call in enumerate(item for item in items if item["type"] == "function_call"):
        if number not in named:
            # The parser has made up an id; a codec derives ids from the turn, so that a repeated turn has the same.
            del call["call_id"]
    return [_drop_id(_check_item(item)) for item in items]


def _check_item(item: Item) -> Item:
    """Return *item* in full form; raises `UsageError` for an item that only the environment may write."""
    if not is_policy_item(item):
        kind = item.get("role") or item.get("type")
        raise UsageError(f"an action may hold the assistant's messages, function calls and reasoning, not {kind!r}")
    if item.get("type") == "function_call":
        return _parse_call(item)
    _check_content(item.get("content"))
    return {"type": "message", **item}


def _check_content(content: object) -> None:
    if not is_content(content):
        raise UsageError(f"the content of a message must be text or a list of parts, got {type(content).__name__}")


def _parse_call(call: Item) -> Item:
    name, arguments = call.get("name"), call.get("arguments", "{}")
    if not isinstance(name, str):
        raise UsageError(f"the `name` of a function call must be the name of a tool, got {name!r}")
    try:
        return call | {"arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    except (TypeError, ValueError) as error:
        raise UsageError(f"the arguments of the call of {name!r} are not JSON: {error}") from None


def _drop_id(item: Item) -> Item:
    """Return *item* without its ID."""
    return {key: value for key, value in item.items() if key != "id"}


FINAL_INFO_KEYS = ("outcome", "failure")
"""The keys of an `info` after which the policy's next action is ignored: the episode is over or was never opened."""

PARSE_ERRORS = (InvalidRequest, LookupError, TypeError, AttributeError)
"""The errors of the parsers of chat messages for other input."""


class Conversation:
    """The conversation of one slot: an `info` with `tools` starts a new one, an outcome or a failure ends it."""

    def __init__(self) -> None:
        self._history: list[Item] = []
        self._new: list[Item] = []
        self._tools: list[Item] | None = None
        self._over = False

    def observe(self, observation: Any, info: Mapping[str, Any]) -> bool:
        """Add an observation; return whether the policy has a turn. Raises `UsageError`."""
        if "tools" in info:
            self._history, self._tools, self._over = [], _parse_tools(info["tools"]), False
        if self._tools is None:
            raise UsageError(
                "the first observation of a policy must come with the info of reset(), which holds the tools"
            )
        self._over = self._over or any(key in info for key in FINAL_INFO_KEYS)
        self._new = [] if self._over else _parse_observation(observation)
        return not self._over

    def build_request(self) -> Item:
        """Return the request for the policy's next turn."""
        tools = {"tools": self._tools} if self._tools else {}
        return {"input": [*self._history, *self._new], **tools}

    def add_output(self, output: Sequence[Item]) -> None:
        """Add the output items of the policy's turn. After a failed turn, the same request may be sent again."""
        self._history += [*self._new, *output]
        self._new = []


def _parse_observation(observation: Any) -> list[Item]:
    is_text = isinstance(observation, str) or not isinstance(observation, Sequence)
    if is_text or not all(isinstance(message, Mapping) for message in observation):
        kind = "text" if isinstance(observation, str) else f"of type {type(observation).__name__}"
        raise UsageError(
            f"a policy reads chat messages, this observation is {kind}; create the environment with codec='chat'"
        )
    # The conversion generates IDs, which are not part of the observation.
    return [
        {key: value for key, value in item.items() if key != "id"}
        for message in observation
        for item in _parse_chat_message(message)
    ]


def _parse_chat_message(message: Mapping[str, Any]) -> list[Item]:
    try:
        return parse_message(dict(message))
    except PARSE_ERRORS as error:
        advice = "a chat message needs a `role` and a `content` that is text or a list of parts"
        raise UsageError(f"the observation cannot be read; {advice}, got {message}") from error


def _parse_tools(offered: Any) -> list[Item]:
    try:
        return parse_tools(offered)
    except PARSE_ERRORS as error:
        message = f"info['tools'] must be a list of tools in the form of Chat Completions, got {offered!r}"
        raise UsageError(f"{message}; pass the info of reset() unchanged") from error


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


class _ShapelessSpace(Space[Any]):
    """A space without a shape; equal to another of its class with the same parameters."""

    def __init__(self, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(shape=None, dtype=None, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Return `False`: the values are no arrays."""
        return False

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._list_parameters() == other._list_parameters()

    def __hash__(self) -> int:
        return hash((type(self), self._list_parameters()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._list_parameters()))})"

    def _list_parameters(self) -> tuple[Any, ...]:
        return ()

    def _sample_text(self) -> str:
        count = int(self.np_random.integers(1, MAX_SAMPLE_WORDS))
        return " ".join(SAMPLE_WORDS[index] for index in self.np_random.integers(len(SAMPLE_WORDS), size=count))


class Prose(_ShapelessSpace):
    """Any text."""

    def contains(self, x: Any) -> bool:
        """Return whether *x* is a string."""
        return isinstance(x, str)

    def sample(self, mask: None = None, probability: None = None) -> str:  # noqa: ARG002  # Gymnasium's signature
        """Sample a text."""
        return self._sample_text()


class Messages(_ShapelessSpace):
    """Lists of chat messages as dicts: a role, and content or tool calls."""

    def contains(self, x: Any) -> bool:
        """Return whether *x* is a list of chat messages."""
        return isinstance(x, list) and all(map(_is_message, x))

    def sample(self, mask: None = None, probability: None = None) -> list[Item]:  # noqa: ARG002  # Gymnasium's signature
        """Sample one message of the user."""
        return [{"role": "user", "content": self._sample_text()}]


class Turns(_ShapelessSpace):
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
        text = self._sample_text()
        return text if self.np_random.integers(2) else {"role": "assistant", "content": text}


class Tokens(_ShapelessSpace):
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

    def _list_parameters(self) -> tuple[Any, ...]:
        return (self.size,)


def _is_message(message: object) -> bool:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        return False
    content, calls = message.get("content"), message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        return False
    return is_content(content) and (content is not None or bool(calls))


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


ObjectArray: TypeAlias = NDArray[np.object_]
"""An array with one Python object per slot."""


class Batch(Space[Any]):
    """Object arrays, or other sequences, of *size* values of the space *single*."""

    def __init__(self, single: Space[Any], size: int, seed: int | np.random.Generator | None = None) -> None:
        # A copy: sampling from the batch must not advance the generator of the single space.
        self.single, self.size = deepcopy(single), size
        super().__init__(shape=(size,), dtype=object, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        """Return `False`: the values are no numbers."""
        return False

    def seed(self, seed: Any = None) -> Any:
        """Seed the sampling; return the seed."""
        seeds = super().seed(seed)
        self.single.seed(int(self.np_random.integers(2**31)))
        return seeds

    def contains(self, x: Any) -> bool:
        """Return whether *x* is a sequence of *size* values of the single space."""
        try:
            values = list_values(x, self.size)
        except UsageError:
            return False
        return all(map(self.single.contains, values))

    def sample(self, mask: None = None, probability: None = None) -> ObjectArray:  # noqa: ARG002  # Gymnasium's signature
        """Sample one value per slot."""
        return build_object_array([self.single.sample() for _ in range(self.size)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Batch) and (self.single, self.size) == (other.single, other.size)

    def __hash__(self) -> int:
        return hash((self.single, self.size))

    def __repr__(self) -> str:
        return f"Batch({self.single!r}, {self.size})"


def build_object_array(values: Iterable[Any]) -> ObjectArray:
    """Return an object array that holds *values* unchanged."""
    listed = list(values)
    array = np.empty(len(listed), dtype=object)
    # One assignment per value: NumPy would convert lists of equal length to rows.
    for index, value in enumerate(listed):
        array[index] = value
    return array


def list_values(batch: Any, size: int) -> list[Any]:
    """Return the values of a batch as a list; raises `UsageError` unless *batch* is a sequence of *size* values."""
    listed = isinstance(batch, Sequence) and not isinstance(batch, (str, bytes))
    if not listed and not (isinstance(batch, np.ndarray) and batch.ndim):
        raise UsageError(f"a batch must be a list or array of {size} values, one per slot; got {_describe(batch)}")
    if len(batch) != size:
        raise UsageError(f"a batch must have {size} values, one per slot; got {len(batch)}")
    return [str(value) if isinstance(value, np.str_) else value for value in batch]


def _describe(batch: object) -> str:
    return "a zero-dimensional array" if isinstance(batch, np.ndarray) else type(batch).__name__


def _batch_space(space: Space[Any], n: int = 1) -> Batch:
    return Batch(space, n, seed=deepcopy(space.np_random))


def _concatenate(space: Space[Any], items: Iterable[Any], out: Any) -> ObjectArray:  # noqa: ARG001  # Gymnasium's signature
    return build_object_array(items)


def _create_empty_array(space: Space[Any], n: int = 1, fn: Any = None) -> ObjectArray:  # noqa: ARG001  # Gymnasium's signature
    return np.full(n, None, dtype=object)


def _iterate(space: Batch, items: Any) -> Iterator[Any]:
    return iter(list_values(items, space.size))


# Gymnasium's own vector environments and wrappers then batch these spaces in the same way.
for _kind in (Messages, Prose, Tokens, Turns):
    batch_space.register(_kind, _batch_space)
    concatenate.register(_kind, _concatenate)
    create_empty_array.register(_kind, _create_empty_array)
iterate.register(Batch, _iterate)
