r"""The shortcut: grade clear answers without calling math-verify again.

math-verify collects all possible answers in a text. It takes the matches of the highest rank, and of these the
match that ends furthest right. In a text that passes `only_box`, this match is always the content of the only box:

- Rank 0 needs the words "I hope". The text does not contain them.
- Rank 50 contains the box, a formula around a box, and the text after "final answer". The box always matches,
  and this match ends at its closing brace. A match that ends further right must close with the only delimiter
  allowed after this brace. The box contains no delimiter, so this match opens before the box and has the same
  content as the box. It is the only formula in its match: there is no second box, and no other formula opens
  after "final answer".
- The answer does not become a percentage: only the delimiter, whitespace and full stops follow the box.

If math-verify can read the content of the box (`answers.grade` reports this), the content alone decides the
grade. The grade of a gold answer and a content is then valid for every text with this content.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import NamedTuple

INTEGER = re.compile(r"0|-?[1-9][0-9]{0,14}")
LONGEST_TEXT = 100_000
LONGEST_KEPT = 500

# Possessive quantifiers: a tail of a million full stops must not cause backtracking.
_TAIL = re.compile(r"[ \t\r\n.]*+(?:\$\$?|\\[\])])?+[ \t\r\n.!*]*+")
_DELIMITER = re.compile(r"[$\n]|\\[()\[\]]|\s\[")
_FINAL_ANSWER = re.compile(r"final answer", re.IGNORECASE)
_OPENING = re.compile(r"(?:\$\$?|\\[\[(])\s*\Z")
_FORMULA = re.compile(r"[$\\\[]")


class Grade(NamedTuple):
    """The grade of an answer. *settled* is true if the content of the only box decided the grade alone."""

    reward: float
    extracted: str | None
    settled: bool = False


class Kept:
    """A cache of settled grades, by gold answer and content of the box. It drops the least recently used grade."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._grades: OrderedDict[tuple[str, str], Grade] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grades)

    def get(self, gold: str, box: str) -> Grade | None:
        """Return the cached grade of this content, or `None`."""
        grade = self._grades.get((gold, box))
        if grade is not None:
            self._grades.move_to_end((gold, box))
        return grade

    def put(self, gold: str, box: str, grade: Grade | None) -> None:
        """Cache a settled grade. If the cache is full, drop the least recently used grade."""
        if grade is None or not grade.settled or len(gold) + len(box) > LONGEST_KEPT:
            return
        self._grades[gold, box] = grade
        if len(self._grades) > self._size:
            self._grades.popitem(last=False)


def only_box(text: str) -> str | None:
    r"""Return the content of the only `\boxed{}`, at the end of *text*, or `None` if other text may count."""
    if len(text) > LONGEST_TEXT or text.count("\\boxed") != 1 or "\\fbox" in text or "I hope" in text:
        return None
    head, _, rest = text.partition("\\boxed{")
    box, brace, tail = rest.rpartition("}")
    if not brace or not _TAIL.fullmatch(tail) or _DELIMITER.search(box) or not _balanced(box):
        return None
    return box if _anchored_alone(head) else None


def integers(gold: str, box: str) -> Grade | None:
    """Return the grade if both are plain integers, else `None`."""
    answer = box.strip()
    if not INTEGER.fullmatch(gold) or not INTEGER.fullmatch(answer):
        return None
    return Grade(float(gold == answer), answer, settled=True)


def _anchored_alone(head: str) -> bool:
    anchor = _FINAL_ANSWER.search(head)
    return anchor is None or not _FORMULA.search(_OPENING.sub("", head[anchor.end() :]))


def _balanced(content: str) -> bool:
    # Count escaped braces too, because math-verify does so to find the end of a box.
    depth = 0
    for brace in re.findall(r"[{}]", content):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0
