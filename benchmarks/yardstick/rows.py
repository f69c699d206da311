"""Generate the task rows of the benchmarks, with the reward that each row must get.

The stub model server answers a math row with the text between `<<<ANS:` and `>>>`. The answers have 20 forms, and 85 %
of them are right. A row of tool_call offers one tool, `get_weather`, which the stub calls once before it replies.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson

RIGHT_SHARE = 0.85
FORMS = 20
ANSWERS = 800
"""The number of answers of one seed: 40 of each form."""

INSTRUCTION = (
    "Solve the following math problem. Make sure to put the answer (and only answer) inside \\boxed{}.\n\nProblem "
)
QUESTION = (
    "Let \\( a_n \\) be a sequence of positive integers such that \\( a_{n+1} = a_n + \\gcd(n, a_n) \\) for every "
    "\\( n \\geq 1 \\), and let \\( S \\) be the set of all indices for which the difference is prime. Determine the "
    "closed form asked for."
)
ASSISTANT = "You are a helpful personal assistant that aims to be helpful and reduce any pain points the user has."
WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": ""}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@dataclass(frozen=True)
class Row:
    """A task row.

    Attributes:
        body: The row as JSON, which is also the body of a `/run` request.
        reward: The reward that the stub's answer to this row must get.
    """

    body: bytes
    reward: float


def build_rows(environment: str, number: int, seed: int = 0) -> list[Row]:
    """Return *number* rows of `math` or `tool_call`.

    The first `ANSWERS` rows of math have different answers, which *seed* determines. The later rows repeat
    these answers with other questions, as the samples of a task repeat answers in a training run.
    """
    if environment == "math":
        answers = build_answers(seed)
        return [_build_math_row(index, *answers[index % ANSWERS]) for index in range(number)]
    return [_build_tool_row(index) for index in range(number)]


def _build_tool_row(index: int) -> Row:
    messages = [
        {"role": "developer", "content": ASSISTANT},
        {"role": "user", "content": f"what's it like in sf? (request {index})"},
    ]
    return Row(orjson.dumps({"responses_create_params": {"input": messages, "tools": [WEATHER_TOOL]}}), 1.0)


def _build_math_row(index: int, gold: str, answer: str, is_right: bool) -> Row:
    question = f"{index}. {QUESTION} <<<ANS:{answer}>>>"
    messages = [{"role": "user", "content": INSTRUCTION + question}]
    row = {"responses_create_params": {"input": messages}, "question": question, "expected_answer": gold}
    return Row(orjson.dumps(row), float(is_right))


@cache
def build_answers(seed: int) -> list[tuple[str, str, bool]]:
    """Return `ANSWERS` tuples of an expected answer, the answer that the stub gives, and whether it is right."""
    rng = random.Random(11 + seed)
    answers = []
    for _ in range(ANSWERS // FORMS):
        a, b, c, d = rng.randint(2, 97), rng.randint(2, 97), rng.randint(2, 30), rng.randint(2, 30)
        for gold, equal in _build_forms(a, b, c, d):
            is_right = rng.random() < RIGHT_SHARE
            answers.append((gold, equal if is_right else str(rng.randint(100, 999)), is_right))
    rng.shuffle(answers)
    return answers


def _build_forms(a: int, b: int, c: int, d: int) -> list[tuple[str, str]]:
    """Return 20 pairs of an expected answer and an equal answer in a different notation."""
    binomial = f"(3-\\sqrt{{3}})(2-\\sqrt{{3}})^{{{c}}}+(3+\\sqrt{{3}})(2+\\sqrt{{3}})^{{{c}}}"
    matrix = f"\\begin{{pmatrix}}{a}&{b}\\\\{c}&{d}\\end{{pmatrix}}"
    return [
        (f"{a}", f"{a}"),
        (f"{a * 1000 + b}", f"{a},{b:03d}"),
        (f"-{a}", f"-{a}"),
        (f"\\(\\frac{{{a}}}{{{b}}}\\)", f"\\frac{{{a}}}{{{b}}}"),
        (f"\\frac{{{a}}}{{4}}", f"{a / 4}"),
        (f"{c}\\sqrt{{{b}}}", f"\\sqrt{{{c * c * b}}}"),
        (f"\\frac{{{a}\\pi}}{{{b}}}", f"\\frac{{{a}}}{{{b}}}\\pi"),
        (f"({c}, {d})", f"({c},{d})"),
        (f"[{c}, \\infty)", f"[{c},\\infty)"),
        (f"\\{{{c}, {c + 1}, {c + 2}\\}}", f"\\{{{c + 2},{c},{c + 1}\\}}"),
        (f"x^2+{a}x+{b}", f"x^2 + {a}x + {b}"),
        (f"(x+{c})(x-{d})", f"x^2+{c - d}x-{c * d}"),
        (f"2^{{{c}}}-1", f"2^{{{c}}}-1"),
        (f"{a}\\%", f"{a}\\%"),
        (f"{a / 10}", f"\\frac{{{a}}}{{10}}"),
        (f"\\frac{{-{c}+\\sqrt{{{b}}}}}{{2}}", f"\\frac{{\\sqrt{{{b}}}-{c}}}{{2}}"),
        (f"e^{{{c}}}+\\ln {b}", f"\\ln({b})+e^{{{c}}}"),
        (f"x={a}", f"{a}"),
        (matrix, matrix),
        (f"\\(\\frac{{{binomial}}}{{6}}\\)", f"\\frac{{{binomial}}}{{6}}"),
    ]
