r"""Compare the CPU time to grade a math answer with calling math-verify in a loop.

    python benchmarks/grading.py [--golds 800] [--rounds 5]

The answers are a standard mix of twenty forms. 85 % are correct, and each is part of a different worked solution. Each
expected answer occurs once per round, as in training with groups. The script alternates between these methods on the
same texts:

a. `math_metric` of math-verify, called in a loop in one warm process;
b. the math environment with its shortcut and gold cache enabled;
c. the math environment with both disabled;
d. for comparison, the math environment with only the gold cache.

CPU time is that of this process and its workers, without start-up. The exit status is 1 if b needs more than 0.6 times
the CPU time of a, if c needs more than 1.3 times the CPU time of a, or if any reward differs from that of a.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from gym_env_math.grading import (
    Grade,
    GradeCache,
    compare_integers,
    find_only_box,
    grade_answer,
    strip_delimiters,
    wrap_in_box,
)
from gym_env_math.rows import MathConfig, MathTask

MAX_RATIO_WITH_CACHE, MAX_RATIO_WITHOUT_CACHE = 0.6, 1.3
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


class Answer(NamedTuple):
    """An expected answer, and the text to grade."""

    gold: str
    text: str


class CountingCache(GradeCache):
    """A gold cache that counts its hits."""

    hits = 0

    def get(self, gold: str, box: str) -> Grade | None:
        """Return the cached grade, and count the hit."""
        found = super().get(gold, box)
        self.hits += found is not None
        return found


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


def answers(golds: int, rounds: int) -> Iterator[Answer]:
    """Yield the texts to grade: each expected answer once per round, and no text twice."""
    rng = random.Random(20)
    expected = pairs(rng, golds)
    for each in range(rounds):
        for row, (gold, right) in enumerate(expected):
            answer = right if rng.random() < CORRECT_SHARE else str(rng.randint(100, 999))
            worked = "".join(rng.choice(STEPS) for _ in range(10))
            yield Answer(gold, f"Solution {each}.{row}. {worked}Therefore the final answer is ${wrap_in_box(answer)}$.")


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


def grade_in_loop(chunk: Sequence[Answer]) -> tuple[list[float], float]:
    """Return the rewards of math-verify, and their CPU time in seconds."""
    started = time.process_time()
    rewards = [float(metric()([wrap_in_box(strip_delimiters(gold))], [text])[0]) for gold, text in chunk]
    return rewards, time.process_time() - started


async def grade_in_environment(chunk: Sequence[Answer], config: MathConfig, kept: GradeCache) -> list[float]:
    """Return the rewards of the environment."""
    limit = asyncio.Semaphore(CONCURRENCY)

    async def one(answer: Answer) -> float:
        async with limit:
            task = MathTask.ask("", expected_answer=answer.gold)
            return (await grade_answer(task, answer.text, config, kept)).reward

    return await asyncio.gather(*map(one, chunk))


def cpu(excluded: int) -> float:
    """Return the CPU time of this process and its descendants in seconds, without the process *excluded*."""
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
    while more := {pid for pid, parent in parents.items() if parent in included} - included - {excluded}:
        included |= more
    return sum(used[pid] for pid in included) / TICKS


async def measure(golds: int, rounds: int) -> int:
    """Measure all methods in turn, print their CPU time, and return the exit status."""
    stream = list(answers(golds, rounds))
    methods = {"b": MathConfig(), "c": MathConfig(shortcut=False, gold_cache=False), "d": MathConfig(shortcut=False)}
    kept = CountingCache()
    cpu_seconds = dict.fromkeys("abcd", 0.0)
    differing = 0
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as loop:
        loop_pid = loop.submit(os.getpid).result()
        warm = stream[:40]
        loop.submit(grade_in_loop, warm).result()
        await grade_in_environment([*warm, *warm], methods["c"], GradeCache())
        for start in range(0, len(stream), CHUNK):
            chunk = stream[start : start + CHUNK]
            expected_rewards, seconds = loop.submit(grade_in_loop, chunk).result()
            cpu_seconds["a"] += seconds
            for method, config in methods.items():
                started = cpu(loop_pid)
                rewards = await grade_in_environment(chunk, config, kept)
                cpu_seconds[method] += cpu(loop_pid) - started
                differing += sum(one != other for one, other in zip(expected_rewards, rewards, strict=True))
    print_shares(stream, kept)
    return print_costs(cpu_seconds, len(stream), differing)


def print_shares(stream: Sequence[Answer], kept: CountingCache) -> None:
    """Print how many answers the shortcut and the cache graded without a worker."""
    boxes = [(strip_delimiters(gold), find_only_box(text)) for gold, text in stream]
    integer_pairs = sum(box is not None and compare_integers(gold, box) is not None for gold, box in boxes)
    repeated = sum(count - 1 for count in Counter(gold for gold, _ in boxes).values())
    shares = {"both integers": integer_pairs, "cached answer": kept.hits}
    shares["sent to a worker"] = len(stream) - sum(shares.values())
    print(f"{len(stream)} answers to {len(stream) - repeated} expected answers")
    for name, count in shares.items():
        print(f"  {name:24s}{count / len(stream):7.1%}")


def print_costs(cpu_seconds: dict[str, float], count: int, differing: int) -> int:
    """Print the CPU time per answer and the ratios with their limits, and return the exit status."""
    names = {"a": "math-verify in a loop", "b": "shortcut and gold cache on", "c": "both off", "d": "gold cache only"}
    limits = {"b": MAX_RATIO_WITH_CACHE, "c": MAX_RATIO_WITHOUT_CACHE}
    for method, name in names.items():
        milliseconds = 1000 * cpu_seconds[method] / count
        ratio = cpu_seconds[method] / cpu_seconds["a"]
        bound = f" (limit {limits[method]})" if method in limits else ""
        print(f"{method}. {name:28s}{milliseconds:7.2f} ms of CPU per answer, ratio {ratio:.2f}{bound}")
    print(f"rewards that differ from math-verify's: {differing}")
    broken = [method for method, bound in limits.items() if cpu_seconds[method] > bound * cpu_seconds["a"]]
    return int(bool(broken or differing))


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--golds", type=int, default=800, help="expected answers")
    parser.add_argument("--rounds", type=int, default=5, help="answers per expected answer")
    options = parser.parse_args()
    sys.exit(asyncio.run(measure(options.golds, options.rounds)))


if __name__ == "__main__":
    main()
