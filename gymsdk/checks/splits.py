"""Check that no row is in two splits, by the hashes of all rows of a data set, and of the first rows of a generator."""

from __future__ import annotations

import hashlib
import json
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, islice

from gymsdk import jsonl
from gymsdk.checks.phases import describe_task
from gymsdk.checks.report import Finding, NotApplicable
from gymsdk.checks.subject import TIME_SHARE, Subject, to_plain
from gymsdk.concurrency import ThreadPool
from gymsdk.errors import BadRow
from gymsdk.types import Row, Task, extract_text

FIRST_ROWS = 20_000
"""How many rows of each split are drawn to find out which splits are data sets, that is, end."""

MAX_ROWS = 200_000
"""How many rows of a split are compared with a data set."""

CPU_SECONDS = 12.0
"""The CPU time in which the rows of one split are drawn. Rows that were not drawn are not compared."""

COSTLY_CPU_SECONDS = 2.0
"""The same for a split whose rows cost more than `COSTLY_ROW_SECONDS` each: a generator, not a data set."""

COSTLY_ROW_SECONDS = 120e-6

WAIT_SECONDS = 60.0
"""The time in which all rows are drawn if the environment waits for something."""

MIN_COMPARED = 100
"""How many first rows of two splits must all differ, even if neither split ends."""

VARIED_SHARE = 0.9
"""The share of a split's prompts that must differ for prompts to identify tasks."""

OVERLAP_SHARE = 0.2
"""The share of the smaller split that another split must contain.

Rows of a generator, and prompts, may be equal by chance. Two data sets must have no row in common.
"""

EXAMPLE_SPLIT = "example"
"""The split that shows rows to people. Its rows may also be in another split."""


@dataclass(slots=True)
class SplitRows:
    """The rows of a split, as far as they were drawn.

    Attributes:
        split: The name of the split.
        source: Yields the remaining rows.
        count: The number of rows.
        rows: The hash of each row without numbering fields, with the number of the first such row.
        prompts: The hash of each prompt, with the number of its first row.
        has_ended: Whether these are all rows.
    """

    split: str
    source: Iterator[Task]
    count: int = 0
    rows: dict[bytes, int] = field(default_factory=dict)
    prompts: dict[bytes, int] = field(default_factory=dict)
    has_ended: bool = False

    def draw(self, most: int, deadline: float) -> None:
        """Draw rows until there are *most*, or until the time is over. A row that cannot be read ends the split."""
        began, before = time.thread_time(), self.count
        try:
            while self.count < most and time.monotonic() < deadline:
                cpu_seconds = time.thread_time() - began
                is_costly = cpu_seconds > COSTLY_ROW_SECONDS * (self.count - before)
                if cpu_seconds > (COSTLY_CPU_SECONDS if is_costly else CPU_SECONDS):
                    return
                task = next(self.source, None)
                if task is None:
                    self.has_ended = True
                    return
                self._add(task)
        except BadRow:
            # Another check reports it.
            self.has_ended = True

    def _add(self, task: Task) -> None:
        row = {key: value for key, value in task.row().items() if not is_numbering_field(key)}
        self.rows.setdefault(_hash(row), self.count)
        if task.input:
            self.prompts.setdefault(_hash(_normalize_prompt(task)), self.count)
        self.count += 1

    @property
    def has_varied_prompts(self) -> bool:
        """Whether nearly every row has a prompt of its own."""
        return len(self.prompts) > max(1, VARIED_SHARE * self.count)


INVISIBLE = dict.fromkeys(map(ord, "\u00ad\u200b\u200c\u200d\u2060\ufeff"))
"""Characters without width, which a copied text may have or lack."""


def is_numbering_field(key: str) -> bool:
    """Return whether the field *key* of a row only numbers the row."""
    return key in {"id", "uuid", "index", "split"} or key.endswith(("_id", "_uuid", "_index"))


def _normalize_prompt(task: Task) -> Row:
    """Return the prompt of *task* without invisible differences, unless it has other parts than text."""
    contents = [item.get("content") for item in task.input]
    if any(isinstance(content, list) and any("text" not in part for part in content) for content in contents):
        return task.responses_create_params
    return {"text": [_normalize_text(extract_text(content)) for content in contents]}


def _normalize_text(text: str) -> str:
    if not text.isascii():
        text = unicodedata.normalize("NFC", text.translate(INVISIBLE))
    return " ".join(text.split()).casefold()


def _hash(value: Row) -> bytes:
    try:
        text = jsonl.dump_canonical_json(value)
    except (TypeError, ValueError, RecursionError):
        text = json.dumps(to_plain(value), sort_keys=True).encode()
    # 16 bytes in place of a row: `MAX_ROWS` rows of each split are held at the same time.
    return hashlib.blake2b(text, digest_size=16).digest()


async def check_overlap(subject: Subject) -> list[Finding]:
    """Return which splits have rows or prompts in common."""
    names = [split for split in subject.environment.splits if split != EXAMPLE_SPLIT]
    if len(names) < 2:  # noqa: PLR2004  # it takes two to share
        raise NotApplicable("it has a single split; there is nothing to compare")
    seconds = min(WAIT_SECONDS, TIME_SHARE * subject.seconds_left)
    # In a thread without an event loop, each row costs no switch between threads.
    return await ThreadPool().run(partial(_list_overlaps, subject, names, seconds), timeout=seconds + WAIT_SECONDS)


def _list_overlaps(subject: Subject, names: list[str], seconds: float) -> list[Finding]:
    splits = _draw_splits(subject, names, time.monotonic() + seconds)
    found = (
        _find_overlap(first, other) if first.count < other.count else _find_overlap(other, first)
        for first, other in combinations(splits, 2)
    )
    return [
        Finding(problem=problem, task=_describe(subject, split, row)) for split, row, problem in filter(None, found)
    ]


def _draw_splits(subject: Subject, names: list[str], deadline: float) -> list[SplitRows]:
    splits = [SplitRows(name, subject.environment.tasks(name, seed=subject.seed)) for name in names]
    for split in splits:
        split.draw(FIRST_ROWS, deadline)
    if any(split.has_ended for split in splits):
        # Only a data set is compared with all rows of the others: two generators never end.
        for split in splits:
            if split.count == FIRST_ROWS and not split.has_ended:
                split.draw(MAX_ROWS, deadline)
    return splits


def _find_overlap(smaller: SplitRows, larger: SplitRows) -> tuple[str, int, str] | None:
    """Return the split, the number of a row of it that both have, and the problem; `None` without an overlap."""
    prompts = smaller.prompts if smaller.has_varied_prompts else {}
    for kind, own, others in (("rows", smaller.rows, larger.rows), ("prompts", prompts, larger.prompts)):
        shared = [number for key, number in own.items() if key in others]
        first = [number for key, number in own.items() if max(number, others.get(key, MIN_COMPARED)) < MIN_COMPARED]
        if _is_overlap(kind, smaller, larger, len(shared), len(first)):
            is_data = smaller.has_ended or larger.has_ended
            listed, count = (shared, smaller.count) if is_data else (first, min(smaller.count, MIN_COMPARED))
            start = "" if smaller.has_ended else "first "
            text = f"{len(listed)} of the {start}{count} {kind} of {smaller.split!r} are in {larger.split!r} too"
            return smaller.split, min(listed), text
    return None


def _is_overlap(kind: str, smaller: SplitRows, larger: SplitRows, shared: int, first: int) -> bool:
    if not (smaller.has_ended or larger.has_ended):
        # Two generators: equal rows far from the beginning may be chance.
        return first > (0 if kind == "rows" else OVERLAP_SHARE * min(smaller.count, MIN_COMPARED))
    if kind == "rows" and (first or (smaller.has_ended and larger.has_ended)):
        return shared > 0
    return shared > OVERLAP_SHARE * smaller.count


def _describe(subject: Subject, split: str, number: int) -> str:
    tasks = subject.environment.tasks(split, seed=subject.seed)
    return next((describe_task(task) for task in islice(tasks, number, None)), "")
