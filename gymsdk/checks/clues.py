"""Clues: what a policy that only looks for the answer finds in the text it is shown."""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from gymsdk.types import Item

MAX_OPTIONS = 60
"""How many options are taken."""

_LINES = re.compile(r"^\s*(?:\(?([^\W\d_]|\d{1,2})[).:]|[-*])\s+(\S.*)$", re.MULTILINE)
_INLINE = re.compile(r"\(([^\W\d_]|\d{1,2})\)\s*([^()\n,;]*)")
_LETTERS = re.compile(r"(?<![A-Za-z])([A-H])[).:]\s*([^\n]*?)(?=\s+[A-H][).:]|\n|$)")
_QUOTED = re.compile(r"""['"`\N{LEFT DOUBLE QUOTATION MARK}]([^'"`\n]{1,40})['"`\N{RIGHT DOUBLE QUOTATION MARK}]""")
_EITHER = re.compile(r"\b(\w+)(?:, (\w+))* or (\w+)\b")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def list_options(prompt: str) -> list[str]:
    """Give what *prompt* offers to choose from: listed letters and their texts, quoted words, one thing or another."""
    found: dict[str, None] = {}
    for pattern in (_LINES, _INLINE, _LETTERS, _QUOTED, _EITHER):
        for match in pattern.findall(prompt):
            parts = (match,) if isinstance(match, str) else match
            found.update(dict.fromkeys(part.strip() for part in parts if part.strip()))
    return list(found)[:MAX_OPTIONS]


def list_letters(prompt: str) -> list[str]:
    """Give the letters or numbers that stand before the options *prompt* lists, each once."""
    marks = [match[0] for pattern in (_LINES, _INLINE, _LETTERS) for match in pattern.findall(prompt)]
    return list(dict.fromkeys(mark for mark in marks if mark))


def list_numbers(text: str) -> list[str]:
    """Give the numbers in *text*, each once."""
    return list(dict.fromkeys(_NUMBER.findall(text)))


def iter_enum_arguments(tool: Item) -> Iterator[dict[str, Any]]:
    """Yield arguments of *tool* with each value its schema lists, something plain for the rest."""
    properties = (tool.get("parameters") or {}).get("properties") or {}
    plain = {name: build_plain_value(schema) for name, schema in properties.items()}
    for name, schema in properties.items():
        yield from ({**plain, name: value} for value in list_choices(schema))


def list_choices(schema: Any) -> list[Any]:
    """Give the values *schema* lists."""
    if not isinstance(schema, dict):
        return []
    nested = [value for each in schema.get("anyOf") or [] for value in list_choices(each)]
    return [*(schema.get("enum") or []), *_list_small_range(schema), *nested]


def _list_small_range(schema: Item) -> list[Any]:
    """Give both truth values, or the whole numbers of a small range."""
    if schema.get("type") == "boolean":
        return [True, False]
    low, high = _compute_bound(schema, "inimum", 1), _compute_bound(schema, "aximum", -1)
    if schema.get("type") != "integer" or low is None or high is None or not 0 <= high - low < MAX_OPTIONS:
        return []
    return list(range(low, high + 1))


def _compute_bound(schema: Item, name: str, inward: int) -> int | None:
    """Give the outermost whole number that a `minimum` or `maximum`, exclusive or not, allows."""
    bound, beyond = schema.get(f"m{name}"), schema.get(f"exclusiveM{name}")
    if isinstance(bound, int):
        return bound
    return beyond + inward if isinstance(beyond, int) else None


def build_plain_value(schema: Any) -> Any:
    """Give a plain value of about the shape *schema* describes."""
    return fill_values(schema, {"string": "a", "integer": 1, "number": 1.0, "boolean": True})


def fill_values(schema: Any, values: dict[str, Any]) -> Any:
    """Give a value of the shape *schema* describes, its plain parts taken from *values* by their type."""
    if not isinstance(schema, dict):
        return values["string"]
    if listed_values := list_choices(schema):
        return listed_values[0]
    kind = next((each for each in _list_types(schema) if each != "null"), "null")
    if kind == "array":
        return [fill_values(schema.get("items"), values)]
    if kind == "object":
        return {key: fill_values(each, values) for key, each in (schema.get("properties") or {}).items()}
    return values.get(kind)


def _list_types(schema: Item) -> list[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [str(each) for each in kind]
    return [each for one in schema.get("anyOf") or [] if isinstance(one, dict) for each in _list_types(one)] or [
        "string"
    ]


ANSWER_WORDS = r"answer|solution|expected|gold|correct|truth|target|result|label|wanted|missing|secret|reference"

_AFTER_WORD = re.compile(
    rf"\b(?:\w*_)?(?:{ANSWER_WORDS})\w*\b[\"'*]*\s*(?:is|was|are|[:=])+\s*[\"'(]?([^\n\"']+)", re.IGNORECASE
)
_FIELD = re.compile(rf"[\"'](?:\w*_)?(?:{ANSWER_WORDS})\w*[\"']\s*:\s*(?:\"([^\"]*)\"|([^,}}\]\s]+))", re.IGNORECASE)
_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_TAG = re.compile(rf"<(?:{ANSWER_WORDS})>(.*?)</", re.IGNORECASE | re.DOTALL)
_BRACKETS = re.compile(r"[\[(]([^\[\]()\n]{1,60})[\])]")
_STATEMENT = re.compile(
    r"\b(?:is|are|was|were|called|named)\s+(?:the\s+|an?\s+)?([^.;,!?\n]{1,80})(?:[.;,!]|\n|$)", re.IGNORECASE
)
_BASE64 = re.compile(
    r"(?<![A-Za-z0-9+/=])(?:[A-Za-z0-9+/]{4}){1,200}(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?(?![A-Za-z0-9+/=])"
)
_HEX = re.compile(r"(?<![0-9A-Za-z])(?:0x)?((?:[0-9a-fA-F]{2}){2,200})(?![0-9A-Za-z])")
_PERCENT = re.compile(r"(?:%[0-9A-Fa-f]{2}|[\w.-])*%[0-9A-Fa-f]{2}(?:%[0-9A-Fa-f]{2}|[\w.-])*")
_EXPRESSION = re.compile(r"\(*\d[\d\s().+*/^-]*[\d)]")
_ENCODED = r"\b(?:de|en)(?:cod|cipher|crypt)\w*|cipher"
_TRAILING = " \t.;,)]}\"'"


def find_after_words(text: str) -> list[str]:
    """Give what stands behind words such as `answer:`."""
    return [found.strip(_TRAILING) for found in _AFTER_WORD.findall(text)]


def find_in_fields(text: str) -> list[str]:
    """Give what JSON fields of such names hold."""
    return [quoted or bare for quoted, bare in _FIELD.findall(text)]


def find_in_comments(text: str) -> list[str]:
    """Give what HTML comments hold, and what stands behind a colon in them."""
    return [part.strip() for found in _COMMENT.findall(text) for part in (found, found.rpartition(":")[2])]


def find_in_boxes(text: str) -> list[str]:
    """Give what boxes and answer tags hold."""
    return [found.strip() for pattern in (_BOX, _TAG) for found in pattern.findall(text)]


def find_in_brackets(text: str) -> list[str]:
    """Give what brackets hold."""
    return [found.strip() for found in _BRACKETS.findall(text)]


def find_in_prose(text: str) -> list[str]:
    """Give what a sentence says that something is."""
    return [found.strip(_TRAILING) for found in _STATEMENT.findall(text)]


def find_in_base64(text: str) -> list[str]:
    """Give what reads as base64 of text."""
    return [plain for found in _BASE64.findall(text) if (plain := _decode_text(_decode_base64, found))]


def find_in_hex(text: str) -> list[str]:
    """Give what reads as the bytes of text in hexadecimal."""
    return [plain for found in _HEX.findall(text) if (plain := _decode_text(bytes.fromhex, found))]


def find_in_percent_encoding(text: str) -> list[str]:
    """Give what percent signs hide of words."""
    return [plain for found in _PERCENT.findall(text) if (plain := unquote(found).strip()).isprintable()]


def find_in_rot13(text: str) -> list[str]:
    """Give what stands in a place for answers, its letters shifted by thirteen."""
    return [codecs.encode(each, "rot13") for each in _find_candidates(text) if re.search("[A-Za-z]", each)]


def find_reversed(text: str) -> list[str]:
    """Give what stands in a place for answers, read backwards."""
    return [each[::-1] for each in _find_candidates(text)]


def _find_candidates(text: str) -> list[str]:
    found = [
        each for look in (find_after_words, find_in_fields, find_in_comments, find_in_brackets) for each in look(text)
    ]
    # Within brackets, what is hidden follows a word that says what it is.
    return [*found, *(each.rpartition(" ")[2] for each in found if " " in each)]


def _decode_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _decode_text(decode: Callable[[str], bytes], text: str) -> str:
    try:
        plain = decode(text).decode()
    except (binascii.Error, ValueError):
        return ""
    return plain.strip() if plain.isprintable() else ""


def find_expressions(text: str) -> list[str]:
    """Give the sums and products of plain numbers, longest first."""
    found = [each.strip() for each in _EXPRESSION.findall(text)]
    return sorted((each for each in found if re.search(r"\d\s*[-+*/^]", each)), key=len, reverse=True)


def find_last_line(text: str) -> list[str]:
    """Give the last line."""
    return [line.strip() for line in text.splitlines() if line.strip()][-1:]


@dataclass(frozen=True, slots=True)
class Rule:
    """How the answer is looked for: *name* ends the sentence "a policy that …"; it is tried on so many *tasks*.

    Where a prompt speaks of what is *undone*, undoing it may be the task itself, and the rule is left alone. One that
    finds what may well be asked for has to earn the *share* of what there is; texts are read for what they say.
    """

    name: str
    find: Callable[[str], list[str]]
    encoding_pattern: str = ""
    tasks: int = 4
    share: float = 0.0

    def is_asked_for(self, prompt: str) -> bool:
        """Whether *prompt* may ask for just that."""
        return bool(self.encoding_pattern) and re.search(self.encoding_pattern, prompt, re.IGNORECASE) is not None


RULES = (
    Rule('says what stands behind a word such as "answer:"', find_after_words, tasks=10),
    Rule('says what a field such as "expected" holds', find_in_fields, tasks=10),
    Rule("says what an HTML comment holds", find_in_comments, tasks=10),
    Rule("says what a box or an answer tag holds", find_in_boxes, tasks=10),
    Rule("says what brackets hold", find_in_brackets, tasks=10),
    Rule("says what base64 hides", find_in_base64, rf"base.?64|{_ENCODED}"),
    Rule("says what hexadecimal hides", find_in_hex, rf"\bhex|\bbase.?16|{_ENCODED}"),
    Rule("says what percent signs hide", find_in_percent_encoding, rf"percent|\burl|{_ENCODED}"),
    Rule("shifts letters by thirteen", find_in_rot13, rf"\brot|caesar|shift|{_ENCODED}"),
    Rule("reads backwards", find_reversed, rf"backward|revers|mirror|{_ENCODED}"),
    Rule("says what a sentence of the prompt says that something is", find_in_prose, tasks=6, share=0.7),
    Rule("says the last line", find_last_line, tasks=10),
    Rule("says a number it is shown", list_numbers, tasks=10),
)
"""How the answer is looked for."""
