r"""Parse the tokens of an answer into a tree.

A node is a tuple that starts with its kind. Expressions: `("num", value)`, `("var", name)`, `("const", name)` with
`pi`, `e`, `i` or `inf`, `("add", a, ...)`, `("mul", a, ...)`, `("div", a, b)`, `("pow", a, b)`, `("neg", a)`,
`("call", name, a, ...)`, `("pm", sign, a, b)`, `("pct", a)`, `("deg", a)`, `("open", name, a, ...)` for sums, integrals
and limits. Other answers: `("list", separators, a, ...)`, `("group", opening, closing, a, ...)`, `("set", a, ...)`,
`("builder", head, condition)`, `("rel", a, operator, b, ...)`, `("setop", operator, a, b)`, `("matrix", row, ...)`,
`("cases", row, ...)`, `("words", text)`, `("qty", a, unit)`, `("ratio", a, ...)`, `("mod", a, modulus)`,
`("ellipsis",)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from gymsdk.graders.maths.lexer import Token, Unreadable, split_tokens
from gymsdk.graders.maths.units import NO_UNIT, Unit, find_unit, label
from gymsdk.graders.maths.words import MULTIPLIERS, find_part, get_meaning, read_number, word_set

Node = tuple[Any, ...]

MAX_DEPTH = 60
MAX_DETERMINANT = 4
FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
"""The operator between two sides that change places."""

RELATIONS = frozenset({"=", "!=", "<", "<=", ">", ">=", "~", "in", "notin", "equiv", "->"})
_CLOSING = {"(": ")", "[": "]", r"\{": r"\}", "<<": ">>", "lfloor": "rfloor", "lceil": "rceil", "|": "|"}
_STARTS = frozenset({"(", "[", "{", r"\{", "<<", "lfloor", "lceil", "inf", "empty", "$"})
_MATRICES = frozenset({"matrix", "pmatrix", "bmatrix", "Bmatrix", "smallmatrix", "array", "vmatrix"})
_CASES = frozenset({"cases", "dcases", "rcases", "numcases"})
_FILLERS = word_set("the answer is are final value of about approximately exactly equals equal to so it")
MAX_UNIT_WORDS = 5
_SKIPPED = word_set("of the each total different distinct possible units unit")
_NO_UNITS = word_set(
    "times more less fewer than greater smaller as if not or and plus minus above below when is are was were be"
    " factorial halves doubled tripled score mod base been will would can cannot may might must should maybe perhaps"
    " but because since so which that this these"
    " those has have had get wrong incorrect correct divided multiplied percent percentage"
)
_TEMPERATURES = (Token("name", "C"), Token("name", "F"))
_LONE_SYMBOLS: dict[str, Node] = {"inf": ("const", "inf"), "empty": ("set",), "...": ("ellipsis",)}
_POWERS_IN_WORDS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}
ONE, ZERO = ("num", Fraction(1)), ("num", Fraction(0))
INFINITY = ("const", "inf")
_NO_WORD = Token("end", "")


def parse(text: str) -> Node:
    """Parse an answer, written as LaTeX or plain text without delimiters.

    Returns:
        The root of the tree.

    Raises:
        Unreadable: The text is not an answer that the grader can read.
    """
    parser = _Parser(split_tokens(text))
    node = parser.parse_list()
    if parser.current.kind != "end":
        raise Unreadable(f"{parser.current.value!r} is not expected there")
    return node


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        self.depth = 0
        self.closers: list[str] = []
        self.has_words = False

    # Tokens

    @property
    def current(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else _NO_WORD

    def peek(self, offset: int = 1) -> Token:
        at = self.at + offset
        return self.tokens[at] if at < len(self.tokens) else _NO_WORD

    def is_symbol(self, *values: str) -> bool:
        return self.current.kind == "symbol" and self.current.value in values

    def accept(self, *values: str) -> str | None:
        if not self.is_symbol(*values):
            return None
        self.at += 1
        return self.tokens[self.at - 1].value

    def expect(self, value: str) -> None:
        if self.accept(value) is None:
            raise Unreadable(f"{value!r} is missing")

    # Lists, relations, unions

    def parse_list(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("the answer is nested too deeply")
        items, separators = [self.parse_relation()], []
        while separator := self.accept(",", ";", "or", "and"):
            while following := self.accept("or", "and"):
                separator = following
            if self.current.kind == "end" and separator in (",", ";"):
                break
            separators.append("," if separator == ";" else separator)
            items.append(self.parse_relation())
        self.depth -= 1
        return items[0] if len(items) == 1 else ("list", tuple(separators), *items)

    def parse_relation(self) -> Node:
        parts: list[Any] = [self.parse_ratio()]
        while self.current.kind == "symbol" and self.current.value in RELATIONS:
            parts.append(self.current.value)
            self.at += 1
            parts.append(self.parse_ratio())
        node = parts[0] if len(parts) == 1 else ("rel", *parts)
        if self.accept("mod"):
            modulus = self.parse_ratio()
            node = ("mod", node, modulus)
        elif self.is_symbol("(") and self.peek() == Token("symbol", "mod"):
            self.at += 2
            node = ("mod", node, self.parse_ratio())
            self.expect(")")
        return node

    def parse_ratio(self) -> Node:
        items = [self.parse_union()]
        while (self.is_symbol(":") and "set" not in self.closers[-1:]) or self.current == Token("words", "to"):
            self.at += 1
            items.append(self.parse_union())
        return items[0] if len(items) == 1 else ("ratio", *items)

    def parse_union(self) -> Node:
        node = self.parse_sum()
        while operator := self.accept("cup", "cap", "minus"):
            node = ("setop", operator, node, self.parse_sum())
        return node

    # Expressions

    def parse_sum(self) -> Node:
        sign = self.accept("+", "-", "pm", "mp")
        node = self.parse_term()
        if sign == "-":
            node = negate(node)
        elif sign in ("pm", "mp"):
            node = ("pm", sign, ZERO, node)
        terms = [node]
        while operator := self.accept("+", "-", "pm", "mp"):
            term = self.parse_term()
            if operator in ("pm", "mp"):
                terms = [("pm", operator, _join("add", terms), term)]
            else:
                terms.append(negate(term) if operator == "-" else term)
        return _join("add", terms)

    def parse_term(self) -> Node:
        factors = [self.parse_factor()]
        while True:
            if self.accept("*"):
                factors.append(self.parse_factor())
            elif self.accept("/"):
                factors = [_divide(_join("mul", factors), self.parse_factor())]
            elif self.accept("choose"):
                factors = [("call", "binom", _join("mul", factors), self.parse_factor())]
            elif self.starts_unit(factors[-1]):
                factors = [self.parse_measure(_join("mul", factors))]
            elif self.starts_factor(factors[-1]):
                is_mixed = self.current.kind == "number" and factors[-1][0] == "num"
                factors.append(self.parse_plain_fraction() if is_mixed else self.parse_factor())
                factors = _join_mixed(factors)
            else:
                return _join("mul", factors)

    def starts_unit(self, before: Node) -> bool:
        token = self.current
        if token.kind == "words":
            return not (token.value == "to" and before[0] == "num")
        if before[0] == "deg":
            return token in _TEMPERATURES
        is_group = self.peek() == Token("symbol", "{")
        return token == Token("macro", "frac") and is_group and self.peek(2).kind == "words"

    def parse_plain_fraction(self) -> Node:
        """Parse the fraction of a mixed number in plain text: "1 1/2"."""
        above = self.parse_atom()
        self.expect("/")
        node = ("div", above, self.parse_atom())
        return ("pct", node) if self.accept("%") else node

    def starts_factor(self, before: Node) -> bool:
        token = self.current
        if token.kind in ("name", "function"):
            return True
        if token.kind == "macro":
            return token.value in ("frac", "sqrt", "binom", "overline", "bar")
        if token.kind == "environment":
            return token.value.startswith("begin")
        if token.kind == "number":
            # "1 1/2" is a mixed number; other numbers side by side are no product.
            mixed = before[0] == "num" and self.peek() == Token("symbol", "/") and self.peek(2).kind == "number"
            return mixed or before[0] in ("call", "group", "div", "const")
        if token.kind == "symbol" and token.value == "(" and self.peek() == Token("symbol", "mod"):
            return False
        if token.kind == "symbol" and token.value == "|":
            return "|" not in self.closers and "set" not in self.closers[-1:]
        return token.kind == "symbol" and token.value in _STARTS

    def parse_factor(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable("the answer is nested too deeply")
        sign = self.accept("-", "+")
        node = self.parse_factor() if sign else self.parse_postfix(self.parse_atom())
        self.depth -= 1
        return negate(node) if sign == "-" else node

    def parse_postfix(self, node: Node) -> Node:
        while True:
            if self.accept("^"):
                node = self.parse_power(node)
            elif self.is_symbol("!"):
                self.at += 1
                node = ("call", "fact2" if self.accept("!") else "fact", node)
            elif self.accept("%"):
                node = ("pct", node)
            elif self.accept("deg"):
                node = self.parse_degrees(node)
            elif self.is_symbol("'") and node[0] in ("var", "deg"):
                self.at += 1
                node = ("var", f"{node[1]}'") if node[0] == "var" else node
            elif self.accept("_"):
                node = self.parse_subscript(node)
            else:
                return node

    def parse_power(self, base: Node) -> Node:
        if self.is_symbol("deg", "'"):
            return base
        if self.is_symbol("{") and self.peek() == Token("symbol", "}"):
            self.at += 2
            return base
        if self.is_symbol("{") and self.peek().value in ("deg", "'") and self.peek().kind == "symbol":
            self.at += 1
            mark = self.current.value
            self.at += 1
            self.expect("}")
            return self.parse_degrees(base) if mark == "deg" else ("var", f"{base[1]}'")
        if self.is_symbol("{") and self.peek().value in ("th", "st", "nd", "rd"):
            self.at += 2
            self.expect("}")
            return base
        if self.accept("-"):
            return ("pow", base, negate(self.parse_argument(whole_number=True)))
        self.accept("+")
        exponent = self.parse_argument(whole_number=True)
        if self.accept("^"):
            self.depth += 1
            if self.depth > MAX_DEPTH:
                raise Unreadable("the answer is nested too deeply")
            exponent = self.parse_power(exponent)
            self.depth -= 1
        return ("pow", base, exponent)

    def parse_degrees(self, node: Node) -> Node:
        """Parse the minutes and seconds of an angle after its degrees."""
        while self.current.kind == "number":
            start = self.at
            self.at += 1
            self.accept("^")
            is_group = self.accept("{") is not None
            seconds = self.accept('"') is not None
            primes = 0 if seconds else sum(1 for _ in iter(lambda: self.accept("'"), None))
            if not (seconds or primes in (1, 2)) or (is_group and not self.accept("}")):
                self.at = start
                break
            divisor = 3600 if seconds or primes == 2 else 60  # noqa: PLR2004 -- two primes are seconds
            node = ("add", node, ("div", ("num", self.tokens[start].number), ("num", Fraction(divisor))))
        return ("deg", node)

    def parse_subscript(self, node: Node) -> Node:
        if node[0] != "var" and not (node[0] == "const" and node[1] != "inf"):
            raise Unreadable("a subscript does not follow a name")
        start = self.at
        depth = 0
        while True:
            depth += self.is_symbol("{") - self.is_symbol("}")
            if self.current.kind == "end":
                raise Unreadable("a subscript is not closed")
            self.at += 1
            if depth == 0:
                break
        written = "".join(token.value for token in self.tokens[start : self.at] if token.value not in ("{", "}"))
        return ("var", f"{node[1]}_{written}")

    def parse_atom(self) -> Node:
        token = self.current
        self.at += 1
        if token.kind == "number":
            return ("num", token.number)
        if token.kind == "name":
            return _name(token.value)
        if token.kind == "function":
            return self.parse_call(token.value)
        if token.kind == "macro":
            return self.parse_macro(token.value)
        if token.kind == "words":
            return self.parse_words(token.value)
        if token.kind == "environment":
            return self.parse_environment(token.value)
        if token.kind == "symbol":
            return self.parse_symbol(token.value)
        raise Unreadable("the answer ends too early")

    def parse_symbol(self, symbol: str) -> Node:
        if symbol == "{":
            node = self.parse_inside("}", self.parse_group)
            return node if node[0] != "list" else ("set", *node[2:])
        if symbol == r"\{":
            return self.parse_set()
        if symbol in ("(", "[", "<<"):
            return self.parse_brackets(symbol)
        if symbol in ("lfloor", "lceil", "|"):
            name = {"lfloor": "floor", "lceil": "ceil", "|": "abs"}[symbol]
            return ("call", name, self.parse_inside(_CLOSING[symbol], self.parse_sum))
        if symbol in _LONE_SYMBOLS:
            return _LONE_SYMBOLS[symbol]
        if symbol in ("~", "=") and self.at == 1:
            return self.parse_sum()
        if symbol == "$":
            return self.parse_money("USD")
        raise Unreadable(f"{symbol!r} is not expected there")

    def parse_inside(self, closing: str, parse_content: Callable[[], Node]) -> Node:
        self.closers.append(closing)
        node = parse_content()
        self.closers.pop()
        self.expect(closing)
        return node

    def parse_brackets(self, opening: str) -> Node:
        if self.accept(")", "]"):
            return ("group", opening, self.tokens[self.at - 1].value)
        self.closers.append(opening)
        node = self.parse_list()
        self.closers.pop()
        closing = self.accept(")", "]", ">>")
        if closing is None or (opening == "<<") != (closing == ">>"):
            raise Unreadable("a bracket is not closed")
        if node[0] == "list":
            if any(separator != "," for separator in node[1]):
                raise Unreadable("a bracket contains alternatives")
            return ("group", opening, closing, *node[2:])
        if (opening, closing) == ("(", ")") or node[0] not in ("group", "rel"):
            return node if (opening, closing) == ("(", ")") else ("group", opening, closing, node)
        return ("group", opening, closing, node)

    def parse_money(self, currency: str) -> Node:
        unit = _get_unit(currency)
        factors = [self.parse_factor()]
        while self.current.kind != "words" and self.starts_factor(factors[-1]):
            factors = _join_mixed([*factors, self.parse_factor()])
        node = _join("mul", factors)
        if self.is_symbol("/") and self.peek().kind == "words":
            self.at += 1
            return ("qty", node, unit * self.parse_unit(self.current.value.split()).raise_to(-1))
        if self.current.kind == "words":
            words = self.current.value.split()
            if words[0].lower() in MULTIPLIERS:
                node = ("mul", node, ("num", Fraction(MULTIPLIERS[words[0].lower()])))
                words = words[1:]
            unit = unit * (self.parse_unit(words) if words else NO_UNIT)
            self.at += not words
        return ("qty", node, unit)

    def parse_set(self) -> Node:
        if self.accept(r"\}"):
            return ("set",)
        self.closers.append("set")
        node = self.parse_list()
        if self.accept("mid", "|", ":"):
            condition = self.parse_list()
            node = ("builder", node, condition)
        self.closers.pop()
        self.expect(r"\}")
        if node[0] == "builder":
            return node
        return ("set", *node[2:]) if node[0] == "list" else ("set", node)

    def parse_group(self) -> Node:
        node = self.parse_list()
        return ("div", node, self.parse_list()) if self.accept("over") else node

    # Functions and structures

    def parse_argument(self, *, whole_number: bool = False) -> Node:
        """Parse a group, or a single token as LaTeX takes it: of a number, its first digit."""
        if self.accept("{"):
            if self.accept("}"):
                raise Unreadable("a group is empty")
            return self.parse_inside("}", self.parse_group)
        token = self.current
        if token.kind == "number" and not whole_number and token.value.isdigit() and len(token.value) > 1:
            rest = token.value[1:]
            self.tokens[self.at] = Token("number", rest, Fraction(int(rest)))
            return ("num", Fraction(int(token.value[0])))
        if token.kind == "name" and whole_number and len(token.value) > 1 and token.value[0] != "\\":
            return self.parse_atom()
        return self.parse_atom()

    def parse_macro(self, name: str) -> Node:
        if name == "frac":
            above = self.parse_argument()
            return ("div", above, self.parse_argument())
        if name == "binom":
            above = self.parse_argument()
            return ("call", "binom", above, self.parse_argument())
        if name == "sqrt":
            return self.parse_root()
        if name in ("overline", "bar"):
            inner = self.parse_argument()
            return ("call", "conj", inner) if inner[0] != "var" or len(inner[1]) == 1 else inner
        if name in ("sum", "prod", "int", "iint", "oint", "lim"):
            return self.parse_open(name)
        raise Unreadable(f"the macro \\{name} is not expected there")

    def parse_root(self) -> Node:
        degree: Node = ("num", Fraction(2))
        if self.accept("["):
            degree = self.parse_inside("]", self.parse_sum)
        return ("call", "root", degree, self.parse_argument())

    def parse_open(self, name: str) -> Node:
        """Parse a sum, product, integral or limit, with its bounds and body."""
        bounds: list[Node] = []
        while mark := self.accept("_", "^"):
            bounds.append(("bound", mark, self.parse_argument(whole_number=True)))
        body = self.parse_sum()
        node: Node = ("open", name, *bounds, body)
        counts_with_i = any(bound[2][:2] == ("rel", ("const", "i")) for bound in bounds)
        return _replace_i(node) if counts_with_i else node

    def parse_call(self, name: str) -> Node:
        if name in ("sqrt", "cbrt"):
            degree = ("num", Fraction(2 if name == "sqrt" else 3))
            return ("call", "root", degree, self.parse_argument(whole_number=True))
        base = power = None
        while mark := self.accept("_", "^"):
            argument = negate(self.parse_argument()) if self.accept("-") else self.parse_argument(whole_number=True)
            base, power = (argument, power) if mark == "_" else (base, argument)
        if name == "log" and base is not None:
            name = "logb"
        if power == ("num", Fraction(-1)) or power == ("neg", ONE):
            name, power = f"arc{name}", None
        arguments = self.parse_call_arguments()
        node: Node = ("call", name, *((base,) if base is not None and name == "logb" else ()), *arguments)
        return node if power is None else ("pow", node, power)

    def parse_call_arguments(self) -> tuple[Node, ...]:
        if self.is_symbol(r"\{"):
            self.at += 1
            return self.parse_set()[1:]
        if self.is_symbol("(", "["):
            self.at += 1
            content = self.parse_inside(_CLOSING[self.tokens[self.at - 1].value], self.parse_list)
            return content[2:] if content[0] == "list" else (content,)
        factors = [self.parse_factor()]
        while self.starts_factor(factors[-1]) and self.current.kind != "function" and not self.is_symbol("("):
            factors.append(self.parse_factor())
        return (_join("mul", factors),)

    def parse_environment(self, mark: str) -> Node:
        begin, _, name = mark.partition(" ")
        if begin != "begin":
            raise Unreadable("an environment is closed that is not open")
        rows: list[tuple[Node, ...]] = []
        row: list[Node] = []
        while True:
            if self.current == Token("environment", f"end {name}"):
                self.at += 1
                break
            if self.accept("row"):
                rows, row = [*rows, tuple(row)], []
            elif not self.accept("&"):
                self.closers.append("cell")
                row.append(
                    self.parse_case()
                    if name in _CASES
                    else self.parse_relation()
                    if name in _MATRICES
                    else self.parse_list()
                )
                self.closers.pop()
        rows = [*rows, tuple(row)] if row else rows
        if name in _CASES and rows and {len(each) for each in rows} == {2}:
            return ("cases", *rows)
        if name in _MATRICES and rows and len({len(each) for each in rows}) == 1:
            return _expand_determinant(rows) if name == "vmatrix" else ("matrix", *rows)
        items = [cell for each in rows for cell in each]
        if name in _MATRICES or not items:
            raise Unreadable("the rows of a matrix differ in length")
        return items[0] if len(items) == 1 else ("list", (",",) * (len(items) - 1), *items)

    def parse_case(self) -> Node:
        """Parse a value, or the condition after "if"; a comma at its end does not count."""
        if self.current.kind == "words":
            words = self.current.value.casefold().split()
            if words[0] in ("if", "for", "when", "where"):
                self.at += 1
                if words[1:]:
                    return ("words", " ".join(words[1:]))
        node = self.parse_relation()
        while self.accept(",", ".", ";"):
            if self.current.kind == "environment" or self.is_symbol("&", "row"):
                break
            node = ("list", (",",), node, self.parse_relation())
        return node

    # Words and units

    def parse_words(self, text: str) -> Node:
        words = [word for word in text.casefold().split() if word not in _FILLERS]
        number = read_number(text)
        if number is not None:
            return ("num", number)
        for length in range(len(words) - 1, 0, -1):
            number = read_number(" ".join(words[:length]))
            if number is not None and words[length] != "and":
                self.at -= 1
                self.tokens[self.at] = Token("words", " ".join(words[length:]))
                return ("num", number)
        if words in (["negative"], ["minus"]) and self.current.kind in ("number", "function", "macro"):
            return negate(self.parse_term())
        if not words and self.current.kind != "end":
            return self.parse_sum()
        if text in ("USD", "EUR", "GBP", "JPY", "INR") and self.current.kind == "number":
            return self.parse_money(text)
        return ("words", get_meaning(text))

    def parse_measure(self, node: Node) -> Node:
        """Parse the words after a number: a multiplier such as "million", and a unit."""
        if self.current.kind == "macro":
            return self.parse_unit_fraction(node)
        words = self.current.value.split()
        special = self.parse_special_measure(node, words)
        if special is not None:
            return special
        words = words[1:] if words[0].lower() in ("degree", "degrees") else words
        if words[0].lower() in MULTIPLIERS:
            factor = ("num", Fraction(MULTIPLIERS[words[0].lower()]))
            node, words = ("mul", node, factor), words[1:]
            if not words:
                self.at += 1
                return node
        unit = self.parse_unit(words)
        if node[0] == "qty":
            return _add_quantities(node, ("qty", ONE, unit))
        measured: Node = ("qty", node, unit)
        # "2 hours 30 minutes" is one quantity.
        if self.current.kind == "number" and self.peek().kind == "words":
            following = self.parse_term()
            return _add_quantities(measured, following)
        return measured

    def parse_special_measure(self, node: Node, words: list[str]) -> Node | None:
        """Parse a percentage, a power, a part, degrees or a temperature; return `None` for any other unit."""
        first = words[0].lower()
        measured: Node | None = None
        if words == ["percent"]:
            measured = ("pct", node)
        elif words in (["squared"], ["cubed"]):
            measured = ("pow", node, ("num", Fraction(_POWERS_IN_WORDS[first])))
        elif (part := find_part(first)) is not None:
            measured = ("div", node, ("num", Fraction(part)))
        elif node[0] == "deg" and first in ("c", "f", "celsius", "fahrenheit"):
            measured = ("qty", node[1], _get_unit("celsius" if first[0] == "c" else "fahrenheit"))
        elif first in ("degree", "degrees") and words[1:2] not in (
            ["celsius"],
            ["fahrenheit"],
            ["Celsius"],
            ["Fahrenheit"],
        ):
            measured = ("deg", node)
        self.at += measured is not None
        return measured

    def parse_unit_fraction(self, node: Node) -> Node:
        r"""Parse a unit such as `\\frac{\\text{m}}{\\text{s}}`."""
        units = []
        self.at += 1
        for _ in range(2):
            self.expect("{")
            units.append(self.parse_unit(self.current.value.split()))
            self.expect("}")
        return ("qty", node, units[0] * units[1].raise_to(-1))

    def parse_unit_power(self) -> int:
        node = self.parse_power(ONE)
        if node[0] != "pow":
            raise Unreadable("a unit has no such power")
        return _get_integer(node[2])

    def parse_unit(self, words: list[str]) -> Unit:
        self.at += 1
        unit = _convert_words(words)
        while True:
            if self.accept("^"):
                # In "m s^{-1}" the power belongs to the last unit.
                power = self.parse_unit_power()
                last = _convert_words(words[-1:])
                unit = unit * last.raise_to(-1) * last.raise_to(power)
            elif self.is_symbol("/", "*") and self.peek().kind in ("words", "name"):
                sign = 1 if self.accept("*") else -1
                self.at += sign == -1
                following = _convert_words(self.current.value.split())
                self.at += 1
                if self.accept("^"):
                    following = following.raise_to(self.parse_unit_power())
                unit = unit * following.raise_to(sign)
            else:
                return unit


def get_children(node: Node) -> Iterator[Node]:
    """Yield the nodes below *node*, without names and operators."""
    for part in node[1:]:
        if isinstance(part, tuple) and part and isinstance(part[0], str):
            yield part


def write_node(node: object) -> str:
    """Return a text that identifies a node. Python refuses to write long integers in decimal, so it is hexadecimal."""
    if isinstance(node, Fraction):
        return f"{node.numerator:x}/{node.denominator:x}"
    return f"({' '.join(map(write_node, node))})" if isinstance(node, tuple) else str(node)


def replace_children(node: Node, replace: Callable[[Node], Node]) -> Node:
    """Return *node* with the result of *replace* in place of the nodes below it."""
    return tuple(
        replace(part) if isinstance(part, tuple) and part and isinstance(part[0], str) else part for part in node
    )


def _name(value: str) -> Node:
    if value in ("pi", "e", "i"):
        return ("const", value)
    return ("var", value)


def negate(node: Node) -> Node:
    """Return the negative of *node*: a number or quantity stays one."""
    if node[0] == "num":
        return ("num", -node[1])
    if node[0] == "neg":
        inner: Node = node[1]
        return inner
    if node[0] in ("qty", "pct", "deg"):
        return (node[0], negate(node[1]), *node[2:])
    return ("neg", node)


def _join(kind: str, items: list[Node]) -> Node:
    return items[0] if len(items) == 1 else (kind, *items)


def _divide(above: Node, below: Node) -> Node:
    """Return the quotient: in "1/2%", the sign belongs to the fraction."""
    if below[0] in ("pct", "deg") and above[0] == below[1][0] == "num":
        return (below[0], ("div", above, below[1]))
    return ("div", above, below)


def _join_mixed(factors: list[Node]) -> list[Node]:
    """Join an integer and a proper fraction after it to a mixed number."""
    whole, part = factors[-2:]
    if not (whole[0] == "num" and whole[1].denominator == 1 and part[0] in ("div", "num", "deg", "pct")):
        return factors
    mark, part = (part[0], part[1]) if part[0] in ("deg", "pct") else ("", part)
    if part[0] == "div" and part[1][0] == part[2][0] == "num":
        above, below = part[1][1], part[2][1]
        if above.denominator == below.denominator == 1 and 0 < above < below:
            mixed = ("num", whole[1] + above / below)
            return [*factors[:-2], (mark, mixed) if mark else mixed]
    return factors


def _expand_determinant(rows: list[tuple[Node, ...]]) -> Node:
    if len(rows) != len(rows[0]) or len(rows) > MAX_DETERMINANT:
        raise Unreadable("the determinant is not square, or too large")
    if len(rows) == 1:
        return rows[0][0]
    minors = [[row[:column] + row[column + 1 :] for row in rows[1:]] for column in range(len(rows))]
    terms = [("mul", rows[0][column], _expand_determinant(minor)) for column, minor in enumerate(minors)]
    return ("add", *(negate(term) if column % 2 else term for column, term in enumerate(terms)))


def _replace_i(node: Node) -> Node:
    """Return a sum over i with a variable in place of the imaginary unit."""
    return ("var", "i") if node == ("const", "i") else replace_children(node, _replace_i)


def _get_integer(node: Node) -> int:
    if node[0] == "num" and node[1].denominator == 1 and abs(node[1]) < 100:  # noqa: PLR2004 -- of a unit
        return int(node[1])
    raise Unreadable("the power of a unit is not a small integer")


def _get_unit(name: str) -> Unit:
    unit = find_unit(name)
    if unit is None:
        raise Unreadable(f"the unit {name} is not known")
    return unit


def _convert_words(words: list[str]) -> Unit:
    """Return the unit that *words* name: "square meters", "miles per hour", "red apples"."""
    unit, sign, power = NO_UNIT, 1, 1
    if _NO_UNITS & {word.lower() for word in words} or len(words) > MAX_UNIT_WORDS:
        raise Unreadable("the words after a number are no unit")
    for position, word in enumerate(words):
        lower = word.lower()
        if lower in ("per", "a", "an"):
            sign = -1
        elif lower in _SKIPPED or (lower == "in" and position < len(words) - 1):
            continue
        elif lower in _POWERS_IN_WORDS:
            if lower.endswith("d"):
                unit = unit.raise_to(_POWERS_IN_WORDS[lower])
            else:
                power = _POWERS_IN_WORDS[lower]
        else:
            unit = unit * (find_unit(word) or label(word)).raise_to(sign * power)
            power = 1
    return unit


def _add_quantities(first: Node, second: Node) -> Node:
    if second[0] != "qty" or first[2].powers != second[2].powers:
        raise Unreadable("quantities of different kinds stand side by side")
    converted = ("mul", second[1], ("num", second[2].factor / first[2].factor))
    return ("qty", ("add", first[1], converted), first[2])
