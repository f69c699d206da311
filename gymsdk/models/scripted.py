"""Scripted policies: the models that need no network, key, GPU or weights."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from gymsdk import jsonl, responses
from gymsdk.convert.content import read_text
from gymsdk.errors import (
    BadModelOption,
    BadRow,
    Failed,
    UnknownModel,
    format_error_detail,
    format_error_location,
    format_suggestion,
)
from gymsdk.models import recordings
from gymsdk.models.recordings import Recording, RecordingStore
from gymsdk.responses import is_policy_item, iter_turns
from gymsdk.types import Episode, Item, ToolCall, extract_text

TYPE_DESCRIPTIONS = {
    "dict_type": "an object, or its text",
    "model_type": "an object",
    "string_type": "a text",
    "tuple_type": "a list",
}
"""What pydantic calls a value of the wrong shape, and what it must be in a script."""


class ScriptedCall(BaseModel):
    """A call in a script, its arguments an object, or verbatim text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arguments: dict[str, Any] | str = {}


class ScriptLine(BaseModel):
    """A turn of a script; *when* that is in what the policy was told last, this line goes before the others."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = ""
    reasoning: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    when: str | None = None

    @model_validator(mode="after")
    def _says(self) -> Self:
        if not self.model_fields_set - {"when"}:
            raise ValueError('it says nothing; write {"text": ""} for an empty answer')
        return self

    def build_items(self, turn: int) -> list[Item]:
        """Give the output items, with the ids that are those of the *turn*."""
        found = [responses.build_reasoning(self.reasoning, id=f"rs_{turn}")] if self.reasoning else []
        if self.text or not self.calls:
            found.append(responses.build_message(self.text, id=f"msg_{turn}"))
        return found + [
            responses.build_function_call(call.name, call.arguments, f"call_{turn}_{n}", id=f"fc_{turn}_{n}")
            for n, call in enumerate(self.calls)
        ]


def read_script(path: Path) -> list[ScriptLine]:
    """Give the lines of the script at *path*; raises `BadRow` at one that is none."""
    found = []
    for number, row in jsonl.read_rows(path):
        try:
            found.append(ScriptLine.model_validate(row))
        except ValidationError as error:
            told = f"{path}:{number}: {_complaint(error)}; a line has text, reasoning, calls, when"
            raise BadRow(told) from None
    return found


def _complaint(error: ValidationError) -> str:
    """What is wrong first with a line, in the words of who writes one."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where, kind = format_error_location(first), first["type"]
    if kind == "extra_forbidden":
        return f"nothing is called {where!r} there"
    if kind == "missing":
        return f"{where} is missing"
    if kind in TYPE_DESCRIPTIONS:
        # Of a choice of types, the last of the place is pydantic's name for one.
        return f"{where.removesuffix('.str').removesuffix('.dict[str,any]')} must be {TYPE_DESCRIPTIONS[kind]}"
    return f"{where}: {format_error_detail(first)}" if where else format_error_detail(first)


TOOL_CALL_PROBABILITY = 0.6
"""How often the random policy calls a tool where there is one."""

PolicyFunction = Callable[[Item, Episode | None], Awaitable[list[Item]]]
"""A policy: the output items it answers a request with."""


class ScriptedModel:
    """A model whose answers *choose* scripts; its tokens are counted as bytes of UTF-8."""

    def __init__(self, name: str, choose: PolicyFunction) -> None:
        self.name = f"scripted/{name}"
        self._choose = choose

    def __repr__(self) -> str:
        return self.name

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Answer *request* as the script says."""
        output = await self._choose(request, episode)
        used = responses.build_usage(_size(recordings.get_input_items(request)), _size(output))
        return responses.build_response(output, model=self.name, usage=used, request=request)

    async def aclose(self) -> None:
        """Release nothing: a script holds nothing."""


def build(name: str, _options: object = None) -> ScriptedModel:
    """Give the policy *name*: `oracle`, `oracle:0.7`, `null`, `echo`, `random`, `script:FILE` or `replay:FILE`."""
    kind, _, argument = name.partition(":")
    if kind == "oracle":
        return ScriptedModel(name, build_oracle(_share(argument or "1")))
    if kind in {"replay", "script"} and argument:
        return ScriptedModel(name, (build_replay if kind == "replay" else build_script)(Path(argument)))
    plain = {"null": play_null, "echo": play_echo, "random": play_random}
    if kind in plain and not argument:
        return ScriptedModel(name, plain[kind])
    known = ["oracle", "oracle:SHARE", *plain, "script:FILE", "replay:FILE"]
    near = format_suggestion(name, known, f"there are {', '.join(known)}")
    raise UnknownModel(f"no scripted policy named {name!r}{near}")


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise BadModelOption(f"scripted/oracle:{text}: the share of right episodes is a number from 0 to 1")
    return share


async def play_null(_request: Item, _episode: Episode | None) -> list[Item]:
    """Say nothing."""
    return [responses.build_message("", id="msg_0")]


async def play_echo(request: Item, _episode: Episode | None) -> list[Item]:
    """Say what the user said last."""
    said = [
        extract_text(item.get("content")) for item in recordings.get_input_items(request) if item.get("role") == "user"
    ]
    return [responses.build_message(said[-1] if said else "", id="msg_0")]


async def play_random(request: Item, episode: Episode | None) -> list[Item]:
    """Call a random tool with random arguments, or say a word or a number; deterministic by seed and turn."""
    turn = _turn(recordings.get_input_items(request))
    rng = random.Random(f"random:{_seed(request, episode)}:{turn}")
    tools = request.get("tools") or []
    if tools and rng.random() < TOOL_CALL_PROBABILITY:
        tool = rng.choice(tools)
        arguments = _arbitrary(tool.get("parameters") or {}, rng)
        return [responses.build_function_call(tool["name"], arguments, f"call_{turn}_0", id=f"fc_{turn}_0")]
    words = ("yes", "no", "blue", "unknown", str(rng.randint(-9, 99)), str(rng.randint(0, 9999) / 100))
    return [responses.build_message(rng.choice(words), id=f"msg_{turn}")]


def _seed(request: Item, episode: Episode | None) -> str:
    if episode is not None:
        return f"{episode.seed}:{episode.repeat}"
    return recordings.compute_digests(_opening(recordings.get_input_items(request)))[-1].hex()


def _arbitrary(schema: object, rng: random.Random) -> Any:
    """Give some value of about the shape *schema* describes."""
    if not isinstance(schema, dict):
        return "blue"
    kind = schema.get("type")
    kind = rng.choice(kind) if isinstance(kind, list) and kind else kind
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    if schema.get("anyOf"):
        return _arbitrary(rng.choice(schema["anyOf"]), rng)
    if kind == "object" or "properties" in schema:
        return {key: _arbitrary(each, rng) for key, each in (schema.get("properties") or {}).items()}
    if kind == "array":
        return [_arbitrary(schema.get("items"), rng) for _ in range(rng.randint(0, 3))]
    plain = {
        "integer": rng.randint(-9, 99),
        "number": rng.randint(0, 9999) / 100,
        "boolean": rng.choice((True, False)),
        "null": None,
    }
    return plain.get(kind, rng.choice(("", "blue", "Paris", "2026-01-31"))) if isinstance(kind, str) else "blue"


def build_oracle(share: float) -> PolicyFunction:
    """Play what the environment's `solve` says, in *share* of the episodes; in the others, do not know."""

    async def choose(_request: Item, episode: Episode | None) -> list[Item]:
        if episode is None:
            raise Failed(
                "the oracle plays an episode in this process, and a request is none: in Gymnasium write"
                " Policy(model, env), over HTTP ask `gymsdk policy serve oracle --env NAME`",
                kind="no_episode",
            )
        if random.Random(f"oracle:{episode.seed}:{episode.repeat}").random() >= share:
            return [responses.build_message("I do not know.", id="msg_0")]
        return await _solution(episode)

    return choose


async def _solution(episode: Episode) -> list[Item]:
    name = episode.environment.name
    solve = getattr(episode.environment, "solve", None)
    actions = await solve(episode) if solve else None
    if actions is None:
        raise Failed(
            f"environment {name!r} does not say what to do here: its `solve` is missing or answered None",
            kind="no_solution",
        )
    turn = sum(1 for _ in iter_turns(episode.transcript.items))
    return [
        responses.build_function_call(act.name, act.arguments, f"call_{turn}_{n}", id=f"fc_{turn}_{n}")
        if isinstance(act, ToolCall)
        else responses.build_message(act.text, id=f"msg_{turn}_{n}")
        for n, act in enumerate(actions)
    ]


def build_replay(path: Path) -> PolicyFunction:
    """Play the turns recorded in a rollouts file, found by how an episode opens; repeats take turns.

    Without an episode, the one of those that open alike is played which what was said follows the furthest.
    """
    try:
        recorded = recordings.read_recordings(path)
    except BadRow as error:
        raise BadModelOption(f"scripted/replay: {error}") from None

    async def choose(request: Item, episode: Episode | None) -> list[Item]:
        played, turn = _played(recorded, request, episode) or (None, 0)
        if played is None:
            raise Failed(f"{path} holds no episode that opens like this one", kind="not_recorded")
        if turn >= len(played.turns):
            raise Failed(f"{path}: the recorded episode ends after {len(played.turns)} turns", kind="not_recorded")
        return played.get_turn(turn)

    return choose


def _played(recorded: RecordingStore, request: Item, episode: Episode | None) -> tuple[Recording, int] | None:
    """Give the episode to play again, and the number of the turn that *request* asks for."""
    history, instructions = recordings.get_input_items(request), request.get("instructions")
    if episode is None:
        marks = recordings.Conversation(request).find_digests(recorded)
        return None if marks is None else recorded.find_next_turn(marks)
    opening = episode.transcript.opening
    *_, mark = recordings.compute_digests(opening, instructions)
    plays = recorded.find_by_opening(mark)
    turn = sum(1 for _ in iter_turns(history[len(opening) :]))
    return (plays[episode.repeat % len(plays)], turn) if plays else None


def build_script(path: Path) -> PolicyFunction:
    """Say the lines of a file: the first whose `when` fits, else in the n-th turn the n-th of those without one.

    After the last of these the last is said again.
    """
    try:
        lines = read_script(path)
    except BadRow as error:
        raise BadModelOption(f"scripted/script: {error}") from None
    plain = [line for line in lines if line.when is None]
    if not lines:
        raise BadModelOption(f'scripted/script: {path} is empty; write a line for each turn, as in {{"text": "42"}}')
    if not plain:
        raise BadModelOption(f"scripted/script: {path} has no line without `when`; add one for all other turns")

    async def choose(request: Item, episode: Episode | None) -> list[Item]:
        history = recordings.get_input_items(request)
        turn = sum(1 for _ in iter_turns(history[len(episode.transcript.opening if episode else _opening(history)) :]))
        told = read_text(history[-1].get("content") or history[-1].get("output")) if history else ""
        fitting = (line for line in lines if line.when is not None and line.when in told)
        return next(fitting, plain[min(turn, len(plain) - 1)]).build_items(turn)

    return choose


def _opening(history: list[Item]) -> list[Item]:
    """Give what came before the policy's first turn; an assistant message of the prompt itself is not one."""
    for index, item in enumerate(history):
        if is_policy_item(item) and "id" in item:
            return history[:index]
    return history


def _turn(history: list[Item]) -> int:
    return sum(1 for _ in iter_turns(history[len(_opening(history)) :]))


def _size(items: list[Item]) -> int:
    return sum(
        len(read_text(item.get("content") or item.get("output") or item.get("arguments")).encode("utf-8", "replace"))
        for item in items
    )
