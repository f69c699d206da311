"""The three real environments pass, and a defect in a single hook is found."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any, Literal

import pytest

import gym_env_math
import gym_env_multineedle
import gym_env_tool_call
from gym_env_math.grading import MathVerdict, grade_answer
from gym_env_math.problems import draw_problems
from gym_env_math.rows import MathTask, build_task
from gym_env_multineedle.grading import grade_extraction
from gym_env_multineedle.haystack import SynonymConfig, SynonymTask, compute_value, generate_tasks
from gym_env_tool_call import grading
from gym_env_tool_call.rows import Request
from gym_env_tool_call.world import Event, Records
from gymsdk import Environment, Reset, Transcript, Verdict, hookimpl
from gymsdk.checks.subject import Subject

Split = Literal["train", "validation"]
COUNT = 4
OPEN_FILES: list[int] = []
"""File descriptors that an environment has left open."""


@pytest.fixture(autouse=True)
def close_left_files():
    yield
    while OPEN_FILES:
        os.close(OPEN_FILES.pop())


def build_mutant(module: ModuleType, **hooks: Any) -> Subject:
    """Return the environment *module* with some of its hooks replaced."""
    changed = ModuleType(module.__name__)
    vars(changed).update({name: value for name, value in vars(module).items() if not name.startswith("__")})
    vars(changed).update(hooks)
    name = module.__name__.removeprefix("gym_env_")
    return Subject(name, lambda: Environment(name, changed), count=COUNT)


def unseeded_tasks() -> Subject:
    @hookimpl
    def tasks(split: Split):
        return map(build_task, draw_problems("train", random.getrandbits(64), ("fractions", "linear"), range(1, 4)))

    return build_mutant(gym_env_math, tasks=tasks)


def reward_for_containing_the_answer() -> Subject:
    @hookimpl
    def tasks(split: Split, seed: int):
        counted = (problem for problem in draw_problems("train", seed, ("combinatorics",), (1,)))
        return (
            build_task(each) for each in counted if each.problem.answer.isdigit() and int(each.problem.answer) < 200
        )

    @hookimpl
    async def verify(task: MathTask, transcript: Transcript):
        return Verdict(reward=float(task.expected_answer in transcript.text()))

    return build_mutant(gym_env_math, verify=verify, tasks=tasks)


def answer_in_the_prompt() -> Subject:
    @hookimpl
    def tasks(split: Split, seed: int):
        for each in gym_env_math.tasks(split, seed, gym_env_math.MathConfig()):
            prompt = f"{each.input[0]['content']}\n(For the grader: the expected answer is {each.expected_answer})"
            yield each.model_copy(update={"responses_create_params": {"input": prompt}})

    return build_mutant(gym_env_math, tasks=tasks)


def random_reward() -> Subject:
    @hookimpl
    async def verify(task: MathTask, transcript: Transcript, config: gym_env_math.MathConfig):
        verdict = await grade_answer(task, transcript.text(), config)
        return verdict.model_copy(update={"reward": verdict.reward * random.random()})

    return build_mutant(gym_env_math, verify=verify)


def reward_above_the_maximum() -> Subject:
    @hookimpl
    async def verify(task: MathTask, transcript: Transcript, config: gym_env_math.MathConfig):
        verdict = await grade_answer(task, transcript.text(), config)
        return verdict.model_copy(update={"reward": verdict.reward * 1.25})

    return build_mutant(gym_env_math, verify=verify)


def rejected_variant() -> Subject:
    @hookimpl
    async def verify(task: MathTask, transcript: Transcript):
        right = transcript.text() == f"\\boxed{{{task.expected_answer.strip('$')}}}"
        return MathVerdict(reward=float(right), library_reward=float(right), expected_answer=task.expected_answer)

    return build_mutant(gym_env_math, verify=verify)


def answer_in_a_tool_error() -> Subject:
    async def get_synonym_value(synonym: str, task: SynonymTask) -> dict[str, Any]:
        """Look up the value of one synonym."""
        known = dict(zip(task.expected_synonyms, task.expected_synonym_values, strict=True))
        return {"synonym_value": known[synonym]} if synonym in known else {"error": f"not one of {known}"}

    @hookimpl
    def tools():
        return [get_synonym_value, gym_env_multineedle.extract_synonym_values]

    return build_mutant(gym_env_multineedle, tools=tools)


def answer_in_a_schema() -> Subject:
    @hookimpl
    def tasks(split: Split, seed: int):
        for each in generate_tasks("train", seed, SynonymConfig()):
            description = f"Hand in the values, such as {each.expected_synonym_values}."
            tool = {"type": "function", "name": "extract_synonym_values", "description": description, "parameters": {}}
            yield each.model_copy(
                update={"responses_create_params": {**each.responses_create_params, "tools": [LOOK_UP, tool]}}
            )

    return build_mutant(gym_env_multineedle, tasks=tasks)


LOOK_UP = {"type": "function", "name": "get_synonym_value", "parameters": {}}


def failing_oracle() -> Subject:
    @hookimpl
    async def verify(task: SynonymTask, transcript: Transcript):
        sorted_task = task.model_copy(update={"expected_synonym_values": sorted(task.expected_synonym_values)})
        return grade_extraction(sorted_task, transcript.calls("extract_synonym_values"))

    return build_mutant(gym_env_multineedle, verify=verify)


def error_without_a_call() -> Subject:
    @hookimpl
    async def verify(task: SynonymTask, transcript: Transcript):
        return grade_extraction(task, [transcript.calls("extract_synonym_values")[-1]])

    return build_mutant(gym_env_multineedle, verify=verify)


def error_for_an_unknown_word() -> Subject:
    async def get_synonym_value(synonym: str) -> dict[str, int]:
        """Look up the value of one synonym."""
        return {"synonym_value": compute_value(synonym), "initial": ord(synonym[0])}

    @hookimpl
    def tools():
        return [get_synonym_value, gym_env_multineedle.extract_synonym_values]

    return build_mutant(gym_env_multineedle, tools=tools)


def verifier_that_changes_the_state() -> Subject:
    @hookimpl
    async def verify(task: Request, state: Records, transcript: Transcript):
        verdict = grading.grade_end(task, task.expected, state, transcript)
        state.events.append(Event(title="judged", date="2026-01-05", start="09:00", minutes=5))
        return verdict

    return build_mutant(gym_env_tool_call, verify=verify)


def state_shared_by_episodes() -> Subject:
    latest: list[Request] = []

    @hookimpl
    async def reset(task: Request):
        latest[:] = [task]
        return Reset(state=task.world.records, tools=task.offered)

    @hookimpl
    async def verify(state: Records, transcript: Transcript):
        return grading.grade_end(latest[0], latest[0].expected, state, transcript)

    return build_mutant(gym_env_tool_call, reset=reset, verify=verify)


def file_left_open() -> Subject:
    @hookimpl
    async def reset(task: Request):
        OPEN_FILES.append(os.open(os.devnull, os.O_RDONLY))
        return Reset(state=task.world.records, tools=task.offered)

    return build_mutant(gym_env_tool_call, reset=reset)


def reward_for_any_reply() -> Subject:
    @hookimpl
    async def verify(task: Request, state: Records, transcript: Transcript):
        verdict = grading.grade_end(task, task.expected, state, transcript)
        return Verdict(reward=max(verdict.reward, 0.3 * bool(transcript.reply.strip())))

    return build_mutant(gym_env_tool_call, verify=verify)


MUTATIONS: list[tuple[Callable[[], Subject], str]] = [
    (unseeded_tasks, "runtime.seed_control"),
    (reward_for_containing_the_answer, "semantic.floor_gap"),
    (answer_in_the_prompt, "semantic.no_solution_leakage"),
    (random_reward, "semantic.verifier_determinism"),
    (reward_above_the_maximum, "semantic.reward_range"),
    (rejected_variant, "semantic.variants"),
    (answer_in_a_tool_error, "semantic.no_solution_leakage"),
    (answer_in_a_schema, "semantic.no_solution_leakage"),
    (failing_oracle, "semantic.oracle_max"),
    (error_without_a_call, "semantic.canary_floor"),
    (error_for_an_unknown_word, "semantic.canary_floor"),
    (verifier_that_changes_the_state, "semantic.verifier_determinism"),
    (state_shared_by_episodes, "runtime.episode_isolation"),
    (file_left_open, "runtime.resources"),
    (reward_for_any_reply, "semantic.floor_gap"),
]
CHECKS = sorted({check for _, check in MUTATIONS})


@pytest.mark.parametrize(("mutation", "check"), MUTATIONS, ids=lambda each: getattr(each, "__name__", None))
async def test_a_mutation_is_found(mutation, check, outcome):
    result = await outcome(check, mutation())
    assert result.status == "failed", result.reason
    assert all(finding.problem for finding in result.findings)


@pytest.mark.parametrize("module", [gym_env_math, gym_env_multineedle, gym_env_tool_call])
@pytest.mark.parametrize("check", CHECKS)
async def test_unchanged_environments_pass(module, check, outcome):
    result = await outcome(check, build_mutant(module))
    assert result.status == "passed" or result.reason, result.findings
