"""Environments with a judge pass with a fixed judge, and their defects are still found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from gymsdk import model, testing
from gymsdk.checks.run import CHECKS, CheckRun
from gymsdk.models.scripted import ScriptedModel, build

JUDGED = """
CITIES = {
    "train": {"France": "Paris", "Italy": "Rome", "Kenya": "Nairobi", "Norway": "Oslo", "Japan": "Tokyo"},
    "test": {"Spain": "Madrid", "Egypt": "Cairo", "Chile": "Santiago", "Nepal": "Kathmandu", "Malta": "Valletta"},
}


class Judged(Config):
    '''The settings: the judge compares answers.'''

    judge: Model DEFAULT


class Question(Task):
    expected: str


@hookimpl
def tasks(split: Literal["train", "test"]):
    for country, city in CITIES[split].items():
        yield Question.ask(f"What is the capital of {country}?", expected=city)


@hookimpl
async def verify(task: Question, transcript: Transcript, config: Judged):
    text = f"Expected: {task.expected}\\nGiven: {transcript.reply}\\nAnswer yes or no."
    answer = await config.judge.respond({"input": [{"role": "user", "content": text}]})
    word = "".join(part.get("text", "") for item in answer["output"] for part in item.get("content", []))
    return Verdict(reward=float(GRADE))


@hookimpl
def solve(task: Question):
    return Message(content=task.expected)
"""
SOUND = JUDGED.replace("DEFAULT", "").replace("GRADE", 'word.strip() == "yes"')
CITIES = re.findall(r'": "(\w+)"', JUDGED)
LINES = [{"when": f"Expected: {city}\nGiven: {city}\nAnswer", "text": "yes"} for city in CITIES]
REWARD_CHECKS = {"semantic.oracle_max", "semantic.floor_gap", "semantic.canary_floor"}


def write_judge(folder: Path, *lines: dict[str, str]) -> str:
    path = folder / "judge.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return f"scripted/script:{path}"


async def check_all(subject, **settings) -> dict[str, str]:
    report = await CheckRun(subject(SOUND, **settings)).report(CHECKS)
    failed = [(result.id, result.findings) for result in report.results if result.status == "failed"]
    assert failed == []
    return {result.id: result.status for result in report.results}


@pytest.mark.slow
async def test_a_fixed_judge_that_compares_passes_every_check(subject, tmp_path):
    results = await check_all(subject, judge=write_judge(tmp_path, *LINES, {"text": "no"}))
    assert {results[name] for name in REWARD_CHECKS} == {"passed"}


@pytest.mark.slow
async def test_a_judge_that_is_passed_as_an_object_passes_every_check(subject, tmp_path):
    judge = build(write_judge(tmp_path, *LINES, {"text": "no"}).removeprefix("scripted/"))
    assert isinstance(judge, ScriptedModel)
    results = await check_all(subject, judge=judge)
    assert {results[name] for name in REWARD_CHECKS} == {"passed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "skipped"),
    [("yes", {"semantic.floor_gap", "semantic.canary_floor"}), ("no", {"semantic.oracle_max"})],
)
async def test_a_judge_with_one_answer_fails_no_check(subject, tmp_path, word, skipped):
    results = await check_all(subject, judge=write_judge(tmp_path, {"text": word}))
    assert {name for name in REWARD_CHECKS if results[name] == "skipped"} == skipped


@pytest.mark.slow
async def test_a_judge_behind_http_passes_every_check(subject, tmp_path):
    judge = model(write_judge(tmp_path, *LINES, {"text": "no"}))
    async with testing.serve(testing.build_app(judge, name="judge")) as url:
        results = await check_all(subject, judge=f"vllm/judge@{url}")
    assert {results[name] for name in REWARD_CHECKS} == {"passed"}


@pytest.mark.parametrize(
    ("grade", "check"),
    [
        ('word.strip() == "yes" or "yes" in transcript.reply.lower()', "semantic.floor_gap"),
        ('word.strip() == "yes" or "score: 1.0" in transcript.reply', "semantic.canary_floor"),
        ('word.strip() == "certainly"', "semantic.oracle_max"),
    ],
)
async def test_a_defect_beside_a_fixed_judge_is_found(subject, outcome, tmp_path, grade, check):
    source = JUDGED.replace("DEFAULT", "").replace("GRADE", grade)
    judge = write_judge(tmp_path, *LINES, {"text": "no"})
    assert (await outcome(check, subject(source, judge=judge))).status == "failed"
