"""Codecs convert an episode to the observations of a policy, and the policy's actions to output items."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, get_args

from gymsdk.convert import chat
from gymsdk.errors import UsageError, format_suggestion
from gymsdk.gym import spaces
from gymsdk.gym.spaces import Messages, Prose, Turn, Turns, parse_action
from gymsdk.jsonl import dump_json
from gymsdk.once import OnceLogger
from gymsdk.tokens import chatml
from gymsdk.tokens import tokenizer as tokenizers
from gymsdk.tokens.bridge import Bridge, BridgeError, parse_call_arguments
from gymsdk.tokens.chatml import SpecialToken, escape_markers, parse_output
from gymsdk.tokens.tokenizer import Tokenizer
from gymsdk.types import Item

if TYPE_CHECKING:
    from gymnasium import Space

    from gymsdk.tokens.tokenizer import Tokenizer

once = OnceLogger(logging.getLogger("gymsdk"))

CodecName: TypeAlias = Literal["chat", "text", "tokens"]
"""The form of observations and actions: chat messages, text, or token IDs."""

CODEC_NAMES: tuple[CodecName, ...] = get_args(CodecName)

K = TypeVar("K")
V = TypeVar("V")


class Codec(Protocol):
    """Converts one episode after another; a codec may keep state of the open episode.

    Items are those of the Responses API, as everywhere in gymsdk.
    """

    @property
    def observation_space(self) -> Space[Any]:
        """The space of the observations."""

    @property
    def action_space(self) -> Space[Any]:
        """The space of the actions."""

    def encode_opening(self, opening: Sequence[Item], tools: Sequence[Item]) -> Any:
        """Return the first observation of an episode with these *opening* messages and tool schemas."""

    def parse_action(self, action: Any, *, turn: int) -> list[Item]:
        """Parse an action into output items.

        Any text of a policy is valid: what looks like a broken tool call becomes a call that the environment can
        answer, or stays text.

        Args:
            action: The action.
            turn: The index of the turn in the episode, from 0; part of the generated IDs.

        Raises:
            UsageError: The action is not of the codec's type.
        """

    def encode_reply(self, items: Sequence[Item], *, over: bool) -> Any:
        """Return the next observation: the tool outputs and messages with which the environment replied.

        Args:
            items: The tool outputs and messages.
            over: Whether the episode is over, so that the observation does not prompt for another turn.

        Raises:
            UsageError: The codec cannot express the reply. `encode_opening` raises this error as well.
        """


def build_codec(name: str, tokenizer: PromptEncoder | Tokenizer | str | None = None) -> Codec:
    """Return a new codec by *name*; only `tokens` takes a *tokenizer*, or an encoder that its codecs share."""
    if name not in CODEC_NAMES:
        suggestion = format_suggestion(str(name), CODEC_NAMES, f"there are {', '.join(CODEC_NAMES)}")
        raise UsageError(f"Unknown codec {name!r}{suggestion}")
    if tokenizer is not None and name != "tokens":
        raise UsageError(f"a tokenizer applies to codec='tokens' only; leave it out, or change codec={name!r}")
    if name == "chat":
        return Chat()
    if name == "text":
        return Text()

    return Tokens(tokenizer)


class Chat:
    """The codec of chat messages. Actions may be a string, a message of the assistant, or a list of items."""

    def __init__(self) -> None:
        self.observation_space = Messages()
        self.action_space = Turns()

    def encode_opening(self, opening: Sequence[Item], tools: Sequence[Item]) -> list[Item]:  # noqa: ARG002  # `info` holds the tools
        """Return the opening messages."""
        return self.encode_reply(opening)

    def parse_action(self, action: Any, *, turn: int) -> list[Item]:
        """Parse the action into items, with an ID each."""
        if isinstance(action, Turn):
            return action.deep_copy()
        return [_add_missing_ids(item, turn, number) for number, item in enumerate(parse_action(action))]

    def encode_reply(self, items: Sequence[Item], *, over: bool = False) -> list[Item]:  # noqa: ARG002  # a list has no prompt
        """Return the new messages."""
        # A copy: a policy may change its observation, but not the transcript.
        return deepcopy(chat.build_messages({"input": list(items)}))


def _add_missing_ids(item: Item, turn: int, number: int) -> Item:
    """Return *item* with the IDs that it lacks, derived from its position so that a repeated turn gets the same IDs."""
    if item["type"] != "function_call":
        return {"id": f"{'rs' if item['type'] == 'reasoning' else 'msg'}_{turn}_{number}", **item}
    return {"id": f"fc_{turn}_{number}", **item, "call_id": item.get("call_id") or f"call_{turn}_{number}"}


class Text:
    """The codec of text: ChatML, with tool calls in the Hermes format.

    The concatenation of all observations and actions is the conversation. Each observation but the first begins with
    the end-of-turn marker of the policy's turn, unless the action ended with the marker. Each observation ends with the
    prompt for the next turn, unless the episode is over. If an episode ends without a reply, its last observation is
    empty.

    ChatML markers in messages and tool outputs are escaped with a space after the `<`, so that no task and no tool can
    forge a turn. The policy's turn ends at its first marker; the rest of the action is part of the conversation, but
    not of the episode.
    """

    def __init__(self) -> None:
        self.observation_space = Prose()
        self.action_space = Prose()
        self._end = ""

    def encode_opening(self, opening: Sequence[Item], tools: Sequence[Item]) -> str:
        """Return the opening messages, with the tools in the system message, and the prompt for the policy's turn."""
        body = chat.build_body({"input": list(opening), "tools": list(tools)})
        self._end = ""
        return _render(body["messages"], body.get("tools", []))

    def parse_action(self, action: Any, *, turn: int) -> list[Item]:
        """Parse reasoning, text and tool calls from the string."""
        if action not in self.action_space:
            raise UsageError(f"an action of codec='text' must be a string, got {type(action).__name__}")
        self._end = _build_turn_end(action)
        return parse_output(chatml.truncate_at_special_token(action)).build_items(turn=turn)

    def encode_reply(self, items: Sequence[Item], *, over: bool) -> str:
        """Return the end of the policy's turn, the new messages, and the prompt for the next turn."""
        if over and not items:
            return ""
        return self._end + _render(chat.build_messages({"input": list(items)}), prompt=not over)


def _render(messages: list[Item], tools: Sequence[Item] = (), *, prompt: bool = True) -> str:
    return chatml.join_pieces(chatml.render_pieces(messages, tools=tools, add_generation_prompt=prompt))


def _build_turn_end(action: str) -> str:
    """Return the text that must follow *action* to end its turn."""
    _, ended, tail = action.rpartition(SpecialToken.END)
    if not ended or tail.strip():
        return f"{SpecialToken.END}\n"
    return "" if tail.endswith("\n") else "\n"


THINKING_CHECK_TOKENS = 16
"""How many tokens at the end of a prompt are decoded to see whether it opens the policy's reasoning."""

MAX_TOOLSETS = 256
"""How many lists of tools are kept; environments may offer each task other tools."""

MAX_RENDERINGS = 64
"""How many renderings are kept for each list of tools."""

MAX_PROMPTS = 64
"""How many prompts are kept. The episodes of a group open one after another; a prompt may have 100,000 tokens."""


class RenderingCache:
    """A tokenizer that keeps its last renderings: the episodes of a group often get the same tool outputs."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._renderings: OrderedDict[bytes, object] = OrderedDict()

    def apply_chat_template(
        self, messages: list[Item], /, *, tools: list[Item] | None = None, add_generation_prompt: bool = False
    ) -> object:
        """Return the ids of a conversation. All calls of one cache must have the same tools."""
        key = dump_json([messages, add_generation_prompt], default=repr)

        def render() -> object:
            return self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=add_generation_prompt
            )

        return _get_or_build(self._renderings, key, render, limit=MAX_RENDERINGS)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class Toolset:
    """A list of tools for one tokenizer. Episodes with equal tools share it.

    Attributes:
        offered: The tools in the format of Chat Completions, with the special tokens in their texts escaped.
        bridge: Computes the token IDs between two turns.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Item], special_tokens: frozenset[str]) -> None:
        body = chat.build_body({"input": [], "tools": list(tools)})
        self.offered: list[Item] = _escape_markers(body.get("tools", []), special_tokens)
        self.bridge = Bridge(RenderingCache(tokenizer), self.offered)
        self._eos = tokenizers.get_eos_id(tokenizer)

    @cached_property
    def end_tokens(self) -> frozenset[int | None]:
        """The token IDs that end a turn of the policy."""
        try:
            return frozenset({self._eos, self.bridge.terminator})
        except BridgeError as error:
            # An episode with a single turn needs no bridge.
            # Every list of tools would repeat the warning.
            once.warn(f"episodes of several turns may fail with this tokenizer: {error}")
            return frozenset({self._eos})


class Prompt(NamedTuple):
    """The prompt of the policy's first turn.

    Attributes:
        messages: The messages, as chat templates take them.
        ids: The token IDs.
        thinking: Whether they open the policy's reasoning.
    """

    messages: list[Item]
    ids: list[int]
    thinking: bool


class PromptEncoder:
    """Renders prompts with one tokenizer, and keeps the results for the codecs of many slots.

    All episodes of an environment often have the same tools, and all episodes of a group have the same prompt.

    Args:
        tokenizer: The tokenizer, the name of a model or a folder, or `None` for the built-in tokenizer of bytes.
    """

    def __init__(self, tokenizer: Tokenizer | str | None = None) -> None:
        self.tokenizer = tokenizers.load_tokenizer(tokenizer)
        self.vocab_size = tokenizers.get_vocab_size(self.tokenizer)
        self._special_tokens = frozenset(tokenizers.get_special_tokens(self.tokenizer).values())
        self._toolsets: OrderedDict[bytes, Toolset] = OrderedDict()
        self._prompts: OrderedDict[tuple[Toolset, bytes], Prompt] = OrderedDict()

    def get_toolset(self, tools: Sequence[Item]) -> Toolset:
        """Return the toolset for the *tools* of an episode."""
        return _get_or_build(
            self._toolsets,
            dump_json(tools, default=repr),
            lambda: Toolset(self.tokenizer, tools, self._special_tokens),
            limit=MAX_TOOLSETS,
        )

    def encode_prompt(self, opening: Sequence[Item], toolset: Toolset) -> Prompt:
        """Return the tokens of the *opening* messages and of the start of the policy's turn."""
        key = toolset, dump_json(opening, default=repr)
        return _get_or_build(self._prompts, key, lambda: self._render_prompt(opening, toolset), limit=MAX_PROMPTS)

    def prepare_messages(self, messages: Sequence[Item]) -> list[Item]:
        """Return chat messages as chat templates take them, with the special tokens in their texts escaped."""
        return [_escape_markers(_build_template_message(message), self._special_tokens) for message in messages]

    def opens_reasoning(self, ids: Sequence[int]) -> bool:
        """Return whether the prompt *ids* ends with the start of the policy's reasoning."""
        return self.tokenizer.decode([*ids[-THINKING_CHECK_TOKENS:]]).rstrip().endswith("<think>")

    def _render_prompt(self, opening: Sequence[Item], toolset: Toolset) -> Prompt:
        messages = self.prepare_messages(chat.build_body({"input": list(opening)})["messages"])
        ids = tokenizers.render_messages(
            self.tokenizer, messages, tools=toolset.offered or None, add_generation_prompt=True
        )
        return Prompt(messages, ids, self.opens_reasoning(ids))


def _get_or_build(cache: OrderedDict[K, V], key: K, build: Callable[[], V], *, limit: int) -> V:
    """Return the value of *key*; build it if *cache*, which keeps the last *limit* used values, lacks it."""
    if key not in cache:
        cache[key] = build()
        if len(cache) > limit:
            cache.popitem(last=False)
    cache.move_to_end(key)
    return cache[key]


class Tokens:
    """The codec of token IDs.

    The concatenation of all observations and actions is the token sequence that the policy saw: generated tokens are
    never tokenized again. Each observation but the first holds what the tokenizer's chat template writes between two
    turns: the end-of-turn token if the action lacks it, the reply, and the prompt for the next turn unless the episode
    is over. If a template does not reveal this text, `UsageError` says so. If an episode ends without a reply, its last
    observation is empty.

    The policy's turn ends at its first end-of-turn token or ChatML marker, and tool calls are in the Hermes format, as
    in `Text`. Special tokens spelled out in messages and tool outputs are escaped with a space after their first
    character, and so are the tags around tool outputs.

    Args:
        tokenizer: The tokenizer, or an encoder that several codecs share.
    """

    def __init__(self, tokenizer: PromptEncoder | Tokenizer | str | None = None) -> None:
        self._encoder = tokenizer if isinstance(tokenizer, PromptEncoder) else PromptEncoder(tokenizer)
        self.tokenizer = self._encoder.tokenizer
        self._toolset = self._encoder.get_toolset([])
        self._generated: list[int] = []
        self._conversation: list[Item] = []
        self._parts: list[list[int]] = []
        self._thinking = False
        self.observation_space = spaces.Tokens(self._encoder.vocab_size)
        self.action_space = spaces.Tokens(self._encoder.vocab_size)

    @property
    def end_tokens(self) -> frozenset[int | None]:
        """The token IDs that end a turn of the policy."""
        return self._toolset.end_tokens

    def encode_opening(self, opening: Sequence[Item], tools: Sequence[Item]) -> list[int]:
        """Return the token IDs of the opening messages and of the prompt for the policy's turn."""
        self._toolset = self._encoder.get_toolset(tools)
        # A tokenizer that cannot continue a conversation is reported before the first turn.
        _ = self._toolset.end_tokens
        prompt = self._encoder.encode_prompt(opening, self._toolset)
        self._generated, self._conversation, self._parts = [], prompt.messages, [prompt.ids]
        self._thinking = prompt.thinking
        return list(prompt.ids)

    def parse_action(self, action: Any, *, turn: int) -> list[Item]:
        """Parse reasoning, text and tool calls from the token IDs."""
        self._generated = self.action_space.ids(action)
        ends = self.end_tokens
        words = [*takewhile(lambda token: token not in ends, self._generated)]
        written = chatml.truncate_at_special_token(self.tokenizer.decode(words))
        items = parse_output(written, thinking=self._thinking).build_items(turn=turn)
        self._conversation = [*self._conversation, *map(_build_template_message, chat.build_messages({"input": items}))]
        return items

    def encode_reply(self, items: Sequence[Item], *, over: bool) -> list[int]:
        """Return the token IDs of the end of the policy's turn, the new messages, and the prompt for the next turn."""
        if over and not items:
            return []
        messages = self._encoder.prepare_messages(chat.build_messages({"input": list(items)}))
        suffix = self._toolset.bridge.suffix(
            self._generated,
            messages,
            conversation=self._conversation,
            parts=self._parts,
            add_generation_prompt=not over,
        )
        self._conversation = [*self._conversation, *messages]
        self._parts = [*self._parts, self._generated, suffix]
        self._thinking = self._encoder.opens_reasoning(suffix)
        return suffix


def _build_template_message(message: Item) -> Item:
    """Return a message in the form that chat templates take: the content as one string, parsed call arguments."""
    text = chatml.extract_content_text(message.get("content"))
    converted = message | {
        "content": text if message["role"] == "assistant" else chatml.escape_tool_response_tags(text)
    }
    return parse_call_arguments(converted)


def _escape_markers(value: Any, marks: frozenset[str]) -> Any:
    """Return a JSON value with the special tokens in its strings escaped."""
    if isinstance(value, str):
        return escape_markers(value, marks)
    if isinstance(value, list):
        return [_escape_markers(element, marks) for element in value]
    return (
        {key: _escape_markers(element, marks) for key, element in value.items()} if isinstance(value, dict) else value
    )
