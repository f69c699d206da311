"""Runs of checks: time limits, results and reports."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

from gymsdk.checks import run as check_catalog
from gymsdk.checks.loading import LOAD_CHECK, check_loading
from gymsdk.checks.report import Check, Finding, NotApplicable, format_report
from gymsdk.checks.run import CheckRun, run_in_thread
from gymsdk.checks.subject import Subject
from gymsdk.errors import BadConfig, Failed, UnknownSplit, UsageError

SUMS = """
class Settings(Config):
    digits: int = 3

class Sum(Task):
    answer: int

@hookimpl
def tasks(split: Literal["train", "test"], seed, config: Settings):
    rng = random.Random(f"{split}:{seed}")
    while True:
        first, second = rng.randrange(10**config.digits), rng.randrange(1000)
        yield Sum.ask(f"What is {first} + {second}?", answer=first + second)

@hookimpl
async def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.answer)))

@hookimpl
async def solve(task: Sum):
    return Message(content=str(task.answer))
"""


def build_check(run: Callable[[Subject], Awaitable[list[Finding]]], **options) -> Check:
    return Check(id="runtime.made", requirement="all is well", why="it matters", fix="mend it", run=run, **options)


async def find_nothing(subject):
    return []


async def find_something(subject):
    return [Finding(problem="a crack")]


async def find_nothing_to_examine(subject):
    raise NotApplicable("it has no tools")


async def sleep(subject):
    await asyncio.sleep(60)


async def fail_in_an_episode(subject):
    raise Failed("the tool broke", kind="tool_raised", stage="step")


async def fail_in_a_task_group(subject):
    async with asyncio.TaskGroup() as group:
        group.create_task(fail_in_an_episode(subject))


@pytest.mark.parametrize(
    ("check", "episode_seconds", "status", "text"),
    [
        (build_check(find_nothing), None, "passed", ""),
        (build_check(find_something), None, "failed", "a crack"),
        (build_check(find_nothing_to_examine), None, "skipped", "it has no tools"),
        (build_check(sleep, seconds=0.05), None, "failed", "it did not end within 0.05 seconds"),
        (
            build_check(sleep, seconds=0.05),
            2.0,
            "skipped",
            "an episode takes 2.0 s, so the check did not end within 0.05 s",
        ),
        (build_check(fail_in_an_episode), None, "failed", "it failed in step (tool_raised): the tool broke"),
        (build_check(fail_in_a_task_group), None, "failed", "it failed in step (tool_raised): the tool broke"),
    ],
)
async def test_a_check_passes_fails_or_is_skipped_with_its_reason(subject, check, episode_seconds, status, text):
    sums = subject(SUMS)
    sums.episode_seconds = episode_seconds or sums.episode_seconds
    result = await CheckRun(sums).run_check(check)
    assert (result.status, result.why) == (status, "it matters" if result.findings else result.why)
    assert [finding.problem for finding in result.findings] == ([text] if status == "failed" else [])
    assert result.reason.partition(";")[0] == (text if status == "skipped" else "")


async def test_a_check_with_slow_episodes_plays_fewer_or_is_skipped_with_the_needed_time(subject):
    sums = subject(SUMS)
    sums.episode_seconds = 3.0
    async with sums.enter_environment() as environment:
        assert await sums.count_affordable(environment, 100, episodes=2) == sums.check_seconds // 6
    sums.episode_seconds = 30.0

    async def check(subject):
        async with subject.enter_environment() as environment:
            await subject.count_affordable(environment, 9, episodes=8)
        return [Finding(problem="it went on")]

    result = await CheckRun(sums).run_check(build_check(check))
    assert result.status == "skipped"
    assert result.reason.startswith(
        "an episode takes 30.0 s, so the required 8 episodes take about 240 s; the check had 1"
    )


async def test_code_that_blocks_the_loop_fails_its_check_and_the_rest_is_skipped(subject, stuck):
    async def block(subject):
        stuck.wait()

    run = CheckRun(subject(SUMS), grace=0.2)
    results = [await run.run_check(build_check(check, seconds=0.05)) for check in (block, find_nothing)]
    assert [result.status for result in results] == ["failed", "skipped"]
    assert "could not be stopped" in results[0].findings[0].problem


async def test_an_exception_of_the_environment_is_a_finding(subject):
    async def check(subject):
        subject.environment.plugin.tasks("train", 0, None).send(None)

    [finding] = (await CheckRun(subject(SUMS)).run_check(build_check(check))).findings
    assert "raised AttributeError: 'NoneType' object has no attribute 'digits'" in finding.problem


async def test_an_internal_error_fails_the_check_and_the_others_continue(subject):
    async def check(subject):
        raise ZeroDivisionError("division by zero")

    report = await CheckRun(subject(SUMS)).report([build_check(check), build_check(find_nothing)])
    assert [result.status for result in report.results] == ["failed", "passed"]
    [finding] = report.results[0].findings
    assert re.fullmatch(
        r"the check itself failed: ZeroDivisionError: division by zero \(test_run.py:\d+\)", finding.problem
    )
    assert "report it as a bug of gymsdk" in finding.fix


async def test_equal_warnings_are_kept_once_and_texts_are_escaped(subject):
    async def check(subject):
        for _ in range(3):
            logging.getLogger("gymsdk").warning("the hook %s raised", "close")
        return [Finding(problem="it said \ud800\x1b[2J\u202e")]

    report = await CheckRun(subject(SUMS)).report([build_check(check)])
    assert report.results[0].warnings == ["the hook close raised"]
    assert r"it said \\ud800" in report.model_dump_json()
    assert r"it said \ud800\x1b[2J\u202e" in format_report(report)


async def test_warnings_of_earlier_checks_are_not_repeated(subject):
    async def check(subject):
        logging.getLogger("gymsdk").warning("episode %s: it does not close", "without an id")
        return []

    run = CheckRun(subject(SUMS))
    warnings = [(await run.run_check(build_check(check))).warnings for _ in range(2)]
    assert warnings == [["an episode: it does not close"], []]


async def test_if_loading_fails_the_remaining_checks_are_skipped(subject):
    run = CheckRun(subject(SUMS.replace("rng.randrange(1000)", "rng.choice([])")))
    results = [await run.run_check(build_check(find_nothing)) for _ in range(2)]
    assert [result.status for result in results] == ["failed", "skipped"]
    assert "hook 'tasks' raised IndexError" in results[0].findings[0].problem
    assert results[1].reason == "it does not load"


@pytest.mark.slow
async def test_checks_that_need_no_loaded_environment_run_if_loading_fails(subject):
    run = CheckRun(subject("1 / 0"))
    report = await run.report(check_catalog.select_checks(["packaging", "runtime.load", "runtime.splits"]))
    statuses = {result.id: result.status for result in report.results}
    assert (statuses["packaging.metadata"], statuses["runtime.load"], statuses["runtime.splits"]) == (
        "passed",
        "failed",
        "skipped",
    )


async def test_a_tasks_hook_that_hangs_fails_the_loading(subject, stuck):
    sums = subject(SUMS.replace("while True:", "while WAIT.wait():"))
    sums.environment.plugin.WAIT = stuck
    result = await CheckRun(sums, load=replace(LOAD_CHECK, run=partial(check_loading, seconds=0.2))).run_check(
        build_check(find_nothing)
    )
    assert "were not drawn within 0.2 seconds" in result.findings[0].problem


async def test_a_misspelt_setting_raises_an_error_for_the_caller(subject):
    with pytest.raises(BadConfig, match="digts"):
        await CheckRun(subject(SUMS, digts=2)).run_check(build_check(find_nothing))


async def test_only_the_selected_split_is_checked_and_a_misspelt_one_raises_an_error(subject):
    sums = subject(SUMS, count=3)
    sums.split = "test"
    assert len(sums.tasks) == 3
    sums = subject(SUMS)
    sums.split = "tset"
    with pytest.raises(UnknownSplit, match="did you mean 'test'"):
        await CheckRun(sums).run_check(build_check(find_nothing))


def test_run_in_thread_works_with_and_without_a_running_loop():
    async def work():
        return 42

    async def fail():
        raise UsageError("no")

    async def within():
        return run_in_thread(work())

    assert (run_in_thread(work()), asyncio.run(within())) == (42, 42)
    with pytest.raises(UsageError, match="no"):
        run_in_thread(fail())


async def test_a_report_shows_findings_reason_and_fix(subject):
    report = await CheckRun(subject(SUMS)).report([build_check(find_something), build_check(find_nothing)])
    lines = format_report(report).splitlines()
    assert lines[:4] == [
        "FAIL  runtime.made                      all is well",
        "      problem: a crack",
        "      why:     it matters",
        "      fix:     mend it",
    ]
    assert lines[-1].startswith("1 passed, 1 failed in ")
