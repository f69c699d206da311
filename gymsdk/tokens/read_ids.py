"""Find what a policy read, and the turn that it generated, in a rendering of the whole conversation."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

MAX_TURN_END = 8
"""The number of ids with which a template ends a turn, at most. If the template leaves out an empty turn, the turns
before and after it share them."""

MAX_PROMPT_END = 64
"""The number of ids by which the start of the policy's turn can be longer than in a short conversation."""

ID_BYTES = array("q").itemsize


class LastRead(NamedTuple):
    """The part of a rendering that the policy read before its last turn, without the start of that turn.

    Attributes:
        start: The index of its first id.
        end: The index after its last id; equal to *start* if it is not known what the policy read.
        repeated: The index at which its ids occur again, -1 if they do not.
    """

    start: int = 0
    end: int = 0
    repeated: int = -1


def find_read(read: Sequence[Sequence[int]], ids: list[int], prompts: list[list[int]]) -> LastRead | None:
    """Find the parts of *read*, without the start of the policy's turn, in order in a rendering.

    Args:
        read: The ids that the policy read before its turns, as for `TemplateBridge.compute_suffix`.
        ids: The rendering.
        prompts: The ids with which the template starts a turn of the policy.

    Returns:
        Where the last part is; `None` if the rendering does not contain a part.
    """
    packed, position = array("q", ids).tobytes(), 0
    kept, found = b"", 0
    for part in read:
        kept = array("q", part[: find_prompt_start(part, prompts)]).tobytes()
        if kept:
            found = find_aligned(packed, kept, position)
            if found < 0:
                return None
            position = found + max(len(kept) - MAX_TURN_END * ID_BYTES, ID_BYTES)
    repeated = find_aligned(packed, kept, found + ID_BYTES) if kept else -1
    return LastRead(found // ID_BYTES, (found + len(kept)) // ID_BYTES, repeated // ID_BYTES)


def find_after_turn(part: Sequence[int], generated: Sequence[int], ids: list[int], last: LastRead) -> list[int] | None:
    """Return the ids that follow the policy's last turn in a rendering that goes on after it.

    Args:
        part: The ids that the policy read before the turn, with the start of the turn.
        generated: The ids of the turn.
        ids: The rendering, with at least one message after the turn.
        last: Where *part* is in it.

    Returns:
        The ids; `None` if the rendering does not contain *part* and *generated*, one directly after the other, or if it
        does not show that they are the last turn.
    """
    # What the policy reads next may be the same again, such as the same output of a tool. It ends the rendering.
    is_last = last.end > last.start and (last.repeated < 0 or ids[last.repeated :] == [*part])
    end = last.start + len(part) + len(generated)
    return ids[end:] if is_last and ids[last.start : end] == [*part, *generated] else None


def find_prompt_start(part: Sequence[int], prompts: list[list[int]]) -> int:
    """Return the index in *part*, which the policy read before its turn, at which the start of its turn begins.

    The start can differ from those in *prompts* in its end, such as in an opening `<think>`.
    """
    longest = max(prompts, key=len, default=[])
    if longest and part[-len(longest) :] == longest:
        return len(part) - len(longest)
    best, start = 0, len(part)
    for prompt in filter(None, prompts):
        for index in range(max(len(part) - len(prompt) - MAX_PROMPT_END, 0), len(part)):
            if part[index] == prompt[0]:
                size = count_common_beginning(part[index:], prompt)
                best, start = (size, index) if size >= best else (best, start)
    return start


def find_aligned(packed: bytes, part: bytes, start: int) -> int:
    """Return the position of *part* in *packed* from *start* on, both arrays of 8-byte ids; -1 if there is none."""
    position = packed.find(part, start)
    while position >= 0 and position % ID_BYTES:
        position = packed.find(part, position + 1)
    return position


def count_common_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
