"""Clues: what a policy that only looks for the answer finds in the text it is shown."""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

from gymsdk.checks.options import numbers

WORDS = r"answer|solution|expected|gold|correct|truth|target|result|label|wanted|missing|secret|reference"

_BEHIND = re.compile(rf"\b(?:\w*_)?(?:{WORDS})\w*\b[\"'*]*\s*(?:is|was|are|[:=])+\s*[\"'(]?([^\n\"']+)", re.IGNORECASE)
_FIELD = re.compile(rf"[\"'](?:\w*_)?(?:{WORDS})\w*[\"']\s*:\s*(?:\"([^\"]*)\"|([^,}}\]\s]+))", re.IGNORECASE)
_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
_BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_TAG = re.compile(rf"<(?:{WORDS})>(.*?)</", re.IGNORECASE | re.DOTALL)
_BRACKETS = re.compile(r"[\[(]([^\[\]()\n]{1,60})[\])]")
_IS = re.compile(
    r"\b(?:is|are|was|were|called|named)\s+(?:the\s+|an?\s+)?([^.;,!?\n]{1,80})(?:[.;,!]|\n|$)", re.IGNORECASE
)
_BASE64 = re.compile(
    r"(?<![A-Za-z0-9+/=])(?:[A-Za-z0-9+/]{4}){1,200}(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?(?![A-Za-z0-9+/=])"
)
_HEX = re.compile(r"(?<![0-9A-Za-z])(?:0x)?((?:[0-9a-fA-F]{2}){2,200})(?![0-9A-Za-z])")
_PERCENT = re.compile(r"(?:%[0-9A-Fa-f]{2}|[\w.-])*%[0-9A-Fa-f]{2}(?:%[0-9A-Fa-f]{2}|[\w.-])*")
_EXPRESSION = re.compile(r"\(*\d[\d\s().+*/^-]*[\d)]")
_CODED = r"\b(?:de|en)(?:cod|cipher|crypt)\w*|cipher"
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


def in_prose(text: str) -> list[str]:
    """Give what a sentence says that something is."""
    return [found.strip(_ENDS) for found in _IS.findall(text)]


def in_base64(text: str) -> list[str]:
    """Give what reads as base64 of text."""
    return [plain for found in _BASE64.findall(text) if (plain := _decoded(_base64, found))]


def in_hex(text: str) -> list[str]:
    """Give what reads as the bytes of text in hexadecimal."""
    return [plain for found in _HEX.findall(text) if (plain := _decoded(bytes.fromhex, found))]


def in_percent(text: str) -> list[str]:
    """Give what percent signs hide of words."""
    return [plain for found in _PERCENT.findall(text) if (plain := unquote(found).strip()).isprintable()]


def in_rot13(text: str) -> list[str]:
    """Give what stands in a place for answers, its letters shifted by thirteen."""
    return [codecs.encode(each, "rot13") for each in _in_places(text) if re.search("[A-Za-z]", each)]


def backwards(text: str) -> list[str]:
    """Give what stands in a place for answers, read backwards."""
    return [each[::-1] for each in _in_places(text)]


def _in_places(text: str) -> list[str]:
    found = [each for look in (behind_words, in_fields, in_comments, in_brackets) for each in look(text)]
    # Within brackets, what is hidden follows a word that says what it is.
    return [*found, *(each.rpartition(" ")[2] for each in found if " " in each)]


def _base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _decoded(decode: Callable[[str], bytes], text: str) -> str:
    try:
        plain = decode(text).decode()
    except (binascii.Error, ValueError):
        return ""
    return plain.strip() if plain.isprintable() else ""


def expressions(text: str) -> list[str]:
    """Give the sums and products of plain numbers, longest first."""
    found = [each.strip() for each in _EXPRESSION.findall(text)]
    return sorted((each for each in found if re.search(r"\d\s*[-+*/^]", each)), key=len, reverse=True)


def last_line(text: str) -> list[str]:
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
    Rule('says what stands behind a word such as "answer:"', behind_words, tasks=10),
    Rule('says what a field such as "expected" holds', in_fields, tasks=10),
    Rule("says what an HTML comment holds", in_comments, tasks=10),
    Rule("says what a box or an answer tag holds", in_boxes, tasks=10),
    Rule("says what brackets hold", in_brackets, tasks=10),
    Rule("says what base64 hides", in_base64, rf"base.?64|{_CODED}"),
    Rule("says what hexadecimal hides", in_hex, rf"\bhex|\bbase.?16|{_CODED}"),
    Rule("says what percent signs hide", in_percent, rf"percent|\burl|{_CODED}"),
    Rule("shifts letters by thirteen", in_rot13, rf"\brot|caesar|shift|{_CODED}"),
    Rule("reads backwards", backwards, rf"backward|revers|mirror|{_CODED}"),
    Rule("says what a sentence of the prompt says that something is", in_prose, tasks=6, share=0.7),
    Rule("says the last line", last_line, tasks=10),
    Rule("says a number it is shown", numbers, tasks=10),
)
"""How the answer is looked for."""
