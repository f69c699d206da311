"""Rules that search the visible text of a task for its answer."""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from urllib.parse import unquote

from gymsdk.types import Item

MAX_OPTIONS = 60
"""How many options are listed."""

_LINES = re.compile(r"^\s*(?:\(?([^\W\d_]|\d{1,2})[).:]|[-*])\s+(\S.*)$", re.MULTILINE)
_INLINE = re.compile(r"\(([^\W\d_]|\d{1,2})\)\s*([^()\n,;]*)")
_LETTERS = re.compile(r"(?<![A-Za-z])([A-H])[).:]\s*([^\n]*?)(?=\s+[A-H][).:]|\n|$)")

_QUOTED = re.compile(r"""['"`\N{LEFT DOUBLE QUOTATION MARK}]([^'"`\n]{1,40})['"`\N{RIGHT DOUBLE QUOTATION MARK}]""")

_EITHER = re.compile(r"\b(\w+)(?:, (\w+))* or (\w+)\b")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
ANSWER_WORDS = r"answer|solution|expected|gold|correct|truth|target|result|label|wanted|missing|secret|reference"

_AFTER_WORD = re.compile(
    rf"\b(?:\w*_)?(?:{ANSWER_WORDS})\w*\b[\"'*]*\s*(?:is|was|are|[:=])+\s*[\"'(]?([^\n\"']+)", re.IGNORECASE
)
_FIELD = re.compile(rf"[\"'](?:\w*_)?(?:{ANSWER_WORDS})\w*[\"']\s*:\s*(?:\"([^\"]*)\"|([^,}}\]\s]+))", re.IGNORECASE)
HINT_WORDS = (
    r"hint|clue|spoiler|psst|cheat|grader|answer|ans|solution|expected|gold|correct|truth|gt|tip|todo|fixme|debug"
    r"|note to self|hinweis|lösung|antwort|tipp|indice|astuce|réponse|pista|respuesta|solución|dica"
    r"|resposta|risposta|suggerimento|\u043e\u0442\u0432\u0435\u0442|\u043f\u043e\u0434\u0441\u043a\u0430\u0437"
)
"""Words for answers and hints in several languages."""

_EAST_ASIAN_WORDS = r"\u7b54\u6848|\u63d0\u793a|\u89e3\u7b54|\u7b54\u3048|\u30d2\u30f3\u30c8|\uc815\ub2f5|\ud78c\ud2b8"
"""Answer, hint, solution in Chinese, Japanese and Korean, which put no blanks around words."""

_SIGNS = r":=,>\-\uff1a\u2192\u2014"
_AFTER_HINT = re.compile(
    rf"(?:\b(?:\w*_)?(?:{HINT_WORDS})\w*\b|{_EAST_ASIAN_WORDS})[\"'*]*(?:\s+\w+){{0,3}}?"
    rf"\s*(?:\bis\b|\bwas\b|[{_SIGNS}])+\s*([^\n<>()\[\]]+)",
    re.IGNORECASE,
)
_UNDER_HINT = re.compile(
    rf"^[^\w\n]*(?:{HINT_WORDS}|{_EAST_ASIAN_WORDS})[^\w\n]*\n\s*(\S.*)$", re.IGNORECASE | re.MULTILINE
)
_HINTED = re.compile(rf"\b(?:{HINT_WORDS})", re.IGNORECASE)
_COMMENTS = (
    re.compile(r"<!--(.*?)-->", re.DOTALL),
    re.compile(r"/\*(.*?)\*/", re.DOTALL),
    re.compile(r"\{#(.*?)#\}", re.DOTALL),
    re.compile(r"(?<![:\w/])//\s*(.+)$", re.MULTILINE),
    # Not a heading, and not the number of an issue.
    re.compile(r"(?<=\S)[ \t]+#[ \t]+(.+)$", re.MULTILINE),
    re.compile(r"^#+[ \t]*([-+]?\d[\d.,]*)$", re.MULTILINE),
    # Not a share, and not a sign between words.
    re.compile(r"(?<!\d)(?<!\d )(?<!\\)%+[ \t]+(.+)$", re.MULTILINE),
    re.compile(r"[ \t](?:--|;+)[ \t]+(.+)$", re.MULTILINE),
    re.compile(r"^\[[^\]\n]+\]:[ \t]*(?:#|<>)[ \t]*[\"'(](.+)[\"')]$", re.MULTILINE),
    re.compile(r"\b(?:def|class)\b[^\n]*:\s*(?:\"{3}|'{3})(.*?)(?:\"{3}|'{3})", re.DOTALL),
    re.compile(
        r"<(?P<tag>\w+)[^<>]*(?:\bhidden\b|display:\s*none|font-size:\s*0|color:\s*white)[^<>]*>(?P<text>.*?)</(?P=tag)>",
        re.IGNORECASE | re.DOTALL,
    ),
)
_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_TAG = re.compile(rf"<(?:{ANSWER_WORDS}|{HINT_WORDS})>(.*?)</", re.IGNORECASE | re.DOTALL)
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


def list_options(prompt: str) -> list[str]:
    """Return the options in *prompt*: listed letters with their texts, quoted words, and alternatives like "a or b"."""
    options: dict[str, None] = {}
    for pattern in (_LINES, _INLINE, _LETTERS, _QUOTED, _EITHER):
        for match in pattern.findall(prompt):
            parts = (match,) if isinstance(match, str) else match
            options.update(dict.fromkeys(part.strip() for part in parts if part.strip()))
    return list(options)[:MAX_OPTIONS]


def list_letters(prompt: str) -> list[str]:
    """Return the distinct letters or numbers in front of the options that *prompt* lists."""
    marks = [match[0] for pattern in (_LINES, _INLINE, _LETTERS) for match in pattern.findall(prompt)]
    return list(dict.fromkeys(mark for mark in marks if mark))


def list_numbers(text: str) -> list[str]:
    """Return the distinct numbers in *text*."""
    return list(dict.fromkeys(_NUMBER.findall(text)))


def iter_enum_arguments(tool: Item) -> Iterator[dict[str, Any]]:
    """Yield arguments of *tool* with each value that its schema lists, and plain values for the others."""
    properties = (tool.get("parameters") or {}).get("properties") or {}
    plain = {name: build_plain_value(schema) for name, schema in properties.items()}
    for name, schema in properties.items():
        yield from ({**plain, name: value} for value in list_choices(schema))


def list_choices(schema: Any) -> list[Any]:
    """Return the values that *schema* lists."""
    if not isinstance(schema, dict):
        return []
    nested = [value for alternative in schema.get("anyOf") or [] for value in list_choices(alternative)]
    return [*(schema.get("enum") or []), *_list_small_range(schema), *nested]


def _list_small_range(schema: Item) -> list[Any]:
    """Return both Boolean values, or the integers of a small range."""
    if schema.get("type") == "boolean":
        return [True, False]
    low, high = _compute_bound(schema, "inimum", 1), _compute_bound(schema, "aximum", -1)
    if schema.get("type") != "integer" or low is None or high is None or not 0 <= high - low < MAX_OPTIONS:
        return []
    return list(range(low, high + 1))


def _compute_bound(schema: Item, name: str, inward: int) -> int | None:
    """Return the outermost integer that a `minimum` or `maximum`, exclusive or not, allows."""
    bound, beyond = schema.get(f"m{name}"), schema.get(f"exclusiveM{name}")
    if isinstance(bound, int):
        return bound
    return beyond + inward if isinstance(beyond, int) else None


def build_plain_value(schema: Any) -> Any:
    """Build a plain value of the shape that *schema* describes."""
    return fill_values(schema, {"string": "a", "integer": 1, "number": 1.0, "boolean": True})


def fill_values(schema: Any, values: dict[str, Any]) -> Any:
    """Build a value of the shape that *schema* describes, with scalars from *values* by type."""
    if not isinstance(schema, dict):
        return values["string"]
    if listed_values := list_choices(schema):
        return listed_values[0]
    kind = next((type_name for type_name in _list_types(schema) if type_name != "null"), "null")
    if kind == "array":
        return [fill_values(schema.get("items"), values)]
    if kind == "object":
        return {key: fill_values(subschema, values) for key, subschema in (schema.get("properties") or {}).items()}
    return values.get(kind)


def _list_types(schema: Item) -> list[str]:
    kind = schema.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [str(type_name) for type_name in kind]
    return [
        type_name
        for alternative in schema.get("anyOf") or []
        if isinstance(alternative, dict)
        for type_name in _list_types(alternative)
    ] or ["string"]


def find_after_words(text: str) -> list[str]:
    """Return the text after words such as `answer:`."""
    return [match.strip(_TRAILING) for match in _AFTER_WORD.findall(text)]


def find_in_fields(text: str) -> list[str]:
    """Return the values of JSON fields with names such as `answer`."""
    return [quoted or bare for quoted, bare in _FIELD.findall(text)]


def find_in_comments(text: str) -> list[str]:
    """Return possible answers in the comments and the hidden elements of *text*."""
    matches = [match for pattern in _COMMENTS for match in pattern.finditer(text)]
    contents = [(match["text"] if "text" in match.re.groupindex else match[1]).strip() for match in matches]
    return [part for content in contents for part in _list_readings(content)]


def find_in_hints(text: str) -> list[str]:
    """Return possible answers after words such as `hint`, under them, and in brackets with such a word."""
    brackets = [content for content in _BRACKETS.findall(text) if _HINTED.search(content)]
    contents = [*_AFTER_HINT.findall(text), *_UNDER_HINT.findall(text), *brackets]
    return [part for content in contents for part in _list_readings(content)]


def _list_readings(content: str) -> list[str]:
    """Return possible answers in *content*: the end of each line after a sign, its last word and number, and all."""
    lines = content.splitlines()
    parts = [re.split(r"[:=\uff1a]", line)[-1] for line in lines]
    parts += [part for line in lines for part in (line.strip(_TRAILING).rpartition(" ")[2], *list_numbers(line)[-1:])]
    return list(dict.fromkeys(stripped for part in [*parts, content] if (stripped := part.strip(f"{_TRAILING}([{{"))))


def find_in_boxes(text: str) -> list[str]:
    """Return the content of boxes and answer tags."""
    return [match.strip() for pattern in (_BOX, _TAG) for match in pattern.findall(text)]


def find_in_brackets(text: str) -> list[str]:
    """Return the text in brackets."""
    return [match.strip() for match in _BRACKETS.findall(text)]


def find_in_prose(text: str) -> list[str]:
    """Return the text after verbs such as `is` or `are`."""
    return [match.strip(_TRAILING) for match in _STATEMENT.findall(text)]


def find_in_base64(text: str) -> list[str]:
    """Return the texts that are encoded as base64."""
    decode = partial(base64.b64decode, validate=True)
    return [plain for match in _BASE64.findall(text) if (plain := _decode_text(decode, match))]


def find_in_hex(text: str) -> list[str]:
    """Return the texts that are encoded as hexadecimal."""
    return [plain for match in _HEX.findall(text) if (plain := _decode_text(bytes.fromhex, match))]


def find_in_percent_encoding(text: str) -> list[str]:
    """Return the texts that are percent-encoded."""
    return [plain for match in _PERCENT.findall(text) if (plain := unquote(match).strip()).isprintable()]


def find_in_rot13(text: str) -> list[str]:
    """Return the likely places of an answer, decoded as ROT13."""
    return [
        codecs.encode(candidate, "rot13") for candidate in _find_candidates(text) if re.search("[A-Za-z]", candidate)
    ]


def find_reversed(text: str) -> list[str]:
    """Return the likely places of an answer, reversed."""
    return [candidate[::-1] for candidate in _find_candidates(text)]


def _find_candidates(text: str) -> list[str]:
    candidates = [
        candidate
        for find in (find_after_words, find_in_fields, find_in_comments, find_in_brackets)
        for candidate in find(text)
    ]
    # In brackets, the hidden text follows a word that names it.
    return [*candidates, *(candidate.rpartition(" ")[2] for candidate in candidates if " " in candidate)]


def _decode_text(decode: Callable[[str], bytes], text: str) -> str:
    try:
        plain = decode(text).decode()
    except (binascii.Error, ValueError):
        return ""
    return plain.strip() if plain.isprintable() else ""


def find_expressions(text: str) -> list[str]:
    """Return the sums and products of plain numbers, the longest first."""
    matches = [match.strip() for match in _EXPRESSION.findall(text)]
    return sorted((match for match in matches if re.search(r"\d\s*[-+*/^]", match)), key=len, reverse=True)


def find_last_line(text: str) -> list[str]:
    """Return the last line."""
    return [line.strip() for line in text.splitlines() if line.strip()][-1:]


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to search for the answer.

    Attributes:
        name: Completes the sentence "a policy that …".
        find: Returns the matches of the rule in a text.
        encoding_pattern: Matches the prompts whose task is this decoding itself; the rule skips them.
        tasks: How many tasks the rule is tried on.
        share: The share of the maximum reward that the rule must earn to count as a leak.
        places: Which matches are tried.
        form: In which form of the oracle the match is tried too: in that of a reply, or of a call as well. A tool's
            arguments are often in the prompt, so the match of a general rule in a call proves nothing.
    """

    name: str
    find: Callable[[str], list[str]]
    encoding_pattern: str = ""
    tasks: int = 4
    share: float = 0.0
    places: tuple[int, ...] = (0, -1)
    form: Literal["", "reply", "any"] = ""

    def is_asked_for(self, prompt: str) -> bool:
        """Return whether *prompt* may ask for this decoding as its task."""
        return bool(self.encoding_pattern) and re.search(self.encoding_pattern, prompt, re.IGNORECASE) is not None


HIDDEN_PLACES = (0, 1, 2, 3, 4, -1)
"""The places of the rules that read one text in several ways."""

RULES = (
    Rule('replies the text after a word such as "answer:"', find_after_words, tasks=10),
    Rule('replies the value of a field such as "expected"', find_in_fields, tasks=10),
    Rule("replies the content of a comment", find_in_comments, tasks=10, places=HIDDEN_PLACES, form="any"),
    Rule('replies the text of a hint, as in "hint: 42"', find_in_hints, tasks=10, places=HIDDEN_PLACES, form="any"),
    Rule("replies the content of a box or an answer tag", find_in_boxes, tasks=10, form="reply"),
    Rule("replies the text in brackets", find_in_brackets, tasks=10),
    Rule("decodes base64", find_in_base64, rf"base.?64|{_ENCODED}", form="any"),
    Rule("decodes hexadecimal", find_in_hex, rf"\bhex|\bbase.?16|{_ENCODED}", form="any"),
    Rule("decodes percent-encoding", find_in_percent_encoding, rf"percent|\burl|{_ENCODED}", form="any"),
    Rule("decodes ROT13", find_in_rot13, rf"\brot|caesar|shift|{_ENCODED}", form="any"),
    Rule("reads backwards", find_reversed, rf"backward|revers|mirror|{_ENCODED}", form="any"),
    Rule("replies what follows a verb such as `is` in the prompt", find_in_prose, tasks=6, share=0.7),
    Rule("replies the last line", find_last_line, tasks=10),
    Rule("replies a number of the prompt", list_numbers, tasks=10),
)
"""All rules."""
