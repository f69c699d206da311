"""Find the ids that a policy read, and the turn that it generated, in a rendering of the whole conversation."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple

MAX_TURN_END = 8
"""The number of ids with which a template ends a turn, at most. If the template leaves out an empty turn, the turns
before and after it share them."""

MIN_PART = 3
"""The number of ids that are searched for, at least. A template that drops a message leaves a line break, say."""

MAX_PROMPT_END = 64
"""The number of ids by which the start of the policy's turn can be longer than in a short conversation."""

ID_BYTES = array("q").itemsize


class Gap(NamedTuple):
    """The ids of a rendering between two parts that the policy read, if these are not the ids of its turn.

    Attributes:
        written: The ids in the rendering.
        own: The ids that the policy generated, after the start of its turn.
        following: The ids after the gap.
    """

    written: Sequence[int]
    own: Sequence[int]
    following: Sequence[int]


class LastRead(NamedTuple):
    """The part of a rendering that the policy read before its last turn, without the start of that turn.

    Attributes:
        start: The index of its first id.
        end: The index after its last id; equal to *start* if the ids that the policy read are not known.
        repeated: The index at which its ids occur again, -1 if they do not.
        gaps: The gaps before it.
        own: The ids from its end to the last turn, with the start of that turn; `None` if some of them are not known.
    """

    start: int = 0
    end: int = 0
    repeated: int = -1
    gaps: Sequence[Gap] = ()
    own: Sequence[int] | None = None


def find_read(parts: Sequence[Sequence[int]], ids: list[int], prompts: list[list[int]]) -> LastRead | None:
    """Find the ids that the policy read, without the start of its turns, in order in a rendering.

    Args:
        parts: The ids before the policy's last turn, as for `TemplateBridge.compute_suffix`.
        ids: The rendering.
        prompts: The ids with which the template starts a turn of the policy.

    Returns:
        Where the last part is; `None` if the rendering does not contain a part, or does not begin with the first.
    """
    packed, gaps = array("q", ids).tobytes(), []
    position = end = 0
    # The ids since the last part that was found, and the parts among them.
    own: list[int] | None = []
    short: list[bytes] = []
    for number, part in enumerate(parts):
        size = 0 if number % 2 else find_prompt_start(part, prompts)
        packed_part = array("q", part[:size]).tobytes()
        if size < MIN_PART:
            own = [*own, *part] if part and own is not None else None
            short.append(packed_part)
            position = end
            continue
        position = _find_part(packed, packed_part, end, own, short, is_first=number == 0)
        if position < 0:
            return None
        if own is not None and packed[end:position] != array("q", own).tobytes():
            gaps.append(Gap(ids[end // ID_BYTES : position // ID_BYTES], own, part[:size]))
        # After ids that are not known, the same text may be that of another message.
        is_unique = own is not None or find_aligned(packed, packed_part, position + ID_BYTES) < 0
        end, own, short = position + len(packed_part), [*part[size:]] if is_unique else None, []
    repeated = find_aligned(packed, packed[position:end], position + ID_BYTES) if position < end else -1
    return LastRead(position // ID_BYTES, end // ID_BYTES, repeated // ID_BYTES, gaps, own)


def _find_part(
    packed: bytes, part: bytes, end: int, own: list[int] | None, short: list[bytes], *, is_first: bool
) -> int:
    """Return the position of *part* after *end*, at which the part before ends; -1 if it is not there."""
    if is_first:
        return 0 if packed.startswith(part) else -1
    # A turn that the template writes in other ids can be as long as other messages up to a copy of the part.
    if own is not None and packed.startswith(array("q", own).tobytes() + part, end):
        return end + len(own) * ID_BYTES
    if own is None or len(own) <= MAX_PROMPT_END:
        # If the template leaves out an empty turn, the parts before and after it share the end of a turn.
        shared = find_aligned(packed, part, max(end - MAX_TURN_END * ID_BYTES, end - len(part) + ID_BYTES, 0))
        if shared <= end:
            return shared
    # A short message can be the beginning of a copy of *part*, which is then not behind that message.
    start = end
    for short_part in short:
        found = find_aligned(packed, short_part, start)
        start = start if found < 0 else found + len(short_part)
    position = find_aligned(packed, part, start)
    return find_aligned(packed, part, end) if position < 0 else position


def is_own_turn(gap: Gap, marks: Collection[int]) -> bool:
    """Return whether a gap has only a turn of the policy, which a template may write in other ids.

    Templates leave out reasoning, and write calls in another form. They do not end the turn more often than the policy.

    Args:
        gap: The gap.
        marks: The ids that may end a turn.
    """
    own, written = (_close_turn(ids, gap.following, marks) for ids in (gap.own, gap.written))
    if not gap.written or not own or own[-1] not in marks:
        return True
    if written[-1] not in marks and own[-1] in written:
        return False
    ends = {own[-1], written[-1]}
    return sum(token in ends for token in written) <= sum(token in ends for token in own)


def _close_turn(ids: Sequence[int], following: Sequence[int], marks: Collection[int]) -> Sequence[int]:
    """Return *ids* up to the id that ends the turn, which the policy reads if its turn was cut off."""
    if ids and ids[-1] in marks:
        return ids
    end = next((index for index, token in enumerate(following) if token in marks), None)
    return ids if end is None else [*ids, *following[: end + 1]]


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
