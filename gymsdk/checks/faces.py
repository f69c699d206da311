"""Faces: the same task and actions give the same in process, as a Gymnasium environment, in a vector, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

from gymsdk import jsonl
from gymsdk.checks.performance import Performance, Script, build_scripts
from gymsdk.checks.report import Check, Finding
from gymsdk.checks.subject import Plain, Subject, find_difference, restore_process_state, to_plain
from gymsdk.convert import chat
from gymsdk.environment import Environment
from gymsdk.types import Item, Playable, Rollout, Verdict

START_SECONDS = 30.0
"""Seconds a server may take until it answers."""

STOP_SECONDS = 15.0
"""Seconds it may take to end."""

SERVER_LABEL = "the server of this check"


@asynccontextmanager
async def serve_environment(environment: Environment) -> AsyncIterator[Playable]:
    """Give *environment* as clients reach it."""
    from gymsdk.deploy.runner import Strand
    from gymsdk.servers import listener, resources
    from gymsdk.servers.remote import RemoteEnvironment

    at = listener.bind_socket("127.0.0.1", what=SERVER_LABEL)
    port = at.getsockname()[1]
    server = listener.Listener(resources.create_app(environment), at, grace=1.0)
    strand = Strand(SERVER_LABEL, server.run)
    try:
        await strand.up(START_SECONDS)
        yield RemoteEnvironment(f"http://127.0.0.1:{port}", environment.name)
    finally:
        await strand.end(STOP_SECONDS)


if TYPE_CHECKING:
    from gymsdk.environment import Environment
    from gymsdk.episode import Budget
    from gymsdk.gym.env import Env
    from gymsdk.gym.vector import VectorEnv

MAX_TASKS = 3
"""Tasks that are played, by the oracle and at random."""

NUM_ENVS = 2
"""Seats of the vector that is compared."""

COMPARED_FIELDS = ("outcome", "ended", "verdict", "reward_components")
"""What the last step's info tells, on every face."""

REWARD_DIGITS = 9
"""Digits of a reward that are compared: faces add up what steps pay in other orders."""

Face: TypeAlias = "Callable[[Environment, Sequence[Script], Budget], list[Plain]]"
"""Plays every script to its end on one face and gives what was seen of each."""


async def _check_faces(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        tasks = await subject.count_affordable(environment, MAX_TASKS, each=12)
        played = await build_scripts(subject, environment, tasks=tasks)
        here = [await _perform(environment, script) for script in played]
    with restore_process_state():
        return await _compare_faces(subject, played, here)


async def _compare_faces(subject: Subject, played: Sequence[Script], here: Sequence[Performance]) -> list[Finding]:
    """Give where *played* went otherwise than *here*, in process."""
    expected = [_describe_performance(performance) for performance in here]
    findings = []
    for name, face in FACES.items():
        for budget in dict.fromkeys(script.budget for script in played):
            chosen = [number for number, script in enumerate(played) if script.budget == budget]
            scripts_of = [played[number] for number in chosen]
            # These faces have a loop of their own, and callers that wait for it.
            seen = await asyncio.to_thread(face, subject.make(), scripts_of, budget)
            findings += _find_mismatch(name, scripts_of, [expected[number] for number in chosen], seen)
    carried = [performance for performance in here if _is_expressible_over_http(performance)]
    return [*findings, *await _compare_http(subject, carried)]


def _find_mismatch(
    name: str, played: Sequence[Script], expected: Sequence[Plain], seen: Sequence[Plain]
) -> list[Finding]:
    """Give the first script that went otherwise on the face *name*."""
    for script, one, other in zip(played, expected, seen, strict=True):
        if found := find_difference(one, other):
            return [Finding(seen=f"{script.title}, in process and {name}: {found}")]
    return []


async def _perform(environment: Playable, script: Script) -> Performance:
    """Give the play of *script*, judged where it came to an end."""
    performance = Performance(script, environment)
    try:
        await performance.play_until_verdict()
        if performance.has_ended and not performance.has_failed:
            await performance.advance()
    finally:
        await performance.close()
    return performance


def _describe_performance(performance: Performance) -> Plain:
    opening = performance.episode.transcript.opening if performance.episode else []
    seen = [_list_messages(items or []) for items in performance.answers]
    told = _describe_rollout(performance.rollout) if performance.has_ended else None
    if performance.episode is None:
        # On the other faces an episode that could not be opened ends at its first step.
        seen, told = ([[]], told) if performance.script.turns else ([], None)
    return to_plain({"opening": _list_messages(opening), "steps": seen, "end": told})


def _list_messages(items: Sequence[Item]) -> list[Item]:
    return chat.build_messages({"input": list(items)})


def _describe_rollout(rollout: Rollout) -> Plain:
    failure = rollout.failure.kind if rollout.failure else None
    components = rollout.components if rollout.verdict else None
    values = (rollout.outcome, rollout.ended, _serialize_verdict(rollout.verdict), components)
    return to_plain(
        dict(zip(COMPARED_FIELDS, values, strict=True)) | {"failure": failure, "reward": _round_reward(rollout.reward)}
    )


def _serialize_verdict(verdict: Verdict | None) -> Plain:
    """Give *verdict* as a line of rollouts has it, as far as JSON can hold it."""
    try:
        return to_plain(verdict.model_dump(mode="json") if verdict else None)
    except ValueError:
        return to_plain(verdict)


def _round_reward(reward: float | None) -> float | None:
    return None if reward is None else round(reward, REWARD_DIGITS)


def _describe_info(info: Mapping[str, object], total: float) -> Plain:
    failure = info.get("failure")
    kind = failure["kind"] if isinstance(failure, dict) else None
    reward = None if failure else _round_reward(total)
    return to_plain({key: info.get(key) for key in COMPARED_FIELDS} | {"failure": kind, "reward": reward})


def _play_env(environment: Environment, played: Sequence[Script], budget: Budget) -> list[Plain]:
    from gymsdk.gym.env import Env

    env = Env(environment, turns=budget.turns, tools=budget.tools, seconds=budget.seconds)
    try:
        return [_play_one(env, script) for script in played]
    finally:
        env.close()


def _play_one(env: Env, script: Script) -> Plain:
    opening, info = env.reset(seed=script.seed, options={"task": script.task})
    seen, paid, over = [], [], False
    for turn in script.turns:
        if not over:
            observation, reward, terminated, truncated, info = env.step(list(turn))
            seen.append(observation)
            paid.append(float(reward))
            over = terminated or truncated
    end = _describe_info(info, sum(paid)) if over else None
    return to_plain({"opening": opening, "steps": seen, "end": end})


def _play_vector_env(environment: Environment, played: Sequence[Script], budget: Budget) -> list[Plain]:
    from gymsdk.gym.vector import VectorEnv

    env = VectorEnv(
        environment,
        num_envs=NUM_ENVS,
        autoreset_mode="disabled",
        turns=budget.turns,
        tools=budget.tools,
        seconds=budget.seconds,
    )
    try:
        return [_play_last_env(env, script) for script in played]
    finally:
        env.close()


def _play_last_env(env: VectorEnv, script: Script) -> Plain:
    import numpy as np

    from gymsdk.gym.vector import info_of

    opening, infos = env.reset(seed=[script.seed] * NUM_ENVS, options={"task": [script.task] * NUM_ENVS})
    seen, paid, over = [], [], False
    for turn in script.turns:
        if not over:
            observations, rewards, terminated, truncated, infos = env.step([list(turn)] * NUM_ENVS)
            seen.append(observations[-1])
            paid.append(float(rewards[-1]))
            over = bool(np.any(terminated | truncated))
    last = info_of(infos, NUM_ENVS - 1)
    end = _describe_info(last, sum(paid)) if over and "outcome" in last else None
    return to_plain({"opening": opening[-1], "steps": seen, "end": end})


FACES: dict[str, Face] = {"through Env": _play_env, "through VectorEnv": _play_vector_env}
"""The Gymnasium faces that are compared with the play in process."""


def _is_expressible_over_http(performance: Performance) -> bool:
    """Whether HTTP can carry it: outputs of tools and a verdict in JSON, but no messages on the way.

    To clients of NeMo Gym a plain reply ends an episode: what an environment says to it, they are never told.
    """
    if performance.episode is None:
        return False
    if any(item.get("type") != "function_call_output" for items in performance.answers for item in items or []):
        return False
    replied = any(item.get("type") == "message" for turn in performance.script.turns[:-1] for item in turn)
    return performance.has_ended and not replied and _is_json_verdict(performance.rollout.verdict)


def _is_json_verdict(verdict: Verdict | None) -> bool:
    try:
        jsonl.dump_json(verdict.model_dump(mode="json") if verdict else None)
    except (TypeError, ValueError):
        return False
    return True


async def _compare_http(subject: Subject, carried: Sequence[Performance]) -> list[Finding]:
    if not carried:
        return []
    async with serve_environment(subject.make()) as remote:
        for performance in carried:
            there = await _perform(remote, performance.script)
            if found := find_difference(_describe_http_view(performance), _describe_http_view(there)):
                return [Finding(seen=f"{performance.script.title}, in process and over HTTP: {found}")]
    return []


def _describe_http_view(performance: Performance) -> Plain:
    """Give what HTTP can carry of a play: what it opened with, what its tools gave, and how it ended."""
    opening = performance.episode.transcript.opening if performance.episode else []
    told = _describe_rollout(performance.rollout) if performance.has_ended else None
    return to_plain({"opening": opening, "steps": performance.answers, "end": _encode_nonfinite(told)})


def _encode_nonfinite(told: Plain) -> Plain:
    """Give *told* as it comes through JSON, which has no nan and no infinity; the reward stands beside the verdict."""
    assert isinstance(told, dict) or told is None, "it is an object"
    verdict = (told or {}).get("verdict")
    if not isinstance(verdict, dict):
        return told
    fields = {key: value for key, value in verdict.items() if key not in {"reward", "components"}}
    return {
        **(told or {}),
        "verdict": {key: None if value in NONFINITE_NAMES else value for key, value in fields.items()},
    }


NONFINITE_NAMES = ("nan", "inf", "-inf")

CHECKS = (
    Check(
        id="runtime.faces_agree",
        asks="the same task and actions give the same in process, through Env, through VectorEnv and over HTTP",
        why="what was evaluated in one of these ways and trained in another must be the same environment",
        mend="let nothing depend on the event loop, the thread or the process an episode runs in; what episodes share "
        "belongs into `lifespan`, which is entered in each of these ways",
        run=_check_faces,
    ),
)
