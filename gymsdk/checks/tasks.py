"""Tasks as the checks speak of them: a sample spread over all there are, and words to find one by."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import TypeVar

from gymsdk.checks.plain import plain
from gymsdk.environment import Environment
from gymsdk.errors import BadRow
from gymsdk.transcript import text_of
from gymsdk.types import Task

T = TypeVar("T")


def sample(tasks: Sequence[T], most: int) -> list[T]:
    """Give *most* of *tasks*, spread evenly over them."""
    count = min(most, len(tasks))
    return [tasks[number * len(tasks) // count] for number in range(count)]


def first(environment: Environment, split: str, seed: int, count: int) -> list[Task]:
    """Give the first *count* tasks of *split*, fewer where a row cannot be read: what is wrong with it is told once."""
    found: list[Task] = []
    try:
        found.extend(islice(environment.tasks(split, seed=seed), count))
    except BadRow:
        # `extend` keeps what came before.
        return found
    return found


def named(task: Task) -> str:
    """Give *task* as a person would find it: its id, and how its prompt begins, or its fields where it has none."""
    fields = {key: value for key, value in task if key != "responses_create_params"}
    known = fields.get("id", fields.get("task_id"))
    # A row that an environment has emptied has a name, too.
    items = task.input if "input" in task.responses_create_params else []
    prompt = " ".join(text_of(item.get("content")) for item in items if _is_content(item.get("content")))
    begins = shown(" ".join(prompt.split()), 60) if prompt.strip() else shown(repr(plain(fields)), 60)
    return begins if known is None else f"{plain(known)}: {begins}"


def _is_content(content: object) -> bool:
    return isinstance(content, str) or (isinstance(content, list) and all(isinstance(part, dict) for part in content))


def shown(text: str, longest: int = 80) -> str:
    """Give the beginning of *text* as a person can read it."""
    cut = text if len(text) <= longest else f"{text[:longest]}…"
    return ascii(cut) if any(not sign.isprintable() and sign != "\n" for sign in cut) else repr(cut)
