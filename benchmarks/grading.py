r"""What grading a maths answer costs in CPU, against calling math-verify in a loop.

    python benchmarks/grading.py [--golds 800] [--rounds 5]

The answers are a standard mix: twenty forms, 85 % right, each in a worked text of its own; every expected answer
comes back once per round, as in training with groups. Three ways take turns on the same texts:

a. `math_metric` of math-verify, called in a loop in one warm process;
b. the math environment with its shortcut and gold cache on;
c. the same with both off;
d. for comparison, the gold cache alone.

CPU is that of this process and of its workers, start-up excluded. Exits with 1 if b costs more than 0.6 of a, if c
costs more than 1.3 of a, or if two rewards differ.
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

from gym_env_math.answers import bare, boxed
from gym_env_math.rows import MathTask
from gym_env_math.settings import MathConfig
from gym_env_math.shortcut import Grade, Kept, integers, only_box
from gym_env_math.verdict import decided

MOST_WITH, MOST_WITHOUT = 0.6, 1.3
RIGHT = 0.85
CHUNK = 100
AT_ONCE = 16
TICKS = os.sysconf("SC_CLK_TCK")

STEPS = (
    r"Write \(S_n\) for the sum of the first \(n\) terms; then $S_1 = 2$ and $S_2 = 5$, so the ratio is $5/2$. ",
    r"By symmetry we may assume $a \le b$, which leaves the cases \(a = 1\) and \(a = 3\). ",
    r"Substituting $u = x^2 - 1$ gives \[ \int u \, du = \frac{u^2}{2} + C, \] and hence 0.75 for the first part. ",
    r"The discriminant is $b^2 - 4ac = 49$, a square, so both roots are rational. ",
    r"Adding the 12 remaining cases to the 30 above we get 42 in total, before dividing by \(k = 7\). ",
)


class Answer(NamedTuple):
    """An expected answer, and a text that answers it."""

    gold: str
    text: str


class Counted(Kept):
    """Kept grades that count how often they were enough."""

    hits = 0

    def get(self, gold: str, box: str) -> Grade | None:
        """Give the kept grade, and count it."""
        found = super().get(gold, box)
        self.hits += found is not None
        return found


def pairs(rng: random.Random, golds: int) -> list[tuple[str, str]]:
    """Expected answers, each with a right answer, in equal shares of the twenty forms."""
    drawn = [pair for _ in range(-(-golds // 20)) for pair in forms(*(rng.randint(2, 60) for _ in range(4)))]
    rng.shuffle(drawn)
    return drawn[:golds]


def forms(a: int, b: int, c: int, d: int) -> list[tuple[str, str]]:
    """Twenty pairs of an expected answer and a right one, written alike or not."""
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
    """Yield the texts to grade: every expected answer once per round, no two texts alike."""
    rng = random.Random(20)
    asked = pairs(rng, golds)
    for each in range(rounds):
        for row, (gold, right) in enumerate(asked):
            said = right if rng.random() < RIGHT else str(rng.randint(100, 999))
            worked = "".join(rng.choice(STEPS) for _ in range(10))
            yield Answer(gold, f"Solution {each}.{row}. {worked}Therefore the final answer is ${boxed(said)}$.")


@lru_cache(maxsize=1)
def metric() -> Callable[[list[str], list[str]], tuple[float, object]]:
    """The metric as NeMo Gym sets it up."""
    from math_verify.metric import math_metric
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    made: Callable[[list[str], list[str]], tuple[float, object]] = math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )
    return made


def in_a_loop(chunk: Sequence[Answer]) -> tuple[list[float], float]:
    """Give math-verify's rewards, and the seconds of CPU they took."""
    began = time.process_time()
    rewards = [float(metric()([boxed(bare(gold))], [text])[0]) for gold, text in chunk]
    return rewards, time.process_time() - began


async def in_the_environment(chunk: Sequence[Answer], config: MathConfig, kept: Kept) -> list[float]:
    """Give the environment's rewards."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(answer: Answer) -> float:
        async with limit:
            task = MathTask.ask("", expected_answer=answer.gold)
            return (await decided(task, answer.text, config, kept)).reward

    return await asyncio.gather(*map(one, chunk))


def cpu(apart_from: int) -> float:
    """Seconds of CPU that this process and its descendants have used, one of them apart."""
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(fields[1])
        used[int(stat.parent.name)] = sum(map(int, fields[11:15]))
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine} - mine - {apart_from}:
        mine |= more
    return sum(used[pid] for pid in mine) / TICKS


async def measure(golds: int, rounds: int) -> int:
    """Run the three ways side by side, print what they cost, and give the exit status."""
    stream = list(answers(golds, rounds))
    ways = {"b": MathConfig(), "c": MathConfig(shortcut=False, gold_cache=False), "d": MathConfig(shortcut=False)}
    kept = Counted()
    spent = dict.fromkeys("abcd", 0.0)
    differing = 0
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as loop:
        rival = loop.submit(os.getpid).result()
        warm = stream[:40]
        loop.submit(in_a_loop, warm).result()
        await in_the_environment([*warm, *warm], ways["c"], Kept())
        for start in range(0, len(stream), CHUNK):
            chunk = stream[start : start + CHUNK]
            wanted, seconds = loop.submit(in_a_loop, chunk).result()
            spent["a"] += seconds
            for way, config in ways.items():
                began = cpu(rival)
                rewards = await in_the_environment(chunk, config, kept)
                spent[way] += cpu(rival) - began
                differing += sum(one != other for one, other in zip(wanted, rewards, strict=True))
    print_shares(stream, kept)
    return print_costs(spent, len(stream), differing)


def print_shares(stream: Sequence[Answer], kept: Counted) -> None:
    """Print how many answers needed no worker, and why."""
    boxes = [(bare(gold), only_box(text)) for gold, text in stream]
    whole = sum(box is not None and integers(gold, box) is not None for gold, box in boxes)
    again = sum(count - 1 for count in Counter(gold for gold, _ in boxes).values())
    shares = {"both whole numbers": whole, "same answer as before": kept.hits}
    shares["sent to a worker"] = len(stream) - sum(shares.values())
    print(f"{len(stream)} answers to {len(stream) - again} expected answers")
    for name, count in shares.items():
        print(f"  {name:24s}{count / len(stream):7.1%}")


def print_costs(spent: dict[str, float], count: int, differing: int) -> int:
    """Print CPU per answer and the ratios with their bounds, and give the exit status."""
    names = {"a": "math-verify in a loop", "b": "shortcut and gold cache on", "c": "both off", "d": "gold cache alone"}
    bounds = {"b": MOST_WITH, "c": MOST_WITHOUT}
    for way, name in names.items():
        ratio = spent[way] / spent["a"]
        bound = f" (at most {bounds[way]})" if way in bounds else ""
        print(f"{way}. {name:28s}{1000 * spent[way] / count:7.2f} ms of CPU per answer, ratio {ratio:.2f}{bound}")
    print(f"rewards that differ from math-verify's: {differing}")
    broken = [way for way, bound in bounds.items() if spent[way] > bound * spent["a"]]
    return int(bool(broken or differing))


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--golds", type=int, default=800, help="expected answers")
    parser.add_argument("--rounds", type=int, default=5, help="answers to each")
    given = parser.parse_args()
    sys.exit(asyncio.run(measure(given.golds, given.rounds)))


if __name__ == "__main__":
    main()
