r"""Grade answers: with a shortcut, with math-verify in worker processes, and with a judge if the settings name one.

The shortcut grades clear answers without calling math-verify again. math-verify collects all possible answers in a
text. It takes the matches of the highest rank, and of these the match that ends furthest right. In a text that passes
`find_only_box`, this match is always the content of the only box:

- Rank 0 needs the words "I hope". The text does not contain them.
- Rank 50 contains the box, a formula around a box, and the text after "final answer". The box always matches,
  and this match ends at its closing brace. A match that ends further right must close with the only delimiter
  allowed after this brace. The box contains no delimiter, so this match opens before the box and has the same
  content as the box. It is the only formula in its match: there is no second box, and no other formula opens
  after "final answer".
- The answer does not become a percentage: only the delimiter, whitespace and full stops follow the box.

If math-verify can read the content of the box (`grade` reports this), the content alone decides the grade. The grade
of a gold answer and a content is then valid for every text with this content.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

from gymsdk import BudgetSpent, Rollout, Unscorable, Verdict, offload

from .judge import judge
from .rows import MathConfig, MathTask, get_question

INTEGER = re.compile(r"0|-?[1-9][0-9]{0,14}")
MAX_SHORTCUT_CHARS = 100_000
MAX_CACHED_CHARS = 500

# Possessive quantifiers: a tail of a million full stops must not cause backtracking.
_TAIL = re.compile(r"[ \t\r\n.]*+(?:\$\$?|\\[\])])?+[ \t\r\n.!*]*+")
_DELIMITER = re.compile(r"[$\n]|\\[()\[\]]|\s\[")
_FINAL_ANSWER = re.compile(r"final answer", re.IGNORECASE)
_OPENING = re.compile(r"(?:\$\$?|\\[\[(])\s*\Z")
_FORMULA = re.compile(r"[$\\\[]")


class Grade(NamedTuple):
    """The grade of an answer. *settled* is true if the content of the only box decided the grade alone."""

    reward: float
    extracted: str | None
    settled: bool = False


class GradeCache:
    """A cache of settled grades, by gold answer and content of the box. It drops the least recently used grade."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._grades: OrderedDict[tuple[str, str], Grade] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grades)

    def get(self, gold: str, box: str) -> Grade | None:
        """Return the cached grade of this content, or `None`."""
        grade = self._grades.get((gold, box))
        if grade is not None:
            self._grades.move_to_end((gold, box))
        return grade

    def put(self, gold: str, box: str, grade: Grade | None) -> None:
        """Cache a settled grade. If the cache is full, drop the least recently used grade."""
        if grade is None or not grade.settled or len(gold) + len(box) > MAX_CACHED_CHARS:
            return
        self._grades[gold, box] = grade
        if len(self._grades) > self._size:
            self._grades.popitem(last=False)


def find_only_box(text: str) -> str | None:
    r"""Return the content of the only `\boxed{}`, at the end of *text*, or `None` if other text may count."""
    if len(text) > MAX_SHORTCUT_CHARS or text.count("\\boxed") != 1 or "\\fbox" in text or "I hope" in text:
        return None
    head, _, rest = text.partition("\\boxed{")
    box, brace, tail = rest.rpartition("}")
    if not brace or not _TAIL.fullmatch(tail) or _DELIMITER.search(box) or not _is_balanced(box):
        return None
    return box if _anchored_alone(head) else None


def compare_integers(gold: str, box: str) -> Grade | None:
    """Return the grade if both are plain integers, else `None`."""
    answer = box.strip()
    if not INTEGER.fullmatch(gold) or not INTEGER.fullmatch(answer):
        return None
    return Grade(float(gold == answer), answer, settled=True)


def _anchored_alone(head: str) -> bool:
    anchor = _FINAL_ANSWER.search(head)
    return anchor is None or not _FORMULA.search(_OPENING.sub("", head[anchor.end() :]))


def _is_balanced(content: str) -> bool:
    # Count escaped braces too, because math-verify does so to find the end of a box.
    depth = 0
    for brace in re.findall(r"[{}]", content):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0


MAX_CACHED_GOLDS = 2048
DECIMAL_PLACES = 6


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


@offload(cpu=10.0, preload=["gym_env_math.warm_up"])
def grade(gold: str, text: str, box: str | None, keep_gold: bool) -> Grade | None:
    """Grade *text* in a worker process.

    Args:
        gold: The expected answer without delimiters.
        text: The text of the policy.
        box: The content of the only box in *text*, or `None`. If math-verify can read this content, it decides
            the grade alone (see `shortcut`).
        keep_gold: Whether to cache the parsed gold answer.

    Returns:
        The grade, or `None` if math-verify cannot read the gold answer.
    """
    known = _parse_gold_cached(gold) if keep_gold else _parse_gold(gold)
    if known is None:
        return None
    alone = _parse_answers(wrap_in_box(box), first_match=True) if box is not None else []
    # math-verify returns the expression and its source text. A single item means that it could not parse the text.
    settled = len(alone) > 1
    return _compare(known, alone if settled else _parse_answers(text), settled=settled)


@offload(cpu=10.0, preload=["gym_env_math.warm_up"])
def is_readable(gold: str) -> bool:
    """Return whether math-verify can read the gold answer."""
    return _parse_gold(gold) is not None


class _ParsedGold(NamedTuple):
    expressions: list[Any]
    written: frozenset[str]


@lru_cache(maxsize=1)
def _library() -> SimpleNamespace:
    import math_verify
    from math_verify.errors import TimeoutException

    from . import latex_parser

    latex_parser.install()
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    formulas, numbers = math_verify.LatexExtractionConfig(), math_verify.ExprExtractionConfig()
    return SimpleNamespace(
        parse=math_verify.parse,
        verify=math_verify.verify,
        gold_targets=(formulas,),
        answer_targets=(numbers, formulas),
        errors=(Exception, TimeoutException),
    )


def _parse_gold(gold: str) -> _ParsedGold | None:
    library = _library()
    # Disable the timeouts of math-verify: they use SIGALRM, and the worker already has a deadline.
    expressions = library.parse(wrap_in_box(gold), library.gold_targets, parsing_timeout=None)
    try:
        written = frozenset(str(reading).strip() for reading in expressions)
    except library.errors:
        return None
    return _ParsedGold(expressions, written - {""}) if expressions else None


_parse_gold_cached = lru_cache(maxsize=MAX_CACHED_GOLDS)(_parse_gold)


def _parse_answers(text: str, *, first_match: bool = False) -> list[Any]:
    library = _library()
    mode = "first_match" if first_match else "any_match"
    expressions: list[Any] = library.parse(text, library.answer_targets, extraction_mode=mode, parsing_timeout=None)
    return expressions


def _compare(gold: _ParsedGold, answers: list[Any], *, settled: bool) -> Grade:
    library = _library()
    try:
        right = library.verify(gold.expressions, answers, DECIMAL_PLACES, timeout_seconds=None)
        return Grade(float(right), _get_extracted_text(gold, answers), settled)
    except library.errors:
        # An answer that cannot be converted to text, for example because it has too many digits, counts as wrong.
        return Grade(0.0, None, settled)


def _get_extracted_text(gold: _ParsedGold, answers: list[Any]) -> str | None:
    written = [str(answer) for answer in answers]
    first = written[0] if written else None
    return next((text for text in written if text.strip() in gold.written), first)


GUESS_REWARD = 0.02
"""The highest expected reward of guessing an integer."""


def compute_guess_reward(task: MathTask) -> float:
    """Return the highest expected reward of a guess. Only an integer can be guessed."""
    return GUESS_REWARD if INTEGER.fullmatch(strip_delimiters(task.expected_answer)) else 0.0


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


async def grade_answer(task: MathTask, text: str, config: MathConfig, cache: GradeCache) -> MathVerdict:
    """Grade everything that the policy wrote.

    Args:
        task: The row with the expected answer.
        text: The text of the policy, without reasoning.
        config: The settings of the environment.
        cache: The cache of settled grades.

    Returns:
        The verdict.

    Raises:
        Unscorable: math-verify cannot read the expected answer and there is no judge, or the judge fails.
    """
    gold = strip_delimiters(task.expected_answer)
    grade, spent = await _grade_in_budget(gold, text, config, cache)
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
        extracted_answer=_replace_surrogates(extracted),
        grader_timeout=spent,
    )
    return verdict if reward else await _ask_judge(verdict, task, text, config)


async def grade_text(gold: str, text: str, config: MathConfig, cache: GradeCache) -> Grade | None:
    """Grade *text* without a judge.

    Args:
        gold: The expected answer without delimiters.
        text: The text of the policy.
        config: The settings of the environment.
        cache: The cache of settled grades.

    Returns:
        The grade, or `None` if math-verify cannot read the expected answer.

    Raises:
        BudgetSpent: Grading exceeded its CPU budget.
        WorkerLost: The worker process died.
    """
    box = find_only_box(text) if config.shortcut else None
    if box is None:
        return await grade(gold, text, None, config.gold_cache)
    known = compare_integers(gold, box) or cache.get(gold, box)
    if known is not None:
        return known
    result = await grade(gold, text, box, config.gold_cache)
    cache.put(gold, box, result)
    return result


async def _grade_in_budget(gold: str, text: str, config: MathConfig, cache: GradeCache) -> tuple[Grade | None, bool]:
    try:
        return await grade_text(gold, text, config, cache), False
    except BudgetSpent:
        # An answer that exceeds the CPU budget is wrong, unless reading the gold answer alone exceeds it too.
        return (Grade(0.0, None), True) if await _is_readable_in_budget(gold) else (None, False)


async def _is_readable_in_budget(gold: str) -> bool:
    try:
        return await is_readable(gold)
    except BudgetSpent:
        return False


async def _ask_judge(verdict: MathVerdict, task: MathTask, text: str, config: MathConfig) -> MathVerdict:
    if config.judge is None:
        return verdict
    answer = verdict.extracted_answer or text
    question = get_question(task)
    judgement = await judge(config.judge, question, task.expected_answer, answer, config.judge_options)
    opinion = {"reward": float(judgement.equal), "judge_evaluations": judgement.evaluations}
    return verdict.model_copy(update=opinion)


def _replace_surrogates(extracted: str | None) -> str | None:
    # JSON cannot encode an unpaired surrogate.
    return None if extracted is None else extracted.encode(errors="replace").decode()


def compute_metrics(rollouts: Iterable[Rollout]) -> dict[str, float]:
    """Compute the metrics of *rollouts*.

    Returns:
        `<subset>/mean/reward` for each family and difficulty in the rows, `symbolic_accuracy`, and
        `judge_accuracy` if a judge graded any rollout.
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
    if fields.get("judge_evaluations"):
        yield "judge_accuracy", rollout.reward
