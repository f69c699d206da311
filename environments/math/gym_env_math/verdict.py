"""Grade an answer: with the shortcut, with math-verify, and with a judge if the settings name one."""

from __future__ import annotations

from typing import Any

from gymsdk import BudgetSpent, Unscorable, Verdict

from . import answers
from .judge import judge
from .rows import MathTask, question_of
from .settings import MathConfig
from .shortcut import Grade, Kept, integers, only_box


class MathVerdict(Verdict):
    """The verdict on an answer.

    Attributes:
        expected_answer: The expected answer, as in the row.
        extracted_answer: The answer that math-verify found in the text, or `None`.
        library_reward: The reward from math-verify, before the judge.
        judge_evaluations: The calls to the judge, or `None` if there were none.
    """

    expected_answer: str
    extracted_answer: str | None = None
    library_reward: float
    judge_evaluations: list[dict[str, Any]] | None = None


async def decided(task: MathTask, text: str, config: MathConfig, kept: Kept) -> MathVerdict:
    """Grade everything that the policy wrote.

    Args:
        task: The row with the expected answer.
        text: The text of the policy, without reasoning.
        config: The settings of the environment.
        kept: The cache of settled grades.

    Returns:
        The verdict.

    Raises:
        Unscorable: math-verify cannot read the expected answer and there is no judge, or the judge fails.
    """
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
    """Grade *text* without a judge.

    Args:
        gold: The expected answer without delimiters.
        text: The text of the policy.
        config: The settings of the environment.
        kept: The cache of settled grades.

    Returns:
        The grade, or `None` if math-verify cannot read the expected answer.

    Raises:
        BudgetSpent: Grading exceeded its CPU budget.
        WorkerLost: The worker process died.
    """
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
        # An answer that exceeds the CPU budget is wrong, unless reading the gold answer alone exceeds it too.
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
    # JSON cannot encode an unpaired surrogate.
    return None if extracted is None else extracted.encode(errors="replace").decode()
