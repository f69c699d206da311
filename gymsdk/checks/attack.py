"""Attacks: scripted policies that do not understand the task, and the rewards they earn."""

from __future__ import annotations

import asyncio
import json
import math
import re
import string
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, stdev
from typing import TypeAlias, TypeVar

from gymsdk import responses
from gymsdk.checks.clues import (
    build_plain_value,
    find_expressions,
    iter_enum_arguments,
    list_letters,
    list_numbers,
    list_options,
)
from gymsdk.checks.phases import describe_task, sample_tasks, shorten_text
from gymsdk.checks.report import Finding
from gymsdk.checks.subject import Play, Subject
from gymsdk.environment import Environment
from gymsdk.models.scripted import PolicyFunction, play_null
from gymsdk.types import Claims, Episode, Item, Rollout, Task, extract_text

CONCURRENCY = 8
"""How many episodes a check plays concurrently."""

T = TypeVar("T")

Turns: TypeAlias = list[list[Item]]
"""The turns of a scripted policy. The last turn repeats until the episode ends."""

FIX_WHOLE_ANSWER = (
    "compare the single answer at the end of the reply as a whole with the expected one; do not search the reply for"
    " the expected answer"
)
FIX_SINGLE_ANSWER = "take one answer from a reply, and give nothing to a reply with several"
FIX_EMPTY_ANSWER = "give nothing to a reply without an answer, before you compare anything"
FIX_CHANCE = "put the chance that one of the options earns into `claims(task).chance`"
FIX_PREFIX_MATCH = "compare the whole answer: a prefix of it, or a character in it, is not an answer"
FIX_REASONING = "grade replies and calls only; a policy's reasoning is not an answer"
FIX_EVALUATION = "treat a reply as data: never compute it with `eval` or a solver"
FIX_TOOL_NAME = "pay for the right arguments and their effect, not for the name of a tool"
FIX_BUDGET_REWARD = "pay nothing for reaching the end of a budget"
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
MAX_LISTED = 40

SHORT_CHARS = 80
"""The maximum length of a reply that is only an answer."""

MAX_TOOLS = 32
"""How many tools of a task are called."""

SIGNIFICANCE = 1e-3
"""The probability below which chance does not explain a mean."""

MIN_STEADY_ATTEMPTS = 6
"""How many similar rewards are needed to rule out chance."""

STANDARD_ERRORS = 4.0
"""How many standard errors above the chance these rewards must lie."""

TOLERANCE = 1e-6
"""Differences of rewards up to this value do not count."""


@dataclass(frozen=True, slots=True)
class TaskView:
    """The view of a task that a policy gets when its episode starts.

    Attributes:
        task: The task.
        claims: The rewards that the environment claims for the task.
        opening: The opening items of the conversation.
        tools: The schemas of the offered tools.
        other: How the oracle plays another task.
        own: How the oracle plays this task.
        replies: The oracle's replies to all sampled tasks that take a single reply.
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
        """The text of the whole prompt."""
        return "\n\n".join(extract_text(item.get("content")) for item in self.opening)

    def last_message(self, *roles: str) -> str:
        """Return the text of the last opening message of one of *roles*."""
        texts = [extract_text(item.get("content")) for item in self.opening if item.get("role") in roles]
        return texts[-1] if texts else ""

    @property
    def reply(self) -> str:
        """The oracle's reply if the oracle plays a single reply, otherwise an empty string."""
        items = [item for turn in self.own for item in turn if item.get("type") != "reasoning"]
        only = len(self.own) == 1 and len(items) == 1 and items[0].get("role") == "assistant"
        return extract_text(items[0].get("content")).strip() if only else ""


@dataclass(frozen=True, slots=True)
class Attack:
    """A way to play without understanding the task.

    Attributes:
        name: Completes the sentence "a policy that …".
        script: Returns the turns to play, or no turns if the attack does not apply to the task.
        fix: How to fix an environment that rewards the attack.
        tasks: The maximum number of tasks to try it on.
    """

    name: str
    script: Callable[[TaskView], Turns]
    fix: str = ""
    tasks: int = 12


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attack on one task: the turns that it played, and the rollout."""

    attack: Attack
    view: TaskView
    turns: Turns
    rollout: Rollout

    @property
    def earned(self) -> float:
        """The reward, or 0 if the rollout was not scored."""
        return self.rollout.reward or 0.0

    @property
    def words(self) -> str:
        """The beginning of the attack's turns as text."""
        return shorten_text("; ".join(_format_item(item) for turn in self.turns for item in turn))


def build_reply_attack(name: str, reply: Callable[[TaskView], str | None], *, fix: str = "", tasks: int = 12) -> Attack:
    """Build the attack that sends one reply. It does not apply to tasks for which *reply* returns `None`."""

    def script(view: TaskView) -> Turns:
        text = reply(view)
        return [] if text is None else [[responses.build_message(text, id="msg_0")]]

    return Attack(name, script, fix, tasks)


def build_text_attack(name: str, text: str, *, fix: str = "", tasks: int = 12) -> Attack:
    """Build the attack that replies *text*."""
    return build_reply_attack(name, lambda _: text, fix=fix, tasks=tasks)


def build_call_turn(*calls: tuple[str, str]) -> list[Item]:
    """Return a turn of tool calls from pairs of a tool's name and its arguments as JSON text."""
    return [
        responses.build_function_call(name, text, f"call_{n}", id=f"fc_{n}") for n, (name, text) in enumerate(calls)
    ]


def build_policy(script: Turns) -> PolicyFunction:
    """Build the policy that plays *script* in one episode and then repeats its last turn."""
    turns_played = 0

    async def choose(_request: Item, _episode: Episode | None) -> list[Item]:
        nonlocal turns_played
        turn, turns_played = turns_played, turns_played + 1
        return script[turn] if turn < len(script) else _renumber_calls(script[-1], turn)

    return choose


def _renumber_calls(items: list[Item], turn: int) -> list[Item]:
    """Return *items* with call ids that are unique to the turn, because a repeated turn would reuse them."""
    return [item | {"call_id": f"{item['call_id']}_{turn}"} if item.get("call_id") else item for item in items]


async def gather_bounded(jobs: Iterable[Awaitable[T]]) -> list[T]:
    """Return the results of *jobs*, `CONCURRENCY` of which run at a time."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def bounded(job: Awaitable[T]) -> T:
        async with slots:
            return await job

    async with asyncio.TaskGroup() as group:
        started = [group.create_task(bounded(job)) for job in jobs]
    return [task.result() for task in started]


async def open_tasks(subject: Subject, environment: Environment, tasks: Sequence[Task]) -> list[TaskView]:
    """Return the views of the tasks that a policy gets. Tasks that fail to open are left out."""
    openings = await gather_bounded(subject.play_script(environment, play_null, task) for task in tasks)
    solutions = [
        extract_turns(play) for play in await gather_bounded(subject.play_oracle(environment, task) for task in tasks)
    ]
    claims = [await environment.claims(task) for task in tasks]
    views = [
        TaskView(task, claimed, first.opening, first.tools, own=solution)
        for task, claimed, first, solution in zip(tasks, claims, openings, solutions, strict=True)
    ]
    replied = tuple(dict.fromkeys(view.reply for view in views if view.reply))
    # In rotation, so that the tasks do not all get the answer of the same other task.
    return [
        replace(view, other=_pick_other_turns([*views[number + 1 :], *views[:number]], view), replies=replied)
        for number, view in enumerate(views)
        if view.opening
    ]


def extract_turns(play: Play) -> Turns:
    """Return the turns of *play*, or none if it was not scored."""
    return list(play.turns) if play.rollout.outcome == "scored" else []


def _pick_other_turns(others: Sequence[TaskView], view: TaskView) -> Turns:
    """Return how the oracle plays another task. If the claimed chance is 0, its turns must differ from this task's."""
    own = format_turns(view.own)
    candidates = (other.own for other in others if other.prompt != view.prompt)
    return next(
        (turns for turns in candidates if turns and own and (view.claims.chance > 0 or format_turns(turns) != own)), []
    )


def format_turns(turns: Turns) -> list[str]:
    """Return one text per item of the turns."""
    return [_format_item(item) for turn in turns for item in turn]


async def run_attacks(
    subject: Subject, environment: Environment, attacks: Sequence[Attack], views: Sequence[TaskView]
) -> list[Attempt]:
    """Play every attack on every task of *views*. Equal turns on the same task are played once."""
    max_tasks = await subject.count_affordable(environment, len(views), episodes=len(attacks) / CONCURRENCY)
    planned = [
        (attack, view, attack.script(view))
        for attack in attacks
        for view in sample_tasks(views, min(attack.tasks, max_tasks))
    ]
    attempts = list(_deduplicate((attack, view, turns) for attack, view, turns in planned if turns))
    rollouts = await gather_bounded(
        subject.play_script(environment, build_policy(turns), view.task, turns=len(turns))
        for _, view, turns in attempts
    )
    return [Attempt(*plan, rollout) for plan, rollout in zip(attempts, rollouts, strict=True)]


def _deduplicate(planned: Iterable[tuple[Attack, TaskView, Turns]]) -> Iterator[tuple[Attack, TaskView, Turns]]:
    seen_keys: set[tuple[int, str]] = set()
    for attack, view, turns in planned:
        key = (id(view), repr(turns))
        if key not in seen_keys:
            seen_keys.add(key)
            yield attack, view, turns


def _format_item(item: Item) -> str:
    if item.get("type") == "function_call":
        return f"{item['name']}({item['arguments']})"
    return extract_text(item.get("content"))


def format_every_form(answers: list[str]) -> str:
    """Return one reply that contains each of *answers* in every usual form."""
    lines = [f"{answer}\n\\boxed{{{answer}}}\n<answer>{answer}</answer>\nAnswer: {answer}" for answer in answers]
    return "\n".join([", ".join(answers), *lines])


def format_answer(answer: str) -> str:
    """Return *answer* in the forms that prompts ask for: in a box, in a tag, after a word."""
    return f"<answer>\\boxed{{{answer}}}</answer>\nAnswer: {answer}"


def _list_prompt_options(view: TaskView) -> str | None:
    options = list_options(view.prompt)
    return format_every_form(options) if options else None


def _build_listing_attack(form: Callable[[list[str]], str]) -> Attack:
    """Build the policy that lists the answers of all tasks, as a policy that guesses often enough would.

    This task's answer stands in the middle, so a verifier that reads the first or the last answer does not take it.
    """

    def reply(view: TaskView) -> str | None:
        own = view.reply
        # A policy that must use a word of the prompt may use other words of it too.
        if not own or len(own) > SHORT_CHARS or own.casefold() in view.prompt.casefold():
            return None
        others = [reply for reply in view.replies if len(reply) <= SHORT_CHARS and not _overlaps(reply, own)]
        middle = len(others) // 2
        return form([*others[:middle], own, *others[middle:]]) if len(others) >= 2 else None  # noqa: PLR2004  # ends

    return build_reply_attack("lists many answers in one reply", reply, fix=FIX_SINGLE_ANSWER, tasks=6)


def _overlaps(answer: str, other: str) -> bool:
    """Return whether one of two answers contains the other, in which case finding one proves nothing."""
    return answer.casefold() in other.casefold() or other.casefold() in answer.casefold()


def _build_option_attack(place: int, which: str) -> Attack:
    def reply(view: TaskView) -> str | None:
        prompt = view.last_message("user") or view.prompt
        options = list_letters(prompt) or list_options(prompt)
        return options[place] if -1 <= place < len(options) and options else None

    return build_reply_attack(f"always takes the {which} option", reply, fix=FIX_CHANCE)


def _build_sign_attack(sign: str) -> Attack:
    """Build the policy that replies one letter or digit, unless it is a whole answer."""

    def reply(view: TaskView) -> str | None:
        whole = any(re.search(rf"(?<!\w){sign}(?!\w)", text, re.IGNORECASE) for text in format_turns(view.own))
        return None if whole or view.claims.chance > 0 else sign

    return build_reply_attack(f"replies {sign!r} and nothing else", reply, fix=FIX_PREFIX_MATCH, tasks=1)


def _build_reasoning_attack(name: str, thought: Callable[[TaskView], str]) -> Attack:
    def script(view: TaskView) -> Turns:
        text = thought(view)
        return (
            [[responses.build_reasoning(text, id="rs_0"), responses.build_message("Done.", id="msg_0")]] if text else []
        )

    return Attack(f"reasons about {name} and does not reply it", script, FIX_REASONING, 6)


def _build_expression_attack(place: int, form: Callable[[str], str]) -> Attack:
    def reply(view: TaskView) -> str | None:
        matches = find_expressions(view.prompt)
        return form(matches[place]) if matches else None

    return build_reply_attack(
        "repeats the expression of the prompt instead of its value", reply, fix=FIX_EVALUATION, tasks=6
    )


def _build_tool_attack(place: int, times: int) -> Attack:
    """Build the policy that calls one tool with plain values *times* times in a turn."""

    def script(view: TaskView) -> Turns:
        if place >= len(view.tools):
            return []
        tool = view.tools[place]
        plain = json.dumps(build_plain_value((tool.get("parameters") or {}) | {"type": "object"}))
        return [build_call_turn(*[(str(tool["name"]), plain)] * times), *build_text_attack("", "Done.").script(view)]

    times_text = "and nothing else" if times == 1 else f"{times} times"
    return Attack(f"calls one tool with plain values {times_text}", script, FIX_TOOL_NAME, 2)


def _call_until_budget(view: TaskView) -> Turns:
    tool = view.tools[0] if view.tools else {}
    plain = json.dumps(build_plain_value((tool.get("parameters") or {}) | {"type": "object"}))
    return [build_call_turn((str(tool.get("name", "no_such_tool")), plain))]


def _list_every_number(view: TaskView) -> str | None:
    found_numbers = list_numbers(view.prompt)
    return format_every_form(found_numbers[:60]) if found_numbers else None


def _list_every_choice(view: TaskView) -> Turns:
    tool_calls = [
        (str(tool["name"]), json.dumps(arguments)) for tool in view.tools for arguments in iter_enum_arguments(tool)
    ]
    return [build_call_turn(*tool_calls[:60]), *build_text_attack("", "Done.").script(view)] if tool_calls else []


PANEL: tuple[Attack, ...] = (
    build_text_attack("says nothing", "", fix=FIX_EMPTY_ANSWER),
    build_text_attack("says blanks", " \n\t ", fix=FIX_EMPTY_ANSWER, tasks=4),
    build_text_attack("says that it does not know", "I don't know.", fix=FIX_EMPTY_ANSWER, tasks=6),
    build_text_attack("gives an empty box", "\\boxed{}\n<answer></answer>\nAnswer:", fix=FIX_EMPTY_ANSWER, tasks=6),
    build_reply_attack(
        "repeats the user's message", lambda view: view.last_message("user") or None, fix=FIX_WHOLE_ANSWER
    ),
    build_reply_attack(
        "repeats the system's message",
        lambda view: view.last_message("system", "developer") or None,
        fix=FIX_WHOLE_ANSWER,
    ),
    build_reply_attack("repeats the whole prompt", lambda view: view.prompt or None, fix=FIX_WHOLE_ANSWER),
    Attack("gives the answer of another task", lambda view: view.other, "compare with this task's own answer"),
    build_reply_attack("gives every option at once", _list_prompt_options, fix=FIX_SINGLE_ANSWER),
    *(_build_listing_attack(form) for form in ("\n".join, format_every_form)),
    *(_build_option_attack(place, which) for place, which in enumerate(ORDINALS)),
    _build_option_attack(-1, "last"),
    Attack(
        "calls the tools with every value of their schemas",
        _list_every_choice,
        "let wrong calls cost what right ones pay",
    ),
    build_text_attack("says every number from 0 to 200", " ".join(map(str, range(201))), fix=FIX_SINGLE_ANSWER),
    build_text_attack(
        "says every letter and yes and no",
        format_every_form([*"ABCDE", "yes", "no", "True", "False"]),
        fix=FIX_SINGLE_ANSWER,
    ),
    build_reply_attack("says every number of the prompt", _list_every_number, fix=FIX_SINGLE_ANSWER),
    build_text_attack(
        "fills thirty boxes",
        "\n".join(format_answer(str(number)) for number in range(30)),
        fix=FIX_SINGLE_ANSWER,
        tasks=6,
    ),
    build_text_attack("always says yes", "yes", fix=FIX_CHANCE),
    build_text_attack("always says no", "no", fix=FIX_CHANCE),
    build_text_attack("always says 0", format_answer("0"), fix=FIX_CHANCE),
    build_text_attack("always says 1", format_answer("1"), fix=FIX_CHANCE),
    build_text_attack(
        "answers with a wildcard", ".*", fix="never use the reply as a pattern; escape it or compare it", tasks=4
    ),
    *(_build_sign_attack(sign) for sign in string.ascii_letters + string.digits),
    *(_build_expression_attack(place, form) for place in (0, -1) for form in (str, format_answer)),
    _build_reasoning_attack("another task's answer", lambda view: "\n".join(format_turns(view.other))),
    _build_reasoning_attack(
        "every number from 0 to 200 and every option",
        lambda view: " ".join([*map(str, range(201)), *list_options(view.prompt)]),
    ),
    Attack("calls a tool at every turn until its turn budget ends", _call_until_budget, FIX_BUDGET_REWARD, 2),
    *(_build_tool_attack(place, times) for place in range(MAX_TOOLS) for times in (1, MAX_LISTED)),
)
"""Every policy of the panel."""


def find_gain_beyond_chance(attempts: Sequence[Attempt]) -> list[Finding]:
    """Return what one attack earned beyond the claimed chance, or nothing if chance may explain it.

    There are three tests:

    1. A task that claims a chance of 0 must not reward a policy that does not understand the task.
    2. On the other tasks, the mean reward may exceed the mean claimed chance only as far as chance explains it. Rewards
       count as shares of the claimed maximum, and Hoeffding's bound for the mean of independent shares must be above
       `SIGNIFICANCE`: with a chance of 0.02 on 12 tasks, three hits pass and four do not.
    3. Hoeffding's bound does not notice small rewards that hardly vary. On at least `MIN_STEADY_ATTEMPTS` tasks, the
       mean gain must therefore be within `STANDARD_ERRORS` standard errors of 0.
    """
    scored = [attempt for attempt in attempts if attempt.rollout.outcome == "scored"]
    without_chance = [attempt for attempt in scored if attempt.view.claims.chance <= 0]
    paid = [attempt for attempt in without_chance if attempt.earned > TOLERANCE]
    others = [attempt for attempt in scored if attempt.view.claims.chance > 0]
    if paid:
        return [_build_finding(without_chance, max(paid, key=_compute_gain))]
    return [_build_finding(others, max(others, key=_compute_gain))] if _exceeds_chance(others) else []


def _exceeds_chance(attempts: Sequence[Attempt]) -> bool:
    if not attempts:
        return False
    # With negative rewards, the shares must still lie between 0 and 1, as Hoeffding's bound requires.
    lowest = min(0.0, *(attempt.earned for attempt in attempts))
    shares = fmean(_compute_share(attempt.earned, attempt, lowest) for attempt in attempts)
    chance = fmean(_compute_share(attempt.view.claims.chance, attempt, lowest) for attempt in attempts)
    if shares <= chance + TOLERANCE:
        return False
    return compute_hoeffding_bound(shares, chance, len(attempts)) < SIGNIFICANCE or _is_steady_gain(attempts)


def _is_steady_gain(attempts: Sequence[Attempt]) -> bool:
    gains = [_compute_gain(attempt) for attempt in attempts]
    # Rewards that are all or nothing vary enough for Hoeffding's bound.
    has_partial_rewards = any(
        TOLERANCE < attempt.earned < attempt.view.claims.maximum - TOLERANCE for attempt in attempts
    )
    if len(gains) < MIN_STEADY_ATTEMPTS or not has_partial_rewards:
        return False
    return fmean(gains) > STANDARD_ERRORS * stdev(gains) / math.sqrt(len(gains)) + TOLERANCE


def _compute_share(reward: float, attempt: Attempt, lowest: float) -> float:
    best = attempt.view.claims.maximum - lowest
    return min(1.0, max(0.0, (reward - lowest) / best)) if best > 0 else 1.0


def compute_hoeffding_bound(mean: float, chance: float, count: int) -> float:
    """Return Hoeffding's bound of the probability that *count* independent shares of mean *chance* reach *mean*."""
    if chance >= 1 or mean <= chance:
        return 1.0
    if chance <= 0:
        return 0.0
    upper = mean * math.log(mean / chance)
    lower = (1 - mean) * math.log((1 - mean) / (1 - chance)) if mean < 1 else 0.0
    return math.exp(-count * (upper + lower))


def _compute_gain(attempt: Attempt) -> float:
    return attempt.earned - attempt.view.claims.chance


def _build_finding(attempts: Sequence[Attempt], worst: Attempt) -> Finding:
    claims, count = worst.view.claims, len(attempts)
    mean, chance = (
        fmean(attempt.earned for attempt in attempts),
        fmean(attempt.view.claims.chance for attempt in attempts),
    )
    tasks = "the one task tried" if count == 1 else f"{count} tasks"
    return Finding(
        problem=f"a policy that {worst.attack.name} earns {mean:.3g} on average over {tasks}; the claimed chance is"
        f" {chance:.3g}; here it said {worst.words} and got {worst.earned:g} of {claims.maximum:g}",
        task=describe_task(worst.view.task),
        fix=worst.attack.fix,
    )
