"""The settings, and the generator: it runs the plan of each row in the row's world to find the expected end."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from inspect import signature
from itertools import count
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from gymsdk import Config, UsageError

from .requests import KINDS, draft, mixtures
from .requests.drafts import Draft, Kind, Scene
from .requests.worlds import world
from .rows import Expected, Plan, Request, fill_references
from .tools import TOOLS, Tool
from .world import Records, World, parse_day, subtract_records

MAX_CALLS = 5


def _split_list(given: object) -> object:
    """Split a list in the notation of the command line: `weather,exchange`."""
    return [each.strip() for each in given.split(",")] if isinstance(given, str) else given


class ToolCallConfig(Config):
    """Which requests to generate.

    Attributes:
        calls: The lowest and the highest number of calls that a request needs.
        kinds: The kinds of request to draw from. Empty: all kinds.
        distractors: The number of offered tools that a request does not need. `None`: offer all tools.
    """

    calls: Annotated[tuple[int, int], BeforeValidator(_split_list)] = (0, MAX_CALLS)
    kinds: Annotated[tuple[str, ...], BeforeValidator(_split_list)] = Field(default=(), validate_default=True)
    distractors: int | None = Field(default=None, ge=0)

    @field_validator("calls")
    @classmethod
    def _check_calls(cls, calls: tuple[int, int]) -> tuple[int, int]:
        if not mixtures(calls, ()):
            raise ValueError(f"no request needs {calls[0]} to {calls[1]} calls; give numbers from 0 to {MAX_CALLS}")
        return calls

    @field_validator("kinds")
    @classmethod
    def _check_kinds(cls, kinds: tuple[str, ...], others: ValidationInfo) -> tuple[str, ...]:
        if unknown := set(kinds) - KINDS.keys():
            raise ValueError(f"no kind of request is named {min(unknown)!r}; the kinds: {', '.join(sorted(KINDS))}")
        calls = others.data.get("calls")
        if calls and not mixtures(calls, kinds):
            raise ValueError(f"no request of these kinds needs {calls[0]} to {calls[1]} calls; widen `calls`")
        return kinds


Split: TypeAlias = Literal["train", "validation", "example"]

SIZES: dict[Split, int | None] = {"train": None, "validation": 300, "example": 10}

SHARES: dict[Split, range] = {"example": range(1), "validation": range(1, 5), "train": range(5, 16)}
"""The sixteenths of all requests that each split may draw from. No two splits share a request, for any seed."""

DRAWS = 400
"""How many requests of a kind the generator draws for a split before it tries another kind."""

KINDS_TRIED = 10

INSTRUCTIONS = (
    "You are a personal assistant. Today is {today:%A}, {today:%Y-%m-%d}. Use the tools for what only they can tell or"
    " do; do not guess, and change nothing you were not asked to change. Write dates as YYYY-MM-DD and times as HH:MM."
    " If the request asks a question, end your last reply with a line of its own: `Answer:`, then the bare value."
)


def requests(split: Split, seed: int, settings: ToolCallConfig) -> Iterator[Request]:
    """Yield the rows of *split*. The same seed and settings yield the same rows."""
    rng = random.Random(f"{split}:{seed}")
    size = SIZES[split]
    for number in count() if size is None else range(size):
        yield _draw_request(rng, split, settings, id=f"{split}-{seed}-{number}")


def _draw_request(rng: random.Random, split: Split, settings: ToolCallConfig, *, id: str) -> Request:
    found = mixtures(settings.calls, settings.kinds)
    for _ in range(KINDS_TRIED):
        kind, chore = rng.choice(found[rng.choice(sorted(found))])
        # A kind with few texts may have no text that belongs to the split.
        for _ in range(DRAWS):
            scene = Scene(rng, world(rng))
            written = draft(scene, kind, chore=chore)
            if zlib.crc32(written.text.encode()) % 16 in SHARES[split]:
                return _build_row(scene, kind, written, settings, id=id)
    raise UsageError(f"split {split!r} has no request of such kinds and calls; choose more kinds, or another split")


def _build_row(scene: Scene, kind: Kind, written: Draft, settings: ToolCallConfig, *, id: str) -> Request:
    opening = INSTRUCTIONS.format(today=parse_day(scene.world.today))
    messages = [{"role": "developer", "content": opening}, {"role": "user", "content": written.text}]
    return Request.model_validate(
        {
            "responses_create_params": {"input": messages},
            "id": id,
            "kind": kind.name,
            "world": scene.world,
            "expected": expected(scene.world, written.plan),
            "plan": written.plan,
            "offered": _choose_tools(scene.rng, written.plan, settings.distractors),
        }
    )


def _choose_tools(rng: random.Random, plan: Plan, distractors: int | None) -> list[str] | None:
    if distractors is None:
        return None
    needed = {call.name for call in plan.calls}
    others = [name for name in TOOLS if name not in needed]
    chosen = needed.union(rng.sample(others, min(distractors, len(others))))
    return [name for name in TOOLS if name in chosen]


def expected(world: World, plan: Plan) -> Expected:
    """Run *plan* in *world* and return the expected end.

    Args:
        world: The world of the row.
        plan: The solution of the row.

    Returns:
        The added and removed records, and the answer.

    Raises:
        ValueError: A call of the plan fails.
    """
    state = world.records.model_copy(deep=True)
    task = Request.ask("", world=world)
    outputs: dict[int, Any] = {}
    for number, call in enumerate(plan.calls):
        outputs[number] = _run_tool(TOOLS[call.name], task, state, fill_references(call.arguments, outputs))
        if "error" in outputs[number]:
            raise ValueError(f"the plan's call {number} of {call.name!r} fails: {outputs[number]['error']}")
    return Expected(
        added=subtract_records(state, world.records),
        removed=subtract_records(world.records, state),
        answer=fill_references(plan.answer, outputs),
        without_calls=not plan.calls,
    )


def _run_tool(tool: Tool, task: Request, state: Records, arguments: dict[str, Any]) -> Any:
    given = {"task": task, "state": state}
    asked = {name: given[name] for name in signature(tool).parameters if name in given}
    running = tool(**arguments, **asked)
    try:
        running.send(None)
    except StopIteration as finished:
        return finished.value
    raise RuntimeError(f"tool {tool.__name__!r} waits for something; a plan runs without an event loop")
