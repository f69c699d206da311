"""Check that the answer does not show in the prompt, the tools or the answers to wrong actions.

The check searches in two ways, and avoids false alarms in both:

- Policies reply with text that a simple rule finds in the visible text. They must not earn more than chance. The prompt
  of a retrieval task contains parts of its answer, but such policies still earn nothing there. An answer in the prompt
  alone is not a leak, because a task may ask to find it there.
- Schemas and the responses to wrong calls and replies should not depend on the answer. A task's own answer must not
  appear there markedly more often than in the same place of other tasks.
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
from gymsdk.checks.forms import find_in_form, write_in_form
from gymsdk.checks.phases import describe_task, sample_tasks
from gymsdk.checks.report import Check, Finding, NotApplicable, excuse_rewards
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.types import Item, Rollout, Task, extract_text, is_policy_item, iter_tool_calls

MIN_SECRET_CHARS = 3
"""The minimum length of a secret. Shorter texts appear everywhere by chance."""

MAX_SECRET_CHARS = 200

SHARED_SHARE = 0.34
"""The share of tasks that may have the same secret. A text that more tasks share is a common term."""

MAX_PEERS = 6
"""How many entries of a list are examined on either side of a secret."""

MIN_ALTERNATIVES = 2
"""How many other entries make a list."""

_PEER = re.compile(r"""['"\[({]*[\w.-]+(?: [\w.-]+){0,2}['"\])}.]*""")

_ANSWER_FIELD = re.compile(ANSWER_WORDS, re.IGNORECASE)

MAX_TASKS = 10
"""How many tasks are searched."""

MIN_SHARE = 0.25
"""The share of tasks whose own answer must appear in a place to count as a leak. At least two tasks are required."""

MAX_TOOLS = 6
"""How many tools of a task are called wrongly."""

MAX_FINDINGS = 4
"""How many findings about policies are reported."""

CONTROL_ATTACKS = (
    build_text_attack("says something", "xyzzy"),
    build_text_attack("says something in form", format_answer("xyzzy")),
)
"""Replies without content; their rewards are not a leak."""

FIX_LEAK = "keep the answer in fields of the row or in the state; write prompts, schemas and errors without it"


def list_secrets(task: Task, turns: Turns, prompt: str) -> set[str]:
    """Return the oracle's answers and tool arguments, and the values of row fields that are named like an answer."""
    texts = [extract_text(item.get("content")) for turn in turns[-1:] for item in turn]
    answers = {answer for text in texts for answer in [*find_in_boxes(text), *find_after_words(text), text.strip()]}
    for call in iter_tool_calls(item for turn in turns for item in turn):
        answers.update(_iter_named_values(call.parsed(), named=True))
    # The policy sees the request, so that nothing in it is a secret.
    row = {key: value for key, value in task.row().items() if key != "responses_create_params"}
    candidates = answers.union(_iter_named_values(row, named=False))
    return {
        candidate
        for candidate in candidates
        if MIN_SECRET_CHARS <= len(candidate) <= MAX_SECRET_CHARS and not contains_words(candidate, prompt)
    }


def _iter_named_values(value: Any, *, named: bool) -> Iterator[str]:
    """Yield the scalar values of fields that are named like an answer, at every depth."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield from _iter_named_values(member, named=named or bool(_ANSWER_FIELD.search(str(key))))
    elif isinstance(value, list):
        for element in value:
            yield from _iter_named_values(element, named=named)
    elif named and isinstance(value, (str, int, float)) and not isinstance(value, bool):
        yield str(value).strip()


def drop_shared_secrets(secrets_by_task: list[set[str]]) -> list[set[str]]:
    """Return the secrets of each task without those that many tasks share."""
    owners = Counter(secret for secrets in secrets_by_task for secret in secrets)
    return [
        {secret for secret in secrets if owners[secret] <= max(1, SHARED_SHARE * len(secrets_by_task))}
        for secrets in secrets_by_task
    ]


def is_one_of_many(secret: str, text: str, secrets: set[str]) -> bool:
    """Return whether *secret* appears in a list in *text* beside entries that contain none of the task's *secrets*.

    For example, a prompt that lists all cities does not give away which one is the answer.
    """
    parts = [part.strip() for part in re.split(r",| or | and |;", text)]
    for number, part in enumerate(parts):
        if re.fullmatch(rf"(?:.*[^\w])?{re.escape(secret)}(?:[^\w].*)?", part, re.IGNORECASE | re.DOTALL):
            nearby_entries = [*parts[max(0, number - MAX_PEERS) : number], *parts[number + 1 : number + 1 + MAX_PEERS]]
            peers = [
                entry
                for entry in nearby_entries
                if _PEER.fullmatch(entry) and not any(contains_words(other, entry) for other in secrets)
            ]
            if len(peers) >= MIN_ALTERNATIVES:
                return True
    return False


def contains_words(secret: str, text: str) -> bool:
    """Return whether *text* contains *secret* as whole words."""
    return re.search(rf"(?<!\w){re.escape(secret)}(?!\w)", text, re.IGNORECASE) is not None


async def _check_leaks(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        views = await open_tasks(subject, environment, sample_tasks(subject.tasks, MAX_TASKS))
        if not views:
            raise NotApplicable("no task of the environment could be opened; give it a `tasks` hook")
        responses = await gather_bounded(_collect_responses(subject, environment, view) for view in views)
        attempts = await run_attacks(subject, environment, [*CONTROL_ATTACKS, *_build_attacks(views, responses)], views)
    profitable = _find_profitable_rules(attempts)[:MAX_FINDINGS]
    return excuse_rewards(subject, profitable, _find_leaks(views, responses))


def _find_profitable_rules(attempts: Sequence[Attempt]) -> list[Finding]:
    """Return what the rules earned beyond what any reply earns, which `semantic.floor_gap` reports."""
    by_attack: defaultdict[Attack, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_attack[attempt.attack].append(attempt)
    plain = max(fmean(attempt.earned for attempt in by_attack[control]) for control in CONTROL_ATTACKS)
    attempts_by_rule = [rule_attempts for attack, rule_attempts in by_attack.items() if attack not in CONTROL_ATTACKS]
    return [
        finding
        for rule_attempts in attempts_by_rule
        if fmean(attempt.earned for attempt in rule_attempts) > max(plain, _compute_threshold(rule_attempts))
        for finding in find_gain_beyond_chance(rule_attempts)
    ]


def _compute_threshold(rule_attempts: Sequence[Attempt]) -> float:
    """Return the mean reward that a rule must exceed if it also finds text that the task asks for."""
    share = next((rule.share for rule in RULES if rule.name == rule_attempts[0].attack.name), 0.0)
    return share * fmean(attempt.view.claims.maximum for attempt in rule_attempts) - TOLERANCE


def _list_schemas(view: TaskView) -> str:
    return json.dumps(view.tools, ensure_ascii=False, default=str)


async def _collect_responses(subject: Subject, environment: Environment, view: TaskView) -> list[Item]:
    """Return everything that the environment answers to wrong calls and replies."""
    names = [str(tool["name"]) for tool in view.tools[:MAX_TOOLS]]
    empty = [(name, "{}") for name in ("no_such_tool", *names)]
    plain = [(str(tool["name"]), _build_plain_call(tool)) for tool in view.tools[:MAX_TOOLS]]
    calls = [
        responses.build_function_call(name, text, f"call_{n}", id=f"fc_{n}")
        for n, (name, text) in enumerate(empty + plain)
    ]
    wrong_replies = [[responses.build_message(text, id="msg_0")] for text in ("I do not know.", format_answer("17"))]
    rollouts = await gather_bounded(
        subject.play_script(environment, build_policy(turns), view.task)
        for turns in ([calls, wrong_replies[0]], wrong_replies)
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


def _build_attacks(views: Sequence[TaskView], responses: Sequence[list[Item]]) -> list[Attack]:
    """Build the policies that reply with the first or the last match of a rule, bare and in answer form."""
    texts = {
        id(view): [
            view.prompt,
            _list_schemas(view),
            _extract_texts(items, calls=True),
            _extract_texts(items, calls=False),
        ]
        for view, items in zip(views, responses, strict=True)
    }
    bare = [
        _build_rule_attack(rule, texts, place, form)
        for rule in RULES
        for place in rule.places
        for form in (str, format_answer)
    ]
    formed = [_build_form_attack(rule, texts, place) for rule in RULES if rule.form for place in rule.places]
    return [*bare, *formed, *(_build_copy_attack(texts, place) for place in (0, -1))]


def _build_rule_attack(rule: Rule, texts: dict[int, list[str]], place: int, form: Callable[[str], str]) -> Attack:
    def reply(view: TaskView) -> str | None:
        match = _find_match(rule, view, texts, place)
        return None if match is None else form(match)

    return build_reply_attack(rule.name, reply, fix=FIX_LEAK, tasks=rule.tasks)


def _build_form_attack(rule: Rule, texts: dict[int, list[str]], place: int) -> Attack:
    """Build the policy that answers with a match of *rule* in the form in which the oracle answers another task."""

    def script(view: TaskView) -> Turns:
        match = _find_match(rule, view, texts, place)
        return [] if match is None else write_in_form(view, match, calls=rule.form == "any")

    return Attack(rule.name, script, FIX_LEAK, rule.tasks)


def _build_copy_attack(texts: dict[int, list[str]], place: int) -> Attack:
    """Build the policy that repeats what has the form of the oracle's answer already."""

    def script(view: TaskView) -> Turns:
        matches = [match for text in texts[id(view)] for match in find_in_form(view, text)]
        return write_in_form(view, matches[place], calls=True) if matches else []

    return Attack("repeats what the prompt shows in the form of an answer", script, FIX_LEAK, MAX_TASKS)


def _find_match(rule: Rule, view: TaskView, texts: dict[int, list[str]], place: int) -> str | None:
    if rule.is_asked_for(view.prompt):
        return None
    matches = [match for text in texts[id(view)] for match in rule.find(text)]
    return matches[place] if -len(matches) <= place < len(matches) else None


def _find_leaks(views: Sequence[TaskView], responses: Sequence[list[Item]]) -> list[Finding]:
    """Return the places in which tasks' own answers appear."""
    own_secrets = drop_shared_secrets([list_secrets(view.task, view.own, view.prompt) for view in views])
    places = {
        "the schema of a tool": [_list_schemas(view) for view in views],
        "the answer to a wrong call": [_extract_texts(items, calls=True) for items in responses],
        "the answer to a wrong reply": [_extract_texts(items, calls=False) for items in responses],
    }
    return [
        finding for name, texts in places.items() for finding in _find_leaks_in_place(views, name, texts, own_secrets)
    ]


def _find_leaks_in_place(
    views: Sequence[TaskView], place: str, texts: list[str], own_secrets: list[set[str]]
) -> list[Finding]:
    hits = [
        (view, secret)
        for number, (view, own) in enumerate(zip(views, own_secrets, strict=True))
        for secret in sorted(own)
        if contains_words(secret, texts[number])
        and not _is_common(secret, texts, number)
        and not is_one_of_many(secret, texts[number], own)
    ]
    tasks = {id(view) for view, _ in hits}
    if len(tasks) < max(2, MIN_SHARE * len(views)):
        return []
    first, secret = hits[0]
    text = f"{place} contains {secret!r}, which belongs to the right answer; {len(tasks)} of {len(views)} tasks show"
    return [
        Finding(
            problem=f"{text} their answer there, and other tasks hardly ever do",
            task=describe_task(first.task),
            fix=FIX_LEAK,
        )
    ]


def _is_common(secret: str, texts: list[str], number: int) -> bool:
    """Return whether *secret* appears in half of the other tasks' texts as well."""
    others = [text for other, text in enumerate(texts) if other != number]
    return sum(contains_words(secret, text) for text in others) * 2 >= max(1, len(others))


CHECKS = (
    Check(
        id="semantic.no_solution_leakage",
        requirement="a simple search of the text that a policy sees does not find the answer",
        why="a policy learns to copy an answer that it sees, and its scores look like skill",
        fix=FIX_LEAK,
        run=_check_leaks,
    ),
)
