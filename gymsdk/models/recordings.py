"""Store recorded episodes, and find the next turn of the recording that a conversation follows.

A conversation is identified by digests: a hash of everything before each turn of the policy. `compute_digests`
describes which differences the hash ignores.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from gymsdk import jsonl
from gymsdk.errors import BadRow
from gymsdk.responses import get_input_items, iter_turn_spans, iter_turns
from gymsdk.types import Item

MAX_SIMILAR_RECORDINGS = 256
"""The number of recordings to keep for one opening; others that differ only later are dropped."""

SYSTEM_ROLES = frozenset({"system", "developer"})
"""The roles of messages that belong to the system prompt."""


def compute_digests(items: Sequence[Item], instructions: str | None = None, *, skip: int = 0) -> list[bytes]:
    """Return the digests of the conversation before each of the policy's turns in *items*, and of the whole.

    The digests do not depend on the API that carried the conversation. They ignore reasoning, ids, the white space of
    JSON, and whether a system prompt is a system message, a developer message or *instructions*.

    Args:
        items: The items of the conversation.
        instructions: The instructions of the request.
        skip: The number of characters to leave out at the start of the system prompt, not counting white space.
    """
    return [state.get_digest() for state in _hash_stages(items, instructions, skip=skip)]


def _hash_stages(items: Sequence[Item], instructions: str | None, *, skip: int = 0) -> Iterator[_ConversationHash]:
    """Yield the state before each of the policy's turns and at the end: always the same object, updated in place."""
    starts = {span.start for span in iter_turn_spans(items)}
    state = _ConversationHash(skip)
    state.add({"role": "system", "content": instructions or ""})
    for index, item in enumerate(items):
        if index in starts:
            yield state
        state.add(item)
    yield state


class Opening(NamedTuple):
    """The start of a conversation: the *digest* without the system prompt, and the *length* of the system prompt.

    The length is in characters, not counting white space.
    """

    digest: bytes
    length: int


def compute_openings(items: Sequence[Item], instructions: str | None = None) -> list[Opening]:
    """Return an opening for each of the digests of `compute_digests`."""
    return [state.get_opening() for state in _hash_stages(items, instructions)]


def has_added_system_prompt(items: Sequence[Item], prompt: Sequence[Item]) -> bool:
    """Whether *items* are *prompt* after an additional system prompt.

    The additional prompt is a separate message, or text at the start of the first message of *prompt*.
    """
    system, expected = _get_system_messages(items), _get_system_messages(prompt)
    if list(items[len(system) :]) != list(prompt[len(expected) :]):
        return False
    [opening], [expected_opening] = compute_openings(system), compute_openings(expected)
    skip = max(0, opening.length - expected_opening.length)
    return compute_digests(system, skip=skip) == compute_digests(expected)


def _get_system_messages(items: Sequence[Item]) -> list[Item]:
    return list(takewhile(lambda item: item.get("role") in SYSTEM_ROLES, items))


class _ConversationHash:
    """The hash of a conversation so far.

    System messages are hashed separately from the rest, because clients may move them to the front.
    """

    def __init__(self, skip: int = 0) -> None:
        self._system = blake2b(digest_size=16)
        self._rest = blake2b(digest_size=16)
        self._last_role = ""
        self._skip = skip
        self._system_length = 0

    def get_digest(self) -> bytes:
        combined = self._system.copy()
        combined.update(b"\0" + self._rest.digest())
        return combined.digest()

    def get_opening(self) -> Opening:
        return Opening(self._rest.digest(), self._system_length)

    def add(self, item: Item) -> None:
        match item.get("type") or "message":
            case "reasoning":
                return
            case "function_call":
                self._update("call", f"{item.get('name')} {_normalize_arguments(item.get('arguments'))}")
            case "function_call_output":
                self._update("output", _get_content_text(item.get("output")))
            case _:
                self._add_message(str(item.get("role")), _get_content_text(item.get("content")))

    def _add_message(self, role: str, text: str) -> None:
        if role in SYSTEM_ROLES:
            # Clients that join several messages differ in the white space between them.
            compact = "".join(text.split())
            self._system.update(compact[max(0, self._skip - self._system_length) :].encode("utf-8", "replace"))
            self._system_length += len(compact)
            return
        # Clients of APIs that require alternating roles join adjacent messages of one role.
        self._update(role, text.strip(), continues=role == self._last_role)

    def _update(self, role: str, text: str, *, continues: bool = False) -> None:
        separator = "" if continues else f"\0{role}\0"
        self._rest.update((separator + text).encode("utf-8", "replace"))
        self._last_role = role


def _get_content_text(content: Any) -> str:
    """Return the text of *content*, with the URLs of images and the data of files."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return "".join(
        value
        for part in content
        for key in ("text", "image_url", "file_data")
        if isinstance(value := part.get(key), str)
    )


def _normalize_arguments(arguments: Any) -> str:
    try:
        value = jsonl.parse_json(arguments) if isinstance(arguments, str) else arguments
        return jsonl.dump_canonical_json(value).decode()
    except (ValueError, TypeError, RecursionError):
        return str(arguments)


@dataclass(frozen=True, slots=True)
class Recording:
    """A recorded episode.

    Attributes:
        digests: The digest of the conversation before each turn.
        turns: The output items of each turn, as JSON.
        environment: The name of the environment.
        row: The row of the episode, in the encoding of the recorder.
        seed: The seed of the episode.
        opening: The opening before the first turn.
        tools: The names of the tools that the episode offers.
    """

    digests: tuple[bytes, ...]
    turns: tuple[bytes, ...]
    environment: str = ""
    row: bytes = b""
    seed: int = 0
    opening: Opening | None = None
    tools: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """The approximate size in bytes."""
        return len(self.row) + sum(map(len, self.turns)) + 64 * len(self.digests)

    def get_turn(self, number: int) -> list[Item]:
        """Return the output items of the turn with this *number*, from 0."""
        items: list[Item] = jsonl.parse_json(self.turns[number])
        return items

    def find_turn(self, digest: bytes) -> int | None:
        """Return the number of the turn after the conversation with this *digest*, `None` if there is none."""
        return self.digests.index(digest) if digest in self.digests else None


def build_recording(digests: Iterable[bytes], turns: Iterable[list[Item]], opening: Opening | None = None) -> Recording:
    """Return the recording of *turns*, given the digest before each turn and the opening before the first."""
    return Recording(tuple(digests), tuple(map(jsonl.dump_json, turns)), opening=opening)


class RecordingStore:
    """Recordings, indexed by their openings."""

    def __init__(self) -> None:
        self._by_first_digest: dict[bytes, list[Recording]] = defaultdict(list)
        self._prompt_lengths: dict[bytes, set[int]] = defaultdict(set)

    def add(self, recording: Recording) -> None:
        """Add *recording*."""
        self._by_first_digest[recording.digests[0]].append(recording)
        if recording.opening is not None:
            self._prompt_lengths[recording.opening.digest].add(recording.opening.length)

    def is_new(self, recording: Recording) -> bool:
        """Whether *recording* differs from all others, and fewer than `MAX_SIMILAR_RECORDINGS` open like it."""
        similar = self.find_by_opening(recording.digests[0])
        return len(similar) < MAX_SIMILAR_RECORDINGS and all(
            (known.digests, known.turns) != (recording.digests, recording.turns) for known in similar
        )

    def find_by_opening(self, digest: bytes) -> Sequence[Recording]:
        """Return the recordings with this *digest* before their first turn."""
        return self._by_first_digest.get(digest, ())

    def prompt_lengths(self, opening: Opening) -> list[int]:
        """Return the lengths of shorter system prompts of recordings that otherwise open like *opening*.

        Returns:
            At most `MAX_SIMILAR_RECORDINGS` lengths, the longest first.
        """
        lengths = self._prompt_lengths.get(opening.digest, ())
        return sorted((length for length in lengths if length < opening.length), reverse=True)[:MAX_SIMILAR_RECORDINGS]

    def find_next_turn(self, digests: Sequence[bytes]) -> tuple[Recording, int] | None:
        """Return the recording that a conversation with these *digests* follows furthest, and its next turn.

        If a conversation follows several recordings equally far, the first one wins. A prompt may contain turns, so
        the recording with the longest opening is preferred.
        """
        for index in reversed(range(len(digests))):
            if similar := self._by_first_digest.get(digests[index]):
                later = set(digests[index:])
                best = max(similar, key=lambda known: len(later.intersection(known.digests)))
                turn = best.find_turn(digests[-1])
                return best, len(digests) - 1 - index if turn is None else turn
        return None


class Conversation:
    """The conversation of a Responses *request*. Its digests are kept, for look-ups in growing stores."""

    def __init__(self, request: Item) -> None:
        self._items = get_input_items(request)
        self._instructions = request.get("instructions")
        self._digests = compute_digests(self._items, self._instructions)
        self._openings: list[Opening] | None = None

    def find_digests(self, store: RecordingStore) -> list[bytes] | None:
        """Return the digests under which *store* has a recording of this conversation, `None` if it has none.

        A client may send its own system prompt before that of the row. If no recording opens like the conversation,
        this method looks for one that opens like it without the first part of its system prompt.
        """
        if store.find_next_turn(self._digests) is not None:
            return self._digests
        if self._openings is None:
            self._openings = compute_openings(self._items, self._instructions)
        for opening in reversed(self._openings):
            for length in store.prompt_lengths(opening):
                digests = compute_digests(self._items, self._instructions, skip=opening.length - length)
                if store.find_next_turn(digests) is not None:
                    return digests
        return None


def read_recordings(path: Path) -> RecordingStore:
    """Read the recordings in a file of rollouts.

    Raises:
        BadRow: A line is not a rollout.
    """
    store = RecordingStore()
    where = str(path)
    try:
        for number, row in jsonl.read_rows(path):
            where = f"{path}:{number}"
            store.add(_parse_row(row))
    except (LookupError, TypeError, AttributeError):
        raise BadRow(f"{where} is not a line of a rollouts file") from None
    return store


def _parse_row(row: Item) -> Recording:
    request, output = row["responses_create_params"], row["response"]["output"]
    prompt, instructions = get_input_items(request), request.get("instructions")
    # A prompt may end with an assistant message, which the digests of the whole would count to the first turn.
    *_, first = compute_digests(prompt, instructions)
    *_, opening = compute_openings(prompt, instructions)
    digests = compute_digests([*prompt, *output], instructions)
    recorded = list(iter_turns(output))
    return build_recording([first, *digests[-len(recorded) : -1]][: max(1, len(recorded))], recorded, opening)
