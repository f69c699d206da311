"""An attack: what a policy says that understands nothing, and what it earned by that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

from gymsdk import turns, wire
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.models.scripted import Choose, null
from gymsdk.outcome import Rollout
from gymsdk.transcript import Item, text_of
from gymsdk.types import Claims, Episode, Task

AT_ONCE = 4
"""How many episodes a check plays at a time."""

T = TypeVar("T")

Turns: TypeAlias = list[list[Item]]
"""What a policy says, turn by turn; the last turn is said again for as long as it is asked."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a policy is shown of *task* when it opens; *other* is how the oracle plays another task."""

    task: Task
    claims: Claims
    opening: list[Item]
    tools: list[Item]
    other: Turns = field(default_factory=list)

    @property
    def prompt(self) -> str:
        """The whole prompt."""
        return "\n\n".join(text_of(item.get("content")) for item in self.opening)

    def last(self, *roles: str) -> str:
        """Give what one of *roles* said last."""
        said = [text_of(item.get("content")) for item in self.opening if item.get("role") in roles]
        return said[-1] if said else ""


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
    def paid(self) -> float:
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
    """Give the policy that says *script*, then its last turn again."""

    async def choose(_request: Item, episode: Episode | None) -> list[Item]:
        turn = sum(1 for _ in turns.turns(episode.transcript.items)) if episode else 0
        return script[turn] if turn < len(script) else _renamed(script[-1], turn)

    return choose


def _renamed(items: list[Item], turn: int) -> list[Item]:
    """Give *items* with call ids of the turn's own: a script says its last turn again and again."""
    return [item | {"call_id": f"{item['call_id']}_{turn}"} if item.get("call_id") else item for item in items]


def sample(tasks: Sequence[T], most: int) -> list[T]:
    """Give *most* of *tasks*, spread evenly over them."""
    count = min(most, len(tasks))
    return [tasks[number * len(tasks) // count] for number in range(count)]


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
    shown_first = await gathered(subject.told(environment, null, task) for task in tasks)
    solved = await gathered(subject.oracle(environment, task) for task in tasks)
    ways = [script(rollout) for rollout in solved]
    return [
        Seen(task, await environment.claims(task), first.opening, first.tools, _other(ways, number))
        for number, (task, first) in enumerate(zip(tasks, shown_first, strict=True))
        if first.opening
    ]


def script(rollout: Rollout) -> Turns:
    """Give what the policy of *rollout* said, turn by turn, nothing where it was not scored."""
    if rollout.outcome != "scored" or rollout.response is None:
        return []
    return list(turns.turns(rollout.response["output"]))


def _other(ways: list[Turns], number: int) -> Turns:
    own = _said(ways[number])
    after = [*ways[number + 1 :], *ways[:number]]
    return next((way for way in after if way and own and _said(way) != own), [])


def _said(way: Turns) -> list[str]:
    return [_words(item) for turn in way for item in turn]


async def attempted(
    subject: Subject, environment: Environment, attacks: Sequence[Attack], seen: Sequence[Seen]
) -> list[Attempt]:
    """Give every attempt of *attacks* on what was *seen*; what two attacks say alike is played once."""
    planned = [(attack, each, attack.script(each)) for attack in attacks for each in sample(seen, attack.tasks)]
    kept = list(_unlike((attack, each, said) for attack, each, said in planned if said))
    rollouts = await gathered(subject.told(environment, played(said), each.task) for _, each, said in kept)
    return [Attempt(*plan, rollout) for plan, rollout in zip(kept, rollouts, strict=True)]


def _unlike(planned: Iterable[tuple[Attack, Seen, Turns]]) -> Iterator[tuple[Attack, Seen, Turns]]:
    had: set[tuple[int, str]] = set()
    for attack, seen, said in planned:
        key = (id(seen), repr(said))
        if key not in had:
            had.add(key)
            yield attack, seen, said


def _words(item: Item) -> str:
    if item.get("type") == "function_call":
        return f"{item['name']}({item['arguments']})"
    return text_of(item.get("content"))


def shown(text: str, longest: int = 80) -> str:
    """Give the beginning of *text* as a person can read it."""
    cut = text if len(text) <= longest else f"{text[:longest]}…"
    return ascii(cut) if any(not sign.isprintable() and sign != "\n" for sign in cut) else repr(cut)


def named(task: Task) -> str:
    """Give *task* as a person would find it: its id, or how its prompt begins."""
    row = task.row()
    known = row.get("id", row.get("task_id"))
    begins = shown(text_of(task.input[-1].get("content")) if task.input else repr(row), 60)
    return begins if known is None else f"{known}: {begins}"
