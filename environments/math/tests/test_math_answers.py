from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest

from gym_env_math.grading import strip_delimiters
from gym_env_math.library import grade


@pytest.mark.parametrize(
    ("expected", "gold"),
    [
        (" 32 ", "32"),
        ("\\(\\frac{1}{2}\\)", "\\frac{1}{2}"),
        ("$x$", "x"),
        ("\\( $7$ \\)", "7"),
        ("$", "$"),
        ("\\(", "\\("),
        ("\\)", "\\)"),
        ("", ""),
        ("$5", "$5"),
    ],
)
def test_delimiters_around_an_expected_answer_are_removed(expected: str, gold: str):
    assert strip_delimiters(expected) == gold


def _grade_in_thread() -> float:
    # The timeouts of math-verify use signals, and only the main thread can set signal handlers.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(grade.__wrapped__, "\\frac{1}{2}", "it is 0.5").result().reward


def test_grading_sets_no_signal_handler(library: ProcessPoolExecutor):
    assert library.submit(_grade_in_thread).result() == 1.0


@pytest.mark.slow
def test_importing_the_environment_does_not_import_sympy():
    code = "import sys, gym_env_math; sys.exit(bool({'sympy', 'math_verify', 'antlr4', 'mpmath'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
