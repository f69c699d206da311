"""The kinds of answers, each in the form in which answers of the kind are compared."""

from __future__ import annotations

from typing import Any, NamedTuple

from gymsdk.graders.maths.parser import Node
from gymsdk.graders.maths.units import Unit


class Scalar(NamedTuple):
    """A number or an expression."""

    node: Node
    kind: str


class Quantity(NamedTuple):
    """A number with a unit."""

    node: Node
    unit: Unit
    kind: str = "quantity"


class Words(NamedTuple):
    """Words, in the form in which equal answers are the same text."""

    text: str
    kind: str = "words"


class Letter(NamedTuple):
    """The letter of a choice, and the answer that stands beside it, if there is one."""

    letter: str
    beside: Answer | None = None
    kind: str = "letter"


class BaseNumber(NamedTuple):
    """A number in the base that is written beside it."""

    digits: str
    base: int
    kind: str = "base"


class Clock(NamedTuple):
    """A time of day: hours, minutes, seconds, and `am`, `pm` or nothing."""

    numbers: tuple[int, ...]
    half: str = ""
    kind: str = "time"


class Ratio(NamedTuple):
    """A ratio of two or more numbers."""

    parts: tuple[Node, ...]
    kind: str = "ratio"


class Residue(NamedTuple):
    """A residue class."""

    node: Node
    modulus: Node
    kind: str = "modulus"


class Matrix(NamedTuple):
    """A matrix, by rows."""

    rows: tuple[tuple[Answer, ...], ...]
    kind: str = "matrix"


class Piecewise(NamedTuple):
    """A function that is defined by cases: values and conditions."""

    rows: tuple[tuple[Answer, Answer], ...]
    kind: str = "piecewise"


class Collection(NamedTuple):
    """Several answers: a `set` or `list` without order, or a `tuple` with its brackets."""

    items: tuple[Answer, ...]
    kind: str
    brackets: str = ""


class Interval(NamedTuple):
    """An interval; an end of `None` is infinite."""

    low: Node | None
    high: Node | None
    has_low: bool = False
    has_high: bool = False


class Reals(NamedTuple):
    """A set of real numbers: intervals in ascending order. A point is a closed interval with equal ends."""

    intervals: tuple[Interval, ...]
    kind: str = "set of reals"


class Assignment(NamedTuple):
    """A value with its name, as in x = 5."""

    name: str
    value: Answer
    arguments: tuple[str, ...] = ()
    kind: str = "assignment"


class Equation(NamedTuple):
    """An equation that is not solved for a variable."""

    left: Node
    right: Node
    kind: str = "equation"


class Relation(NamedTuple):
    """An inequality or a chain of them that is no set of reals: expressions and operators in turn."""

    parts: tuple[Any, ...]
    kind: str = "relation"


class SetExpression(NamedTuple):
    r"""An expression of sets with names, such as `A \cap B`."""

    node: Node
    kind: str = "set expression"


Answer = (
    Scalar
    | Quantity
    | Words
    | Letter
    | BaseNumber
    | Clock
    | Ratio
    | Residue
    | Matrix
    | Piecewise
    | Collection
    | Reals
    | Assignment
    | Equation
    | Relation
    | SetExpression
)

ALL_REALS = Reals((Interval(None, None),))
NOTHING = Reals(())
