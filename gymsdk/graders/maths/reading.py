"""Read an answer: times, dates and other special notations, and everything else as a tree."""

from __future__ import annotations

import re
from fractions import Fraction

from gymsdk.graders.maths.interpretation import interpret, interpret_words
from gymsdk.graders.maths.kinds import Answer, Assignment, BaseNumber, Clock, Letter, Scalar, Words
from gymsdk.graders.maths.lexer import LONE_SIGN, Unreadable, split_tokens
from gymsdk.graders.maths.parser import parse
from gymsdk.graders.maths.unicode import to_latex
from gymsdk.graders.maths.units import find_unit
from gymsdk.graders.maths.words import SHORTEST_WORD, get_meaning, number_words, read_number, word_set

MAX_CHARS = 5000
_END_CHARS = 100

_BASE_WORDS = number_words(
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen", 2
)
_BASE = re.compile(
    r"(-?)\(?\s*([0-9A-Za-z]+(?:\.[0-9A-Za-z]+)?)\s*\)?\s*"
    r"(?:_\s*(?:\{\s*\(?|\(|)|\(?\s*(?:in\s+)?base[\s-]*)\s*([0-9]{1,2}|[a-z]+)\s*\)?\s*\}?\s*\)?"
)
_CLOCK = re.compile(
    r"([0-9]{1,2}):([0-5][0-9])(?::([0-5][0-9]))?\s*(?:\\text\{)?\s*\\?,?\s*([ap])?\.?\s*(?(4)m\.?)\s*\}?",
    re.IGNORECASE,
)
_HOUR = re.compile(r"([0-9]{1,2})\s*(?:\\text\{)?\s*\\?,?\s*([ap])\.?\s*m\.?\s*\}?", re.IGNORECASE)
_LETTER = re.compile(
    r"(?:(?:option|choice|answer)\s*)?(?:\(([A-Za-z])\)|([A-J])\s*[).:](?!\d)|(?<=[a-z]\s)([A-J])\b)\s*(.*)",
    re.IGNORECASE | re.DOTALL,
)
_BARE_LETTER = re.compile(r"[A-J]")
_STYLED_LETTER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textrm|textit|mathit)\s*\{\s*(.*?)\s*\}(.*)", re.DOTALL)
_WORDS = re.compile(r"[A-Za-z](?:[A-Za-z' -]|(?<=[A-Za-z])\. )*[A-Za-z]")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mbox|textnormal)\s*\{([^{}]*)\}")
_LABEL = re.compile(
    r"(?:(?:so|thus|hence|therefore|then|and)\b,?\s*)?(?:(?:the\s+)?(?:final\s+)?answer\s*(?:is\s*:?|:|=)\s*)?",
    re.IGNORECASE,
)
_TEXT_LABEL = re.compile(r"\\text\{\s*(?:the\s+)?(?:final\s+)?answer\s*(?:is)?\s*:?\s*\}\s*", re.IGNORECASE)
_ONLY_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_FOR_ALL = re.compile(
    r"(?:\\text\{|,|\\[,; ]|\\quad|\s)*\s*(?:for|with)\s+(?:all|every|each|any)\s*\}?\s*(?:\w+\s+)?[A-Za-z]"
    r"(?:\s*\\in\s*\\mathbb\s*\{?\s*[RNZQC]\s*\}?)?\s*\}?\Z"
)
_COMBINATIONS = re.compile(
    r"(?:\{\s*\})?\s*[_^]\s*\{?\s*(?P<total>\d+)\s*\}?\s*"
    r"(?:\\mathrm\s*)?\{?(?P<kind>[CP])\}?\s*_\s*\{?\s*(?P<chosen>\d+)\s*\}?"
)
_MONTHS = tuple(number_words("january february march april may june july august september october november december"))
_DATE = re.compile(
    r"(?:(?P<month>[a-z]{3,9})\.?\s+(?P<day>\d{1,2})|(?P<day_first>\d{1,2})(?:\s+of)?\s+(?P<month_last>[a-z]{3,9}))"
    r"(?:st|nd|rd|th)?(?:,?\s+(?P<year>\d{4}))?",
    re.IGNORECASE,
)
_NUMBERED = re.compile(r"[A-Za-z]{3,}(?: [A-Za-z]{3,}){0,2} [0-9]{1,6}[A-Za-z]?")
_DELIMITERS = re.compile(r"\\\(|\\\)|\\\[(?!-?\d+(?:\.\d+)?(?:pt|em|ex|cm|mm)\])|\\\]|(?<!\\)\$\$?")
_ENDLESS = re.compile(r"[0-9]\s*\.{3,4}\Z")
_FRENCH = re.compile(r"(?:\\left\s*)?([\[\]])([^\[\]()]*[,;][^\[\]()]*)(?:\\right\s*)?([\[\]])")
_POSITIVE = re.compile(r"\\mathbb\s*\{?R\}?\s*[\^_]\s*\{?\s*(?:\+|>\s*0)\s*\}?")
_SPELLED = re.compile(r"([A-Za-z][A-Za-z -]*)\(\s*([^()]+?)\s*\)")
_CHOOSE = re.compile(r"(?<![A-Za-z])C\s*\(\s*(\d+)\s*,\s*(\d+)\s*\)")
_NAMED = re.compile(r"([A-Za-z]\s*\([^()]*=[^()]*\))\s*=(.+)", re.DOTALL)
_ISO_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_MONEY = re.compile(r"(?<![\\$])\$(?=\s*\d)")


def read_answer(text: str) -> Answer:
    r"""Read an answer, written as LaTeX, Unicode or plain text, with or without delimiters such as `\( \)` or `$ $`.

    Raises:
        Unreadable: The text is no answer, or exceeds a limit on its length, depth or numbers.
    """
    if len(text) > MAX_CHARS:
        raise Unreadable("the answer is too long")
    written = _rewrite(strip_marks(re.sub(r"\s+", " ", to_latex(text))))
    if not written:
        raise Unreadable("the answer is empty")
    try:
        for read in (_read_clock, _read_base, _read_letter, _read_date, _read_spelled, _read_words, _read_named):
            answer = read(written)
            if answer is not None:
                return answer
        return interpret(parse(written))
    except RecursionError as error:
        raise Unreadable("the answer is nested too deeply") from error


def _rewrite(text: str) -> str:
    r"""Return *text* without a label before it and "for all x" after it, and binomial coefficients as `\binom`."""
    only_text = _ONLY_TEXT.fullmatch(text)
    labelled = _LABEL.match(only_text.group(1).lstrip()) if only_text else None
    if only_text is not None and labelled is not None and labelled.end():
        text = only_text.group(1).lstrip()[labelled.end() :].rstrip(" .")
    text = _TEXT_LABEL.sub("", text)
    text = text[_LABEL.match(text).end() :]  # type: ignore[union-attr]  # it also matches nothing
    text = text[:-_END_CHARS] + _FOR_ALL.sub("", text[-_END_CHARS:])
    text = _FRENCH.sub(_turn_brackets, text)
    text = _POSITIVE.sub(r"(0,\\infty)", text)
    if "C" in text or "P" in text:
        text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
        text = _COMBINATIONS.sub(_write_combinations, text)
    return text


def _turn_brackets(found: re.Match[str]) -> str:
    """Write ]1, 2[ as (1, 2): a bracket that turns away from the interval leaves out its end."""
    opening, inside, closing = found.groups()
    if (opening, closing) == ("[", "]"):
        return found.group()
    return f"{'[' if opening == '[' else '('}{inside}{']' if closing == ']' else ')'}"


def _write_combinations(found: re.Match[str]) -> str:
    total, kind, chosen = (found.group(name) for name in ("total", "kind", "chosen"))
    return rf"\binom{{{total}}}{{{chosen}}}" + (f"({chosen})!" if kind == "P" else "")


def strip_marks(text: str) -> str:
    """Return *text* without delimiters of formulas, markdown, and punctuation at its end."""
    if text.count("$") % 2 or _MONEY.fullmatch(text[:1] + text[1:2]):
        text = _MONEY.sub(r"\\$", text)
    text = _DELIMITERS.sub(" ", text.replace("\\!", ""))
    text = text.replace("**", "^") if re.search(r"\d\s*\*\*\s*\d|[a-z]\*\*\d", text) else text.replace("**", "")
    text = text.strip(' \t\n$*`"')
    if _ENDLESS.search(text[-_END_CHARS:]):
        return text
    shorter = _strip_end(text)
    # A factorial is part of the answer.
    factorials = len(text) - len(shorter) - len(text[len(shorter) :].lstrip("!"))
    return text[: len(shorter) + factorials] if shorter else ""


def _strip_end(text: str) -> str:
    """Return *text* without punctuation, spaces and commands for spaces at its end."""
    while True:
        shorter = text.rstrip(" \t\n.,;:!~").rstrip("\\")
        if shorter == text:
            return text
        text = shorter


def _read_clock(text: str) -> Answer | None:
    text = LONE_SIGN.sub(r"\1", _TEXT.sub(r" \1 ", text)).strip()
    found = _CLOCK.fullmatch(text)
    if found is not None:
        numbers = tuple(int(number) for number in found.groups()[:3] if number is not None)
        return Clock(numbers, f"{(found.group(4) or '').lower()}m" if found.group(4) else "")
    found = _HOUR.fullmatch(text)
    return None if found is None else Clock((int(found.group(1)), 0), f"{found.group(2).lower()}m")


def _read_base(text: str) -> Answer | None:
    found = _BASE.fullmatch(_TEXT.sub(r"\1", text))
    if found is None:
        return None
    sign, digits, name = found.groups()
    digits = digits.upper().lstrip("0") or "0"
    base = int(name) if name.isdigit() else _BASE_WORDS.get(name)
    if base is None or not 2 <= base <= 36 or (len(digits) == 1 and digits.isalpha()):  # noqa: PLR2004 -- of digits
        return None
    try:
        Fraction(int(digits.replace(".", ""), base))
    except ValueError:
        if digits.isalpha():
            return None
        raise Unreadable(f"a digit is too large for base {base}") from None
    if base == 10 and "." not in digits:  # noqa: PLR2004 -- an ordinary number
        return Scalar(("num", Fraction(int(sign + digits))), "number")
    return BaseNumber(sign + digits, base)


def _read_letter(text: str) -> Answer | None:
    styled = _STYLED_LETTER.fullmatch(text)
    if styled is not None:
        text = f"{styled.group(1)} {styled.group(2)}".strip()
        if _BARE_LETTER.fullmatch(text):
            return Letter(text)
    found = _LETTER.fullmatch(text)
    if found is None:
        return None
    parenthesised, bare, worded, rest = found.groups()
    letter = parenthesised or bare or worded
    if not rest:
        return Letter(letter.upper()) if letter.upper() <= "J" else None
    has_space = found.start(4) > found.end(1) + 1
    if parenthesised and (letter.islower() or not (has_space or re.match(r"\\?[\s\\$\d({-]", rest))):
        return None
    if _LETTER.fullmatch(rest):
        raise Unreadable("several letters")
    try:
        return Letter(letter.upper(), read_answer(rest))
    except Unreadable:
        return None


def _read_date(text: str) -> Answer | None:
    """Read a date, or a name with a number such as "Room 12"."""
    plain = " ".join(_TEXT.sub(r" \1 ", text).replace("~", " ").split()).strip(" .")
    plain = re.sub(r"(\d)(?:\^\{?)?\s*(?:st|nd|rd|th)\b\}?", r"\1", plain)
    iso = _ISO_DATE.fullmatch(plain)
    if iso is not None and 1 <= int(iso.group(2)) <= len(_MONTHS):
        return Words(f"{_MONTHS[int(iso.group(2)) - 1]} {int(iso.group(3))} {iso.group(1)}")
    found = _DATE.fullmatch(plain)
    if found is not None:
        name = (found.group("month") or found.group("month_last")).lower()
        months = [month for month in _MONTHS if month.startswith(name)]
        if len(months) == 1:
            return Words(
                " ".join(filter(None, (months[0], found.group("day") or found.group("day_first"), found.group("year"))))
            )
    if _NUMBERED.fullmatch(plain) and not _is_label(plain.split()[0]):
        return Words(plain.casefold())
    return None


def _read_spelled(text: str) -> Answer | None:
    """Read a number in words with its digits behind it: "forty-two (42)"."""
    found = _SPELLED.fullmatch(text)
    number = read_number(found.group(1).strip()) if found is not None else None
    if found is None or number is None:
        return None
    answer = read_answer(found.group(2))
    if answer != Scalar(("num", number), "number"):
        raise Unreadable("the words and the digits are different numbers")
    return answer


def _read_named(text: str) -> Answer | None:
    """Read a value whose name contains a relation, such as P(X = 2) = 0.3."""
    found = _NAMED.fullmatch(text)
    return None if found is None else Assignment("".join(found.group(1).split()), read_answer(found.group(2)))


def _is_label(word: str) -> bool:
    return word.lower() in _NO_NAMES or read_number(word) is not None


_NO_NAMES = word_set(
    "usd gbp eur jpy inr negative positive plus minus the answer about approximately exactly equals equal sqrt sin cos"
    " tan log exp pi all base"
)


def _read_words(text: str) -> Answer | None:
    plain = _TEXT.sub(r" \1 ", text).strip(" .")
    if not _WORDS.fullmatch(plain):
        return None
    number = read_number(plain)
    if number is not None:
        return Scalar(("num", number), "number")
    plain = re.sub(r"^(?:a|an|the)\s+(?=[A-Z]|[a-z]{3})", "", plain)
    if _is_lone_word(plain):
        return interpret_words(get_meaning(plain))
    only_text = _TEXT.sub("", text).strip(" .") == ""
    words = plain.split()
    if read_number(words[0]) is not None and find_unit(words[-1]) is not None and "of" not in words:
        # "two weeks"
        return None
    sentence = len(words) > 1 and sum(len(word) > 1 for word in words) > len(words) // 2
    if sentence or (only_text and len(words) == 1 and len(plain) > 1):
        if {"or", "and"} & set(words) and only_text is False:
            return None
        if only_text and re.search(r"\b(?:or|and)\b", plain):
            return None
        return interpret_words(get_meaning(plain))
    return None


def _is_lone_word(text: str) -> bool:
    """Return whether the letters are a word, such as "eat", and not a product ("xyz") or the name of a function."""
    if not text.isalpha() or not text.islower() or len(text) < SHORTEST_WORD:
        return False
    is_product = len(text) == SHORTEST_WORD and any(
        set(text) <= set(names) for names in ("xyzw", "abcd", "pqr", "kmn", "rst", "uvw")
    )
    return not is_product and split_tokens(text)[0].kind not in ("function", "symbol") and text not in _GREEK_WORDS


_GREEK_WORDS = frozenset(["pi", "theta", "alpha", "beta", "gamma", "lambda", "phi", "omega"])
