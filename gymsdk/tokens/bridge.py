"""Compute the token ids between two turns without re-encoding the tokens that a policy generated.

A chat template renders a whole conversation, and its rendering of an earlier turn often differs from the generated
tokens: the same text can be tokenized in several ways, and templates drop earlier reasoning. `TemplateBridge`
therefore asks the template to render a placeholder turn in place of the policy's turn. Everything that the template
writes after the placeholder text is what follows the generation. Renderings with two placeholder texts show where
that is: their common ending cannot depend on the text.

The algorithm is a generator: it yields requests to a tokenizer, `Rendering` or `Decoding`, and receives their results.
`Bridge` runs it with a tokenizer in this process; the models run it with the tokenizer of an inference server.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from gymsdk.errors import UsageError
from gymsdk.tokens.tokenizer import Tokenizer, get_eos_id, get_special_tokens, render_messages
from gymsdk.types import Item, ToolCall

PLACEHOLDER_WORDS = ("one", "six")
"""The texts of the placeholder turns. They end in different letters, so that their common ending is the template's."""

MAX_CACHED = 1024
"""The number of cached renderings. Their keys contain names of tools, which a policy can invent."""

ResultT = TypeVar("ResultT")


class BridgeError(UsageError):
    """The chat template does not determine which ids follow a generation."""


class Rendering(NamedTuple):
    """A request for the ids of *messages*, with or without the start of the next assistant turn.

    The messages are those of Chat Completions: the arguments of tool calls are JSON text.
    """

    messages: list[Item]
    add_generation_prompt: bool


class Decoding(NamedTuple):
    """A request for the text of *ids*."""

    ids: list[int]


TokenizerSteps: TypeAlias = Generator[Rendering | Decoding, Any, ResultT]
"""A computation that yields requests for a tokenizer. It receives a list of ids or a text for each."""


class TurnEnding(NamedTuple):
    """The ids with which a chat template ends an assistant turn, split at the *terminator*."""

    before: list[int]
    terminator: int
    after: list[int]


class TemplateBridge:
    """Computes the ids between turns of conversations that share a chat template and a list of tools.

    Args:
        terminators: The ids that may end a turn, if they are known: the end-of-text token and other special tokens.
            Otherwise the only visible token that the template writes after a turn ends it.
    """

    def __init__(self, terminators: Collection[int] = ()) -> None:
        self._terminators = frozenset(terminators)
        self._endings: dict[tuple[str, ...], TurnEnding] = {}
        self._beginnings: dict[tuple[Any, ...], list[int]] = {}
        self._generation_prompt: str | None = None

    def find_terminator(self) -> TokenizerSteps[int]:
        """Return the id that ends a turn of the policy.

        Raises:
            BridgeError: The chat template ends a turn without a terminator.
        """
        ending = yield from self._get_ending(())
        return ending.terminator

    def compute_suffix(
        self,
        generated: Sequence[int],
        messages: Sequence[Item],
        *,
        calls: Sequence[Item] = (),
        add_generation_prompt: bool = True,
    ) -> TokenizerSteps[list[int]]:
        """Return the ids to append to the *generated* ids so that the policy sees *messages* and can answer them.

        Args:
            generated: The ids that the policy generated in its turn. If the turn was cut off before its terminator,
                the result starts with the terminator, even without messages.
            messages: The chat messages after the turn.
            calls: The tool calls of the turn, in the format of Chat Completions.
            add_generation_prompt: Whether to append the start of the next assistant turn.

        Returns:
            The ids to append.

        Raises:
            BridgeError: The template does not determine these ids. The sequence cannot be extended; the caller must
                start a new one from the rendered conversation.
        """
        ending = yield from self._get_ending(calls)
        following = yield from self._render_after_turn(calls, messages, add_generation_prompt=add_generation_prompt)
        head = [*ending.before, ending.terminator]
        if following[: len(head)] != head:
            raise BridgeError("the chat template ends an assistant turn in another way if messages follow it")
        return _drop_generated([ending.terminator, *ending.after], generated, following[len(head) - 1 :])

    def find_generation_prompt_text(self) -> TokenizerSteps[str]:
        """Return the text with which the template starts the policy's turn, such as a role or an opening `<think>`."""
        if self._generation_prompt is None:
            messages: list[Item] = [{"role": "user", "content": "question"}]
            closed = yield Rendering(messages, add_generation_prompt=False)
            prompted = yield Rendering(messages, add_generation_prompt=True)
            self._generation_prompt = yield Decoding(prompted[len(closed) :])
        return self._generation_prompt

    def count_suffix(
        self, generated: Sequence[int], messages: Sequence[Item], new_messages: Sequence[Item]
    ) -> TokenizerSteps[list[int]]:
        """Return the same ids as `compute_suffix`, found by counting the turns in the rendered conversation.

        This method is for templates that reject the conversation with a placeholder turn. It requires that the
        template renders the policy's last turn in the same way with and without messages after it.

        Args:
            generated: The ids that the policy generated in its turn.
            messages: The whole conversation up to and including that turn.
            new_messages: The chat messages after the turn.

        Raises:
            BridgeError: The template does not determine these ids.
        """
        before = yield Rendering([*messages], add_generation_prompt=False)
        whole = yield Rendering([*messages, *new_messages], add_generation_prompt=True)
        index = yield from self._find_terminator_index(before, generated)
        terminator, after = before[index], before[index + 1 :]
        turns = before.count(terminator)
        positions = [position for position, token in enumerate(whole) if token == terminator]
        if len(positions) < turns:
            raise BridgeError("the chat template drops turns if messages follow them")
        cut = positions[turns - 1] + 1
        last_turn = before[_find_last(before[:index], terminator) + 1 : index + 1]
        if whole[cut - len(last_turn) : cut] != last_turn or whole[cut : cut + len(after)] != after:
            raise BridgeError("the chat template writes an assistant turn in another way if messages follow it")
        return _drop_generated([terminator, *after], generated, whole[cut - 1 :])

    def _find_terminator_index(self, ids: list[int], generated: Sequence[int]) -> TokenizerSteps[int]:
        """Return the index of the id that ends the last turn in *ids*."""
        known = self._terminators | set(generated[-1:])
        index = next((index for index in reversed(range(len(ids))) if ids[index] in known), None)
        if index is not None:
            text = yield Decoding(ids[index + 1 :])
            if not text.strip():
                return index
        raise BridgeError("the chat template ends an assistant turn without a special token")

    def _get_ending(self, calls: Sequence[Item]) -> TokenizerSteps[TurnEnding]:
        names = _get_names(calls)
        if names not in self._endings:
            ending = yield from self._find_ending(calls)
            _remember(self._endings, names, ending)
        return self._endings[names]

    def _find_ending(self, calls: Sequence[Item]) -> TokenizerSteps[TurnEnding]:
        terminators = set(self._terminators)
        if calls:
            ending = yield from self._get_ending(())
            terminators.add(ending.terminator)
        rendered = yield from self._render_after_turn(calls, [])
        index = next((index for index in reversed(range(len(rendered))) if rendered[index] in terminators), None)
        if index is None and not calls:
            index = yield from self._find_only_visible_token(rendered)
        if index is None:
            raise BridgeError("the chat template ends an assistant turn without a special token")
        return TurnEnding(rendered[:index], rendered[index], rendered[index + 1 :])

    def _find_only_visible_token(self, ids: list[int]) -> TokenizerSteps[int | None]:
        """Return the index of the only id that is not white space, `None` if there are none or several."""
        visible = []
        for index, token in enumerate(ids):
            text = yield Decoding([token])
            visible += [index] if text.strip() else []
        return visible[0] if len(visible) == 1 else None

    def _render_after_turn(
        self, calls: Sequence[Item], messages: Sequence[Item], *, add_generation_prompt: bool = False
    ) -> TokenizerSteps[list[int]]:
        """Return the ids that the template writes after the text of a placeholder turn and before the end."""
        roles = tuple(str(message.get("role")) for message in messages)
        key = (_get_names(calls), roles, add_generation_prompt)
        first_word, second_word = PLACEHOLDER_WORDS
        first: list[int]
        second: list[int]
        first = yield _build_rendering(first_word, calls, messages, add_generation_prompt)
        beginning = self._beginnings.get(key)
        if beginning is not None and first[: len(beginning)] == beginning:
            return first[len(beginning) :]
        second = yield _build_rendering(second_word, calls, messages, add_generation_prompt)
        if first == second:
            raise BridgeError("the chat template leaves out an assistant turn")
        common = 0
        while common < min(len(first), len(second)) and first[-1 - common] == second[-1 - common]:
            common += 1
        _remember(self._beginnings, key, first[: len(first) - common])
        return first[len(first) - common :]


class Bridge:
    """A `TemplateBridge` with a tokenizer of this process.

    Args:
        tokenizer: Provides the chat template.
        tools: The tools that the policy may call, in the format of Chat Completions.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Item] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools) or None
        self._bridge = TemplateBridge(get_terminators(tokenizer))

    @property
    def terminator(self) -> int:
        """The id that ends a turn of the policy.

        Raises:
            BridgeError: The chat template ends a turn without a terminator.
        """
        return self._run(self._bridge.find_terminator())

    def suffix(
        self,
        generated: Sequence[int],
        messages: Sequence[Item],
        *,
        calls: Sequence[Item] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids to append to the *generated* ids; see `TemplateBridge.compute_suffix`."""
        return self._run(
            self._bridge.compute_suffix(generated, messages, calls=calls, add_generation_prompt=add_generation_prompt)
        )

    def _run(self, steps: TokenizerSteps[ResultT]) -> ResultT:
        result: object = None
        while True:
            try:
                request = steps.send(result)
            except StopIteration as stop:
                value: ResultT = stop.value
                return value
            try:
                result = answer_from_tokenizer(self._tokenizer, request, self._tools)
            except UsageError as error:
                raise BridgeError(str(error)) from error


def get_terminators(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of *tokenizer* that may end a turn: the end-of-text token and the special tokens."""
    eos = get_eos_id(tokenizer)
    return {*get_special_tokens(tokenizer), *([] if eos is None else [eos])}


def answer_from_tokenizer(
    tokenizer: Tokenizer, request: Rendering | Decoding, tools: list[Item] | None
) -> list[int] | str:
    """Return what *request* asks for: the ids of messages, or the text of ids.

    Raises:
        UsageError: The chat template cannot render the messages.
    """
    if isinstance(request, Decoding):
        return tokenizer.decode(request.ids)
    messages = [parse_call_arguments(message) for message in request.messages]
    return render_messages(tokenizer, messages, tools=tools, add_generation_prompt=request.add_generation_prompt)


def parse_call_arguments(message: Item) -> Item:
    """Return a chat *message* with the arguments of its calls as objects, as chat templates take them.

    Arguments that are no JSON object stay text.
    """
    if not message.get("tool_calls"):
        return message
    calls = [call | {"function": _parse_arguments(call["function"])} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def _parse_arguments(function: Item) -> Item:
    arguments = function.get("arguments") or "{}"
    if not isinstance(arguments, str):
        return function
    parsed = ToolCall(name=str(function.get("name")), arguments=arguments).parsed()
    return function if parsed is None else function | {"arguments": parsed}


def _build_rendering(
    word: str, calls: Sequence[Item], messages: Sequence[Item], add_generation_prompt: bool
) -> Rendering:
    # Some templates reject a turn with both text and calls.
    turn: Item = {"role": "assistant", "content": "" if calls else word}
    if calls:
        turn["tool_calls"] = [
            call | {"function": {"name": call["function"].get("name"), "arguments": json.dumps({"argument": word})}}
            for call in calls
        ]
    return Rendering([{"role": "user", "content": "question"}, turn, *messages], add_generation_prompt)


def _get_names(calls: Sequence[Item]) -> tuple[str, ...]:
    return tuple(str(call["function"].get("name")) for call in calls)


def _remember(cache: dict[Any, Any], key: object, value: object) -> None:
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = value


def _find_last(ids: Sequence[int], token: int) -> int:
    """Return the index of the last *token* in *ids*, -1 if there is none."""
    return next((index for index in reversed(range(len(ids))) if ids[index] == token), -1)


def _drop_generated(expected: Sequence[int], generated: Sequence[int], following: list[int]) -> list[int]:
    """Return *following* without the ids of the turn's *expected* ending that the policy generated itself."""
    for count in range(len(expected), 0, -1):
        if list(generated[-count:]) == list(expected[:count]) == following[:count]:
            return following[count:]
    return following
