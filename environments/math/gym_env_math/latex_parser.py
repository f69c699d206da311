r"""Make math-verify's LaTeX parser faster without changing its results.

ANTLR decides between the alternatives of a rule with SLL prediction, which caches its decisions. If a decision is
ambiguous, ANTLR repeats it with full-context LL prediction, which caches nothing and takes most of the parser's time.
SLL prediction alone either returns the tree of LL prediction or reports a syntax error, as ANTLR documents for
`PredictionMode.SLL`. Therefore `TwoStageParser` tries SLL prediction first. If this reports a syntax error, it parses
the text again with LL prediction.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import sympy
from antlr4 import ParserATNSimulator, PredictionMode  # type: ignore[import-untyped]  # it has no annotations
from latex2sympy2_extended import latex2sympy2

CONTEXT_RULES = frozenset({"atom_expr"})
"""Rules with decisions that need the full context in common formulas, such as the exponent in `x^2+3x`."""

_INTEGER = re.compile(r"[0-9]{1,1000}")
_DECIMAL = re.compile(r"[0-9]{1,15}\.[0-9]{1,15}")


class _Simulator(ParserATNSimulator):  # type: ignore[misc]  # its base class has no annotations
    def adaptivePredict(self, input: Any, decision: int, outerContext: Any) -> int:  # noqa: N802, N803 - ANTLR calls it
        needs_context = self.parser.ruleNames[self.atn.decisionToState[decision].ruleIndex] in CONTEXT_RULES
        self.predictionMode = PredictionMode.LL if needs_context else PredictionMode.SLL
        alternative: int = super().adaptivePredict(input, decision, outerContext)
        return alternative


class TwoStageParser:
    """Parses a text with SLL prediction, and with LL prediction if that reports a syntax error.

    Args:
        create_parser: Returns a new parser of the text that raises an exception for a syntax error.
    """

    def __init__(self, create_parser: Callable[[], Any]) -> None:
        self._create_parser = create_parser

    def math(self) -> Any:
        """Return the parse tree of the text."""
        parser = self._create_parser()
        simulator = _Simulator(parser, parser.atn, parser.decisionsToDFA, parser.sharedContextCache)
        parser._interp = simulator  # noqa: SLF001 - ANTLR has no public way to replace it
        try:
            return parser.math()
        except Exception:  # noqa: BLE001 - the error listener of the library raises plain exceptions
            return self._create_parser().math()


BaseConverter: Any = latex2sympy2._Latex2Sympy  # noqa: SLF001 - the library has no public name for it


class FastConverter(BaseConverter):  # type: ignore[misc]  # its base class has no annotations
    """Converts LaTeX to sympy with the same results as its base class."""

    def create_parser(self, latex_str: str) -> TwoStageParser:
        """Return a parser of the text."""
        create_parser = super().create_parser
        return TwoStageParser(lambda: create_parser(latex_str))

    def parse_number(self, text: str) -> Any:
        """Return the number that a numeral denotes."""
        # For a string, sympy.Number executes `from sympy import *` and evaluates Python code.
        digits = text.replace(",", "")
        if _INTEGER.fullmatch(digits):
            return sympy.Integer(int(digits))
        return sympy.Float(digits) if _DECIMAL.fullmatch(digits) else super().parse_number(text)


def install() -> None:
    """Make math-verify in this process use the faster converter."""
    latex2sympy2._Latex2Sympy = FastConverter  # noqa: SLF001 - the library has no public way to replace it
