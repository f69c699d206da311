"""The verdict on an answer: the shortcut's or math-verify's, and a judge's where one is set."""

from __future__ import annotations

from typing import Any

from gymsdk import BudgetSpent, Unscorable, Verdict

from . import answers
from .judge import judge
from .rows import MathTask, question_of
from .settings import MathConfig
from .shortcut import Grade, Kept, integers, only_box


class MathVerdict(Verdict):
    """The reward, the answer that was found, what math-verify gave it, and the judge's calls if any."""

    expected_answer: str
    extracted_answer: str | None = None
    library_reward: float
    judge_evaluations: list[dict[str, Any]] | None = None


async def decided(task: MathTask, text: str, config: MathConfig, kept: Kept) -> MathVerdict:
    """Give the verdict on everything the policy wrote; raises `Unscorable` where none can be had."""
    gold = answers.bare(task.expected_answer)
    grade, spent = await _graded_in_budget(gold, text, config, kept)
    if grade is None and config.judge is None:
        raise Unscorable(
            f"math-verify cannot read the expected answer {task.expected_answer!r}; write it as LaTeX, or set a judge",
            kind="gold_unreadable",
        )
    reward, extracted, _ = grade or Grade(0.0, None)
    verdict = MathVerdict(
        reward=reward,
        library_reward=reward,
        expected_answer=task.expected_answer,
        extracted_answer=_sendable(extracted),
        grader_timeout=spent,
    )
    return verdict if reward else await _second_opinion(verdict, task, text, config)


async def graded(gold: str, text: str, config: MathConfig, kept: Kept) -> Grade | None:
    """Give the grade of *text*, `None` where the gold answer cannot be read; raises `BudgetSpent`, `WorkerLost`."""
    box = only_box(text) if config.shortcut else None
    if box is None:
        return await answers.grade(gold, text, None, config.gold_cache)
    grade = integers(gold, box) or kept.get(gold, box)
    if grade is None:
        grade = await answers.grade(gold, text, box, config.gold_cache)
        kept.put(gold, box, grade)
    return grade


async def _graded_in_budget(gold: str, text: str, config: MathConfig, kept: Kept) -> tuple[Grade | None, bool]:
    try:
        return await graded(gold, text, config, kept), False
    except BudgetSpent:
        # An answer too heavy to compare is wrong; beside a gold answer too heavy to read, none can be.
        return (Grade(0.0, None), True) if await _readable(gold) else (None, False)


async def _readable(gold: str) -> bool:
    try:
        return await answers.readable(gold)
    except BudgetSpent:
        return False


async def _second_opinion(verdict: MathVerdict, task: MathTask, text: str, config: MathConfig) -> MathVerdict:
    if config.judge is None:
        return verdict
    answer = verdict.extracted_answer or text
    question = question_of(task)
    judgement = await judge(config.judge, question, task.expected_answer, answer, config.judge_options)
    opinion = {"reward": float(judgement.equal), "judge_evaluations": judgement.evaluations}
    return verdict.model_copy(update=opinion)


def _sendable(extracted: str | None) -> str | None:
    # Half a surrogate pair has no place in JSON.
    return None if extracted is None else extracted.encode(errors="replace").decode()
