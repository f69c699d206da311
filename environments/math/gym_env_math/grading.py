"""Grade answers with gymsdk's grader or math-verify, and ask a judge if the settings name one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any, NamedTuple

from gymsdk import BudgetSpent, Rollout, Unscorable, Verdict
from gymsdk.graders import maths

from . import library
from .judge import judge
from .rows import MathConfig, MathTask, get_question

_NUMBER = re.compile(r"-?(?:[0-9.]+|\\d?frac\{-?[0-9]+\}\{[0-9]+\}|[0-9]+/[0-9]+)")
_OPERATION = re.compile(r"(?<!\A)(?<![{(])[-+*]|\\(?:cdot|times|div|sum|int|binom|sqrt)\b|!")
_FORMULA = re.compile(r"\\\((.+?)\\\)|\$(.+?)\$", re.DOTALL)
_IGNORED = re.compile(r"[\s\\$()=?.]")
INTEGER = re.compile(r"0|-?[1-9][0-9]{0,14}")
MAX_WRITTEN = 1000
UNDECIDED = "undecided"
GOLD_UNREADABLE = "gold_unreadable"


def strip_delimiters(expected: str) -> str:
    r"""Return the gold answer without surrounding whitespace, `\( \)` or `$ $`."""
    gold = expected.strip()
    if len(gold) >= len(r"\(\)") and gold.startswith(r"\(") and gold.endswith(r"\)"):
        gold = gold[2:-2].strip()
    if len(gold) >= len("$$") and gold.startswith("$") and gold.endswith("$"):
        gold = gold[1:-1].strip()
    return gold


def wrap_in_box(content: str) -> str:
    r"""Return *content* in a `\boxed{}`."""
    return f"\\boxed{{{content}}}"


GUESS_REWARD = 0.02
"""The highest expected reward of guessing an integer."""


def compute_guess_reward(task: MathTask) -> float:
    """Return the highest expected reward of a guess. Only an integer can be guessed."""
    return GUESS_REWARD if INTEGER.fullmatch(strip_delimiters(task.expected_answer)) else 0.0


class MathVerdict(Verdict):
    """The verdict on an answer.

    Attributes:
        expected_answer: The expected answer, as in the row.
        extracted_answer: The answer that the grader found in the text, in its normal form, or `None`.
        written_answer: The same answer as the policy wrote it, up to `MAX_WRITTEN` characters.
        library_reward: The reward from the grader, before the judge.
        grader: The grader. Verdicts of version 0.1, which have no such field, are from math-verify.
        grader_version: The version of the grader; empty in verdicts of version 0.1.
        undecided: Whether gymsdk's grader read both answers but could not compare them, so that the judge, math-verify
            or the setting `undecided` decided.
        judge_evaluations: The calls to the judge, or `None` if there were none.
    """

    expected_answer: str
    extracted_answer: str | None = None
    written_answer: str | None = None
    library_reward: float
    grader: str = library.GRADER
    grader_version: str = ""
    undecided: bool = False
    judge_evaluations: list[dict[str, Any]] | None = None


class _Graded(NamedTuple):
    """The result of a grader: `None` as reward if it gives none, for the reason that is the kind."""

    reward: float | None
    extracted: str | None
    grader: str
    version: str
    kind: str = ""
    reason: str = ""
    spent: bool = False
    undecided: bool = False
    written: str | None = None


async def grade_answer(task: MathTask, text: str, config: MathConfig) -> MathVerdict:
    """Grade everything that the policy wrote.

    Args:
        task: The row with the expected answer.
        text: The text of the policy, without reasoning.
        config: The settings of the environment.

    Returns:
        The verdict.

    Raises:
        Unscorable: The grader cannot read the expected answer, or cannot compare the answers, and there is no judge; or
            the judge fails.
    """
    graded = await _grade_text(strip_delimiters(task.expected_answer), text, config)
    if graded.reward and graded.written is not None and copies_calculation(task, graded.written):
        graded = graded._replace(reward=0.0)
    if graded.reward is None and config.judge is None:
        raise Unscorable(graded.reason, kind=graded.kind)
    reward = graded.reward or 0.0
    verdict = MathVerdict(
        reward=reward,
        library_reward=reward,
        expected_answer=task.expected_answer,
        extracted_answer=_replace_surrogates(graded.extracted),
        written_answer=_replace_surrogates(graded.written and graded.written[:MAX_WRITTEN]),
        grader=graded.grader,
        grader_version=graded.version,
        grader_timeout=graded.spent,
        undecided=graded.undecided,
    )
    if reward or config.judge is None:
        return verdict
    answer = _replace_surrogates(graded.written or graded.extracted) or text
    judgement = await judge(config.judge, get_question(task), task.expected_answer, answer, config.judge_options)
    return verdict.model_copy(update={"reward": float(judgement.equal), "judge_evaluations": judgement.evaluations})


def copies_calculation(task: MathTask, written: str) -> bool:
    """Return whether an answer copies a calculation of the question, which is not worked out.

    Args:
        task: The row with the question and the expected answer. Only numbers are calculated.
        written: The answer as the policy wrote it.
    """
    if not _NUMBER.fullmatch(strip_delimiters(task.expected_answer)) or not _OPERATION.search(written):
        return False
    answer = _IGNORED.sub("", written)
    return any(_IGNORED.sub("", "".join(found)) == answer for found in _FORMULA.findall(get_question(task)))


async def _grade_text(gold: str, text: str, config: MathConfig) -> _Graded:
    if config.grader == library.GRADER:
        return await _grade_with_library(gold, text)
    name, _, number = maths.GRADER.partition("/")
    try:
        grade = maths.grade(gold, text)
    except maths.GoldUnreadable as error:
        advice = "write it as LaTeX, set a judge, or try --set grader=math-verify"
        return _Graded(None, None, name, number, GOLD_UNREADABLE, f"{error}; {advice}")
    graded = _Graded(None, grade.extracted, name, number, written=grade.found)
    if grade.outcome != maths.UNDECIDED:
        return graded._replace(reward=float(grade.outcome == maths.EQUAL))
    return await _settle(graded._replace(kind=UNDECIDED, reason=grade.reason, undecided=True), gold, text, config)


async def _settle(graded: _Graded, gold: str, text: str, config: MathConfig) -> _Graded:
    """Return the result for answers that gymsdk's grader could not compare."""
    if config.judge is None and library.is_installed():
        other = await _grade_with_library(gold, text)
        if other.reward is not None and not other.spent:
            return graded._replace(reward=other.reward)
    if config.undecided == "zero":
        return graded._replace(reward=0.0)
    advice = "set a judge, install gym-env-math[sympy], or give no reward for such answers with --set undecided=zero"
    return graded._replace(reason=f"the answers cannot be compared: {graded.reason}; {advice}")


async def _grade_with_library(gold: str, text: str) -> _Graded:
    name, number = library.GRADER, library.get_version()
    unreadable = f"math-verify cannot read the expected answer {gold!r}; write it as LaTeX, or set a judge"
    try:
        grade = await library.grade(gold, text)
    except BudgetSpent:
        # An answer that exceeds the CPU budget is wrong, unless reading the gold answer alone exceeds it too.
        if await _is_readable_in_budget(gold):
            return _Graded(0.0, None, name, number, spent=True)
        return _Graded(None, None, name, number, GOLD_UNREADABLE, unreadable)
    if grade is None:
        return _Graded(None, None, name, number, GOLD_UNREADABLE, unreadable)
    return _Graded(grade.reward, grade.extracted, name, number)


async def _is_readable_in_budget(gold: str) -> bool:
    try:
        return await library.is_readable(gold)
    except BudgetSpent:
        return False


def _replace_surrogates(extracted: str | None) -> str | None:
    # JSON cannot encode an unpaired surrogate.
    return None if extracted is None else extracted.encode(errors="replace").decode()


def compute_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Compute the metrics of *rollouts*.

    Returns:
        `<subset>/mean/reward` for each family and difficulty in the rows, `symbolic_accuracy`, `judge_accuracy` if a
        judge graded any rollout, and `undecided`, the share of the scored answers that gymsdk's grader could not
        compare.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in _iter_scores(rollout):
            found[name].append(value)
    return {name: fmean(values) for name, values in sorted(found.items())}


def _iter_scores(rollout: Rollout) -> Iterator[tuple[str, float]]:
    if rollout.reward is None:
        return
    for name in ("family", "difficulty"):
        if (value := rollout.row.get(name)) is not None:
            yield f"{name}={value}/mean/reward", rollout.reward
    # A verdict from a file is a plain `Verdict` with extra fields. A verdict from the host has only a reward.
    fields = rollout.verdict.model_dump() if rollout.verdict else {}
    if "library_reward" in fields:
        yield "symbolic_accuracy", fields["library_reward"]
    if fields.get("grader", library.GRADER) != library.GRADER:
        yield UNDECIDED, float(fields["undecided"])
    if fields.get("judge_evaluations"):
        yield "judge_accuracy", rollout.reward
