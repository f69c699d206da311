"""Secrets: what belongs to a task's right answer and is not in its prompt."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from gymsdk.checks.attack import Turns
from gymsdk.checks.clues import WORDS, behind_words, in_boxes
from gymsdk.transcript import text_of, tool_calls
from gymsdk.types import Task

SHORTEST = 3
"""Characters a secret has: shorter ones stand everywhere by chance."""

LONGEST = 200

SHARED = 0.34
"""The share of tasks that may have the same secret: what more of them have is a word of the trade."""

PEERS = 6
"""Entries of a list that are looked at on either side of one."""

ALTERNATIVES = 2
"""Other entries that make a list of one."""

_PEER = re.compile(r"""['"\[({]*[\w.-]+(?: [\w.-]+){0,2}['"\])}.]*""")
_NAMED = re.compile(WORDS, re.IGNORECASE)


def secrets(task: Task, way: Turns, prompt: str) -> set[str]:
    """Give what the oracle answers and hands to tools, and what the row's fields named like an answer hold."""
    texts = [text_of(item.get("content")) for turn in way[-1:] for item in turn]
    said = {found for text in texts for found in [*in_boxes(text), *behind_words(text), text.strip()]}
    for call in tool_calls(item for turn in way for item in turn):
        said.update(_held(call.parsed(), named=True))
    row = {key: value for key, value in task.row().items() if key != "responses_create_params"}
    held = said.union(_held(row, named=False))
    return {each for each in held if SHORTEST <= len(each) <= LONGEST and not stands_in(each, prompt)}


def _held(value: Any, *, named: bool) -> Iterator[str]:
    """Yield the plain values beneath fields that are named like an answer."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _held(each, named=named or bool(_NAMED.search(str(key))))
    elif isinstance(value, list):
        for each in value:
            yield from _held(each, named=named)
    elif named and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        yield str(value).strip()


def distinct(known: list[set[str]]) -> list[set[str]]:
    """Give the secrets of each task without those that many tasks share."""
    owners = Counter(secret for secrets in known for secret in secrets)
    return [{secret for secret in secrets if owners[secret] <= max(1, SHARED * len(known))} for secrets in known]


def one_of_many(secret: str, text: str, known: set[str]) -> bool:
    """Whether *secret* stands in a list in *text* beside others that are none of those *known*.

    Who is told every city there is, is not told which one to go to.
    """
    parts = [part.strip() for part in re.split(r",| or | and |;", text)]
    for number, part in enumerate(parts):
        if re.fullmatch(rf"(?:.*[^\w])?{re.escape(secret)}(?:[^\w].*)?", part, re.IGNORECASE | re.DOTALL):
            beside = [*parts[max(0, number - PEERS) : number], *parts[number + 1 : number + 1 + PEERS]]
            peers = [each for each in beside if _PEER.fullmatch(each) and not any(stands_in(k, each) for k in known)]
            if len(peers) >= ALTERNATIVES:
                return True
    return False


def stands_in(secret: str, text: str) -> bool:
    """Whether *secret* stands in *text* as whole words."""
    return re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text, re.IGNORECASE) is not None
