"""Prepare the grader on import: the process that workers are forked from imports this module.

Each worker then starts with the decisions that ANTLR has cached for these forms of answers.
"""

from __future__ import annotations

from .library import grade

ANSWERS = (
    ("x^2 + 2x + 1", "(x+1)(x+1)"),
    (r"\frac{1}{2}", "0.5"),
    (r"2\sqrt{3}", r"\sqrt{12}"),
    (r"\frac{\pi}{2}", r"\pi/2"),
    (r"\frac{-1+\sqrt{5}}{2}", r"\frac{\sqrt{5}-1}{2}"),
    (r"e^{2}+\ln 3", r"\ln(3)+e^2"),
    (r"2^{10}-1", "1,023"),
    ("(1, 2)", "(1,2)"),
    (r"[1, \infty)", r"[1,\infty)"),
    (r"(-\infty, 2) \cup (3, 4]", r"(3, 4] \cup (-\infty, 2)"),
    (r"\{1, 2\}", r"\{2,1\}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("x=5", "5"),
    (r"5\%", r"5\%"),
    (r"45^\circ", "45"),
    ("3 + 4i", "4i + 3"),
)
"""Expected answers and equal answers in common forms."""

for _gold, _box in ANSWERS:
    grade.__wrapped__(_gold, f"\\boxed{{{_box}}}")
