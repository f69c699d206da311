r"""The shortcut: answers whose grade is known without asking math-verify again.

math-verify collects everything in a text that may be an answer and takes the match of the highest rank that
ends furthest right. Of a text that passes `only_box`, that is always the content of its one box:

- Rank 0 needs the words "I hope", and there are none.
- Rank 50 holds the box by itself, a formula around a box, and what follows "final answer". The box by itself
  always matches and ends with its last brace. What ends further right must close with the one delimiter
  allowed after that brace, so it opens before the box, as the box holds no delimiter, and reads as the content
  of the box; it is the only formula of its match, as there is no second box and as, after "final answer",
  no other formula opens.
- Nothing turns it into a percentage: after the box there is only that delimiter, blanks and full stops.

So the content alone decides wherever math-verify can read it (`answers.grade` says whether it can), and what
was decided once for a gold answer and a content holds for every such text.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import NamedTuple

INTEGER = re.compile(r"0|-?[1-9][0-9]{0,14}")
LONGEST_TEXT = 100_000
LONGEST_KEPT = 500

# Possessive: a tail of a million full stops must not be tried a million ways.
_TAIL = re.compile(r"[ \t\r\n.]*+(?:\$\$?|\\[\])])?+[ \t\r\n.!*]*+")
_DELIMITER = re.compile(r"[$\n]|\\[()\[\]]|\s\[")
_FINAL_ANSWER = re.compile(r"final answer", re.IGNORECASE)
_OPENING = re.compile(r"(?:\$\$?|\\[\[(])\s*\Z")
_FORMULA = re.compile(r"[$\\\[]")


class Grade(NamedTuple):
    """What math-verify makes of an answer; *settled* where the content of the text's box alone decided it."""

    reward: float
    extracted: str | None
    settled: bool = False


class Kept:
    """The latest settled grades, by gold answer and content of the box."""

    def __init__(self, size: int = 4096) -> None:
        self._size = size
        self._grades: OrderedDict[tuple[str, str], Grade] = OrderedDict()

    def __len__(self) -> int:
        return len(self._grades)

    def get(self, gold: str, box: str) -> Grade | None:
        """Give the grade that is kept of this content, if any."""
        grade = self._grades.get((gold, box))
        if grade is not None:
            self._grades.move_to_end((gold, box))
        return grade

    def put(self, gold: str, box: str, grade: Grade | None) -> None:
        """Keep a settled grade, forgetting the one that was longest not asked for."""
        if grade is None or not grade.settled or len(gold) + len(box) > LONGEST_KEPT:
            return
        self._grades[gold, box] = grade
        if len(self._grades) > self._size:
            self._grades.popitem(last=False)


def only_box(text: str) -> str | None:
    r"""The content of the one `\boxed{}` that ends *text*, or `None` where more than it may count."""
    if len(text) > LONGEST_TEXT or text.count("\\boxed") != 1 or "\\fbox" in text or "I hope" in text:
        return None
    head, _, rest = text.partition("\\boxed{")
    box, brace, tail = rest.rpartition("}")
    if not brace or not _TAIL.fullmatch(tail) or _DELIMITER.search(box) or not _balanced(box):
        return None
    return box if _anchored_alone(head) else None


def integers(gold: str, box: str) -> Grade | None:
    """The grade where both are plain integers, or `None` where one is not."""
    answer = box.strip()
    if not INTEGER.fullmatch(gold) or not INTEGER.fullmatch(answer):
        return None
    return Grade(float(gold == answer), answer, settled=True)


def _anchored_alone(head: str) -> bool:
    anchor = _FINAL_ANSWER.search(head)
    return anchor is None or not _FORMULA.search(_OPENING.sub("", head[anchor.end() :]))


def _balanced(content: str) -> bool:
    # Escaped braces count too: that is how math-verify finds the end of a box.
    depth = 0
    for brace in re.findall(r"[{}]", content):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            return False
    return depth == 0
