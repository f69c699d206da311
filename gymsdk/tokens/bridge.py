"""Compute the token ids between two turns without re-encoding the tokens that a policy generated.

A chat template renders a whole conversation, and its rendering of an earlier turn often differs from the generated
tokens: the same text can be tokenized in several ways, and templates drop earlier reasoning. `TemplateBridge`
asks the template to render the conversation. The rendering must contain all that the policy read before, from its
beginning, with nothing between but the turns of the policy. If it also contains the policy's last turn exactly as it
was generated, the rest follows the generation. Otherwise the template renders the conversation again, with a
placeholder in place of the text of that turn. The two renderings agree in the text of the template after that turn.

The algorithm is a generator: it yields requests to a tokenizer, `Rendering` or `Decoding`, and receives their results.
`Bridge` runs it with a tokenizer in this process; the models run it with the tokenizer of an inference server.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from gymsdk.errors import UsageError
from gymsdk.tokens.placeholders import (
    PLACEHOLDER_WORDS,
    QUESTION,
    TurnEnding,
    build_outputs,
    build_short_conversation,
    drop_generated,
    find_following,
    find_last,
    follows_placeholder,
    get_common_ending,
    get_turn_text,
    pair_words,
    place_word,
)
from gymsdk.tokens.read_ids import (
    MAX_TURN_END,
    Gap,
    LastRead,
    count_common_beginning,
    find_after_turn,
    find_read,
    is_own_turn,
)
from gymsdk.tokens.tokenizer import Tokenizer, get_eos_id, get_special_tokens, render_messages
from gymsdk.types import Item, ToolCall, extract_text

MARK = re.compile(r"[<\[].+[>\]\[]")
"""The texts of tokens that may end a turn, where the special tokens are not known."""

MAX_CACHED = 1024
"""The number of cached renderings. Their keys contain names of tools, which a policy can invent."""

OTHER_MESSAGES = "the chat template writes the messages in another way after the policy's own turn"
NO_TERMINATOR = "the chat template ends an assistant turn without a special token"
LEFT_OUT = "the chat template leaves out an assistant turn"
REWRITTEN = "the chat template rewrites messages that the policy has read"
UNKNOWN_WORDS = (
    "the tokenizer turns different words of an assistant turn into the same ids, so the ends of turns cannot be found;"
    " use a tokenizer whose vocabulary covers the texts of the conversations"
)

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
"""A computation that yields requests for a tokenizer. It receives a list of ids or a text for each, or a `BridgeError`
if the chat template rejects the messages."""


class TemplateBridge:
    """Computes the ids between turns of conversations that share a chat template and a list of tools.

    Args:
        terminators: The ids that may end a turn, if they are known: the end-of-text token and other special tokens.
            Otherwise the only visible token that the template writes after a turn ends it.
        list_words: Returns words of the vocabulary, for tokenizers without `PLACEHOLDER_WORDS`.
    """

    def __init__(self, terminators: Collection[int] = (), list_words: Callable[[], Iterable[str]] = tuple) -> None:
        self._terminators = frozenset(terminators)
        # An engine does not say which tokens are special. The bridge learns the tokens that end turns.
        self._marks = {*terminators}
        self._pairs = [*PLACEHOLDER_WORDS]
        self._list_words = list_words
        self._endings: dict[tuple[Any, ...], TurnEnding | None] = {}
        self._prompts: dict[str, list[int]] = {}
        self._prompt_text: str | None = None

    def find_terminator(self) -> TokenizerSteps[int]:
        """Return the id that ends a turn of the policy.

        Raises:
            BridgeError: The chat template ends a turn without a terminator.
        """
        _, ending = yield from self._choose_words({"role": "assistant", "content": ""}, (), [QUESTION])
        index = self._find_last_mark(ending.final)
        if index is None and (index := ending.terminator) is None:
            raise BridgeError(NO_TERMINATOR)
        return ending.final[index]

    def compute_suffix(
        self,
        generated: Sequence[int],
        messages: Sequence[Item],
        *,
        conversation: Sequence[Item] = (),
        parts: Sequence[Sequence[int]] = (),
        calls: Sequence[Item] = (),
        add_generation_prompt: bool = True,
    ) -> TokenizerSteps[list[int]]:
        """Return the ids to append to the *generated* ids so that the policy sees *messages* and can answer them.

        Args:
            generated: The ids that the policy generated in its turn. If the turn was cut off before its terminator,
                the result starts with the terminator, even without messages.
            messages: The chat messages after the turn.
            conversation: The chat messages up to and including the turn. Without them, a short conversation takes
                their place; a template that looks at them then writes another text.
            parts: The ids before the turn: those of the opening messages, then alternately those that the policy
                generated in an earlier turn and those that it read after that turn. The template must still write
                what the policy read, and nothing between it and the turns.
            calls: The tool calls of the turn, if there is no *conversation*.
            add_generation_prompt: Whether to append the start of the next assistant turn.

        Returns:
            The ids to append.

        Raises:
            BridgeError: The template does not determine these ids. The sequence cannot be extended; the caller must
                start a new one from the rendered conversation.
        """
        *earlier, turn = conversation or build_short_conversation(calls)
        new_conversation = [*earlier, turn, *messages]
        rendered: list[int] = yield Rendering(new_conversation, add_generation_prompt)
        last_read = yield from self._find_read(parts, rendered, new_conversation)
        if parts and messages and last_read and generated and generated[-1] in self._marks:
            suffix = find_after_turn(parts[-1], generated, rendered, last_read)
            if suffix is not None and all(is_own_turn(gap, self._marks) for gap in last_read.gaps):
                return suffix
        words, ending = yield from self._choose_words(turn, messages, earlier)
        first: list[int] = yield Rendering([*earlier, place_word(turn, words[0]), *messages], add_generation_prompt)
        match = find_following(first, rendered, ending)
        if match is None:
            second: list[int] = yield Rendering(
                [*earlier, place_word(turn, words[1]), *messages], add_generation_prompt
            )
            if first == second:
                raise BridgeError(LEFT_OUT)
            following = get_common_ending(first, second)
            role = str(messages[0].get("role")) if messages else "user"
            if not follows_placeholder(first, following, ending.placeholder):
                raise BridgeError(OTHER_MESSAGES)
            end = yield from self._find_turn_end(
                following, generated, turn, words, ending, role=role, is_short=not conversation
            )
        else:
            following, end = match
        if generated and generated[-1] in self._marks and generated[-1] in following[:end]:
            # Some templates write more than one token that ends a turn.
            end = following.index(generated[-1])
        is_complete = [*generated[-1:]] == following[end : end + 1]
        if not is_complete and ending.terminator is None and [*generated[-1:]] == ending.final[end : end + 1]:
            # The template ends the last turn of a conversation with another token than earlier turns.
            end, is_complete = end + 1, True
        # A turn that was cut off lacks what follows its text. The end of a call is a part of what the policy writes.
        following = following[end if is_complete or turn.get("tool_calls") else 0 :]
        if rendered[len(rendered) - len(following) :] != following:
            raise BridgeError(OTHER_MESSAGES)
        self._check_read(last_read, generated, rendered, len(rendered) - len(following))
        return drop_generated(generated, following)

    def find_generation_prompt_text(self) -> TokenizerSteps[str]:
        """Return the text with which the template starts the policy's turn, such as a role or an opening `<think>`."""
        if self._prompt_text is None:
            ids = yield from self._get_generation_prompt([QUESTION])
            self._prompt_text = yield Decoding(ids)
        return self._prompt_text

    def count_suffix(
        self,
        generated: Sequence[int],
        messages: Sequence[Item],
        new_messages: Sequence[Item],
        *,
        parts: Sequence[Sequence[int]] = (),
    ) -> TokenizerSteps[list[int]]:
        """Return the same ids as `compute_suffix`, found by counting the turns in the rendered conversation.

        This method is for templates that reject the conversation with a placeholder turn. It requires that the
        template renders the policy's last turn in the same way with and without messages after it.

        Args:
            generated: The ids that the policy generated in its turn.
            messages: The whole conversation up to and including that turn.
            new_messages: The chat messages after the turn.
            parts: The ids before that turn, as for `compute_suffix`.

        Raises:
            BridgeError: The template does not determine these ids.
        """
        before = yield Rendering([*messages], add_generation_prompt=False)
        rendered = yield Rendering([*messages, *new_messages], add_generation_prompt=True)
        index = yield from self._find_terminator_index(before, generated)
        terminator, after = before[index], before[index + 1 :]
        turns = before.count(terminator)
        positions = [position for position, token in enumerate(rendered) if token == terminator]
        if len(positions) < turns:
            raise BridgeError("the chat template drops turns if messages follow them")
        turn_end = positions[turns - 1] + 1
        last_turn = before[find_last(before[:index], terminator) + 1 : index + 1]
        if (
            rendered[turn_end - len(last_turn) : turn_end] != last_turn
            or rendered[turn_end : turn_end + len(after)] != after
        ):
            raise BridgeError("the chat template writes an assistant turn in another way if messages follow it")
        last_read = yield from self._find_read(parts, rendered, [*messages, *new_messages])
        self._check_read(last_read, generated, rendered, turn_end - 1)
        return drop_generated(generated, rendered[turn_end - 1 :])

    def _find_terminator_index(self, ids: list[int], generated: Sequence[int]) -> TokenizerSteps[int]:
        """Return the index of the id that ends the last turn in *ids*."""
        turn: Item = {"role": "assistant", "content": ""}
        is_mark = bool(generated) and (yield from self._is_mark(generated[-1], turn))
        known = self._terminators | set(generated[-1:] if is_mark else ())
        index = next((index for index in reversed(range(len(ids))) if ids[index] in known), None)
        if index is not None:
            text = yield Decoding(ids[index + 1 :])
            if not text.strip():
                return index
        raise BridgeError(NO_TERMINATOR)

    def _find_turn_end(
        self,
        following: list[int],
        generated: Sequence[int],
        turn: Item,
        words: tuple[str, str],
        ending: TurnEnding,
        *,
        role: str,
        is_short: bool,
    ) -> TokenizerSteps[int]:
        """Return the index in *following*, the ids after the text of a placeholder turn, of the id that ends the turn.

        Raises:
            BridgeError: The ids do not show where the turn ends.
        """
        calls, common, final = turn.get("tool_calls"), ending.common, ending.final
        if following[: len(common)] != common or (is_short and len(common) < len(final)):
            raise BridgeError("the chat template ends an assistant turn in another way if messages follow it")
        if ending.terminator is not None:
            return ending.terminator
        last = generated[-1] if generated else None
        is_mark = last is not None and (yield from self._is_mark(last, turn))
        if is_mark and last in final[: len(common) + 1]:
            index = final.index(last)
            if (yield from self._is_mark(following[index], turn)):
                self._marks |= {final[index], following[index]}
                return index
        followed = yield from self._find_followed([QUESTION], turn, words, role)
        shared = following[: count_common_beginning(following, followed)]
        end = shared.index(last) if is_mark and last in shared else None
        if end is None and not calls:
            end = next((index for index, token in enumerate(shared) if token in self._marks), None)
        if end is None:
            raise BridgeError(NO_TERMINATOR)
        self._marks.add(shared[end])
        return end

    def _is_mark(self, token: int, turn: Item) -> TokenizerSteps[bool]:
        """Return whether *token*, the last of a generation, is a special token and not a part of the text of *turn*."""
        if token in self._marks or self._terminators:
            return token in self._marks
        text: str = yield Decoding([token])
        return bool(MARK.fullmatch(text.strip())) and not get_turn_text(turn).endswith(text.strip())

    def _find_read(
        self, parts: Sequence[Sequence[int]], ids: list[int], conversation: list[Item]
    ) -> TokenizerSteps[LastRead | None]:
        """Find the parts that the policy read in the rendering *ids* of the *conversation*; see `find_read`."""
        if not parts:
            return LastRead()
        prompts = [(yield from self._get_generation_prompt(conversation))]
        call = next((number for number, message in enumerate(conversation) if message.get("tool_calls")), None)
        if call is not None:
            prompts.append((yield from self._get_generation_prompt_after_outputs(conversation[call])))
        return find_read(parts, ids, prompts)

    def _check_read(self, last: LastRead | None, generated: Sequence[int], rendering: list[int], end: int) -> None:
        """Check that the template wrote the parts that the policy read, with only the policy's turns between them.

        Args:
            last: Where the part is that the policy read last.
            generated: The ids of the last turn.
            rendering: The conversation.
            end: The index in it of the ids to append to the turn.

        Raises:
            BridgeError: The template wrote it in another way when the policy read it.
        """
        if last is None or last.end > end + MAX_TURN_END:
            raise BridgeError(REWRITTEN)
        gaps = [*last.gaps]
        if last.own is not None:
            gaps.append(Gap(rendering[last.end : end], [*last.own, *generated], rendering[end:]))
        if not all(is_own_turn(gap, self._marks) for gap in gaps):
            raise BridgeError(REWRITTEN)

    def _get_generation_prompt(self, conversation: list[Item]) -> TokenizerSteps[list[int]]:
        if "" not in self._prompts:
            try:
                self._prompts[""] = yield from _find_generation_prompt([QUESTION])
            except BridgeError:
                # Some templates require more of a conversation.
                self._prompts[""] = yield from _find_generation_prompt(conversation)
        return self._prompts[""]

    def _get_generation_prompt_after_outputs(self, turn: Item) -> TokenizerSteps[list[int]]:
        if "tool" not in self._prompts:
            calls = turn["tool_calls"]
            try:
                self._prompts["tool"] = yield from _find_generation_prompt(
                    [*build_short_conversation(calls), *build_outputs(calls)]
                )
            except BridgeError:
                self._prompts["tool"] = []
        return self._prompts["tool"]

    def _choose_words(
        self, turn: Item, messages: Sequence[Item], earlier: Sequence[Item]
    ) -> TokenizerSteps[tuple[tuple[str, str], TurnEnding]]:
        """Return the texts of two placeholder turns in place of *turn*, and the template's text after the first.

        Raises:
            BridgeError: The renderings of placeholder turns do not differ.
        """
        texts = [get_turn_text(message) for message in messages]
        # The new messages must not contain a placeholder, which shows where they begin.
        pairs = sorted(self._pairs, key=lambda pair: any(word in text for word in pair for text in texts))
        for first_word, second_word in chain(pairs, self._find_known_pairs([turn, *earlier, *messages])):
            # A placeholder that ends like the real turn hides where the turn ends.
            pair = (
                (second_word, first_word) if get_turn_text(turn).endswith(first_word[-1]) else (first_word, second_word)
            )
            ending = yield from self._get_ending(turn, pair, earlier)
            if ending is not None:
                self._pairs += [] if (first_word, second_word) in self._pairs else [(first_word, second_word)]
                return pair, ending
        without: list[int] = yield Rendering([*earlier], add_generation_prompt=False)
        placed: list[int] = yield Rendering([*earlier, place_word(turn, pair[0])], add_generation_prompt=False)
        if turn.get("tool_calls"):
            yield from self._choose_words({"role": "assistant", "content": ""}, messages, [QUESTION])
            raise BridgeError("the chat template leaves out the calls of an assistant turn")
        raise BridgeError(LEFT_OUT if len(placed) <= len(without) else UNKNOWN_WORDS)

    def _find_known_pairs(self, conversation: Sequence[Item]) -> Iterator[tuple[str, str]]:
        """Yield words that the tokenizer knows: of its vocabulary, and of the texts of a *conversation*."""
        yield from pair_words(self._list_words())
        yield from pair_words(word for message in conversation for word in get_turn_text(message).split())

    def _get_ending(
        self, turn: Item, words: tuple[str, str], earlier: Sequence[Item]
    ) -> TokenizerSteps[TurnEnding | None]:
        """Return the template's text after a turn like *turn*, `None` if the texts of *words* do not differ."""
        calls = turn.get("tool_calls") or ()
        key = (tuple(str(call["function"].get("name")) for call in calls), words)
        if key not in self._endings:
            try:
                ending = yield from self._find_ending(*build_short_conversation(calls), words)
            except BridgeError:
                # Some templates require more of a conversation.
                ending = yield from self._find_ending(*earlier, turn, words)
            _remember(self._endings, key, ending)
        return self._endings[key]

    def _find_ending(self, *conversation: Any) -> TokenizerSteps[TurnEnding | None]:
        *earlier, turn, words = conversation
        if turn.get("tool_calls"):
            # The token that ends a turn without calls may also end a turn with calls.
            yield from self._get_ending({"role": "assistant", "content": ""}, words, [QUESTION])
        first: list[int] = yield Rendering([*earlier, place_word(turn, words[0])], add_generation_prompt=False)
        second: list[int] = yield Rendering([*earlier, place_word(turn, words[1])], add_generation_prompt=False)
        if first == second:
            return None
        final = get_common_ending(first, second)
        placeholder = first[count_common_beginning(first, second) : len(first) - len(final)]
        followed = yield from self._find_followed(earlier, turn, words)
        common = final[: count_common_beginning(final, followed)]
        index = self._find_last_mark(final)
        if index is None:
            index = yield from self._find_only_visible_token(final)
            self._marks |= set() if index is None or turn.get("tool_calls") else {final[index]}
        return TurnEnding(final, common, index if len(common) == len(final) else None, placeholder)

    def _find_followed(
        self, earlier: list[Item], turn: Item, words: tuple[str, str], role: str = "user"
    ) -> TokenizerSteps[list[int]]:
        """Return the template's text after a turn like *turn* if its outputs or a message of *role* follow it."""
        following = build_outputs(turn.get("tool_calls") or ())
        renderings: list[list[int]] = []
        for word in words:
            messages = [*earlier, place_word(turn, word), *(following or [QUESTION | {"role": role}])]
            ids: list[int] = yield Rendering(messages, add_generation_prompt=False)
            renderings.append(ids)
        return get_common_ending(*renderings)

    def _find_last_mark(self, ids: list[int]) -> int | None:
        return next((index for index in reversed(range(len(ids))) if ids[index] in self._marks), None)

    def _find_only_visible_token(self, ids: list[int]) -> TokenizerSteps[int | None]:
        """Return the index of the only id that is not white space, `None` if there are none or several."""
        visible = []
        for index, token in enumerate(ids):
            text = yield Decoding([token])
            visible += [index] if text.strip() else []
        return visible[0] if len(visible) == 1 else None


class Bridge:
    """A `TemplateBridge` with a tokenizer of this process.

    Args:
        tokenizer: Provides the chat template.
        tools: The tools that the policy may call, in the format of Chat Completions.
    """

    def __init__(self, tokenizer: Tokenizer, tools: Sequence[Item] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools) or None
        self._bridge = TemplateBridge(get_terminators(tokenizer), lambda: list_words(tokenizer))

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
        conversation: Sequence[Item] = (),
        parts: Sequence[Sequence[int]] = (),
        calls: Sequence[Item] = (),
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids to append to the *generated* ids; see `TemplateBridge.compute_suffix`."""
        return self._run(
            self._bridge.compute_suffix(
                generated,
                messages,
                conversation=conversation,
                parts=parts,
                calls=calls,
                add_generation_prompt=add_generation_prompt,
            )
        )

    def _run(self, steps: TokenizerSteps[ResultT]) -> ResultT:
        result: object = None
        error: BridgeError | None = None
        while True:
            try:
                request = steps.send(result) if error is None else steps.throw(error)
            except StopIteration as stop:
                value: ResultT = stop.value
                return value
            try:
                result, error = answer_from_tokenizer(self._tokenizer, request, self._tools), None
            except UsageError as refusal:
                error = BridgeError(str(refusal))
                error.__cause__ = refusal


def get_terminators(tokenizer: Tokenizer) -> set[int]:
    """Return the ids of *tokenizer* that may end a turn: the end-of-text token and the special tokens."""
    eos = get_eos_id(tokenizer)
    return {*get_special_tokens(tokenizer), *([] if eos is None else [eos])}


def list_words(tokenizer: Tokenizer) -> list[str]:
    """Return the words of letters in the vocabulary of *tokenizer*; none if it does not provide its vocabulary."""
    get_vocab = getattr(tokenizer, "get_vocab", None)
    return sorted(word for word in get_vocab() if word.isascii() and word.isalpha()) if callable(get_vocab) else []


def answer_from_tokenizer(
    tokenizer: Tokenizer,
    request: Rendering | Decoding,
    tools: list[Item] | None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> list[int] | str:
    """Return what *request* asks for: the ids of messages, or the text of ids.

    The arguments are those of `render_messages`.

    Raises:
        UsageError: The chat template cannot render the messages.
    """
    if isinstance(request, Decoding):
        return tokenizer.decode(request.ids)
    messages = [parse_call_arguments(message) for message in request.messages]
    add_generation_prompt = request.add_generation_prompt
    return render_messages(
        tokenizer, messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
    )


def parse_call_arguments(message: Item) -> Item:
    """Return a chat *message* as chat templates take it: its content as a text, the arguments of its calls as objects.

    Arguments that are no JSON object stay text.
    """
    message = message | {"content": extract_text(message.get("content"))}
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


def _find_generation_prompt(messages: list[Item]) -> TokenizerSteps[list[int]]:
    closed: list[int] = yield Rendering(messages, add_generation_prompt=False)
    prompted: list[int] = yield Rendering(messages, add_generation_prompt=True)
    if closed == prompted:
        # Some templates always start the policy's turn, and write another start once the turn is there.
        turn: Item = {"role": "assistant", "content": PLACEHOLDER_WORDS[0][0]}
        closed = yield Rendering([*messages, turn], add_generation_prompt=False)
    return prompted[count_common_beginning(closed, prompted) :]


def _remember(cache: dict[Any, Any], key: object, value: object) -> None:
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = value
