"""Clues: what a policy that only looks for the answer finds in the text it is shown."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable

from gymsdk.checks.options import numbers

WORDS = r"answer|solution|expected|gold|correct|truth|target|result|label"

_BEHIND = re.compile(rf"\b(?:\w*_)?(?:{WORDS})\w*\b[\"'*]*\s*(?:is|was|are|[:=])+\s*[\"'(]?([^\n\"']+)", re.IGNORECASE)
_FIELD = re.compile(rf"[\"'](?:\w*_)?(?:{WORDS})\w*[\"']\s*:\s*(?:\"([^\"]*)\"|([^,}}\]\s]+))", re.IGNORECASE)
_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_TAG = re.compile(rf"<(?:{WORDS})>(.*?)</", re.IGNORECASE | re.DOTALL)
_BRACKETS = re.compile(r"[\[(]([^\[\]()\n]{1,60})[\])]")
_BASE64 = re.compile(
    r"(?<![A-Za-z0-9+/=])(?:[A-Za-z0-9+/]{4}){1,200}(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?(?![A-Za-z0-9+/=])"
)
_ENDS = " \t.;,)]}\"'"


def behind_words(text: str) -> list[str]:
    """Give what stands behind words such as `answer:`."""
    return [found.strip(_ENDS) for found in _BEHIND.findall(text)]


def in_fields(text: str) -> list[str]:
    """Give what JSON fields of such names hold."""
    return [quoted or bare for quoted, bare in _FIELD.findall(text)]


def in_comments(text: str) -> list[str]:
    """Give what HTML comments hold, and what stands behind a colon in them."""
    return [part.strip() for found in _COMMENT.findall(text) for part in (found, found.rpartition(":")[2])]


def in_boxes(text: str) -> list[str]:
    """Give what boxes and answer tags hold."""
    return [found.strip() for pattern in (_BOX, _TAG) for found in pattern.findall(text)]


def in_brackets(text: str) -> list[str]:
    """Give what brackets hold."""
    return [found.strip() for found in _BRACKETS.findall(text)]


def in_base64(text: str) -> list[str]:
    """Give what reads as base64 of text."""
    return [plain for found in _BASE64.findall(text) if (plain := _decoded(found))]


def _decoded(text: str) -> str:
    try:
        plain = base64.b64decode(text, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
    return plain.strip() if plain.isprintable() else ""


def last_line(text: str) -> list[str]:
    """Give the last line."""
    return [line.strip() for line in text.splitlines() if line.strip()][-1:]


RULES: dict[str, Callable[[str], list[str]]] = {
    'says what stands behind a word such as "answer:"': behind_words,
    'says what a field such as "expected" holds': in_fields,
    "says what an HTML comment holds": in_comments,
    "says what a box or an answer tag holds": in_boxes,
    "says what brackets hold": in_brackets,
    "says what base64 hides": in_base64,
    "says the last line": last_line,
    "says a number it is shown": numbers,
}
"""How the answer is looked for, by what a policy does that looks so."""
