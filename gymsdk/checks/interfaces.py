"""Check that a task gives the same results in process, through Gymnasium, in a vector environment and over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeAlias

from gymsdk import jsonl
from gymsdk.checks.oracle import BUDGET_LABELS
from gymsdk.checks.phases import Performance, Script, build_scripts
from gymsdk.checks.report import Check, Finding
from gymsdk.checks.subject import Plain, Subject, find_difference, restore_process_state, to_plain
from gymsdk.convert import chat
from gymsdk.types import Item, Playable, Rollout, Verdict

if TYPE_CHECKING:
    from gymsdk.environment import Environment
    from gymsdk.gym.env import Env
    from gymsdk.gym.vector import VectorEnv
    from gymsdk.types import Budget

START_SECONDS = 30.0
"""Seconds the server may take until it answers."""

STOP_SECONDS = 15.0
"""Seconds the server may take to stop."""

SERVER_LABEL = "the server of this check"


@asynccontextmanager
async def serve_environment(environment: Environment) -> AsyncIterator[Playable]:
    """Serve *environment* and yield its HTTP client."""
    from gymsdk.deploy.runner import BackgroundTask
    from gymsdk.edge.addresses import bind_socket
    from gymsdk.edge.listener import Listener
    from gymsdk.servers import resources
    from gymsdk.servers.remote import RemoteEnvironment

    listening_socket = bind_socket("127.0.0.1", what=SERVER_LABEL)
    port = listening_socket.getsockname()[1]
    server = Listener(resources.create_app(environment), listening_socket, grace=1.0)
    task = BackgroundTask(SERVER_LABEL, server.run)
    try:
        await task.wait_until_up(START_SECONDS)
        yield RemoteEnvironment(f"http://127.0.0.1:{port}", environment.name)
    finally:
        await task.stop(STOP_SECONDS)


MAX_TASKS = 3
"""How many tasks are played, by the oracle and at random."""

NUM_ENVS = 2
"""The size of the vector environment."""

COMPARED_FIELDS = ("outcome", "ended", "verdict", "reward_components")
"""The fields of the last step's info that every interface reports."""

REWARD_DIGITS = 9
"""How many digits of a reward are compared. Interfaces add up step rewards in different orders."""

PlayScripts: TypeAlias = "Callable[[Environment, Sequence[Script], Budget], list[Plain]]"
"""Plays every script on one interface and returns the observations."""


async def _check_interfaces(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        tasks = await subject.count_affordable(environment, MAX_TASKS, episodes=12)
        played_scripts = await build_scripts(subject, environment, tasks=tasks)
        in_process = [await _perform(environment, script) for script in played_scripts]
    with restore_process_state():
        return await _compare_interfaces(subject, played_scripts, in_process)


async def _compare_interfaces(
    subject: Subject, played_scripts: Sequence[Script], in_process: Sequence[Performance]
) -> list[Finding]:
    """Compare how the scripts went in process with the other interfaces."""
    expected = [_describe_performance(performance) for performance in in_process]
    findings = []
    for name, play_scripts in GYMNASIUM_INTERFACES.items():
        budgets = [_choose_budget(performance, subject.budget) for performance in in_process]
        for budget in dict.fromkeys(budgets):
            chosen = [number for number, other in enumerate(budgets) if other == budget]
            budget_scripts = [played_scripts[number] for number in chosen]
            # These interfaces run their own event loop and block the caller.
            observed = await asyncio.to_thread(play_scripts, subject.make(), budget_scripts, budget)
            findings += _find_first_mismatch(name, budget_scripts, [expected[number] for number in chosen], observed)
    expressible = [performance for performance in in_process if _is_expressible_over_http(performance)]
    return [*findings, *await _compare_http(subject, expressible)]


def _choose_budget(performance: Performance, largest: Budget) -> Budget:
    """Return the budget of a play, or the *largest* one if no budget ended the play.

    Each budget needs an interface of its own, which enters `lifespan`.
    """
    ended = performance.episode.transcript.ended if performance.episode else None
    return performance.script.budget if ended in BUDGET_LABELS else largest


def _find_first_mismatch(
    name: str, played_scripts: Sequence[Script], expected: Sequence[Plain], observed: Sequence[Plain]
) -> list[Finding]:
    """Return one finding for the first script whose results differ on the interface *name*, or none."""
    for script, in_process, on_interface in zip(played_scripts, expected, observed, strict=True):
        if difference := find_difference(in_process, on_interface):
            return [Finding(problem=f"{script.title}, in process and {name}: {difference}")]
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
    steps = [_list_messages(items or []) for items in performance.answers]
    end = _describe_rollout(performance.rollout) if performance.has_ended else None
    if performance.episode is None:
        # On the other interfaces, an episode that cannot be opened ends at its first step.
        steps, end = ([[]], end) if performance.script.turns else ([], None)
    return to_plain({"opening": _list_messages(opening), "steps": steps, "end": end})


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


def _play_env(environment: Environment, played_scripts: Sequence[Script], budget: Budget) -> list[Plain]:
    from gymsdk.gym.env import Env

    env = Env(environment, turns=budget.turns, tools=budget.tools, seconds=budget.seconds)
    try:
        return [_play_one(env, script) for script in played_scripts]
    finally:
        env.close()


def _play_one(env: Env, script: Script) -> Plain:
    opening, info = env.reset(seed=script.seed, options={"task": script.task})
    observations, step_rewards, done = [], [], False
    for turn in script.turns:
        if not done:
            observation, reward, terminated, truncated, info = env.step(list(turn))
            observations.append(observation)
            step_rewards.append(float(reward))
            done = terminated or truncated
    end = _describe_info(info, sum(step_rewards)) if done else None
    return to_plain({"opening": opening, "steps": observations, "end": end})


def _play_vector_env(environment: Environment, played_scripts: Sequence[Script], budget: Budget) -> list[Plain]:
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
        return [_play_last_env(env, script) for script in played_scripts]
    finally:
        env.close()


def _play_last_env(env: VectorEnv, script: Script) -> Plain:
    import numpy as np

    from gymsdk.gym.vector import get_info

    opening, infos = env.reset(seed=[script.seed] * NUM_ENVS, options={"task": [script.task] * NUM_ENVS})
    last_observations, step_rewards, done = [], [], False
    for turn in script.turns:
        if not done:
            observations, rewards, terminated, truncated, infos = env.step([list(turn)] * NUM_ENVS)
            last_observations.append(observations[-1])
            step_rewards.append(float(rewards[-1]))
            done = bool(np.any(terminated | truncated))
    last = get_info(infos, NUM_ENVS - 1)
    end = _describe_info(last, sum(step_rewards)) if done and "outcome" in last else None
    return to_plain({"opening": opening[-1], "steps": last_observations, "end": end})


GYMNASIUM_INTERFACES: dict[str, PlayScripts] = {"through Env": _play_env, "through VectorEnv": _play_vector_env}
"""The Gymnasium interfaces that are compared with the play in process."""


def _is_expressible_over_http(performance: Performance) -> bool:
    """Return whether HTTP can represent the play.

    It can if the environment answers with tool outputs only, the verdict is valid JSON, and the policy replies only in
    its last turn: for clients of NeMo Gym a plain reply ends the episode.
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


async def _compare_http(subject: Subject, performances: Sequence[Performance]) -> list[Finding]:
    if not performances:
        return []
    async with serve_environment(subject.make()) as remote:
        for performance in performances:
            remote_performance = await _perform(remote, performance.script)
            difference = find_difference(_describe_http_view(performance), _describe_http_view(remote_performance))
            if difference:
                return [Finding(problem=f"{performance.script.title}, in process and over HTTP: {difference}")]
    return []


def _describe_http_view(performance: Performance) -> Plain:
    """Return the part of a play that HTTP can represent: the opening, the tool outputs and the end."""
    opening = performance.episode.transcript.opening if performance.episode else []
    end = _describe_rollout(performance.rollout) if performance.has_ended else None
    return to_plain({"opening": opening, "steps": performance.answers, "end": _encode_nonfinite(end)})


def _encode_nonfinite(end: Plain) -> Plain:
    """Return *end* as an HTTP response has it: without nan and infinity, and with the reward outside the verdict."""
    assert isinstance(end, dict) or end is None, "a rollout is described by an object"
    verdict = (end or {}).get("verdict")
    if not isinstance(verdict, dict):
        return end
    fields = {key: value for key, value in verdict.items() if key not in {"reward", "components"}}
    return {
        **(end or {}),
        "verdict": {key: None if value in NONFINITE_NAMES else value for key, value in fields.items()},
    }


NONFINITE_NAMES = ("nan", "inf", "-inf")

CHECKS = (
    Check(
        id="runtime.faces_agree",
        requirement="the same task and actions give the same in process, through Env, through VectorEnv and over HTTP",
        why="evaluation and training may use different interfaces and must see the same environment",
        fix="let nothing depend on the event loop, the thread or the process of an episode; put shared objects into "
        "`lifespan`, which every interface enters",
        run=_check_interfaces,
    ),
)
