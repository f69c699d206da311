"""An attack: what a policy says that understands nothing, and what it earned by that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

from gymsdk import wire
from gymsdk.checks.subject import Play, Subject
from gymsdk.checks.tasks import sample, shown
from gymsdk.environment import Environment
from gymsdk.models.scripted import Choose, null
from gymsdk.outcome import Rollout
from gymsdk.transcript import Item, text_of
from gymsdk.types import Claims, Episode, Task

AT_ONCE = 8
"""How many episodes a check plays at a time."""

T = TypeVar("T")

Turns: TypeAlias = list[list[Item]]
"""What a policy says, turn by turn; the last turn is said again for as long as it is asked."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a policy is shown of *task* when it opens; *own* is how the oracle plays it, *other* another task.

    *replies* are those of the oracle to all tasks that take one reply and no more.
    """

    task: Task
    claims: Claims
    opening: list[Item]
    tools: list[Item]
    other: Turns = field(default_factory=list)
    own: Turns = field(default_factory=list)
    replies: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """The whole prompt."""
        return "\n\n".join(text_of(item.get("content")) for item in self.opening)

    def last_message(self, *roles: str) -> str:
        """Give what one of *roles* said last."""
        said = [text_of(item.get("content")) for item in self.opening if item.get("role") in roles]
        return said[-1] if said else ""

    @property
    def reply(self) -> str:
        """What the oracle replies, where one reply is all it does, else nothing."""
        items = [item for turn in self.own for item in turn if item.get("type") != "reasoning"]
        only = len(self.own) == 1 and len(items) == 1 and items[0].get("role") == "assistant"
        return text_of(items[0].get("content")).strip() if only else ""


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to play without understanding; *name* ends the sentence "a policy that …".

    *script* gives nothing where there is nothing to attack; *tasks* is on how many it is tried.
    """

    name: str
    script: Callable[[Seen], Turns]
    mend: str = ""
    tasks: int = 12


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attack on one task: what was *said*, and the rollout that came of it."""

    attack: Attack
    seen: Seen
    said: Turns
    rollout: Rollout

    @property
    def earned(self) -> float:
        """What it earned; nothing where it was not scored."""
        return self.rollout.reward or 0.0

    @property
    def words(self) -> str:
        """The beginning of what was said."""
        return shown("; ".join(_words(item) for turn in self.said for item in turn))


def replies(name: str, reply: Callable[[Seen], str | None], *, mend: str = "", tasks: int = 12) -> Attack:
    """Give the attack that makes one reply, none where *reply* gives `None`."""

    def script(seen: Seen) -> Turns:
        text = reply(seen)
        return [] if text is None else [[wire.message(text, id="msg_0")]]

    return Attack(name, script, mend, tasks)


def says(name: str, text: str, *, mend: str = "", tasks: int = 12) -> Attack:
    """Give the attack that replies *text*."""
    return replies(name, lambda _: text, mend=mend, tasks=tasks)


def calls(*asked: tuple[str, str]) -> list[Item]:
    """Give one turn that calls tools: their names and their arguments as text."""
    return [wire.function_call(name, text, f"call_{n}", id=f"fc_{n}") for n, (name, text) in enumerate(asked)]


def played(script: Turns) -> Choose:
    """Give the policy that says *script* in one episode, then its last turn again."""
    asked = 0

    async def choose(_request: Item, _episode: Episode | None) -> list[Item]:
        nonlocal asked
        turn, asked = asked, asked + 1
        return script[turn] if turn < len(script) else _renamed(script[-1], turn)

    return choose


def _renamed(items: list[Item], turn: int) -> list[Item]:
    """Give *items* with call ids of the turn's own: a script says its last turn again and again."""
    return [item | {"call_id": f"{item['call_id']}_{turn}"} if item.get("call_id") else item for item in items]


async def gathered(jobs: Iterable[Awaitable[T]]) -> list[T]:
    """Give what all *jobs* give, `AT_ONCE` at a time."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def bounded(job: Awaitable[T]) -> T:
        async with gate:
            return await job

    async with asyncio.TaskGroup() as group:
        started = [group.create_task(bounded(job)) for job in jobs]
    return [each.result() for each in started]


async def looked_at(subject: Subject, environment: Environment, tasks: Sequence[Task]) -> list[Seen]:
    """Give what a policy sees of each of *tasks*, left out where it does not open."""
    shown_first = await gathered(subject.play_script(environment, null, task) for task in tasks)
    ways = [script(play) for play in await gathered(subject.play_oracle(environment, task) for task in tasks)]
    claims = [await environment.claims(task) for task in tasks]
    seen = [
        Seen(task, claimed, first.opening, first.tools, own=way)
        for task, claimed, first, way in zip(tasks, claims, shown_first, ways, strict=True)
    ]
    replied = tuple(dict.fromkeys(each.reply for each in seen if each.reply))
    return [
        replace(each, other=_other([*seen[number + 1 :], *seen[:number]], each), replies=replied)
        for number, each in enumerate(seen)
        if each.opening
    ]


def script(play: Play) -> Turns:
    """Give what was said in *play*, turn by turn, nothing where it was not scored."""
    return list(play.turns) if play.rollout.outcome == "scored" else []


def _other(others: Sequence[Seen], seen: Seen) -> Turns:
    """Give how another task is played; where nothing is left to chance, otherwise than this one."""
    mine = said(seen.own)
    ways = (each.own for each in others if each.prompt != seen.prompt)
    return next((way for way in ways if way and mine and (seen.claims.chance > 0 or said(way) != mine)), [])


def said(way: Turns) -> list[str]:
    """Give the words and calls of *way*."""
    return [_words(item) for turn in way for item in turn]


async def attempted(
    subject: Subject, environment: Environment, attacks: Sequence[Attack], seen: Sequence[Seen]
) -> list[Attempt]:
    """Give every attempt of *attacks* on what was *seen*; what two attacks say alike is played once."""
    most = await subject.count_affordable(environment, len(seen), each=len(attacks) / AT_ONCE)
    planned = [
        (attack, each, attack.script(each)) for attack in attacks for each in sample(seen, min(attack.tasks, most))
    ]
    kept = list(_unlike((attack, each, way) for attack, each, way in planned if way))
    rollouts = await gathered(
        subject.play_script(environment, played(way), each.task, turns=len(way)) for _, each, way in kept
    )
    return [Attempt(*plan, rollout) for plan, rollout in zip(kept, rollouts, strict=True)]


def _unlike(planned: Iterable[tuple[Attack, Seen, Turns]]) -> Iterator[tuple[Attack, Seen, Turns]]:
    had: set[tuple[int, str]] = set()
    for attack, seen, way in planned:
        key = (id(seen), repr(way))
        if key not in had:
            had.add(key)
            yield attack, seen, way


def _words(item: Item) -> str:
    if item.get("type") == "function_call":
        return f"{item['name']}({item['arguments']})"
    return text_of(item.get("content"))
