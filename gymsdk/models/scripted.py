"""Scripted policies: models that need no network, key, GPU or weights."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from gymsdk import jsonl, responses
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
from gymsdk.responses import build_usage, get_input_items, iter_turns, read_text
from gymsdk.types import Episode, Item, ToolCall, extract_text, is_policy_item

TOOL_CALL_PROBABILITY = 0.6
"""The probability that the random policy calls a tool if the request offers any."""

TYPE_DESCRIPTIONS = {
    "dict_type": "an object, or JSON text",
    "model_type": "an object",
    "string_type": "a string",
    "tuple_type": "a list",
}
"""The required type of a value in a script, by the type of pydantic's error."""

PolicyFunction = Callable[[Item, Episode | None], Awaitable[list[Item]]]
"""A policy: returns the output items for a request. The episode is `None` if another process plays it."""


class ScriptedModel:
    """A model that runs a policy function. Its usage counts each byte of UTF-8 as a token.

    Args:
        name: The name of the policy, without `scripted/`.
        choose: The policy.
    """

    def __init__(self, name: str, choose: PolicyFunction) -> None:
        self.name = f"scripted/{name}"
        self._choose = choose

    def __repr__(self) -> str:
        return self.name

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the Response with the output of the policy."""
        output = await self._choose(request, episode)
        usage = build_usage(_count_bytes(get_input_items(request)), _count_bytes(output))
        return responses.build_response(output, model=self.name, usage=usage, request=request)

    async def aclose(self) -> None:
        """Do nothing: a policy function holds no resources."""


def build(name: str, _options: object = None) -> ScriptedModel:
    """Return the policy *name*: `oracle`, `oracle:0.7`, `null`, `echo`, `random`, `script:FILE` or `replay:FILE`.

    Raises:
        UnknownModel: There is no such policy.
        BadModelOption: The share or the file is invalid.
    """
    kind, _, argument = name.partition(":")
    if kind == "oracle":
        return ScriptedModel(name, build_oracle(_parse_share(argument or "1")))
    if kind in {"replay", "script"} and argument:
        return ScriptedModel(name, (build_replay if kind == "replay" else build_script)(Path(argument)))
    functions = {"null": play_null, "echo": play_echo, "random": play_random}
    if kind in functions and not argument:
        return ScriptedModel(name, functions[kind])
    known = ["oracle", "oracle:SHARE", *functions, "script:FILE", "replay:FILE"]
    hint = format_suggestion(name, known, f"there are {', '.join(known)}")
    raise UnknownModel(f"no scripted policy named {name!r}{hint}")


def _parse_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    # Not `share < 0 or share > 1`, which is false for `nan`, too.
    if not 0 <= share <= 1:
        raise BadModelOption(f"scripted/oracle:{text}: the share of right episodes must be a number from 0 to 1")
    return share


async def play_null(_request: Item, _episode: Episode | None) -> list[Item]:
    """Answer with an empty message."""
    return [responses.build_message("", id="msg_0")]


async def play_echo(request: Item, _episode: Episode | None) -> list[Item]:
    """Repeat the last message of the user."""
    texts = [extract_text(item.get("content")) for item in get_input_items(request) if item.get("role") == "user"]
    return [responses.build_message(texts[-1] if texts else "", id="msg_0")]


async def play_random(request: Item, episode: Episode | None) -> list[Item]:
    """Call a random tool with random arguments, or answer with a word or a number; deterministic by seed and turn."""
    history = get_input_items(request)
    turn = sum(1 for _ in iter_turns(history[len(_get_opening(history)) :]))
    # Seeded by a text: the hash of a tuple would differ between processes.
    rng = random.Random(f"random:{_get_seed(request, episode)}:{turn}")
    tools = [tool for tool in request.get("tools") or [] if isinstance(tool.get("name"), str)]
    if tools and rng.random() < TOOL_CALL_PROBABILITY:
        tool = rng.choice(tools)
        arguments = _generate_value(tool.get("parameters") or {}, rng)
        return [responses.build_function_call(tool["name"], arguments, f"call_{turn}_0", id=f"fc_{turn}_0")]
    replies = ("yes", "no", "blue", "unknown", str(rng.randint(-9, 99)), str(rng.randint(0, 9999) / 100))
    return [responses.build_message(rng.choice(replies), id=f"msg_{turn}")]


def _get_seed(request: Item, episode: Episode | None) -> str:
    if episode is not None:
        return f"{episode.seed}:{episode.repeat}"
    return recordings.compute_digests(_get_opening(get_input_items(request)))[-1].hex()


def _generate_value(schema: object, rng: random.Random) -> Any:
    """Return a random value that roughly matches the JSON *schema*."""
    if not isinstance(schema, dict):
        return "blue"
    kind = schema.get("type")
    kind = rng.choice(kind) if isinstance(kind, list) and kind else kind
    # A client's schema may have values of any types.
    for keyword in ("enum", "anyOf"):
        if isinstance(choices := schema.get(keyword), list) and choices:
            chosen = rng.choice(choices)
            return chosen if keyword == "enum" else _generate_value(chosen, rng)
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties")
        return {
            key: _generate_value(member, rng)
            for key, member in (properties.items() if isinstance(properties, dict) else ())
        }
    if kind == "array":
        return [_generate_value(schema.get("items"), rng) for _ in range(rng.randint(0, 3))]
    scalars = {
        "integer": rng.randint(-9, 99),
        "number": rng.randint(0, 9999) / 100,
        "boolean": rng.choice((True, False)),
        "null": None,
    }
    return scalars.get(kind, rng.choice(("", "blue", "Paris", "2026-01-31"))) if isinstance(kind, str) else "blue"


def build_oracle(share: float) -> PolicyFunction:
    """Return a policy that plays the solution of the environment in a *share* of the episodes.

    In the other episodes, the policy gives a wrong answer.
    """

    async def choose(_request: Item, episode: Episode | None) -> list[Item]:
        if episode is None:
            raise Failed(
                "scripted/oracle needs an episode that is played in this process, got a request without one; in"
                " Gymnasium write Policy(model, env), over HTTP query `gymsdk policy serve oracle --env NAME`",
                kind="no_episode",
            )
        if random.Random(f"oracle:{episode.seed}:{episode.repeat}").random() >= share:
            return [responses.build_message("I do not know.", id="msg_0")]
        return await _solve(episode)

    return choose


async def _solve(episode: Episode) -> list[Item]:
    name = episode.environment.name
    solve = getattr(episode.environment, "solve", None)
    actions = await solve(episode) if solve else None
    if actions is None:
        raise Failed(
            f"environment {name!r} provides no solution for this turn: its `solve` is missing or returned None",
            kind="no_solution",
        )
    turn = sum(1 for _ in iter_turns(episode.transcript.items))
    return [
        responses.build_function_call(action.name, action.arguments, f"call_{turn}_{n}", id=f"fc_{turn}_{n}")
        if isinstance(action, ToolCall)
        else responses.build_message(action.text, id=f"msg_{turn}_{n}")
        for n, action in enumerate(actions)
    ]


def build_replay(path: Path) -> PolicyFunction:
    """Return a policy that plays the turns in a file of rollouts.

    The opening of an episode selects the recording; if several match, each repeat of the episode plays the next one.
    Without an episode, the recording that matches the request furthest is played.

    Raises:
        BadModelOption: The file cannot be read.
    """
    try:
        store = recordings.read_recordings(path)
    except BadRow as error:
        raise BadModelOption(f"scripted/replay: {error}") from None

    async def choose(request: Item, episode: Episode | None) -> list[Item]:
        recording, turn = _find_recorded_turn(store, request, episode) or (None, 0)
        if recording is None:
            raise Failed(f"{path} has no episode with the same opening", kind="not_recorded")
        if turn >= len(recording.turns):
            raise Failed(f"{path}: the recorded episode ends after {len(recording.turns)} turns", kind="not_recorded")
        return recording.get_turn(turn)

    return choose


def _find_recorded_turn(store: RecordingStore, request: Item, episode: Episode | None) -> tuple[Recording, int] | None:
    """Return the recording to play and the number of its turn that *request* asks for."""
    history, instructions = get_input_items(request), request.get("instructions")
    if episode is None:
        digests = recordings.Conversation(request).find_digests(store)
        return None if digests is None else store.find_next_turn(digests)
    opening = episode.transcript.opening
    *_, digest = recordings.compute_digests(opening, instructions)
    matching = store.find_by_opening(digest)
    turn = sum(1 for _ in iter_turns(history[len(opening) :]))
    return (matching[episode.repeat % len(matching)], turn) if matching else None


def build_script(path: Path) -> PolicyFunction:
    """Return a policy that plays the lines of a script.

    The policy plays the first line with a matching `when`. If none matches, turn n plays the n-th line without
    `when`, and later turns repeat the last of these lines.

    Raises:
        BadModelOption: The file cannot be read, or has no line without `when`.
    """
    try:
        lines = read_script(path)
    except BadRow as error:
        raise BadModelOption(f"scripted/script: {error}") from None
    unconditional = [line for line in lines if line.when is None]
    if not lines:
        raise BadModelOption(f'scripted/script: {path} is empty; write a line for each turn, as in {{"text": "42"}}')
    if not unconditional:
        raise BadModelOption(f"scripted/script: {path} has no line without `when`; add one for all other turns")

    async def choose(request: Item, episode: Episode | None) -> list[Item]:
        history = get_input_items(request)
        opening_length = len(episode.transcript.opening if episode else _get_opening(history))
        turn = sum(1 for _ in iter_turns(history[opening_length:]))
        last_text = read_text(history[-1].get("content") or history[-1].get("output")) if history else ""
        matching = (line for line in lines if line.when is not None and line.when in last_text)
        return next(matching, unconditional[min(turn, len(unconditional) - 1)]).build_items(turn)

    return choose


class ScriptedCall(BaseModel):
    """A tool call in a script, with its arguments as an object or as verbatim text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    arguments: dict[str, Any] | str = {}


class ScriptLine(BaseModel):
    """A turn of a script. A line with *when* is played if the last message or tool output contains the text *when*."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str = ""
    reasoning: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    when: str | None = None

    @model_validator(mode="after")
    def _check_output(self) -> Self:
        if not self.model_fields_set - {"when"}:
            raise ValueError('it has no output; write {"text": ""} for an empty answer')
        return self

    def build_items(self, turn: int) -> list[Item]:
        """Return the output items; their ids contain the number of the *turn*."""
        items = [responses.build_reasoning(self.reasoning, id=f"rs_{turn}")] if self.reasoning else []
        if self.text or not self.calls:
            items.append(responses.build_message(self.text, id=f"msg_{turn}"))
        return items + [
            responses.build_function_call(call.name, call.arguments, f"call_{turn}_{n}", id=f"fc_{turn}_{n}")
            for n, call in enumerate(self.calls)
        ]


def read_script(path: Path) -> list[ScriptLine]:
    """Read the lines of the script at *path*.

    Raises:
        BadRow: A line is invalid.
    """
    lines = []
    for number, row in jsonl.read_rows(path):
        try:
            lines.append(ScriptLine.model_validate(row))
        except ValidationError as error:
            message = f"{path}:{number}: {_format_error(error)}; a line has text, reasoning, calls, when"
            raise BadRow(message) from None
    return lines


def _format_error(error: ValidationError) -> str:
    """Return the first error of a line in the terms of a script."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location, kind = format_error_location(first), first["type"]
    if kind == "extra_forbidden":
        return f"unknown key {location!r}"
    if kind == "missing":
        return f"{location} is missing"
    if kind in TYPE_DESCRIPTIONS:
        # For a union of types, pydantic appends the name of a type to the location.
        return f"{location.removesuffix('.str').removesuffix('.dict[str,any]')} must be {TYPE_DESCRIPTIONS[kind]}"
    return f"{location}: {format_error_detail(first)}" if location else format_error_detail(first)


def _get_opening(history: list[Item]) -> list[Item]:
    """Return the items before the policy's first turn; an assistant message in the prompt has no id."""
    for index, item in enumerate(history):
        if is_policy_item(item) and "id" in item:
            return history[:index]
    return history


def _count_bytes(items: list[Item]) -> int:
    return sum(
        len(read_text(item.get("content") or item.get("output") or item.get("arguments")).encode("utf-8", "replace"))
        for item in items
    )
