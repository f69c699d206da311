"""Recordings: episodes played once, whose turns are found again by the conversation that asks for them."""

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
from gymsdk.responses import iter_turn_spans, iter_turns
from gymsdk.types import Item

MAX_SIMILAR_RECORDINGS = 256
"""Recordings kept of one opening: the next ones that differ in nothing but what comes later are left out."""

SYSTEM_ROLES = frozenset({"system", "developer"})
"""The roles of the messages that make a system prompt."""


def get_input_items(request: Item) -> list[Item]:
    """Give the items of a Responses *request*."""
    given = request.get("input") or []
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def compute_digests(items: Sequence[Item], instructions: str | None = None, *, skip: int = 0) -> list[bytes]:
    """Give a mark of all that was said before each of the policy's turns in *items*, and one of the whole.

    Two tellings of one conversation have the same marks, whichever API carried them: thoughts, ids and the spacing of
    JSON count for nothing, nor does it whether something is told to the system, the developer or as *instructions*.
    The first *skip* characters that the system was told, white space aside, are left out.
    """
    return [said.mark() for said in _stages(items, instructions, skip=skip)]


def _stages(items: Sequence[Item], instructions: str | None, *, skip: int = 0) -> Iterator[_Said]:
    """Yield what was said before each of the policy's turns in *items*, and the whole: one object that grows."""
    starts = {span.start for span in iter_turn_spans(items)}
    said = _Said(skip)
    said.add({"role": "system", "content": instructions or ""})
    for index, item in enumerate(items):
        if index in starts:
            yield said
        said.add(item)
    yield said


class Opening(NamedTuple):
    """How a conversation opens apart from its system prompt: the *digest* of that, and the prompt's *length*.

    The length is in characters, white space aside.
    """

    digest: bytes
    length: int


def compute_openings(items: Sequence[Item], instructions: str | None = None) -> list[Opening]:
    """Return an opening for each of the marks that `marks` gives."""
    return [said.opening() for said in _stages(items, instructions)]


def has_added_system_prompt(items: Sequence[Item], prompt: Sequence[Item]) -> bool:
    """Return whether *items* are *prompt* behind a system prompt of a harness.

    The harness may put messages of its own before those of *prompt*, or join its text with the first of them.
    """
    lead, own = _system_messages(items), _system_messages(prompt)
    if list(items[len(lead) :]) != list(prompt[len(own) :]):
        return False
    [added], [asked] = compute_openings(lead), compute_openings(own)
    return compute_digests(lead, skip=max(0, added.length - asked.length)) == compute_digests(own)


def _system_messages(items: Sequence[Item]) -> list[Item]:
    """Return the messages of the system or the developer that *items* begin with."""
    return list(takewhile(lambda item: item.get("role") in SYSTEM_ROLES, items))


class _Said:
    """What has been said so far, as two running digests: what the system was told may move to the front."""

    def __init__(self, skip: int = 0) -> None:
        self._system = blake2b(digest_size=16)
        self._rest = blake2b(digest_size=16)
        self._speaker = ""
        self._skip = skip
        self._length = 0

    def mark(self) -> bytes:
        whole = self._system.copy()
        whole.update(b"\0" + self._rest.digest())
        return whole.digest()

    def opening(self) -> Opening:
        return Opening(self._rest.digest(), self._length)

    def add(self, item: Item) -> None:
        match item.get("type") or "message":
            case "reasoning":
                return
            case "function_call":
                self._say("call", f"{item.get('name')} {_canonical(item.get('arguments'))}")
            case "function_call_output":
                self._say("output", _text(item.get("output")))
            case _:
                self._message(str(item.get("role")), _text(item.get("content")))

    def _message(self, role: str, text: str) -> None:
        if role in SYSTEM_ROLES:
            # Who makes one message of several puts what it likes between them.
            told = "".join(text.split())
            self._system.update(told[max(0, self._skip - self._length) :].encode("utf-8", "replace"))
            self._length += len(told)
            return
        # Some APIs want speakers to alternate, and clients then make one message of two.
        self._say(role, text.strip(), goes_on=role == self._speaker)

    def _say(self, speaker: str, text: str, *, goes_on: bool = False) -> None:
        head = "" if goes_on else f"\0{speaker}\0"
        self._rest.update((head + text).encode("utf-8", "replace"))
        self._speaker = speaker


def _text(content: Any) -> str:
    """Give the text of *content*, and where its images and files are."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    return "".join(
        value
        for part in content
        for key in ("text", "image_url", "file_data")
        if isinstance(value := part.get(key), str)
    )


def _canonical(arguments: Any) -> str:
    try:
        value = jsonl.parse_json(arguments) if isinstance(arguments, str) else arguments
        return jsonl.dump_canonical_json(value).decode()
    except (ValueError, TypeError, RecursionError):
        return str(arguments)


@dataclass(frozen=True, slots=True)
class Recording:
    """One episode: its *turns* as JSON, each with the mark of what was said before it.

    *row* is what was played, as whoever recorded it packs one, with the *environment* and the *seed*.
    """

    digests: tuple[bytes, ...]
    turns: tuple[bytes, ...]
    environment: str = ""
    row: bytes = b""
    seed: int = 0
    opening: Opening | None = None

    @property
    def size(self) -> int:
        """About how many bytes it takes."""
        return len(self.row) + sum(map(len, self.turns)) + 64 * len(self.digests)

    def get_turn(self, number: int) -> list[Item]:
        """Give the output items of one turn."""
        found: list[Item] = jsonl.parse_json(self.turns[number])
        return found

    def find_turn(self, mark: bytes) -> int | None:
        """Give the number of the turn before which just what *mark* stands for was said, `None` where there is none."""
        return self.digests.index(mark) if mark in self.digests else None


def build_recording(asked: Iterable[bytes], turns: Iterable[list[Item]], opening: Opening | None = None) -> Recording:
    """Return the recording of *turns*: a conversation with that mark *asked* for each, the first has that *opening*."""
    return Recording(tuple(asked), tuple(map(jsonl.dump_json, turns)), opening=opening)


class RecordingStore:
    """Recordings by how they open."""

    def __init__(self) -> None:
        self._found: dict[bytes, list[Recording]] = defaultdict(list)
        self._prompt_lengths: dict[bytes, set[int]] = defaultdict(set)

    def add(self, recording: Recording) -> None:
        """Keep *recording*."""
        self._found[recording.digests[0]].append(recording)
        if recording.opening is not None:
            self._prompt_lengths[recording.opening.digest].add(recording.opening.length)

    def is_new(self, recording: Recording) -> bool:
        """Whether *recording* says what none of those kept does, and there are not too many that open like it."""
        alike = self.find_by_opening(recording.digests[0])
        return len(alike) < MAX_SIMILAR_RECORDINGS and all(
            (each.digests, each.turns) != (recording.digests, recording.turns) for each in alike
        )

    def find_by_opening(self, mark: bytes) -> Sequence[Recording]:
        """Give the recordings that open with what *mark* stands for."""
        return self._found.get(mark, ())

    def prompt_lengths(self, opening: Opening) -> list[int]:
        """Return the lengths of the shorter system prompts with which recordings open like *opening*, longest first."""
        lengths = self._prompt_lengths.get(opening.digest, ())
        return sorted((length for length in lengths if length < opening.length), reverse=True)[:MAX_SIMILAR_RECORDINGS]

    def find_next_turn(self, marks: Sequence[bytes]) -> tuple[Recording, int] | None:
        """Give the recording that a conversation with *marks* follows the furthest, and which of its turns comes next.

        Of those that it follows equally far, that is the first. A prompt may hold turns itself: the longest counts.
        """
        for index in reversed(range(len(marks))):
            if alike := self._found.get(marks[index]):
                said = set(marks[index:])
                found = max(alike, key=lambda each: len(said.intersection(each.digests)))
                after = found.find_turn(marks[-1])
                return found, len(marks) - 1 - index if after is None else after
        return None


class Conversation:
    """The conversation of a Responses *request*, which is looked up again as often as there are more recordings."""

    def __init__(self, request: Item) -> None:
        self._items = get_input_items(request)
        self._instructions = request.get("instructions")
        self._marks = compute_digests(self._items, self._instructions)
        self._openings: list[Opening] | None = None

    def find_digests(self, found: RecordingStore) -> list[bytes] | None:
        """Return the marks by which *found* has a recording of this conversation, `None` if it has none.

        A harness may put a system prompt of its own before the row's. Where no recording opens like the conversation,
        those count that open like it without the first part of its system prompt.
        """
        if found.find_next_turn(self._marks) is not None:
            return self._marks
        if self._openings is None:
            self._openings = compute_openings(self._items, self._instructions)
        for opening in reversed(self._openings):
            for length in found.prompt_lengths(opening):
                without = compute_digests(self._items, self._instructions, skip=opening.length - length)
                if found.find_next_turn(without) is not None:
                    return without
        return None


def read_recordings(path: Path) -> RecordingStore:
    """Give the recordings in a rollouts file; raises `BadRow` where it is none."""
    found = RecordingStore()
    where = str(path)
    try:
        for number, row in jsonl.read_rows(path):
            where = f"{path}:{number}"
            found.add(_of_line(row))
    except (LookupError, TypeError, AttributeError):
        raise BadRow(f"{where} is no line of a rollouts file") from None
    return found


def _of_line(row: Item) -> Recording:
    asked, output = row["responses_create_params"], row["response"]["output"]
    opening = get_input_items(asked)
    # A prompt may end with words of the assistant's own: where the policy's begin is known here.
    *_, first = compute_digests(opening, asked.get("instructions"))
    *_, opens = compute_openings(opening, asked.get("instructions"))
    later = compute_digests([*opening, *output], asked.get("instructions"))
    said = list(iter_turns(output))
    return build_recording([first, *later[-len(said) : -1]][: max(1, len(said))], said, opens)
