"""Faces: the same task and actions give the same in process, as a Gymnasium environment, and in a vector of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymsdk import wire
from gymsdk.checks.check import Check, Finding
from gymsdk.checks.performance import Script, difference, plain, scripts
from gymsdk.checks.subject import Subject
from gymsdk.convert import chat
from gymsdk.environment import Environment
from gymsdk.errors import EpisodeError
from gymsdk.outcome import Rollout
from gymsdk.sitting import Budget, Sitting
from gymsdk.transcript import Item

TASKS = 3
"""Tasks that are played, by the oracle and at random."""

SEATS = 2
"""Seats of the vector that is compared."""

SEEN = ("outcome", "ended", "verdict", "reward_components")
"""What the last step's info tells, on every face."""

Face = Callable[[Environment, Sequence[Script], Budget], list[Any]]
"""Plays every script to its end on one face and gives what was seen of each."""


async def _look(subject: Subject) -> list[Finding]:
    async with subject.fresh() as environment:
        played = await scripts(subject, environment, tasks=TASKS)
        expected = [await _in_process(environment, script, subject.budget) for script in played]
    findings = []
    for name, face in FACES.items():
        # These faces have a loop of their own, and callers that wait for it.
        seen = await asyncio.to_thread(face, subject.make(), played, subject.budget)
        for script, one, other in zip(played, expected, seen, strict=True):
            if found := difference(one, other):
                findings.append(Finding(seen=f"{script.title}, in process and {name}: {found}"))
                break
    return findings


async def _in_process(environment: Environment, script: Script, budget: Budget) -> Any:
    sitting = Sitting(environment, budget)
    seen: list[Any] = []
    opening: list[Item] = []
    try:
        opening = (await sitting.open(script.task, seed=script.seed)).transcript.opening
        for turn in script.turns:
            if not sitting.over:
                # A turn that fails shows the policy nothing more.
                seen.append([])
                seen[-1] = _messages((await sitting.answer(wire.response(list(turn), model="script"))).items)
        if sitting.over:
            await sitting.judge()
    except EpisodeError as error:
        sitting.ending = error
    finally:
        await sitting.close()
    told = _told(sitting.rollout()) if sitting.ending else None
    if sitting.episode is None:
        # On the other faces an episode that could not be opened ends at its first step.
        seen, told = ([[]], told) if script.turns else ([], None)
    return plain({"opening": _messages(opening), "steps": seen, "end": told})


def _messages(items: Sequence[Item]) -> list[Item]:
    return chat.messages({"input": list(items)})


def _told(rollout: Rollout) -> Any:
    failure = rollout.failure.kind if rollout.failure else None
    verdict = rollout.verdict.model_dump(mode="json") if rollout.verdict else None
    components = rollout.components if rollout.verdict else None
    values = (rollout.outcome, rollout.ended, verdict, components)
    return dict(zip(SEEN, values, strict=True)) | {"failure": failure, "reward": rollout.reward}


def _of_info(info: Mapping[str, Any], total: float) -> Any:
    failure = info["failure"]["kind"] if info.get("failure") else None
    return {key: info.get(key) for key in SEEN} | {"failure": failure, "reward": None if failure else total}


def _gymnasium(environment: Environment, played: Sequence[Script], budget: Budget) -> list[Any]:
    from gymsdk.gym import Env

    env = Env(environment, turns=budget.turns, tools=budget.tools, seconds=budget.seconds)
    try:
        return [_single(env, script) for script in played]
    finally:
        env.close()


def _single(env: Any, script: Script) -> Any:
    opening, info = env.reset(seed=script.seed, options={"task": script.task})
    seen, paid, over = [], [], False
    for turn in script.turns:
        if not over:
            observation, reward, terminated, truncated, info = env.step(list(turn))
            seen.append(observation)
            paid.append(reward)
            over = terminated or truncated
    end = _of_info(info, sum(paid)) if over else None
    return plain({"opening": opening, "steps": seen, "end": end})


def _vector(environment: Environment, played: Sequence[Script], budget: Budget) -> list[Any]:
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


def _last_seat(env: Any, script: Script) -> Any:
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
"""The faces that are compared with the play in process."""


CHECKS = (
    Check(
        id="runtime.faces_agree",
        asks="the same task and actions give the same in process, through Env and through VectorEnv",
        why="what was evaluated on one face and trained on another must be the same environment",
        mend="let nothing depend on the event loop, the thread or the process an episode runs in; what episodes share "
        "belongs into `lifespan`, which every face enters",
        look=_look,
    ),
)
