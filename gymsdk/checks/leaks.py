"""Leaks: the answer in what a policy can see, which are its prompt, its tools, and what it is told when it is wrong.

Two ways of looking, both made to be wrong seldom. Policies that answer with what a simple rule finds in the visible
text must not earn more than chance: a retrieval task has parts of its answer in the prompt, and still pays nothing
to them. That the answer stands in the prompt is no leak by itself, since tasks ask for what is to be read there. And
in what should not depend on the answer (schemas, replies to wrong calls and wrong answers) a task's own answer must
not stand markedly more often than it stands in the same place of other tasks.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from gymsdk import responses
from gymsdk.checks.attack import (
    TOLERANCE,
    Attack,
    Attempt,
    TaskView,
    Turns,
    build_policy,
    build_reply_attack,
    build_text_attack,
    find_gain_beyond_chance,
    format_answer,
    gather_bounded,
    open_tasks,
    run_attacks,
)
from gymsdk.checks.clues import ANSWER_WORDS, RULES, Rule, build_plain_value, find_after_words, find_in_boxes
from gymsdk.checks.performance import describe_task, sample_tasks
from gymsdk.checks.report import Check, Finding, NotApplicable
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.responses import is_policy_item
from gymsdk.types import Item, Rollout, Task, extract_text, iter_tool_calls

MIN_SECRET_CHARS = 3
"""Characters a secret has: shorter ones stand everywhere by chance."""

MAX_SECRET_CHARS = 200

SHARED_SHARE = 0.34
"""The share of tasks that may have the same secret: what more of them have is a word of the trade."""

MAX_PEERS = 6
"""Entries of a list that are looked at on either side of one."""

MIN_ALTERNATIVES = 2
"""Other entries that make a list of one."""

_PEER = re.compile(r"""['"\[({]*[\w.-]+(?: [\w.-]+){0,2}['"\])}.]*""")
_ANSWER_FIELD = re.compile(ANSWER_WORDS, re.IGNORECASE)


def list_secrets(task: Task, way: Turns, prompt: str) -> set[str]:
    """Give what the oracle answers and hands to tools, and what the row's fields named like an answer hold."""
    texts = [extract_text(item.get("content")) for turn in way[-1:] for item in turn]
    said = {found for text in texts for found in [*find_in_boxes(text), *find_after_words(text), text.strip()]}
    for call in iter_tool_calls(item for turn in way for item in turn):
        said.update(_iter_named_values(call.parsed(), named=True))
    row = {key: value for key, value in task.row().items() if key != "responses_create_params"}
    held = said.union(_iter_named_values(row, named=False))
    return {
        each for each in held if MIN_SECRET_CHARS <= len(each) <= MAX_SECRET_CHARS and not contains_words(each, prompt)
    }


def _iter_named_values(value: Any, *, named: bool) -> Iterator[str]:
    """Yield the plain values beneath fields that are named like an answer."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _iter_named_values(each, named=named or bool(_ANSWER_FIELD.search(str(key))))
    elif isinstance(value, list):
        for each in value:
            yield from _iter_named_values(each, named=named)
    elif named and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        yield str(value).strip()


def drop_shared_secrets(known: list[set[str]]) -> list[set[str]]:
    """Give the secrets of each task without those that many tasks share."""
    owners = Counter(secret for secrets in known for secret in secrets)
    return [{secret for secret in secrets if owners[secret] <= max(1, SHARED_SHARE * len(known))} for secrets in known]


def is_one_of_many(secret: str, text: str, known: set[str]) -> bool:
    """Whether *secret* stands in a list in *text* beside others that are none of those *known*.

    Who is told every city there is, is not told which one to go to.
    """
    parts = [part.strip() for part in re.split(r",| or | and |;", text)]
    for number, part in enumerate(parts):
        if re.fullmatch(rf"(?:.*[^\w])?{re.escape(secret)}(?:[^\w].*)?", part, re.IGNORECASE | re.DOTALL):
            beside = [*parts[max(0, number - MAX_PEERS) : number], *parts[number + 1 : number + 1 + MAX_PEERS]]
            peers = [
                each for each in beside if _PEER.fullmatch(each) and not any(contains_words(k, each) for k in known)
            ]
            if len(peers) >= MIN_ALTERNATIVES:
                return True
    return False


def contains_words(secret: str, text: str) -> bool:
    """Whether *secret* stands in *text* as whole words."""
    return re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text, re.IGNORECASE) is not None


MAX_TASKS = 10
"""Tasks whose visible text is searched."""

MIN_SHARE = 0.25
"""The share of tasks whose own answer must stand in a place for that to be a leak, and two of them at least."""

MAX_TOOLS = 6
"""How many tools of a task are called wrongly."""

MAX_FINDINGS = 4
"""Findings about policies that are told."""

CONTROL_ATTACKS = (
    build_text_attack("says something", "xyzzy"),
    build_text_attack("says something in form", format_answer("xyzzy")),
)
"""What any words earn."""

FIX_LEAK = "keep the answer in fields of the row or in the state; write prompts, schemas and errors without it"


async def _check_leaks(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        seen = await open_tasks(subject, environment, sample_tasks(subject.tasks, MAX_TASKS))
        if not seen:
            raise NotApplicable("the environment has no task that could be opened; give it a `tasks` hook")
        told = await gather_bounded(_collect_responses(subject, environment, each) for each in seen)
        attempts = await run_attacks(subject, environment, [*CONTROL_ATTACKS, *_build_attacks(seen, told)], seen)
    return [*_find_earned(attempts)[:MAX_FINDINGS], *_find_betrayals(seen, told)]


def _find_earned(attempts: Sequence[Attempt]) -> list[Finding]:
    """Give what was earned by looking, not what any words earn: that is the affair of the floor."""
    by_attack: defaultdict[Attack, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_attack[attempt.attack].append(attempt)
    plain = max(fmean(attempt.earned for attempt in by_attack[control]) for control in CONTROL_ATTACKS)
    looked = [tried for attack, tried in by_attack.items() if attack not in CONTROL_ATTACKS]
    return [
        found
        for tried in looked
        if fmean(each.earned for each in tried) > max(plain, _compute_threshold(tried))
        for found in find_gain_beyond_chance(tried)
    ]


def _compute_threshold(tried: Sequence[Attempt]) -> float:
    """Give what a policy has to earn on average whose rule also finds what is there to be found."""
    share = next((rule.share for rule in RULES if rule.name == tried[0].attack.name), 0.0)
    return share * fmean(each.seen.claims.maximum for each in tried) - TOLERANCE


def _list_schemas(seen: TaskView) -> str:
    return json.dumps(seen.tools, ensure_ascii=False, default=str)


async def _collect_responses(subject: Subject, environment: Environment, seen: TaskView) -> list[Item]:
    """Give all that the environment says to calls and replies that are wrong."""
    names = [str(tool["name"]) for tool in seen.tools[:MAX_TOOLS]]
    empty = [(name, "{}") for name in ("no_such_tool", *names)]
    plain = [(str(tool["name"]), _build_plain_call(tool)) for tool in seen.tools[:MAX_TOOLS]]
    calls = [
        responses.build_function_call(name, text, f"call_{n}", id=f"fc_{n}")
        for n, (name, text) in enumerate(empty + plain)
    ]
    ends = [[responses.build_message(text, id="msg_0")] for text in ("I do not know.", format_answer("17"))]
    rollouts = await gather_bounded(
        subject.play_script(environment, build_policy(way), seen.task) for way in ([calls, ends[0]], ends)
    )
    return [item for rollout in rollouts for item in _list_environment_items(rollout)]


def _build_plain_call(tool: Item) -> str:
    return json.dumps(build_plain_value((tool.get("parameters") or {}) | {"type": "object"}))


def _list_environment_items(rollout: Rollout) -> list[Item]:
    output = (rollout.response or {}).get("output") or []
    return [item for item in output if not is_policy_item(item)]


def _extract_texts(items: Sequence[Item], *, calls: bool) -> str:
    chosen = [item for item in items if (item.get("type") == "function_call_output") == calls]
    return "\n".join(extract_text(item.get("output") if calls else item.get("content")) for item in chosen)


def _build_attacks(seen: Sequence[TaskView], told: Sequence[list[Item]]) -> list[Attack]:
    """Give the policies that answer with what a rule finds: the first and the last find, bare and in form."""
    shown = {
        id(each): [
            each.prompt,
            _list_schemas(each),
            _extract_texts(said, calls=True),
            _extract_texts(said, calls=False),
        ]
        for each, said in zip(seen, told, strict=True)
    }
    return [
        _build_rule_attack(rule, shown, place, form)
        for rule in RULES
        for place in (0, -1)
        for form in (str, format_answer)
    ]


def _build_rule_attack(rule: Rule, shown: dict[int, list[str]], place: int, form: Callable[[str], str]) -> Attack:
    def reply(seen: TaskView) -> str | None:
        if rule.is_asked_for(seen.prompt):
            return None
        found = [each for text in shown[id(seen)] for each in rule.find(text)]
        return form(found[place]) if found else None

    return build_reply_attack(rule.name, reply, mend=FIX_LEAK, tasks=rule.tasks)


def _find_betrayals(seen: Sequence[TaskView], told: Sequence[list[Item]]) -> list[Finding]:
    """Give the places in which tasks' own answers stand."""
    own = drop_shared_secrets([list_secrets(each.task, each.own, each.prompt) for each in seen])
    places = {
        "the schema of a tool": [_list_schemas(each) for each in seen],
        "the answer to a wrong call": [_extract_texts(said, calls=True) for said in told],
        "what is said to a wrong reply": [_extract_texts(said, calls=False) for said in told],
    }
    return [found for name, texts in places.items() for found in _find_betrayal(seen, name, texts, own)]


def _find_betrayal(seen: Sequence[TaskView], place: str, texts: list[str], own: list[set[str]]) -> list[Finding]:
    hits = [
        (each, secret)
        for number, (each, known) in enumerate(zip(seen, own, strict=True))
        for secret in sorted(known)
        if contains_words(secret, texts[number])
        and not _is_common(secret, texts, number)
        and not is_one_of_many(secret, texts[number], known)
    ]
    tasks = {id(each) for each, _ in hits}
    if len(tasks) < max(2, MIN_SHARE * len(seen)):
        return []
    first, secret = hits[0]
    told = f"{place} holds {secret!r}, which belongs to the right answer; so it is on {len(tasks)} of {len(seen)} tasks"
    return [
        Finding(seen=f"{told}, and hardly ever there on other tasks", task=describe_task(first.task), mend=FIX_LEAK)
    ]


def _is_common(secret: str, texts: list[str], number: int) -> bool:
    """Whether *secret* stands in half of the other tasks' texts as well."""
    others = [text for other, text in enumerate(texts) if other != number]
    return sum(contains_words(secret, text) for text in others) * 2 >= max(1, len(others))


CHECKS = (
    Check(
        id="semantic.no_solution_leakage",
        asks="a simple look at what a policy can see does not find the answer",
        why="a policy learns to copy an answer that it is shown, and scores that say so look like skill",
        mend=FIX_LEAK,
        run=_check_leaks,
    ),
)
