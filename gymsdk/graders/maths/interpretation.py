"""Find the kind of the answer that a tree stands for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from gymsdk.graders.maths.equality import EQUAL, compare_nodes, rename
from gymsdk.graders.maths.kinds import (
    ALL_REALS,
    NOTHING,
    Answer,
    Assignment,
    Collection,
    Equation,
    Letter,
    Matrix,
    Piecewise,
    Quantity,
    Ratio,
    Relation,
    Residue,
    Scalar,
    SetExpression,
    Words,
)
from gymsdk.graders.maths.lexer import Unreadable
from gymsdk.graders.maths.limits import PRECISIONS
from gymsdk.graders.maths.parser import INFINITY, ONE, ZERO, Node, get_children, negate, replace_children
from gymsdk.graders.maths.reals import INEQUALITIES, read_reals, try_reals
from gymsdk.graders.maths.values import Evaluation, check_expression, contains, find_variables

MAX_SIGNS = 4
MAX_ELLIPSIS = 1000

TOTAL = "total"
"""The name of a sum of names, such as m + n, or of the size of a set."""

CHOICES = frozenset("ABCDEFGHIJ")
"""The letters that an answer alone is a choice of."""


def interpret(node: Node) -> Answer:
    """Return the answer that a tree stands for.

    Raises:
        Unreadable: The tree is no answer.
    """
    read = _READERS.get(node[0])
    if read is not None:
        return read(node)
    if contains(node, "pm"):
        return _collect_signs(node)
    if node[0] in ("mul", "div", "neg") and contains(node, "matrix"):
        return _multiply_matrix(node)
    if node[0] == "mul" and len(node) == 3 and node[1][0] == "var" and node[2][0] == "group":  # noqa: PLR2004
        # A point with its name, such as P(2, 5).
        return Assignment(node[1][1], interpret(node[2]))
    if node[0] == "add" and contains(node, "set"):
        return read_reals(node)
    if node == ("ellipsis",):
        return Words("...")
    return _interpret_scalar(node)


def _multiply_matrix(node: Node) -> Answer:
    """Return the matrix that a number times a matrix is."""
    if node[0] == "div":
        factors = [node[1], ("div", ONE, node[2])]
    else:
        factors = [("num", -ONE[1]), node[1]] if node[0] == "neg" else list(node[1:])
    matrices = [factor for factor in factors if factor[0] == "matrix"]
    others = [factor for factor in factors if factor[0] != "matrix"]
    if len(matrices) != 1:
        raise Unreadable("a product of matrices is not evaluated")
    rows = [tuple(("mul", *others, cell) for cell in row) for row in matrices[0][1:]]
    return _interpret_matrix(("matrix", *rows))


def _interpret_scalar(node: Node) -> Answer:
    if node in (INFINITY, ("neg", INFINITY)):
        return Scalar(node, "infinity")
    check_expression(node)
    return Scalar(node, "expression" if find_variables(node) else "number")


def _collect_signs(node: Node) -> Answer:
    variants: list[Answer] = []
    for variant in expand_signs(node):
        answer = interpret(variant)
        if answer not in variants:
            variants.append(answer)
    return variants[0] if len(variants) == 1 else Collection(tuple(variants), "list")


def expand_signs(node: Node) -> list[Node]:
    r"""Return the tree for all choices of signs: `\mp` has the other sign than `\pm`, two `\pm` are independent."""
    signs = _count_signs(node)
    if len(signs) > MAX_SIGNS:
        raise Unreadable("too many signs are open")
    if "mp" in signs:
        return [_choose_signs(node, itertools.repeat(choice)) for choice in (1, -1)]
    choices = itertools.product((1, -1), repeat=len(signs))
    return [_choose_signs(node, iter(choice)) for choice in choices]


def _count_signs(node: Node) -> list[str]:
    found = [node[1]] if node[0] == "pm" else []
    for child in get_children(node):
        found += _count_signs(child)
    return found


def _choose_signs(node: Node, choices: Iterator[int]) -> Node:
    if node[0] == "pm":
        sign = next(choices) * (1 if node[1] == "pm" else -1)
        first, second = _choose_signs(node[2], choices), _choose_signs(node[3], choices)
        second = second if sign > 0 else negate(second)
        return second if first == ZERO else ("add", first, second)
    return replace_children(node, lambda child: _choose_signs(child, choices))


def interpret_words(meaning: str) -> Answer:
    known: dict[str, Answer] = {
        "empty": NOTHING,
        "reals": ALL_REALS,
        "infinity": Scalar(INFINITY, "infinity"),
        "-infinity": Scalar(("neg", INFINITY), "infinity"),
    }
    if meaning in known:
        return known[meaning]
    return Letter(meaning.upper()) if len(meaning) == 1 and meaning <= "j" else Words(meaning)


def _interpret_quantity(node: Node) -> Answer:
    if contains(node[1], "pm"):
        return Collection(tuple(interpret(("qty", part, node[2])) for part in expand_signs(node[1])), "list")
    check_expression(node[1])
    return Quantity(node[1], node[2])


def _expand_ellipsis(items: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the items with the integers that an ellipsis between two others leaves out, if they are evenly spaced."""
    if ("ellipsis",) not in items:
        return items
    at = items.index(("ellipsis",))
    before, after = items[:at], items[at + 1 :]
    numbers = [*before, *after]
    if len(before) < 2 or not after or not all(_is_integer(item) for item in numbers):  # noqa: PLR2004
        return items
    step = before[-1][1] - before[-2][1]
    gap = after[0][1] - before[-1][1]
    if not step or gap % step or not 0 < gap / step <= MAX_ELLIPSIS:
        return items
    left_out = [("num", before[-1][1] + step * number) for number in range(1, int(gap / step))]
    return (*before, *left_out, *after)


def _is_integer(node: Node) -> bool:
    return node[0] == "num" and bool(node[1].denominator == 1)


def _interpret_list(node: Node) -> Answer:
    separators, items = node[1], _expand_ellipsis(node[2:])
    if len(items) > len(node) - 2:
        return Collection(tuple(interpret(item) for item in items), "list")
    items = _share_modulus(items)
    items = _drop_integers(items)
    if len(items) == 1:
        return interpret(items[0])
    node, separators = ("list", separators[: len(items) - 1], *items), separators[: len(items) - 1]
    if all(map(_can_be_reals, items)) and any(item[0] != "rel" or item[2] != "=" for item in items):
        reals = try_reals(node)
        names = find_variables(node)
        if reals is not None:
            return Assignment(next(iter(names)), reals) if len(names) == 1 else reals
    answers = _flatten([interpret(item) for item in items])
    if "and" in separators and len(answers) == 2:  # noqa: PLR2004 -- "2 hours and 30 minutes"
        return _sum_quantities(answers)
    return _collect_assignments(answers)


def _share_modulus(items: tuple[Node, ...]) -> tuple[Node, ...]:
    r"""Return the residues of `n \\equiv 0, 1 \\pmod 4`, all with the modulus."""
    if items[-1][0] != "mod" or items[0][0] != "rel" or items[0][2] != "equiv" or len(items[0]) != 4:  # noqa: PLR2004
        return items
    left, modulus = items[0][1], items[-1][2]
    residues = [items[0][3], *items[1:-1], items[-1][1]]
    return tuple(("mod", ("rel", left, "equiv", residue), modulus) for residue in residues)


def _drop_integers(items: tuple[Node, ...]) -> tuple[Node, ...]:
    r"""Return the items without "k in Z" at the end, and with `k` as name of the integer."""
    last = items[-1]
    if len(items) == 1 or last[0] != "rel" or last[2:] != ("in", ("var", "set Z")) or last[1][0] != "var":
        return items
    return tuple(rename(item, last[1][1], "k") for item in items[:-1])


def _can_be_reals(node: Node) -> bool:
    return node[0] == "setop" or (node[0] == "rel" and (node[2] in INEQUALITIES or node[2] in ("=", "in")))


def _flatten(answers: Sequence[Answer]) -> list[Answer]:
    flat: list[Answer] = []
    for answer in answers:
        flat += answer.items if isinstance(answer, Collection) and answer.kind == "list" else [answer]
    return flat


def _sum_quantities(answers: Sequence[Answer]) -> Answer:
    first, second = answers
    if not isinstance(first, Quantity) or not isinstance(second, Quantity):
        return _collect_assignments([*answers])
    if first.unit.powers != second.unit.powers or first.unit.factor <= second.unit.factor:
        return Collection(tuple(answers), "list")
    added = ("mul", second.node, ("num", second.unit.factor / first.unit.factor))
    return Quantity(("add", first.node, added), first.unit)


def _collect_assignments(answers: list[Answer]) -> Answer:
    named = [answer for answer in answers if isinstance(answer, Assignment)]
    names = {answer.name for answer in named}
    if len(names) != 1 or answers[0] != named[0] or not all(isinstance(each, Assignment | Scalar) for each in answers):
        return Collection(tuple(answers), "list")
    # "x = 2 or x = 3", and "x = 2, 3".
    values = [answer.value if isinstance(answer, Assignment) else answer for answer in answers]
    return Assignment(named[0].name, Collection(tuple(_flatten(values)), "list"))


def _interpret_group(node: Node) -> Answer:
    opening, closing, items = node[1], node[2], node[3:]
    items = _expand_ellipsis(items)
    rows = [item[3:] for item in items if item[:3] == ("group", "[", "]")]
    if opening == "[" and rows and len(rows) == len(items) and len({len(row) for row in rows}) == 1:
        return _interpret_matrix(("matrix", *rows))
    if not items:
        raise Unreadable("a bracket is empty")
    if len(items) == 1:
        return interpret(items[0])
    if contains(("list", (), *items), "pm"):
        variants = [interpret(variant) for variant in expand_signs(("group", opening, closing, *items))]
        return Collection(tuple(variants), "list")
    if _has_infinity(items) or opening + closing in ("[)", "(]"):
        return read_reals(node)
    return Collection(tuple(interpret(item) for item in items), "tuple", opening + closing)


def _has_infinity(items: Sequence[Node]) -> bool:
    return any(item in (INFINITY, ("neg", INFINITY)) for item in items)


def _interpret_set(node: Node) -> Answer:
    if len(node) == 1:
        return NOTHING
    node = ("set", *_expand_ellipsis(node[1:]))
    return Collection(tuple(_flatten([interpret(item) for item in node[1:]])), "set")


def _interpret_builder(node: Node) -> Answer:
    reals = try_reals(node)
    if reals is not None:
        return reals
    head, condition = node[1], node[2]
    if head[0] == "var" and condition[0] == "rel" and condition[2] in ("=", "in"):
        answer = interpret(condition)
        if isinstance(answer, Assignment) and answer.name == head[1]:
            return answer.value
    return Relation(("builder", head, condition))


def _interpret_matrix(node: Node) -> Answer:
    if len(node) == 2 and len(node[1]) == 1:  # noqa: PLR2004 -- one cell
        return interpret(node[1][0])
    return Matrix(tuple(tuple(interpret(cell) for cell in row) for row in node[1:]))


def _interpret_cases(node: Node) -> Answer:
    rows = tuple((interpret(value), _interpret_condition(condition)) for value, condition in node[1:])
    return Piecewise(rows)


def _interpret_condition(node: Node) -> Answer:
    return Words("otherwise") if node in _OTHERWISE else interpret(node)


def _interpret_ratio(node: Node) -> Answer:
    for part in node[1:]:
        check_expression(part)
    return Ratio(node[1:])


def _interpret_residue(node: Node) -> Answer:
    inner, modulus = node[1], node[2]
    name = None
    if inner[0] == "rel" and inner[2] in ("equiv", "="):
        name, inner = get_name(inner[1]), inner[3]
    check_expression(inner)
    check_expression(modulus)
    if modulus[0] == "num" and modulus[1] <= 0:
        raise Unreadable("a modulus is positive")
    residue = Residue(inner, modulus)
    return residue if name is None else Assignment(name, residue)


def _interpret_union(node: Node) -> Answer:
    parts = _flatten_union(node)
    if all(part[0] in ("set", "num") for part in parts) and any(part[0] == "set" for part in parts):
        parts = [part if part[0] == "set" else ("set", part) for part in parts]
        return Collection(tuple(interpret(item) for part in parts for item in part[1:]), "set")
    return SetExpression(node) if _is_set_expression(node) else read_reals(node)


def _is_set_expression(node: Node) -> bool:
    if node[0] == "setop":
        return all(map(_is_set_expression, node[2:]))
    if node[0] in ("pow", "call"):
        return _is_complement(node)
    return bool(node[0] == "var" and node[1] != "set R")


def _is_complement(node: Node) -> bool:
    inner = node[1] if node[0] == "pow" else node[2]
    marked = node[2] in (("var", "c"), ("var", "C")) if node[0] == "pow" else node[1] == "conj"
    return marked and _is_set_expression(inner)


def contains_point(node: Node, inside: frozenset[str]) -> bool:
    """Return whether a point that lies in exactly the sets *inside* belongs to a set expression."""
    if node[0] == "var":
        name = str(node[1])
        return (name.removesuffix("'") in inside) != name.endswith("'")
    if node[0] == "setop":
        first, second = (contains_point(part, inside) for part in node[2:])
        return first or second if node[1] == "cup" else first and (second if node[1] == "cap" else not second)
    return not contains_point(node[1] if node[0] == "pow" else node[2], inside)


def _flatten_union(node: Node) -> list[Node]:
    if node[0] == "setop" and node[1] == "cup":
        return [*_flatten_union(node[2]), *_flatten_union(node[3])]
    return [node]


def _interpret_name(node: Node) -> Answer:
    if node[1] == "set R":
        return ALL_REALS
    if node[1] in CHOICES:
        return Letter(node[1])
    return Scalar(node, "expression")


# Relations


def _interpret_relation(node: Node) -> Answer:
    parts, operators = node[1::2], set(node[2::2])
    if operators == {"="}:
        return _interpret_equation(parts)
    if operators <= {"=", "~"}:
        return _interpret_equation(tuple(itertools.takewhile(lambda part: part is not None, _before_rounding(node))))
    if operators == {"in"} and len(parts) == 2:  # noqa: PLR2004 -- "x in S"
        inside = interpret(parts[1])
        return Assignment(get_name(parts[0]) or "", inside) if get_name(parts[0]) else inside
    if operators == {"equiv"}:
        raise Unreadable("a congruence has no modulus")
    if operators <= INEQUALITIES or operators == {"notin"}:
        reals = try_reals(node)
        if reals is not None:
            return Assignment(next(iter(find_variables(node))), reals)
    for part in parts:
        if part[0] != "words":
            check_expression(part)
    return Relation(tuple(node[1:]))


def _before_rounding(node: Node) -> tuple[Node, ...]:
    """Return the sides before the first "approximately equal", or all if only a name stands before it."""
    at = node.index("~")
    exact = node[1:at:2]
    if len(exact) > 1 or not get_name(exact[0]):
        _check_rounding(exact[-1], node[at + 1])
    return exact if len(exact) > 1 or not get_name(exact[0]) else node[1::2][:2]


def _check_rounding(exact: Node, rounded: Node) -> None:
    """Raise `Unreadable` if the rounded value is not near the exact one."""
    evaluation = Evaluation(PRECISIONS[0])
    try:
        values = [evaluation.convert(evaluation.evaluate(part)) for part in (exact, rounded)]
    except ArithmeticError:
        return
    if abs(values[0] - values[1]) > abs(values[0]) / 100:
        raise Unreadable("a rounded value is far from the exact one")


def get_name(node: Node) -> str | None:
    """Return the name if *node* is one, else `None`.

    A name is a variable, a tuple of variables, an angle, or a function with its arguments, such as `f(x)` or `P(A)`.
    The name of a function of a lower-case variable is the same for all names of the variable.
    """
    if node[0] == "var":
        return str(node[1])
    if node[0] == "group" and all(item[0] == "var" for item in node[3:]):
        return ",".join(item[1] for item in node[3:])
    if node[0] == "div" and all(part[0] == "mul" and part[1] == ("var", "d") for part in node[1:]):
        return "/".join("".join(str(factor[1]) for factor in part[1:]) for part in node[1:])
    if node[0] != "mul" or len(node) < 3:  # noqa: PLR2004 -- a function and its argument
        return None
    if any(factor[0] == "var" and factor[1].startswith("\\angle") for factor in node[1:]):
        return "".join(str(factor[1]) for factor in node[1:] if factor != ("var", "m"))
    function = node[1]
    if function[0] == "pow" and function[2] in (("neg", ONE), ("num", -ONE[1])):
        function = ("var", f"{function[1][1]}^-1")
    if function[0] != "var" or len(node) != 3 or not _is_function(function[1]):  # noqa: PLR2004
        return None
    arguments = node[2][3:] if node[2][0] == "group" else node[2:3]
    if any(argument[0] not in ("var", "num") for argument in arguments):
        return None
    are_variables = all(argument[0] == "var" and argument[1].islower() for argument in arguments)
    written = "..." if are_variables else ",".join(str(argument[1]) for argument in arguments)
    return f"{function[1]}({written})"


def _is_function(name: str) -> bool:
    return name[0] in "fghFGHPQRpqTSyVAENaus" or "_" in name


def _get_arguments(node: Node) -> tuple[str, ...]:
    if node[0] != "mul":
        return ()
    inner = node[2][3:] if node[2][0] == "group" else node[2:3]
    return tuple(str(item[1]) for item in inner if item[0] == "var")


def _is_total(node: Node) -> bool:
    """Return whether a problem may ask for *node*: a sum of different names, or the size of a set."""
    if node[0] == "add":
        return len(set(node[1:])) == len(node) - 1 and all(term[0] == "var" for term in node[1:])
    if node[:2] == ("call", "abs"):
        return bool(node[2][0] == "var")
    return node[0] == "var" or bool(
        node[0] == "mul" and all(factor[0] == "var" and factor[1].isupper() for factor in node[1:])
    )


def _interpret_equation(parts: tuple[Node, ...]) -> Answer:
    words = [part for part in parts if part[0] == "words"]
    if words:
        rest = tuple(part for part in parts if part[0] != "words")
        if not rest or parts[0][0] != "words":
            raise Unreadable("an equation with words")
        return _interpret_equation(rest)
    if len(parts) == 1:
        return interpret(parts[0])
    listed = _list_assignments(parts)
    if listed is not None:
        return listed
    named, values = _find_named(parts)
    if named is None and len(parts) == 2 and any(map(find_variables, parts)):  # noqa: PLR2004 -- no chain
        for part in parts:
            check_expression(part)
        return Equation(*parts)
    if len(values) > 1:
        _check_chain(values)
    answer = interpret(values[-1])
    if named is None:
        return answer
    name = get_name(named) or TOTAL
    return (
        Equation(parts[0], parts[-1])
        if isinstance(answer, Letter) and name in CHOICES
        else Assignment(name, answer, _get_arguments(named))
    )


def _list_assignments(parts: tuple[Node, ...]) -> Answer | None:
    """Return the assignments that "(x, y) = (1, 2)" or "p = q = 2" stands for, else `None`."""
    first, last = parts[0], parts[-1]
    if first[0] == last[0] == "group" and (len(parts), len(first)) == (2, len(last)) and get_name(first):
        pairs = list(zip(first[3:], last[3:], strict=True))
    elif len(parts) > 2 and all(get_name(part) is not None for part in parts[:-1]):  # noqa: PLR2004 -- a chain
        pairs = [(part, last) for part in parts[:-1]]
    else:
        return None
    return Collection(tuple(Assignment(str(get_name(name)), interpret(value)) for name, value in pairs), "list")


def _find_named(parts: tuple[Node, ...]) -> tuple[Node | None, tuple[Node, ...]]:
    """Return the side that is a name, if there is one, and the sides that are its value."""
    first, last = parts[0], parts[-1]
    has_name = get_name(first) is not None or (_is_total(first) and not find_variables(last))
    if has_name and not (first[0] == "var" and len(parts) == 2 and get_name(last) == "y"):  # noqa: PLR2004 -- "x = y"
        named, values = first, parts[1:]
    elif get_name(last) is not None and len(parts) == 2:  # noqa: PLR2004 -- "5 = x"
        named, values = last, parts[:1]
    else:
        return None, parts
    # A variable that is also in its value has none, but a function is defined with its argument.
    has_arguments = bool({"(", "/"} & set(get_name(named) or ""))
    is_recursive = find_variables(named) & find_variables(values[0]) and not has_arguments
    return (None, parts) if is_recursive else (named, values)


def _check_chain(values: Sequence[Node]) -> None:
    """Raise `Unreadable` if a chain of equations contradicts itself: 4 = 5 is no way to write 5."""
    for first, second in itertools.pairwise(values):
        check_expression(first)
        check_expression(second)
        if compare_nodes(first, second).outcome != EQUAL:
            raise Unreadable("a chain of equations contradicts itself")


_OTHERWISE = (("words", "otherwise"), ("words", "else"), ("words", "elsewhere"))

_READERS: dict[str, Callable[[Node], Answer]] = {
    "list": _interpret_list,
    "group": _interpret_group,
    "set": _interpret_set,
    "builder": _interpret_builder,
    "rel": _interpret_relation,
    "setop": _interpret_union,
    "matrix": _interpret_matrix,
    "cases": _interpret_cases,
    "ratio": _interpret_ratio,
    "mod": _interpret_residue,
    "qty": _interpret_quantity,
    "words": lambda node: interpret_words(node[1]),
    "var": _interpret_name,
}
