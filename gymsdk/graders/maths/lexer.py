r"""Split an answer into tokens: numbers, names, functions, operators and words.

Macros that only change the style (`\left`, `\mathrm`, `\displaystyle`) leave no token, and macros with the same meaning
(`\dfrac`, `\leqslant`) become one.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from gymsdk.graders.maths.units import AMBIGUOUS_NAMES, PRODUCTS, find_unit
from gymsdk.graders.maths.words import MULTIPLIERS, SHORTEST_WORD, read_number, word_set

MAX_TOKENS = 4000
_DIGITS_AT_ONCE = 4000


class Unreadable(ValueError):
    """The text is no answer that the grader can read."""


class Token(NamedTuple):
    """A token.

    Attributes:
        kind: `number`, `name`, `function`, `macro`, `words`, `symbol` or `environment`.
        value: Its text in one form: of a number its digits, of a symbol the operator.
        number: The value of a number.
    """

    kind: str
    value: str
    number: Fraction | None = None


FUNCTIONS = word_set(
    "sin cos tan cot sec csc arcsin arccos arctan arccot arcsec arccsc sinh cosh tanh coth sech csch"
    " arcsinh arccosh arctanh ln log lg lb exp cis gcd lcm max min det floor ceil abs sqrt cbrt sgn"
)
_FUNCTION_NAMES = {
    **{name: name for name in FUNCTIONS},
    **{name.replace("arc", "a", 1): name for name in FUNCTIONS if name.startswith("arc")},
    "arsinh": "arcsinh",
    "arcosh": "arccosh",
    "artanh": "arctanh",
    "tg": "tan",
    "ctg": "cot",
    "arctg": "arctan",
    "cosec": "csc",
    "ceiling": "ceil",
}
_GREEK = word_set(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho"
    " varrho sigma varsigma tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Upsilon"
    " Phi Psi Omega ell hbar"
)
_SAME_GREEK = {"varepsilon": "epsilon", "vartheta": "theta", "varrho": "rho", "varphi": "phi", "varsigma": "sigma"}
_SYMBOL_MACROS = {
    **dict.fromkeys(("times", "cdot", "ast", "star", "bullet", "cdotp"), "*"),
    **dict.fromkeys(("div", "slash"), "/"),
    **dict.fromkeys(("le", "leq", "leqslant", "leqq"), "<="),
    **dict.fromkeys(("ge", "geq", "geqslant", "geqq"), ">="),
    **dict.fromkeys(("ne", "neq"), "!="),
    **dict.fromkeys(("approx", "simeq", "cong", "doteq"), "~"),
    **dict.fromkeys(("lt",), "<"),
    **dict.fromkeys(("gt",), ">"),
    **dict.fromkeys(("lbrace",), r"\{"),
    **dict.fromkeys(("rbrace",), r"\}"),
    **dict.fromkeys(("lbrack",), "["),
    **dict.fromkeys(("rbrack",), "]"),
    **dict.fromkeys(("lparen",), "("),
    **dict.fromkeys(("rparen",), ")"),
    **dict.fromkeys(("vert", "lvert", "rvert"), "|"),
    "mid": "mid",
    "colon": ":",
    **dict.fromkeys(("setminus", "smallsetminus", "backslash"), "minus"),
    **dict.fromkeys(("cup", "bigcup"), "cup"),
    **dict.fromkeys(("cap", "bigcap"), "cap"),
    **dict.fromkeys(("lor", "vee"), "or"),
    **dict.fromkeys(("land", "wedge"), "and"),
    **dict.fromkeys(("pmod", "bmod", "mod", "pod"), "mod"),
    **dict.fromkeys(("to", "rightarrow", "longrightarrow", "implies", "Rightarrow", "iff"), "->"),
    **dict.fromkeys(("circ", "degree"), "deg"),
    **dict.fromkeys(("ldots", "dots", "cdots", "dotsc", "dotsb"), "..."),
    **dict.fromkeys(("prime",), "'"),
    "pm": "pm",
    "mp": "mp",
    "in": "in",
    "notin": "notin",
    "equiv": "equiv",
    "langle": "<<",
    "rangle": ">>",
    "lfloor": "lfloor",
    "rfloor": "rfloor",
    "lceil": "lceil",
    "rceil": "rceil",
    "choose": "choose",
    "infty": "inf",
    "infin": "inf",
    "emptyset": "empty",
    "varnothing": "empty",
    "bot": "perp",
    "perp": "perp",
    "over": "over",
}
_CURRENCIES = {"pounds": "GBP", "euro": "EUR", "yen": "JPY"}
_STYLE = word_set(
    "left right middle big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm displaystyle"
    " textstyle scriptstyle scriptscriptstyle limits nolimits rm bf it sf tt cal boldmath mathstrut strut"
    " quad qquad thinspace medspace thickspace negthinspace enspace enskip nobreak allowbreak hfill hline"
    " cr relax protect small large Large normalsize checkmark blacksquare square qed Box blacktriangle"
)
_WITH_MATHS = word_set(
    "mathbf boldsymbol bm mathit mathsf mathtt mathcal mathscr mathfrak pmb underline boxed fbox hat"
    " tilde vec widehat ensuremath smash overrightarrow underbrace overbrace"
)
_WITH_TEXT = word_set(
    "text textbf textit textrm textsf texttt textnormal textup textsc emph mbox hbox mathrm operatorname"
    " mathnormal operatorname* unit si SI"
)
_WITH_SYMBOL = word_set("mathop mathrel mathbin mathopen mathclose mathord mathpunct mathinner")
_WITH_NOTHING = word_set("hspace hspace* vspace phantom hphantom vphantom label tag color rule kern mskip hskip")
_STRUCTURES = word_set("frac sqrt binom sum prod int iint oint lim log overline bar dot overset")
_SAME_STRUCTURE = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac", "nicefrac", "sfrac"), "frac"),
    **dict.fromkeys(("dbinom", "tbinom"), "binom"),
}
_SETS = {"R": "R", "Z": "Z", "N": "N", "Q": "Q", "C": "C"}

_SPACE = re.compile(r"(?:\s|~|\\[,;:!> ]|\\(?:\r?\n))+")
_MACRO = re.compile(r"\\([A-Za-z]+\*?)")
_LETTERS = re.compile(r"[^\W\d_]+")
_PLAIN = r"(?:[0-9]+)"
_GROUPS = r"(?:[1-9][0-9]{0,2}(?:(?:\{,\}|\\!?,\\!|\\,|\\ |\\;|\\:|~|'| )[0-9]{3})+(?![0-9]))"
_COMMAS = r"(?:[1-9][0-9]{0,2}(?:,(?:\\!)?[0-9]{3})+(?![0-9]|,[0-9]))"
_FRACTION = r"(?:\.[0-9]+(?:\\,[0-9]+)*|\.(?![0-9.]))?(?:[eE][+-]?[0-9]{1,9}(?![\w.]))?"
_NUMBER = re.compile(rf"(?:{_GROUPS}|{_PLAIN}){_FRACTION}|\.[0-9]+")
_NUMBER_WITH_COMMAS = re.compile(rf"(?:{_COMMAS}|{_GROUPS}|{_PLAIN}){_FRACTION}|\.[0-9]+")
_EUROPEAN = re.compile(
    r"[1-9][0-9]{0,2}(?:(?:\.[0-9]{3}){2,}|(?:\.[0-9]{3})+,[0-9]+"
    r"|(?:(?: |\\,|~)[0-9]{3})+,(?:[0-9]{1,2}|[0-9]{4,}))(?![0-9,])"
)
_ROW_SPACE = re.compile(r"\s*\[\s*-?[0-9.]+\s*(?:pt|em|ex|mm|cm|in|px)\s*\]")
_ORDERED = re.compile(r"\\mid|[<>]|\\[lg]e(?![a-z]{2})")
_DECIMAL_COMMA = re.compile(r"([0-9]+)\{,\}([0-9]+)")
_REPEATING = re.compile(
    r"([0-9]*)\.([0-9]*)(?:\\(?:overline|bar)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))|\(([0-9]+)\)(?!\s*[\^!])"
    r"|((?:\\dot\s*(?:\{\s*[0-9]\s*\}|[0-9])[0-9]*)+))"
)
_ENDLESS = re.compile(r"([0-9]*)\.([0-9]+)\s*(?:\.{3,4}|\\l?dots|\\cdots)")
_LOOSE_COMMA = re.compile(r",(?:\s|\\[ ,;:])|;")
_WORD_IN_BRACKETS = re.compile(r"\(([^\W\d_]{2,})\)")
_TWO_LETTERS = re.compile(r"[^\W\d_]{2}")
_MATHS_IN_TEXT = re.compile(r"[\d^+=*/]")
_FACTORIAL_EQUATION = re.compile(r"(?<=[0-9)])!=")
LONE_SIGN = re.compile(r"\{\s*([-+=<>:])\s*\}")
_DERIVATIVE = re.compile(r"(?<![A-Za-z\\])(d[a-z])\s*/\s*(d[a-z])(?![A-Za-z])")
_ANGLES = re.compile(r"\s*<([^<>=]*,[^<>=]*)>\s*")
_SYMBOLS = ("+/-", "**", "<=", ">=", "!=", "==", "...", "->")
_OPENING, _CLOSING = frozenset("([") | {r"\{", "<<"}, frozenset(")]") | {r"\}", ">>"}
_SHORT_WORDS = word_set("yes no odd all any not the are is two six ten one none both even true") | frozenset(
    {"No", "Yes", "AM", "PM", "am", "pm", "a.m", "p.m", "USD", "EUR", "GBP", "DNE", "per", "sq", "cu"}
)
_ALIGNED = frozenset({"aligned", "align", "gathered", "gather", "split", "equation", "eqnarray", "alignedat"})
_ELEMENTS = frozenset(["or", "and"])


def split_tokens(text: str) -> list[Token]:
    """Split *text* into tokens.

    Raises:
        Unreadable: A group is not closed, or the text has too many tokens.
    """
    text = LONE_SIGN.sub(r" \1 ", _FACTORIAL_EQUATION.sub("! =", text))
    text = _DERIVATIVE.sub(
        r"\\frac{\1}{\2}", _ANGLES.sub(r"\\langle \1 \\rangle", text) if _ANGLES.fullmatch(text) else text
    )
    lexer = _Lexer(text)
    lexer.run(text)
    return lexer.tokens


class _Lexer:
    def __init__(self, text: str) -> None:
        self.tokens: list[Token] = []
        self.depth = 0
        self.is_aligned = False
        # A comma without a space in brackets separates, unless others have spaces, or the brackets hold an inequality.
        self.has_groups = _LOOSE_COMMA.search(text) is not None or _ORDERED.search(text) is not None

    def add(self, kind: str, value: str, number: Fraction | None = None) -> None:
        if kind == "words" and self.tokens and self.tokens[-1].kind == "words":
            self.tokens[-1] = Token("words", f"{self.tokens[-1].value} {value}")
            return
        self.tokens.append(Token(kind, value, number))
        if len(self.tokens) > MAX_TOKENS:
            raise Unreadable("the answer is too long")

    def run(self, text: str, *, prose: bool = False) -> None:
        at = 0
        while at < len(text):
            character = text[at]
            if found := _SPACE.match(text, at):
                at = found.end()
            elif character.isdigit() or (character == "." and text[at + 1 : at + 2].isdigit()):
                at = self.read_number(text, at)
            elif character == "\\":
                at = self.read_macro(text, at)
            elif prose and character in ".'":
                at += 1
            elif found := _LETTERS.match(text, at):
                self.add_letters(found.group(), prose=prose)
                at = found.end()
            else:
                at = self.read_symbol(text, at)

    def read_number(self, text: str, at: int) -> int:
        for pattern, convert in ((_REPEATING, _convert_repeating), (_ENDLESS, _convert_endless)):
            if found := pattern.match(text, at):
                self.add("number", "", convert(found))
                return found.end()
        if self.depth == 0 and (found := _EUROPEAN.match(text, at)):
            digits = re.sub(r"[^0-9,]", "", re.sub(r"\\,", "", found.group())).replace(",", ".")
            self.add("number", "", to_fraction(digits))
            return found.end()
        found = _DECIMAL_COMMA.match(text, at)
        if found is not None and len(found.group(2)) != 3:  # noqa: PLR2004 -- three digits are a group of thousands
            self.add("number", "", to_fraction(f"{found.group(1)}.{found.group(2)}"))
            return found.end()
        commas = self.depth == 0 or self.has_groups
        found = (_NUMBER_WITH_COMMAS if commas else _NUMBER).match(text, at)
        if found is None:
            raise Unreadable("a number is malformed")
        digits = re.sub(r"[^0-9.eE+-]", "", found.group())
        self.add("number", digits, to_fraction(digits))
        return found.end()

    def read_macro(self, text: str, at: int) -> int:
        found = _MACRO.match(text, at)
        if found is None:
            return self.read_escape(text, at)
        name, end = found.group(1), found.end()
        if name in _WITH_TEXT:
            inner, end = _read_group(text, end)
            self.add_text(inner, is_prose=name not in ("mathrm", "operatorname", "mathnormal", "operatorname*"))
        elif name in _WITH_SYMBOL:
            inner, end = _read_group(text, end)
            self.run(inner)
        elif name in _WITH_NOTHING or name in ("textcolor", "colorbox"):
            _, end = _read_group(text, end)
        elif name == "mathbb":
            inner, end = _read_group(text, end)
            self.add("name", f"set {_SETS.get(inner.strip(), inner)}")
        elif name in ("begin", "end"):
            end = self.read_environment(name, text, end)
        elif name == "not":
            self.run(text[end : end + 1])
            end += 1
            self.tokens[-1] = Token("symbol", {"=": "!=", "in": "notin"}.get(self.tokens[-1].value, "not"))
        elif name not in _STYLE and name not in _WITH_MATHS:
            self.add_macro(name)
        elif name in ("left", "right") and text[end : end + 1] == ".":
            end += 1
        return end

    def read_environment(self, mark: str, text: str, end: int) -> int:
        inner, end = _read_group(text, end)
        name = inner.strip().rstrip("*")
        if mark == "begin" and name == "array":
            _, end = _read_group(text, end)
        self.is_aligned = mark == "begin" and name in _ALIGNED
        self.add("environment", f"{mark} {name}")
        return end

    def add_macro(self, name: str) -> None:
        if name in _CURRENCIES:
            self.add("words", _CURRENCIES[name])
        elif name in ("angle", "triangle", "measuredangle"):
            self.add("name", f"\\{name}")
        elif name in _SYMBOL_MACROS:
            self.add_symbol(_SYMBOL_MACROS[name])
        elif name in _FUNCTION_NAMES and name not in _STRUCTURES:
            self.add("function", _FUNCTION_NAMES[name])
        elif name == "pi":
            self.add("name", "pi")
        elif name in _GREEK:
            self.add("name", f"\\{_SAME_GREEK.get(name, name)}")
        elif (name := _SAME_STRUCTURE.get(name, name)) in _STRUCTURES:
            self.add("function" if name == "log" else "macro", name)
        elif name == "%":
            self.add("symbol", "%")
        else:
            raise Unreadable(f"the macro \\{name} is not known")

    def read_escape(self, text: str, at: int) -> int:
        escaped = text[at + 1 : at + 2]
        if escaped == "\\":
            self.add("symbol", "row")
            spacing = _ROW_SPACE.match(text, at + 2)
            return spacing.end() if spacing else at + 2
        if escaped in "{}|" and escaped:
            self.add_symbol("|" if escaped == "|" else f"\\{escaped}")
        elif escaped in ("%", "$"):
            self.add("symbol", escaped)
        elif escaped not in ("(", ")", "[", "]", "#", "&", "_", "/", "-", ""):
            raise Unreadable(f"the macro \\{escaped} is not known")
        return at + 2

    def read_symbol(self, text: str, at: int) -> int:
        if text[at] == "&" and self.is_aligned:
            return at + 1
        symbol = next((each for each in _SYMBOLS if text.startswith(each, at)), text[at])
        self.add_symbol({"**": "^", "==": "=", "+/-": "pm"}.get(symbol, symbol))
        return at + len(symbol)

    def add_symbol(self, symbol: str) -> None:
        self.depth += (symbol in _OPENING) - (symbol in _CLOSING)
        self.add("symbol", symbol)

    def add_text(self, inner: str, *, is_prose: bool) -> None:
        text = inner.strip()
        if is_prose and _MATHS_IN_TEXT.search(text) and not _TWO_LETTERS.search(text) and _LETTERS.search(text):
            self.run(text)
            return
        if found := _WORD_IN_BRACKETS.fullmatch(text):
            text = found.group(1)
        if text in (".", "!"):
            return
        if text in _ELEMENTS or text == "mod":
            self.add("symbol", text)
        elif text in _FUNCTION_NAMES and text not in AMBIGUOUS_NAMES:
            self.add("function", _FUNCTION_NAMES[text])
        elif len(text) == 1 and text.isalpha() and not is_prose:
            after_number = self.tokens and self.tokens[-1].kind == "number"
            self.add("words" if after_number and find_unit(text) else "name", text)
        elif text:
            self.run(text, prose=True)

    def add_letters(self, letters: str, *, prose: bool) -> None:
        if letters in _ELEMENTS or letters == "mod" or (letters == "choose" and not prose):
            self.add("symbol", letters)
        elif prose or (letters in AMBIGUOUS_NAMES and letters != "a" and self.follows_value()):
            self.add("words", letters)
        elif letters in _FUNCTION_NAMES:
            self.add("function", _FUNCTION_NAMES[letters])
        elif letters in ("pi", "Pi", "PI"):
            self.add("name", "pi")
        elif letters in ("inf", "infinity", "Infinity", "oo"):
            self.add("symbol", "inf")
        elif letters in ("theta", "alpha", "beta", "gamma", "lambda", "phi", "omega"):
            self.add("name", f"\\{letters}")
        elif len(letters) == 1 or not letters.isascii():
            self.add("name" if len(letters) == 1 else "words", letters)
        elif _is_word(letters) or (self.follows_value() and find_unit(letters) and letters not in PRODUCTS):
            self.add("words", letters)
        elif letters.isupper():
            self.add("name", letters)
        else:
            self.add_product(letters)

    def follows_value(self) -> bool:
        """Return whether a value ends before, so that a unit can follow."""
        last = self.tokens[-1] if self.tokens else Token("end", "")
        return last.kind in ("number", "words") or last == Token("name", "pi") or last.value in (")", "}", "/", "*")

    def add_product(self, letters: str) -> None:
        for length in range(len(letters) - 1, 1, -1):
            if letters[:length] in _FUNCTION_NAMES and letters[:length] not in AMBIGUOUS_NAMES:
                self.add("function", _FUNCTION_NAMES[letters[:length]])
                self.add_letters(letters[length:], prose=False)
                return
        self.add("name", letters[0])
        if letters[1:]:
            self.add_product(letters[1:])


def _is_word(letters: str) -> bool:
    if letters in _SHORT_WORDS or letters.lower() in MULTIPLIERS or read_number(letters) is not None:
        return True
    starts_with_function = any(
        letters.startswith(name) and len(letters) - len(name) == 1
        for name in ("sin", "cos", "tan", "log", "ln", "sqrt")
    )
    is_long = len(letters) > SHORTEST_WORD and not letters.isupper() and not starts_with_function
    return is_long or (len(letters) == SHORTEST_WORD and letters[0].isupper() and letters[1:].islower())


def _read_group(text: str, at: int) -> tuple[str, int]:
    """Return the content of the group at *at*, or the single character there, and where it ends."""
    while at < len(text) and text[at].isspace():
        at += 1
    if text[at : at + 1] != "{":
        return text[at : at + 1], at + 1
    end = find_closing(text, at)
    if end is None:
        raise Unreadable("a group is not closed")
    return text[at + 1 : end], end + 1


def find_closing(text: str, at: int) -> int | None:
    """Return the position of the brace that closes the one at *at*, or `None`; escaped braces do not count."""
    depth = 0
    for found in re.compile(r"\\.|[{}]", re.DOTALL).finditer(text, at):
        depth += {"{": 1, "}": -1}.get(found.group(), 0)
        if depth == 0:
            return found.start()
    return None


def to_fraction(digits: str) -> Fraction:
    """Return the value of a decimal number of any length.

    Raises:
        Unreadable: Its exponent is too large.
    """
    mantissa, _, exponent = digits.lower().partition("e")
    whole, _, part = mantissa.partition(".")
    scale = int(exponent or 0) - len(part)
    if abs(scale) > MAX_EXPONENT:
        raise Unreadable("the exponent is too large")
    value = _to_integer((whole + part) or "0")
    return Fraction(value * 10**scale) if scale >= 0 else Fraction(value, 10**-scale)


MAX_EXPONENT = 20_000


def _to_integer(digits: str) -> int:
    # Python refuses to convert more than 4,300 digits at once, because the time grows with the square.
    value = 0
    for start in range(0, len(digits), _DIGITS_AT_ONCE):
        chunk = digits[start : start + _DIGITS_AT_ONCE]
        value = value * 10 ** len(chunk) + int(chunk)
    return value


def _convert_repeating(found: re.Match[str]) -> Fraction:
    whole, start, group, digit, parenthesised, dotted = found.groups()
    period = group or digit or parenthesised
    if dotted is not None:
        period = re.sub(r"[^0-9]", "", dotted)
        # Two dots mark the first and the last digit of the period.
        marked = re.findall(r"\\dot\s*\{?\s*([0-9])\s*\}?([0-9]*)", dotted)
        if len(marked) == 1 and marked[0][1]:
            raise Unreadable("the period has no end")
    return to_fraction(f"{whole or 0}.{start or 0}") + Fraction(
        _to_integer(period), (10 ** len(period) - 1) * 10 ** len(start)
    )


def _convert_endless(found: re.Match[str]) -> Fraction:
    """Return the value of 0.1666...: the shortest period occurs three times, or twice if it has several digits."""
    whole, digits = found.groups()
    for length in range(1, len(digits) // 2 + 1):
        repeats = 3 if length == 1 and len(digits) > 2 else 2  # noqa: PLR2004 -- 0.33... has two digits
        period = digits[-length:]
        if digits.endswith(period * repeats):
            start = digits
            while start.endswith(period):
                start = start[:-length]
            return to_fraction(f"{whole or 0}.{start or 0}") + Fraction(
                _to_integer(period), (10**length - 1) * 10 ** len(start)
            )
    raise Unreadable("a number with an ellipsis has no period")
