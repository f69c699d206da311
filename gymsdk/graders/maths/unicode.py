"""Write the Unicode characters of a mathematical text as LaTeX."""

from __future__ import annotations

import re
import unicodedata

from gymsdk.graders.maths.words import number_words

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱᵃᵇᶜᵈᵉᵏᵐᵗˣʸᶻᵀ", "0123456789+-=()niabcdekmtxyzT", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₒₓₙₖₘᵢⱼₚₛₜ", "0123456789+-=()aeoxnkmijpst", strict=True))
_GREEK = tuple(
    number_words(
        "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho varsigma sigma tau"
        " upsilon phi chi psi omega"
    )
)
_SYMBOLS = {
    **dict.fromkeys("‐‑‒–—―−﹣－⁻", "-"),
    **dict.fromkeys("×✕✖⨯", r"\times "),
    **dict.fromkeys("·⋅∙•∗＊", r"\cdot "),
    **dict.fromkeys("÷∕⁄／", "/"),
    **dict.fromkeys("≤⩽≦", r"\le "),
    **dict.fromkeys("≥⩾≧", r"\ge "),
    **dict.fromkeys("≈≅≃", r"\approx "),
    **dict.fromkeys("∅⌀", r"\emptyset "),
    **dict.fromkeys("∣❘｜", "|"),
    **dict.fromkeys("…⋯", r"\ldots "),
    **dict.fromkeys("∖⧵", r"\setminus "),
    **dict.fromkeys("⟨〈", r"\langle "),
    **dict.fromkeys("⟩〉", r"\rangle "),
    **dict.fromkeys("°º˚", r"^\circ "),
    **dict.fromkeys("′’‘ʹ", "'"),
    **dict.fromkeys("″“”", '"'),
    **dict.fromkeys("→⟶", r"\to "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad\u2061\u2062\u2063\u200e\u200f", ""),
    **dict.fromkeys("，、、", ","),
    **dict.fromkeys("。．", "."),
    "≠": r"\ne ",
    "±": r"\pm ",
    "∓": r"\mp ",
    "∞": r"\infty ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "≡": r"\equiv ",
    "⌊": r"\lfloor ",
    "⌋": r"\rfloor ",
    "⌈": r"\lceil ",
    "⌉": r"\rceil ",
    "∠": r"\angle ",
    "∧": r"\land ",
    "∨": r"\lor ",
    "ℝ": r"\mathbb{R}",
    "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}",
    "ℚ": r"\mathbb{Q}",
    "ℂ": r"\mathbb{C}",
    "ϕ": r"\phi ",
    "ϵ": r"\epsilon ",
    "ϑ": r"\theta ",
    "∆": r"\Delta ",
    "√": r"\sqrt ",
    "∛": r"\sqrt[3] ",
    "∜": r"\sqrt[4] ",
    "‾": "",
    "€": r"\text{ EUR }",
    "£": r"\text{ GBP }",
    "¥": r"\text{ JPY }",
    "¢": r"\text{ cents}",
    "‰": r"\cdot\frac{1}{1000}",
    **{chr(ord("α") + number): f"\\{name} " for number, name in enumerate(_GREEK)},
    **{chr(ord("Α") + number): f"\\{name.capitalize()} " for number, name in enumerate(_GREEK) if name != "varsigma"},
}
_TABLE = str.maketrans(_SYMBOLS)
_UPPER = re.compile(f"[{''.join(map(re.escape, _SUPERSCRIPTS))}]+")
_LOWER = re.compile(f"[{''.join(map(re.escape, _SUBSCRIPTS))}]+")
_VULGAR = re.compile("[¼-¾⅐-⅞↉]")
_OVERLINED = re.compile("(?:[0-9]\u0305)+")
_ROOT = re.compile("([√∛∜])\\s*([0-9]+(?:\\.[0-9]+)?)")
_DOTTED = re.compile("([0-9])\u0307")


def to_latex(text: str) -> str:
    """Return *text* with LaTeX in place of Unicode's operators, powers, fractions and letters of mathematics.

    The characters that compatibility normalisation (NFKC) unites, such as full-width or italic letters, become plain.
    """
    if text.isascii():
        return text
    text = _VULGAR.sub(_write_fraction, text)
    text = _ROOT.sub(r"\1{\2}", text)
    text = _UPPER.sub(lambda found: _write_script("^", found.group(), _SUPERSCRIPTS), text)
    text = _LOWER.sub(lambda found: _write_script("_", found.group(), _SUBSCRIPTS), text)
    text = _OVERLINED.sub(lambda found: rf"\overline{{{found.group().replace(chr(0x305), '')}}}", text)
    text = _DOTTED.sub(r"\\dot{\1}", text)
    text = unicodedata.normalize("NFKC", text.translate(_TABLE)).translate(_TABLE)
    return "".join(map(_write_digit, text))


def _write_fraction(found: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", found.group()).partition("⁄")
    return rf"\frac{{{above}}}{{{below}}}"


def _write_script(sign: str, characters: str, names: dict[str, str]) -> str:
    return f"{sign}{{{''.join(names[character] for character in characters)}}}"


def _write_digit(character: str) -> str:
    if character.isascii():
        return character
    digit = unicodedata.decimal(character, None)
    return character if digit is None else str(digit)
