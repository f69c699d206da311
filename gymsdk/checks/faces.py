"""Faces: the same task and actions give the same in process, as a Gymnasium environment, in a vector, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from gymsdk import values
from gymsdk.checks.check import Check, Finding
from gymsdk.checks.performance import Performance, Script, scripts
from gymsdk.checks.plain import Plain, difference, plain
from gymsdk.checks.process import put_back
from gymsdk.checks.served import served
from gymsdk.checks.subject import Subject
from gymsdk.convert import chat
from gymsdk.outcome import Rollout
from gymsdk.transcript import Item
from gymsdk.types import Playable, Verdict

if TYPE_CHECKING:
    from gymsdk.environment import Environment
    from gymsdk.gym import Env, VectorEnv
    from gymsdk.sitting import Budget

TASKS = 3
"""Tasks that are played, by the oracle and at random."""

SEATS = 2
"""Seats of the vector that is compared."""

SEEN = ("outcome", "ended", "verdict", "reward_components")
"""What the last step's info tells, on every face."""

GRAIN = 9
"""Digits of a reward that are compared: faces add up what steps pay in other orders."""

Face: TypeAlias = "Callable[[Environment, Sequence[Script], Budget], list[Plain]]"
"""Plays every script to its end on one face and gives what was seen of each."""


async def _look(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        tasks = await subject.count_affordable(environment, TASKS, each=12)
        played = await scripts(subject, environment, tasks=tasks)
        here = [await _performed(environment, script) for script in played]
    with put_back():
        return await _compared(subject, played, here)


async def _compared(subject: Subject, played: Sequence[Script], here: Sequence[Performance]) -> list[Finding]:
    """Give where *played* went otherwise than *here*, in process."""
    expected = [_in_process(performance) for performance in here]
    findings = []
    for name, face in FACES.items():
        for budget in dict.fromkeys(script.budget for script in played):
            chosen = [number for number, script in enumerate(played) if script.budget == budget]
            scripts_of = [played[number] for number in chosen]
            # These faces have a loop of their own, and callers that wait for it.
            seen = await asyncio.to_thread(face, subject.make(), scripts_of, budget)
            findings += _unlike(name, scripts_of, [expected[number] for number in chosen], seen)
    carried = [performance for performance in here if _can_be_carried(performance)]
    return [*findings, *await _over_http(subject, carried)]


def _unlike(name: str, played: Sequence[Script], expected: Sequence[Plain], seen: Sequence[Plain]) -> list[Finding]:
    """Give the first script that went otherwise on the face *name*."""
    for script, one, other in zip(played, expected, seen, strict=True):
        if found := difference(one, other):
            return [Finding(seen=f"{script.title}, in process and {name}: {found}")]
    return []


async def _performed(environment: Playable, script: Script) -> Performance:
    """Give the play of *script*, judged where it came to an end."""
    performance = Performance(script, environment)
    try:
        await performance.play_until_verdict()
        if performance.has_ended and not performance.has_failed:
            await performance.advance()
    finally:
        await performance.close()
    return performance


def _in_process(performance: Performance) -> Plain:
    opening = performance.episode.transcript.opening if performance.episode else []
    seen = [_messages(items or []) for items in performance.answers]
    told = _told(performance.rollout) if performance.has_ended else None
    if performance.episode is None:
        # On the other faces an episode that could not be opened ends at its first step.
        seen, told = ([[]], told) if performance.script.turns else ([], None)
    return plain({"opening": _messages(opening), "steps": seen, "end": told})


def _messages(items: Sequence[Item]) -> list[Item]:
    return chat.messages({"input": list(items)})


def _told(rollout: Rollout) -> Plain:
    failure = rollout.failure.kind if rollout.failure else None
    components = rollout.components if rollout.verdict else None
    values = (rollout.outcome, rollout.ended, _as_written(rollout.verdict), components)
    return plain(dict(zip(SEEN, values, strict=True)) | {"failure": failure, "reward": _rounded(rollout.reward)})


def _as_written(verdict: Verdict | None) -> Plain:
    """Give *verdict* as a line of rollouts has it, as far as JSON can hold it."""
    try:
        return plain(verdict.model_dump(mode="json") if verdict else None)
    except ValueError:
        return plain(verdict)


def _rounded(reward: float | None) -> float | None:
    return None if reward is None else round(reward, GRAIN)


def _of_info(info: Mapping[str, object], total: float) -> Plain:
    failure = info.get("failure")
    kind = failure["kind"] if isinstance(failure, dict) else None
    reward = None if failure else _rounded(total)
    return plain({key: info.get(key) for key in SEEN} | {"failure": kind, "reward": reward})


def _gymnasium(environment: Environment, played: Sequence[Script], budget: Budget) -> list[Plain]:
    from gymsdk.gym import Env

    env = Env(environment, turns=budget.turns, tools=budget.tools, seconds=budget.seconds)
    try:
        return [_single(env, script) for script in played]
    finally:
        env.close()


def _single(env: Env, script: Script) -> Plain:
    opening, info = env.reset(seed=script.seed, options={"task": script.task})
    seen, paid, over = [], [], False
    for turn in script.turns:
        if not over:
            observation, reward, terminated, truncated, info = env.step(list(turn))
            seen.append(observation)
            paid.append(float(reward))
            over = terminated or truncated
    end = _of_info(info, sum(paid)) if over else None
    return plain({"opening": opening, "steps": seen, "end": end})


def _vector(environment: Environment, played: Sequence[Script], budget: Budget) -> list[Plain]:
    from gymsdk.gym import VectorEnv

    env = VectorEnv(
        environment,
        num_envs=SEATS,
        autoreset_mode="disabled",
        turns=budget.turns,
        tools=budget.tools,
        seconds=budget.seconds,
    )
    try:
        return [_last_seat(env, script) for script in played]
    finally:
        env.close()


def _last_seat(env: VectorEnv, script: Script) -> Plain:
    import numpy as np

    from gymsdk.gym.infos import info_of

    opening, infos = env.reset(seed=[script.seed] * SEATS, options={"task": [script.task] * SEATS})
    seen, paid, over = [], [], False
    for turn in script.turns:
        if not over:
            observations, rewards, terminated, truncated, infos = env.step([list(turn)] * SEATS)
            seen.append(observations[-1])
            paid.append(float(rewards[-1]))
            over = bool(np.any(terminated | truncated))
    last = info_of(infos, SEATS - 1)
    end = _of_info(last, sum(paid)) if over and "outcome" in last else None
    return plain({"opening": opening[-1], "steps": seen, "end": end})


FACES: dict[str, Face] = {"through Env": _gymnasium, "through VectorEnv": _vector}
"""The Gymnasium faces that are compared with the play in process."""


def _can_be_carried(performance: Performance) -> bool:
    """Whether HTTP can carry it: outputs of tools and a verdict in JSON, but no messages on the way.

    To clients of NeMo Gym a plain reply ends an episode: what an environment says to it, they are never told.
    """
    if performance.episode is None:
        return False
    if any(item.get("type") != "function_call_output" for items in performance.answers for item in items or []):
        return False
    replied = any(item.get("type") == "message" for turn in performance.script.turns[:-1] for item in turn)
    return performance.has_ended and not replied and _is_json(performance.rollout.verdict)


def _is_json(verdict: Verdict | None) -> bool:
    try:
        values.written(verdict.model_dump(mode="json") if verdict else None)
    except (TypeError, ValueError):
        return False
    return True


async def _over_http(subject: Subject, carried: Sequence[Performance]) -> list[Finding]:
    if not carried:
        return []
    async with served(subject.make()) as remote:
        for performance in carried:
            there = await _performed(remote, performance.script)
            if found := difference(_of_http(performance), _of_http(there)):
                return [Finding(seen=f"{performance.script.title}, in process and over HTTP: {found}")]
    return []


def _of_http(performance: Performance) -> Plain:
    """Give what HTTP can carry of a play: what it opened with, what its tools gave, and how it ended."""
    opening = performance.episode.transcript.opening if performance.episode else []
    told = _told(performance.rollout) if performance.has_ended else None
    return plain({"opening": opening, "steps": performance.answers, "end": _sent(told)})


def _sent(told: Plain) -> Plain:
    """Give *told* as it comes through JSON, which has no nan and no infinity; the reward stands beside the verdict."""
    assert isinstance(told, dict) or told is None, "it is an object"
    verdict = (told or {}).get("verdict")
    if not isinstance(verdict, dict):
        return told
    fields = {key: value for key, value in verdict.items() if key not in {"reward", "components"}}
    return {**(told or {}), "verdict": {key: None if value in UNSENT else value for key, value in fields.items()}}


UNSENT = ("nan", "inf", "-inf")

CHECKS = (
    Check(
        id="runtime.faces_agree",
        asks="the same task and actions give the same in process, through Env, through VectorEnv and over HTTP",
        why="what was evaluated in one of these ways and trained in another must be the same environment",
        mend="let nothing depend on the event loop, the thread or the process an episode runs in; what episodes share "
        "belongs into `lifespan`, which is entered in each of these ways",
        run=_look,
    ),
)
