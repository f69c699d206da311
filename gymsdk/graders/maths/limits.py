"""The limits of an evaluation, the errors beyond them, and the contexts of mpmath."""

from __future__ import annotations

import threading
from typing import Any

PRECISIONS = (60, 150, 400)
"""The precisions in decimal digits. The first suffices nearly always."""

MAX_LOST = 40
"""How many digits of the first precision may be lost."""

MAX_BITS = 150_000
MAX_TOTAL_BITS = 1_500_000
MAX_ROOT_BITS = 20_000
MAX_MAGNITUDE = 1000
MAX_ANGLE_BITS = 400
MAX_FACTORIAL = 10_000
MAX_TERMS = 200
MAX_STEPS = 2000
VANISHING_DIGITS = 200
MAX_HEIGHT = 64
GUARD_DIGITS = 6
ABSORBED_DIGITS = 45


class Undefined(ArithmeticError):
    """The expression has no value, such as a division by zero."""


class TooLarge(ArithmeticError):
    """The value, or a part of it, has too many digits or too large an exponent."""


class Undecidable(ArithmeticError):
    """Too few digits are left to compare, or a part cannot be evaluated."""


_contexts = threading.local()


def get_context(digits: int) -> Any:
    """Return mpmath's context with this precision. Threads do not share one, because functions change its precision."""
    by_digits: dict[int, Any] = _contexts.__dict__.setdefault("by_digits", {})
    if digits not in by_digits:
        try:
            from mpmath.ctx_mp import MPContext
        except ImportError as error:
            raise ImportError('grading maths needs mpmath: pip install "gymsdk[maths]"') from error
        by_digits[digits] = context = MPContext()
        context.dps = digits
    return by_digits[digits]
