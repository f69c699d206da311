"""Leaks: the answer in what a policy can see, which are its prompt, its tools, and what it is told when it is wrong.

Two ways of looking, both made to be wrong seldom. Policies that answer with what a simple rule finds in the visible
text must not earn more than chance: a retrieval task has parts of its answer in the prompt, and still pays nothing
to them. That the answer stands in the prompt is no leak by itself, since tasks ask for what is to be read there. And
in what should not depend on the answer (schemas, replies to wrong calls and wrong answers) a task's own answer must
not stand markedly more often than it stands in the same place of other tasks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean

from gymsdk import wire
from gymsdk.checks.attack import (
    Attack,
    Attempt,
    Seen,
    attempted,
    gathered,
    looked_at,
    played,
    replies,
    says,
)
from gymsdk.checks.check import Check, Finding, NotApplicable
from gymsdk.checks.clues import RULES, Rule
from gymsdk.checks.luck import GRAIN, beyond
from gymsdk.checks.options import plain_value
from gymsdk.checks.panel import one_form
from gymsdk.checks.secrets import distinct, one_of_many, secrets, stands_in
from gymsdk.checks.subject import Subject
from gymsdk.checks.tasks import named, sample
from gymsdk.environment import Environment
from gymsdk.outcome import Rollout
from gymsdk.transcript import Item, text_of
from gymsdk.turns import of_policy

TASKS = 10
"""Tasks whose visible text is searched."""

SHARE = 0.25
"""The share of tasks whose own answer must stand in a place for that to be a leak, and two of them at least."""

TOOLS = 6
"""How many tools of a task are called wrongly."""

MOST = 4
"""Findings about policies that are told."""

CONTROLS = (says("says something", "xyzzy"), says("says something in form", one_form("xyzzy")))
"""What any words earn."""

MEND = "keep the answer in fields of the row or in the state; write prompts, schemas and errors without it"


async def _look(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        seen = await looked_at(subject, environment, sample(subject.tasks, TASKS))
        if not seen:
            raise NotApplicable("the environment has no task that could be opened; give it a `tasks` hook")
        told = await gathered(_told(subject, environment, each) for each in seen)
        attempts = await attempted(subject, environment, [*CONTROLS, *_attacks(seen, told)], seen)
    return [*_earned(attempts)[:MOST], *_placed(seen, told)]


def _earned(attempts: Sequence[Attempt]) -> list[Finding]:
    """Give what was earned by looking, not what any words earn: that is the affair of the floor."""
    by_attack: defaultdict[Attack, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_attack[attempt.attack].append(attempt)
    plain = max(fmean(attempt.earned for attempt in by_attack[control]) for control in CONTROLS)
    looked = [tried for attack, tried in by_attack.items() if attack not in CONTROLS]
    return [
        found
        for tried in looked
        if fmean(each.earned for each in tried) > max(plain, _least(tried))
        for found in beyond(tried)
    ]


def _least(tried: Sequence[Attempt]) -> float:
    """Give what a policy has to earn on average whose rule also finds what is there to be found."""
    share = next((rule.share for rule in RULES if rule.name == tried[0].attack.name), 0.0)
    return share * fmean(each.seen.claims.maximum for each in tried) - GRAIN


def _schemas(seen: Seen) -> str:
    return json.dumps(seen.tools, ensure_ascii=False, default=str)


async def _told(subject: Subject, environment: Environment, seen: Seen) -> list[Item]:
    """Give all that the environment says to calls and replies that are wrong."""
    names = [str(tool["name"]) for tool in seen.tools[:TOOLS]]
    empty = [(name, "{}") for name in ("no_such_tool", *names)]
    plain = [(str(tool["name"]), _plain(tool)) for tool in seen.tools[:TOOLS]]
    calls = [wire.function_call(name, text, f"call_{n}", id=f"fc_{n}") for n, (name, text) in enumerate(empty + plain)]
    ends = [[wire.message(text, id="msg_0")] for text in ("I do not know.", one_form("17"))]
    rollouts = await gathered(subject.play_script(environment, played(way), seen.task) for way in ([calls, ends[0]], ends))
    return [item for rollout in rollouts for item in _of_environment(rollout)]


def _plain(tool: Item) -> str:
    return json.dumps(plain_value((tool.get("parameters") or {}) | {"type": "object"}))


def _of_environment(rollout: Rollout) -> list[Item]:
    output = (rollout.response or {}).get("output") or []
    return [item for item in output if not of_policy(item)]


def _texts(items: Sequence[Item], *, calls: bool) -> str:
    chosen = [item for item in items if (item.get("type") == "function_call_output") == calls]
    return "\n".join(text_of(item.get("output") if calls else item.get("content")) for item in chosen)


def _attacks(seen: Sequence[Seen], told: Sequence[list[Item]]) -> list[Attack]:
    """Give the policies that answer with what a rule finds: the first and the last find, bare and in form."""
    shown = {
        id(each): [each.prompt, _schemas(each), _texts(said, calls=True), _texts(said, calls=False)]
        for each, said in zip(seen, told, strict=True)
    }
    return [_attack(rule, shown, place, form) for rule in RULES for place in (0, -1) for form in (str, one_form)]


def _attack(rule: Rule, shown: dict[int, list[str]], place: int, form: Callable[[str], str]) -> Attack:
    def reply(seen: Seen) -> str | None:
        if rule.is_asked_for(seen.prompt):
            return None
        found = [each for text in shown[id(seen)] for each in rule.find(text)]
        return form(found[place]) if found else None

    return replies(rule.name, reply, mend=MEND, tasks=rule.tasks)


def _placed(seen: Sequence[Seen], told: Sequence[list[Item]]) -> list[Finding]:
    """Give the places in which tasks' own answers stand."""
    own = distinct([secrets(each.task, each.own, each.prompt) for each in seen])
    places = {
        "the schema of a tool": [_schemas(each) for each in seen],
        "the answer to a wrong call": [_texts(said, calls=True) for said in told],
        "what is said to a wrong reply": [_texts(said, calls=False) for said in told],
    }
    return [found for name, texts in places.items() for found in _betrayed(seen, name, texts, own)]


def _betrayed(seen: Sequence[Seen], place: str, texts: list[str], own: list[set[str]]) -> list[Finding]:
    hits = [
        (each, secret)
        for number, (each, known) in enumerate(zip(seen, own, strict=True))
        for secret in sorted(known)
        if stands_in(secret, texts[number])
        and not _common(secret, texts, number)
        and not one_of_many(secret, texts[number], known)
    ]
    tasks = {id(each) for each, _ in hits}
    if len(tasks) < max(2, SHARE * len(seen)):
        return []
    first, secret = hits[0]
    told = f"{place} holds {secret!r}, which belongs to the right answer; so it is on {len(tasks)} of {len(seen)} tasks"
    return [Finding(seen=f"{told}, and hardly ever there on other tasks", task=named(first.task), mend=MEND)]


def _common(secret: str, texts: list[str], number: int) -> bool:
    """Whether *secret* stands in half of the other tasks' texts as well."""
    others = [text for other, text in enumerate(texts) if other != number]
    return sum(stands_in(secret, text) for text in others) * 2 >= max(1, len(others))


CHECKS = (
    Check(
        id="semantic.no_solution_leakage",
        asks="a simple look at what a policy can see does not find the answer",
        why="a policy learns to copy an answer that it is shown, and scores that say so look like skill",
        mend=MEND,
        run=_look,
    ),
)
