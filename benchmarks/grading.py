r"""Measure gymsdk's maths grader beside math-verify: rates, CPU time, and right answers lost.

    python benchmarks/grading.py [--pairs FILE] [--golds 200] [--rounds 3]

The script prints three tables, all measured in this run:

1. The rates on the pairs of FILE (by default the pairs of the tests; JSON lines with `gold`, `reply`, `right`, and
   `ambiguous` for pairs that do not count), and the CPU time of each grade in one warm process, by
   `time.process_time_ns`. math-verify runs in a process of its own, which is stopped after 10 s of an answer.
2. The CPU time of an episode through `gymsdk.play`, workers included, with each grader.
3. Ordinary replies: the environment's own tasks with their other forms, word problems in the form of GSM8K, and boxed
   answers in the form of MATH. A right answer is lost if math-verify accepts it and gymsdk's grader does not.

The exit status is 1 if the median of a grade is over 0.5 ms, the 99th percentile over 3 ms, the maximum over 50 ms, a
right ordinary answer is lost, more than 1 % of the right answers are refused or a wrong one is accepted, or an episode
with gymsdk's grader needs more than 0.3 times the CPU time of one with math-verify.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import gymsdk
from gym_env_math.grading import strip_delimiters, wrap_in_box
from gym_env_math.rows import MathTask
from gymsdk.graders.maths import EQUAL, UNDECIDED, GoldUnreadable, grade
from gymsdk.responses import build_message, build_response
from gymsdk.types import Episode, Item

PAIRS = Path(__file__).resolve().parent.parent / "tests" / "graders" / "maths_pairs.jsonl"
MAX_MEDIAN, MAX_P99, MAX_MAX = 0.5, 3.0, 50.0
MAX_REFUSED, MAX_RATIO = 0.01, 0.3
SECONDS = 10
CORRECT_SHARE = 0.85
CHUNK = 100
CONCURRENCY = 16
TICKS = os.sysconf("SC_CLK_TCK")

STEPS = (
    r"Write \(S_n\) for the sum of the first \(n\) terms; then $S_1 = 2$ and $S_2 = 5$, so the ratio is $5/2$. ",
    r"By symmetry we may assume $a \le b$, which leaves the cases \(a = 1\) and \(a = 3\). ",
    r"Substituting $u = x^2 - 1$ gives \[ \int u \, du = \frac{u^2}{2} + C, \] and hence 0.75 for the first part. ",
    r"The discriminant is $b^2 - 4ac = 49$, a square, so both roots are rational. ",
    r"Adding the 12 remaining cases to the 30 above we get 42 in total, before dividing by \(k = 7\). ",
)


class Pair(NamedTuple):
    """An expected answer, a reply, and whether the reply is right; `None` if careful people differ."""

    gold: str
    text: str
    right: bool | None = True


class Graded(NamedTuple):
    """The result of a grader: whether it accepts the answer, `None` without a decision; and the CPU time in ms."""

    accepted: bool | None
    milliseconds: float


def pairs(rng: random.Random, golds: int) -> list[tuple[str, str]]:
    """Return expected answers, each with a correct answer, with equal shares of the twenty forms."""
    drawn = [pair for _ in range(-(-golds // 20)) for pair in forms(*(rng.randint(2, 60) for _ in range(4)))]
    rng.shuffle(drawn)
    return drawn[:golds]


def forms(a: int, b: int, c: int, d: int) -> list[tuple[str, str]]:
    """Return twenty pairs of an expected answer and a correct answer, in equal or different notation."""
    surd = rf"\frac{{(1+\sqrt{{5}})^{{{c}}}-(1-\sqrt{{5}})^{{{c}}}}}{{2^{{{c}}}\sqrt{{5}}}}"
    matrix = rf"\begin{{pmatrix}}{a}&{b}\\{c}&{d}\end{{pmatrix}}"
    return [
        (f"{a}", f"{a}"),
        (f"{1000 * a + b}", f"{a},{b:03d}"),
        (f"-{b}", f"-{b}"),
        (rf"\(\frac{{{a}}}{{{b}}}\)", rf"\frac{{{a}}}{{{b}}}"),
        (rf"\frac{{{b}}}{{8}}", f"{b / 8}"),
        (rf"{c}\sqrt{{{d}}}", rf"\sqrt{{{c * c * d}}}"),
        (rf"\frac{{{a}\pi}}{{{c}}}", rf"\frac{{{a}}}{{{c}}}\pi"),
        (f"({a}, {d})", f"({a},{d})"),
        (rf"[{b}, \infty)", rf"[{b},\infty)"),
        (rf"\{{{a}, {a + 2}, {a + 5}\}}", rf"\{{{a + 5}, {a}, {a + 2}\}}"),
        (f"x^2-{a}x+{b}", f"x^2 - {a}x + {b}"),
        (f"(x-{c})(x+{d})", f"x^2+{d - c}x-{c * d}" if d >= c else f"x^2-{c - d}x-{c * d}"),
        (f"3^{{{c}}}+1", f"3^{{{c}}}+1"),
        (rf"{a}\%", rf"{a}\%"),
        (f"{b / 10}", rf"\frac{{{b}}}{{10}}"),
        (rf"\frac{{-{a}+\sqrt{{{b}}}}}{{2}}", rf"\frac{{\sqrt{{{b}}}-{a}}}{{2}}"),
        (rf"\ln {a}+e^{{{c}}}", rf"e^{{{c}}}+\ln({a})"),
        (f"x={d}", f"{d}"),
        (matrix, matrix),
        (rf"\({surd}\)", surd),
    ]


def answers(golds: int, rounds: int) -> Iterator[Pair]:
    """Yield the texts to grade: each expected answer once per round, and no text twice."""
    rng = random.Random(20)
    expected = pairs(rng, golds)
    for number in range(rounds):
        for row, (gold, right) in enumerate(expected):
            answer = right if rng.random() < CORRECT_SHARE else str(rng.randint(100, 999))
            worked = "".join(rng.choice(STEPS) for _ in range(10))
            yield Pair(gold, f"Solution {number}.{row}. {worked}Therefore the final answer is ${wrap_in_box(answer)}$.")


@lru_cache(maxsize=1)
def metric() -> Callable[[list[str], list[str]], tuple[float, object]]:
    """Return the metric with the same configuration as in NeMo Gym."""
    from math_verify.metric import math_metric
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    built: Callable[[list[str], list[str]], tuple[float, object]] = math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )
    return built


def grade_with_gymsdk(pair: Pair) -> Graded:
    """Grade in this process."""
    started = time.process_time_ns()
    try:
        outcome = grade(pair.gold, pair.text).outcome
    except GoldUnreadable:
        outcome = UNDECIDED
    milliseconds = (time.process_time_ns() - started) / 1e6
    return Graded(None if outcome == UNDECIDED else outcome == EQUAL, milliseconds)


def grade_with_library(pair: Pair) -> Graded:
    """Grade with math-verify in a warm process."""
    from math_verify.errors import TimeoutException

    started = time.process_time_ns()
    try:
        accepted: bool | None = metric()([wrap_in_box(strip_delimiters(pair.gold))], [pair.text])[0] > 0
    except (Exception, TimeoutException):  # noqa: BLE001 -- any exception is no decision
        accepted = None
    return Graded(accepted, (time.process_time_ns() - started) / 1e6)


def grade_all_with_library(pairs: Sequence[Pair]) -> list[Graded]:
    """Grade with math-verify in a process that is replaced if it takes longer than the limit."""
    results: list[Graded] = []
    context = multiprocessing.get_context("spawn")
    while len(results) < len(pairs):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            pool.submit(grade_with_library, Pair("1", "\\boxed{1}")).result()
            for pair in pairs[len(results) :]:
                try:
                    results.append(pool.submit(grade_with_library, pair).result(timeout=SECONDS))
                except (TimeoutError, BrokenProcessPool):
                    results.append(Graded(None, SECONDS * 1e3))
                    for process in list((pool._processes or {}).values()):  # noqa: SLF001 -- there is no public way
                        process.kill()
                    break
    return results


def read_pairs(path: Path) -> list[Pair]:
    """Return the pairs of a file."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    return [Pair(row["gold"], row["reply"], None if row.get("ambiguous") else row["right"]) for row in rows]


class Rates(NamedTuple):
    """What a grader refuses and accepts wrongly, and its CPU times in ms."""

    refused: float
    accepted: float
    undecided: float
    median: float
    p99: float
    highest: float


def compute_rates(pairs: Sequence[Pair], graded: Sequence[Graded]) -> Rates:
    """Compute the rates of a grader over the pairs that count."""
    decided = [(pair.right, result) for pair, result in zip(pairs, graded, strict=True) if pair.right is not None]
    right = [result for is_right, result in decided if is_right]
    wrong = [result for is_right, result in decided if not is_right]
    times = sorted(result.milliseconds for result in graded)
    return Rates(
        sum(not result.accepted for result in right) / len(right),
        sum(result.accepted is True for result in wrong) / len(wrong),
        sum(result.accepted is None for _, result in decided) / len(decided),
        times[len(times) // 2],
        times[int(0.99 * len(times))],
        times[-1],
    )


def measure_rates(path: Path, rounds: int) -> bool:
    """Print the rates and CPU times of both graders on a file, and return whether they are in the limits."""
    pairs = read_pairs(path)
    print(f"{len(pairs)} pairs, {sum(pair.right is True for pair in pairs)} right, hard ones on purpose")
    for pair in pairs[:200]:
        grade_with_gymsdk(pair)
    library = compute_rates(pairs, grade_all_with_library(pairs))
    measured = [compute_rates(pairs, list(map(grade_with_gymsdk, pairs))) for _ in range(rounds)]
    print("| grader | right refused | wrong accepted | undecided | CPU ms: median, p99, max |")
    print("|---|---|---|---|---|")
    for name, rates in [("math-verify", library), *(("gymsdk", rates) for rates in measured)]:
        shares = " | ".join(f"{share:.2%}" for share in rates[:3])
        print(f"| {name} | {shares} | {', '.join(f'{value:.2f}' for value in rates[3:])} |")
    return all(
        rates.refused <= MAX_REFUSED
        and rates.accepted == 0
        and (rates.median <= MAX_MEDIAN and rates.p99 <= MAX_P99 and rates.highest <= MAX_MAX)
        for rates in measured
    )


def cpu() -> float:
    """Return the CPU time of this process and its descendants in seconds."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(fields[1])
        used[int(stat.parent.name)] = sum(map(int, fields[11:15]))
    included = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in included} - included:
        included |= more
    return sum(used[pid] for pid in included) / TICKS


class Say:
    """A policy that replies with one text."""

    name = "say"

    def __init__(self, text: str) -> None:
        self._text = text

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the text."""
        del request, episode
        return build_response([build_message(self._text)], model=self.name)


async def play_all(environment: gymsdk.Environment, pairs: Iterable[Pair]) -> list[float | None]:
    """Play an episode for each pair, and return the rewards."""
    limit = asyncio.Semaphore(CONCURRENCY)

    async def play(pair: Pair) -> float | None:
        async with limit:
            row = {"responses_create_params": {"input": "?"}, "question": "?", "expected_answer": pair.gold}
            return (await gymsdk.play(environment, Say(pair.text), row)).reward

    return await asyncio.gather(*map(play, pairs))


async def measure_episodes(golds: int, rounds: int) -> bool:
    """Print the CPU time of an episode with each grader, and return whether the ratio is in the limit."""
    stream = list(answers(golds, rounds))
    seconds = {"math-verify": 0.0, "gymsdk": 0.0}
    async with gymsdk.load("math", grader="math-verify") as library, gymsdk.load("math") as own:
        environments = {"math-verify": library, "gymsdk": own}
        for environment in environments.values():
            await play_all(environment, stream[:40])
        for start in range(0, len(stream), CHUNK):
            for name, environment in environments.items():
                before = cpu()
                await play_all(environment, stream[start : start + CHUNK])
                seconds[name] += cpu() - before
    ratio = seconds["gymsdk"] / seconds["math-verify"]
    print(f"\n{len(stream)} episodes through gymsdk.play, twenty forms, {CORRECT_SHARE:.0%} right")
    for name, spent in seconds.items():
        print(f"  {name:12s}{1e3 * spent / len(stream):7.2f} ms of CPU per episode")
    print(f"  ratio {ratio:.2f} (limit {MAX_RATIO})")
    return ratio <= MAX_RATIO


def ordinary() -> list[Pair]:
    """Return right replies as models write them: our own tasks, word problems, and boxed answers."""
    rng = random.Random(5)
    environment = gymsdk.load("math")
    drawn = itertools.islice(environment.tasks("train", seed=9), 600)
    tasks = [task for task in drawn if isinstance(task, MathTask)]
    own = [
        Pair(task.expected_answer, f"We work it out. The answer is ${wrap_in_box(form)}$.")
        for task in tasks
        for form in (task.expected_answer, *task.other_answers)
    ]
    words = []
    for _ in range(300):
        value = rng.choice([rng.randint(2, 99), rng.randint(1000, 99999), rng.randint(1, 400) / 4])
        written = f"{value:,}"
        words += [
            Pair(f"{value}", f"She has {value} of them.\n#### {written}"),
            Pair(f"{value}", f"So the total cost is ${written}.\n\nThe answer is {written}."),
            Pair(f"{value}", f"Therefore, the answer is **{written}**."),
        ]
    boxed = [
        Pair(gold, f"Thus we obtain\n\\[\n{wrap_in_box(answer)}\n\\]")
        for _ in range(40)
        for gold, answer in forms(*(rng.randint(2, 60) for _ in range(4)))
    ]
    return [*own, *words, *boxed]


def measure_ordinary() -> bool:
    """Print how many right ordinary answers each grader accepts, and return whether none is lost."""
    pairs = ordinary()
    own, library = list(map(grade_with_gymsdk, pairs)), grade_all_with_library(pairs)
    lost = [
        pair for pair, ours, theirs in zip(pairs, own, library, strict=True) if theirs.accepted and not ours.accepted
    ]
    undecided = sum(result.accepted is None for result in own)
    found = sum(map(accepts, own)), sum(map(accepts, library))
    print(f"\n{len(pairs)} right ordinary replies: gymsdk accepts {found[0]}, math-verify {found[1]}")
    print(f"  accepted by math-verify and not by gymsdk: {len(lost)}; undecided: {undecided / len(pairs):.2%}")
    for pair in lost[:10]:
        print(f"  {pair.gold!r} <- {pair.text[-80:]!r}")
    return not lost


def accepts(result: Graded) -> bool:
    """Return whether a grader accepts the answer."""
    return result.accepted is True


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="the pairs")
    parser.add_argument("--golds", type=int, default=200, help="expected answers of the episodes")
    parser.add_argument("--rounds", type=int, default=3, help="runs over the pairs, and answers per expected answer")
    options = parser.parse_args()
    in_limits = [
        measure_rates(options.pairs, options.rounds),
        asyncio.run(measure_episodes(options.golds, options.rounds)),
        measure_ordinary(),
    ]
    sys.exit(not all(in_limits))


if __name__ == "__main__":
    main()
