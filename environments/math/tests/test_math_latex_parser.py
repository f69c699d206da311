"""The faster parser of the environment, compared with the parser of math-verify."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

import math_corpus
import pytest

FORMULAS = (
    "x^2+3x",
    r"\frac{x^2+1}{x-1}",
    "ax^2 + bx + c",
    r"(-\infty, 2) \cup (3, 4]",
    r"\{(1, 2), (3, 4)\}",
    r"e^{2}+\ln 3",
    r"\sin^2 x + \cos x",
    r"1 \le x < 4",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
    "x=2+3=5",
    "1,234",
    "1,2",
    r"\frac{1",
    "5 ~ 5",
    "x^",
    "",
)
NUMERALS = (
    "0", "7", "007", "00", "-7", "+7", "1,234", "1234567890" * 40, "9" * 1001, "9" * 5000, "1 000", "²", "٣", "8.0",
    "0.50", "0.1", "1.23456789012345", "1.234567890123456", ".5", "5.", "1,234.5", "0,5", "1.2.3", "1e5", "0x10",
    "nan", "inf", "1_000", "",
)  # fmt: skip


def _describe(convert: Any, text: str) -> str:
    """Return the exact result of a conversion, or its error."""
    import sympy

    try:
        return sympy.srepr(convert(text))
    except Exception as error:  # noqa: BLE001 - the library raises plain exceptions
        return f"{type(error).__name__}: {error}"


def _find_differences(formulas: list[str]) -> tuple[list[tuple[str, str, str]], int]:
    """Return the formulas that the converters convert differently, and the number of errors."""
    from gym_env_math.latex_parser import BaseConverter, FastConverter

    converted = [
        (text, *(_describe(each().parse, text) for each in (BaseConverter, FastConverter))) for text in formulas
    ]
    return [each for each in converted if each[1] != each[2]], sum("Exception: " in base for _, base, _ in converted)


def _find_different_numbers() -> list[tuple[str, str, str]]:
    from gym_env_math.latex_parser import BaseConverter, FastConverter

    both = BaseConverter().parse_number, FastConverter().parse_number
    converted = [(text, *(_describe(each, text) for each in both)) for text in NUMERALS]
    return [each for each in converted if each[1] != each[2]]


def _find_differences_with_sll_alone() -> tuple[list[tuple[str, str, str]], int]:
    from gym_env_math import latex_parser

    before, latex_parser.CONTEXT_RULES = latex_parser.CONTEXT_RULES, frozenset()
    try:
        return _find_differences(list(FORMULAS))
    finally:
        latex_parser.CONTEXT_RULES = before


def _is_used_by_math_verify() -> bool:
    from gym_env_math import latex_parser
    from gym_env_math.grading import grade

    parsed = []

    class Recorder(latex_parser.FastConverter):
        def create_parser(self, latex_str: str) -> latex_parser.TwoStageParser:
            parsed.append(latex_str)
            return super().create_parser(latex_str)

    grade.__wrapped__("1", "", "1", keep_gold=False)
    before, latex_parser.latex2sympy2._Latex2Sympy = latex_parser.latex2sympy2._Latex2Sympy, Recorder
    try:
        grade.__wrapped__("x^9+8x^5", "", "x^9 + 8x^5", keep_gold=False)
    finally:
        latex_parser.latex2sympy2._Latex2Sympy = before
    return issubclass(before, latex_parser.FastConverter) and len(parsed) > 0


def test_formulas_and_syntax_errors_give_the_same_result(library: ProcessPoolExecutor):
    differences, errors = library.submit(_find_differences, list(FORMULAS)).result()
    assert (differences, errors) == ([], 4)


def test_a_formula_that_needs_its_context_is_parsed_a_second_time(library: ProcessPoolExecutor):
    assert library.submit(_find_differences_with_sll_alone).result() == ([], 4)


def test_numerals_give_the_same_number(library: ProcessPoolExecutor):
    assert library.submit(_find_different_numbers).result() == []


def test_the_grader_uses_the_faster_converter(library: ProcessPoolExecutor):
    assert library.submit(_is_used_by_math_verify).result()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(4))
def test_random_formulas_give_the_same_result(library: ProcessPoolExecutor, seed: int):
    differences, errors = library.submit(_find_differences, math_corpus.draw_formulas(600, seed)).result()
    assert differences == []
    assert 100 < errors < 500
