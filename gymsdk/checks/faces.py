"""Check that a task gives the same results in process, through Gymnasium, in a vector environment and over HTTP."""

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
"""Seconds the server may take until it answers."""

STOP_SECONDS = 15.0
"""Seconds the server may take to stop."""

SERVER_LABEL = "the server of this check"


@asynccontextmanager
async def serve_environment(environment: Environment) -> AsyncIterator[Playable]:
    """Serve *environment* and yield its HTTP client."""
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
"""How many tasks are played, by the oracle and at random."""

NUM_ENVS = 2
"""The size of the vector environment."""

COMPARED_FIELDS = ("outcome", "ended", "verdict", "reward_components")
"""The fields of the last step's info that every interface reports."""

REWARD_DIGITS = 9
"""How many digits of a reward are compared. Interfaces add up step rewards in different orders."""

Face: TypeAlias = "Callable[[Environment, Sequence[Script], Budget], list[Plain]]"
"""Plays every script on one interface and returns what was observed."""


async def _check_faces(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        tasks = await subject.count_affordable(environment, MAX_TASKS, each=12)
        played = await build_scripts(subject, environment, tasks=tasks)
        here = [await _perform(environment, script) for script in played]
    with restore_process_state():
        return await _compare_faces(subject, played, here)


async def _compare_faces(subject: Subject, played: Sequence[Script], here: Sequence[Performance]) -> list[Finding]:
    """Compare how the scripts went in process with the other interfaces."""
    expected = [_describe_performance(performance) for performance in here]
    findings = []
    for name, face in FACES.items():
        for budget in dict.fromkeys(script.budget for script in played):
            chosen = [number for number, script in enumerate(played) if script.budget == budget]
            scripts_of = [played[number] for number in chosen]
            # These interfaces run an event loop of their own and block the caller.
            seen = await asyncio.to_thread(face, subject.make(), scripts_of, budget)
            findings += _find_mismatch(name, scripts_of, [expected[number] for number in chosen], seen)
    carried = [performance for performance in here if _is_expressible_over_http(performance)]
    return [*findings, *await _compare_http(subject, carried)]


def _find_mismatch(
    name: str, played: Sequence[Script], expected: Sequence[Plain], seen: Sequence[Plain]
) -> list[Finding]:
    """Return the first script whose results differ on the interface *name*."""
    for script, one, other in zip(played, expected, seen, strict=True):
        if found := find_difference(one, other):
            return [Finding(seen=f"{script.title}, in process and {name}: {found}")]
    return []


async def _perform(environment: Playable, script: Script) -> Performance:
    """Play *script* and judge it if it came to an end."""
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
        # On the other interfaces, an episode that cannot be opened ends at its first step.
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
    """Return *verdict* as a line of rollouts contains it, as far as JSON can represent it."""
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
"""The Gymnasium interfaces that are compared with the play in process."""


def _is_expressible_over_http(performance: Performance) -> bool:
    """Return whether HTTP can represent the play: tool outputs and a verdict in JSON, and no messages in between.

    For clients of NeMo Gym, a plain reply ends an episode. They never receive an environment's answer to it.
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
    """Return the part of a play that HTTP can represent: the opening, the tool outputs and the end."""
    opening = performance.episode.transcript.opening if performance.episode else []
    told = _describe_rollout(performance.rollout) if performance.has_ended else None
    return to_plain({"opening": opening, "steps": performance.answers, "end": _encode_nonfinite(told)})


def _encode_nonfinite(told: Plain) -> Plain:
    """Return *told* as JSON transports it: without nan and infinity, and with the reward beside the verdict."""
    assert isinstance(told, dict) or told is None, "a rollout is described by an object"
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
        why="evaluation and training may use different interfaces and must see the same environment",
        mend="let nothing depend on the event loop, the thread or the process of an episode; put shared objects into "
        "`lifespan`, which every interface enters",
        run=_check_faces,
    ),
)
