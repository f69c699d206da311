"""Find the answer that a reply gives: in a box, a tag, an "Answer:" line or a conclusion; or that it gives none."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

from gymsdk.graders.maths.lexer import find_closing
from gymsdk.graders.maths.units import AMBIGUOUS_NAMES, find_unit
from gymsdk.graders.maths.words import MULTIPLIERS

MAX_BOXES = 64
MAX_TAIL = 2000
"""How many characters at the end of a reply are searched for an answer that is not marked."""

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_TAG_START = re.compile("<answer>", re.IGNORECASE)
_OPEN_TAG = re.compile(r"<answer>(?!.*</answer>)", re.IGNORECASE | re.DOTALL)
_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_AFTER_BOX = re.compile(
    r"(?:\}|\s)*?(?:\\[,; !]|\s|~|\$)*(\\?%|(?:\^\s*\{?\s*)?\\(?:circ|degree)\s*\}?|°|_\s*\{?\s*\w+\s*\}?"
    r"|\\?\(?\\pmod\s*\{?\s*\d+\s*\}?|\\pi\b|\\sqrt\s*(?:\{[^{}]*\}|\d)|i\b(?=[\s$.]|\Z)|\\(?:times"
    r"|cdot)\s*10\s*\^\s*\{?-?\d+\}?"
    r"|\^\s*\{?-?\w+\}?|\\(?:text|mathrm|textrm)\s*\{[^{}]{1,40}\}(?:\^\{?-?\d\}?)?|[A-Za-z]{1,20}\b(?:\^\d)?)"
)
_MINUS_BEFORE = re.compile(r"(?:^|[$=(\[:]|\\\(|\\\[)\s*-(?:\\[,;! ])?\Z|(?<=\s)-\Z")
_SIGNS_BEFORE = re.compile(r"\\(?:pm|mp)\s*\Z|[±∓]\s*\Z")
_JOINED = re.compile(
    r"[\s$.]*(?:\\[()\[\],;:! ]|\\quad|\\qquad|\s)*(?:,|;|/|(?:,\s*)?(?:or|and|either|also)"
    r"|\\text\{\s*(?:,\s*)?(?:or|and)\s*\}"
    r"|\\(?:lor|land))[\s$]*(?:\\[()\[\],;:! ]|\\quad|\\qquad|\s|(?:[a-z](?:_\w)?\s*=))*",
    re.IGNORECASE,
)
_SIDE = re.compile(
    r"=|&|\\\\|\\(?:Rightarrow|implies|iff|to|quad|qquad|therefore|approx)\b|\\text\{[^{}]*\b(?:is|answer|so|thus"
    r"|hence|therefore)\b[^{}]*\}:?"
)
_NUMBERED = re.compile(
    r"\W*(?:(?:and\s+)?(?:option|candidate|possibility|choice|case|guess|answer)\s*\(?\w{1,2}\)?\s*[:.)]?)\W*",
    re.IGNORECASE,
)
_ALTERNATIVE = re.compile(
    r"[\s$.,;(]*(?:\\[)\]]\s*)*(?:\\text\s*\{\s*)?(?:,\s*)?\b(?:or|alternatively|or maybe)\b(?!\s+(?:equivalently"
    r"|simply|just|about|in))"
    r"(?:\s+(?:maybe|perhaps|possibly|else|even))*\s*\}?[\s,]*([^\n]{1,80})",
    re.IGNORECASE,
)
_DENIED_BEFORE = re.compile(
    r"(?:\bnot(?: be)?|\bnever|cannot be|can't be|isn't|aren't|n't be|\bneither)\s*(?:equal to\s*)?(?:[$\s(]"
    r"|\\[(\[])*\Z"
    r"|\b(?:if|suppose|assum\w*|not the case that|not true that)\b[^,]*\Z"
    r"|^\W*(?:is|are|can|could|does|was)\s(?:the|it|this|that|there)\b[^,]*\Z|\b(?:false|doubt) that\b[^,]*\Z",
    re.IGNORECASE,
)
_DENIED_AFTER = re.compile(
    r"(?:[$\s.*)]|\\[)\]])*(?:\?|(?:is|was|are|would be|seems?)\s+(?:wrong|incorrect|not|false|impossible|invalid)\b)",
    re.IGNORECASE,
)
_RETRACTED = re.compile(
    r"\b(?:(?:that|this|it)(?:'s| is| was) (?:wrong|incorrect|not right)|(?:correct|right|real|actual|true) answer is"
    r"|let me (?:reconsider|re-?check)|made an? (?:mistake|error)|i was wrong)\b",
    re.IGNORECASE,
)
_REJECTED = re.compile(
    r"\b(?:fails?|reject\w*|extraneous|discard\w*|invalid|not|wrong|impossible|contradict\w*"
    r"|too (?:big|small|large))\b",
    re.IGNORECASE,
)
_GUESSED = re.compile(
    r"\b(?:maybe|perhaps|possibly|might|could be|alternatively|guess|option|another possibility)\b", re.IGNORECASE
)
_ANSWER = re.compile(
    r"(?<![^\s.*#_>(])(?:(?:the|my|our|an)\s+)?"
    r"(?:(?:final|correct|required|desired|right)\s+)*(?:answer|result|solution|option|choice|ans"
    r"|final)(?:\s+(?:to\s+(?:the|this)\s+\w+|here))?\s*"
    r"[*_]*+[ \t]*+(:|\bis\b|\bare\b|\bmust be\b|\bshould be\b|\bof\b|=|\n|—|–|-\s|\.\s)\s*(?:\*\*|__"
    r"|\*)*(?:\s*:)?"
    r"(?:\s*(?:equal to|exactly|therefore|simply|given by|just|clearly|then|thus|indeed|option|choice)\b)*\s*:?",
    re.IGNORECASE | re.MULTILINE,
)
_DENIED_START = re.compile(r"\s*(?:not\b|n't\b|never\b|no,)", re.IGNORECASE)
_ASIDE = re.compile(r",?\s*\(?\b(?:not|rather than|instead of)\b|\s\(not\b", re.IGNORECASE)
_CONTINUED = re.compile(
    r"(?:[,;/(]\s*)*(?:or\b|and\b|alternatively|times|plus|minus|more|less|over|divided|multiplied|squared|cubed"
    r"|factorial|doubled"
    r"|in base|mod|\\text)|[,;/]?\s*(?:\\?%|°)",
    re.IGNORECASE,
)
_FOREIGN_ANSWER = re.compile(
    r"(?:答案|答え|答|最终答案|답|정답)\s*(是|为|為|は|은|는|：|:)"
    r"|\b(?:Antwort|respuesta|réponse|resposta|risposta|Ответ|Odpowiedź)\s*(:|(?:ist|est|es|é|è|lautet)\b)",
    re.IGNORECASE,
)
_CORRECTED = re.compile(
    r"[,;]?\s*(?:\bbut(?: rather)?\b|\brather\b|(?<=[,;])\s*it(?:'s| is)\b|\bit is\b)\s*", re.IGNORECASE
)
_HASHES = re.compile(
    r"(?:^|(?<=\s))####[ \t]*(?!.*\b(?:answer|step|solution|part|result)\b)(.+)$", re.MULTILINE | re.IGNORECASE
)
_FENCE = re.compile(r"^```.*$", re.MULTILINE)
_NO_DENIAL = re.compile(r"does(?: not|n't) exist|not defined|no (?:real )?solutions?", re.IGNORECASE)
_NEGATED = re.compile(
    r"\b(?:not|never|neither|nor|cannot|wrong|incorrect|false|no longer|rather than|instead of|unlikely|doubt)\b|n't\b",
    re.IGNORECASE,
)
_HEDGED = re.compile(
    r"\b(?:maybe|perhaps|possibly|probably|might|could be|may be|guess\w*|not sure|unsure|either|candidates?"
    r"|i think|whether"
    r"|i believe|seems?|if|suppose|assum\w*|let us check|remains?|show that|half of|twice|doubt|let us|let's|start"
    r"|check|need to|first|next)\b",
    re.IGNORECASE,
)
_BOUNDED = re.compile(
    r"\b(?:at least|at most|more than|less than|fewer than|greater than|no more than|no less than|exceeds?|above"
    r"|below|between"
    r"|up to|over|under|nearly|almost|half|twice|double|triple|times|about|approximately|around|roughly)\s*(?:\\?\$"
    r"|\\\()?\s*$",
    re.IGNORECASE,
)
_BOUNDED_AFTER = re.compile(r"\b(?:at least|at most|or more|or less|or fewer|or so)\b", re.IGNORECASE)
_DOUBTED = re.compile(r"[\s.]*(?:or|but|wait|hmm|no)\b[^.?]*\?", re.IGNORECASE)
_CONCLUSION = re.compile(
    r"^\W*(?:so|thus|therefore|hence|in total|altogether|consequently|finally|in conclusion"
    r"|we (?:get|have|find|obtain|conclude)(?: that)?|this (?:gives|means|yields)|it follows(?: that)?)\b",
    re.IGNORECASE,
)
_EQUALS = re.compile(
    r"(?:=|\b(?:is|are|was|were|equals?|gives?|get|gets|yields?|obtain|makes?|made|has|have|had|earns?|costs?|pays?"
    r"|spends?"
    r"|sells?|saves?|takes?|needs?|total of|find|that|there (?:are|is)|leaves?|left with|be|(?:profit|total|sum"
    r"|cost|price|amount|average|area|answer|value|length|number) of|(?:equal|comes?|amounts?|adds? up) to))"
    r"\s*(?:a total of|exactly|just|only|equal to)?\s*(?:\\?\$|\\\()?\s*\Z",
    re.IGNORECASE,
)
_SENTENCE_WITH_NUMBER = re.compile(r"\s*[A-Z][a-z']+ (?=[a-z]+ )[^\n]*\d")
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<!\\)\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(
    r"(?<![\w.,/^])(?:\\?\$\s?)?-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?%?"
    r"|(?<![\w.,/^])(?:\\?\$\s?)?-?[0-9]+(?:\.[0-9]+)?(?:/[0-9]+)?%?"
)
_ONLY_FORMULA = re.compile(r"\$\$.+\$\$|\$[^$]+\$\.?|\\\[.+\\\]\.?|\\\(.+\\\)\.?", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=[.!?])(?:\*\*|[\"')])?\s+|\n+")
_SHORT = 200
MAX_BARE_WORDS = 3
"""How many words a reply that is only an answer can have."""

_VERB = re.compile(r"\b(?:is|are|was|we|there|has|have|get)\b", re.IGNORECASE)


class Found(NamedTuple):
    """An answer that a reply gives.

    Attributes:
        text: The answer, as it is written.
        box: The content of the box alone, if the formula around it belongs to the answer.
        others: Further boxes that can make up a list with it, the last of which is *text*.
    """

    text: str
    others: tuple[str, ...] = ()
    box: str | None = None


def find_answer(reply: str) -> Found | None:
    """Return the answer that *reply* gives, or `None` if it gives none.

    A box or a tag that is cut off is no answer, and neither is a number out of a negation, a question, a hedge or a
    sentence that is cut off.
    """
    if "<think>" in reply or "</think>" in reply:
        reply = _THINK.sub(" ", reply.rpartition("</think>")[2])
    boxes = list(_find_boxes(reply))
    tag_at, tag = _find_tag(reply)
    tags = list(_TAG.finditer(reply[-MAX_TAIL:])) if tag is not None else []
    if len({found.group(1).strip() for found in tags}) > 1 and _are_listed(
        reply[-MAX_TAIL:][tags[-2].end() : tags[-1].start()]
    ):
        return Found(", ".join(found.group(1).strip() for found in tags))
    if tag is not None and (not boxes or tag_at > boxes[-1][0]):
        inner = find_answer(tag) if _BOX.search(tag) else Found(tag.strip())
        return inner if inner is not None and inner.text else None
    if boxes:
        return _choose_box(reply, boxes)
    if _OPEN_TAG.search(reply[-MAX_TAIL:]):
        return None
    return _find_in_prose(reply)


def _find_tag(reply: str) -> tuple[int, str | None]:
    at = max((found.start() for found in _TAG_START.finditer(reply)), default=-1)
    found = _TAG.match(reply, at) if at >= 0 else None
    return (at, found.group(1)) if found else (-1, None)


# Boxes


def _find_boxes(reply: str) -> Iterator[tuple[int, int, str | None]]:
    """Yield the start, end and content of the last boxes; of a box that is cut off, `None` as content."""
    starts = list(_BOX.finditer(reply))[-MAX_BOXES:] if "box" in reply else []
    covered = 0
    for found in starts:
        if found.start() < covered:
            continue
        at = found.end()
        if reply[at : at + 1] != "{":
            token = re.compile(r"\\?[A-Za-z]+|-?[0-9]+(?:[.,][0-9]+)*|\S").match(reply, at)
            yield (found.start(), token.end(), token.group()) if token else (found.start(), at, None)
            continue
        end = find_closing(reply, at)
        if end is None:
            yield found.start(), len(reply), None
            return
        covered = end
        yield found.start(), end + 1, reply[at + 1 : end]


def _choose_box(reply: str, boxes: list[tuple[int, int, str | None]]) -> Found | None:
    """Return the last box and the boxes listed with it; `None` if it is cut off, denied, asked or hedged."""
    start, end, content = boxes[-1]
    if content is None or _is_denied(reply, start, end):
        return None
    contents = [_complete(reply, box) for box in boxes if box[2] is not None]
    joined = [contents[-1]]
    for at in range(len(boxes) - 1, 0, -1):
        if boxes[at - 1][2] is None or not _are_listed(reply[boxes[at - 1][1] : boxes[at][0]]):
            break
        joined.insert(0, contents[at - 1])
    joined += _find_alternative(reply, end)
    if len(set(joined)) > 1:
        # Boxes with "or", a comma or nothing between them are one answer.
        return Found(", ".join(joined))
    others = tuple(dict.fromkeys(contents))
    rejected = any(_REJECTED.search(reply[a[1] : b[0]]) for a, b in itertools.pairwise(boxes))
    if len(others) > 1 and _GUESSED.search(_get_sentence(reply, start)):
        return None
    formula = _find_formula(reply, boxes[-1])
    if formula is not None:
        return Found(formula, () if rejected else others, contents[-1])
    return Found(contents[-1], () if rejected else others)


def _find_formula(reply: str, box: tuple[int, int, str | None]) -> str | None:
    """Return the side of the formula that the box is a part of, if it is more than the box; else `None`."""
    start, end, content = box
    line = max(0, start - _SHORT, reply.rfind("\n\n", 0, start) + 1)
    before, after = reply[line:start], reply[end : end + _SHORT].partition("\n\n")[0]
    if before.count("$") % 2:
        before, after = before.rpartition("$")[2], after.partition("$")[0]
    else:
        opening = max(("\\(", "\\["), key=before.rfind)
        at = before.rfind(opening)
        if at < 0 or before.find({"\\(": "\\)", "\\[": "\\]"}[opening], at) >= 0:
            return None
        before, after = before[at + 2 :], re.split(r"\\[)\]]", after)[0]
    before = _SIDE.split(before)[-1]
    after = _SIDE.split(after)[0]
    if not re.search(r"[^\s.,;{}]", before + after) or re.search(r"\\(?:begin|end|boxed)", before + after):
        return None
    return f"{before}{{{_open_inner_boxes(content or '')}}}{after}"


def _get_sentence(reply: str, at: int) -> str:
    """Return the text of the sentence before *at*."""
    return _SENTENCE_END.split(reply[max(0, at - _SHORT) : at])[-1]


def _is_denied(reply: str, start: int, end: int) -> bool:
    """Return whether the text beside a box denies it or asks whether it is right."""
    before, after = _get_sentence(reply, start), reply[end : end + _SHORT]
    return bool(_DENIED_BEFORE.search(before) or _DENIED_AFTER.match(after) or _RETRACTED.search(after))


def _are_listed(between: str) -> bool:
    """Return whether two boxes with this text between them are one list, as "or" or nothing shows."""
    if (
        _JOINED.fullmatch(between)
        or (not re.search(r"[A-Za-z=]", between) and "\\" not in between)
        or _NUMBERED.fullmatch(between)
    ):
        return True
    is_sentence = "\n" not in between and not re.search(r"[.;!?]\s", between)
    return is_sentence and bool(re.search(r"\b(?:or|if|when|maybe|alternatively|possibly|perhaps)\b", between))


def _find_alternative(reply: str, end: int) -> list[str]:
    """Return the value that "or" adds behind the last box."""
    found = _ALTERNATIVE.match(reply, end, end + _SHORT)
    if found is None:
        return []
    rest = found.group(1)
    formula = _FORMULA.match(rest) or _NUMBER.match(rest) or re.match(r"\\\w+(?:\{[^{}]*\})*", rest)
    return [formula.group() if formula else rest.split("\n")[0]]


def _complete(reply: str, box: tuple[int, int, str | None]) -> str:
    """Return the content of a box with the sign, unit or base that stands beside it."""
    start, end, content = box
    text = _open_inner_boxes((content or "").strip())
    if signs := _SIGNS_BEFORE.search(reply[max(0, start - 20) : start]):
        text = f"{signs.group()} ({text})"
    elif _MINUS_BEFORE.search(reply[max(0, start - 20) : start]):
        text = f"-{text}" if not text.startswith("-") else f"-({text})"
    after = _AFTER_BOX.match(reply, end, end + 80)
    if after is None:
        return text
    sign = after.group(1)
    if sign[0].isalpha():
        name = sign.split("^")[0]
        is_unit = len(sign) > 1 and (find_unit(name) or name in MULTIPLIERS) and name not in ("in", "as", "min")
        return f"{text} \\text{{ {sign} }}" if is_unit else text
    if sign.startswith(("\\text", "\\mathrm")):
        words = re.sub(r"\\\w+\s*\{|\}.*", "", sign).split()
        return f"{text} {sign}" if words and (find_unit(words[0]) or words[0] in MULTIPLIERS) else text
    if sign.startswith(("\\pi", "\\sqrt", "^", "\\times", "\\cdot", "i")) and not re.fullmatch(r"[\w.]+", text):
        text = f"({text})"
    return f"{text}{sign}"


def _open_inner_boxes(text: str) -> str:
    found = _BOX.match(text)
    while found and text[found.end() : found.end() + 1] == "{":
        end = find_closing(text, found.end())
        if end != len(text) - 1:
            break
        text = text[found.end() + 1 : end].strip()
        found = _BOX.match(text)
    return text


# Prose


def _find_in_prose(reply: str) -> Found | None:
    tail = _FENCE.sub("", reply[-MAX_TAIL:]).replace("`", "").rstrip()
    marked = sorted((*_ANSWER.finditer(tail), *_FOREIGN_ANSWER.finditer(tail)), key=lambda found: found.start())
    hashes = list(_HASHES.finditer(tail))
    if hashes and not (marked and marked[-1].start() > hashes[-1].start()):
        return Found(hashes[-1].group(1).strip())
    if marked:
        return _read_marked(tail, marked[-1])
    stripped = tail.strip()
    if len(stripped) <= _SHORT and "\n" not in stripped and not _is_prose(stripped):
        return Found(stripped)
    return _read_conclusion(tail)


def _read_marked(tail: str, found: re.Match[str]) -> Found | None:
    """Return what follows "the answer is" or "Answer:", unless the sentence denies, asks or hedges."""
    start = max(
        tail.rfind("\n", 0, found.start()), *(tail.rfind(sign, 0, found.start()) for sign in (". ", "! ", "? "))
    )
    before = tail[start + 1 : found.start()].rpartition(",")[2]
    line = tail[found.end() :].lstrip(" \t*:")
    if not line.partition("\n")[0].strip(" *`$"):
        line = line.lstrip("\n *`")
    formula = re.match(r"\s*(?:\$\$(.+?)\$\$|\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\])", line, re.DOTALL)
    end = formula.end() if formula else 0
    rest = _SENTENCE_END.split(line[end:], maxsplit=1)[0]
    if line[:end].endswith(".") or (formula and line[end : end + 1] == "\n"):
        rest = ""
    sentence = line[:end] + rest
    if _NEGATED.search(
        _NO_DENIAL.sub("", before + tail[found.start() : found.end()] + line[:4])
    ) or _DENIED_START.match(sentence):
        corrections = list(_CORRECTED.finditer(sentence))
        if not corrections:
            return None
        # "The answer is not 3, it is 4."
        before, sentence, end = "", sentence[corrections[-1].end() :], 0
        rest = sentence
    if not _NO_DENIAL.search(sentence):
        sentence = sentence[:end] + _ASIDE.split(sentence[end:], maxsplit=1)[0]
    # A sentence that ends with an operator is cut off.
    is_cut = sentence.rstrip().endswith((",", "+", "-", "=", "\\")) and tail.endswith(sentence.rstrip())
    if is_cut or _is_doubtful(before, sentence, line[len(sentence) :]):
        return None
    if not end and _SENTENCE_WITH_NUMBER.match(sentence):
        return _read_conclusion(f"So {sentence.strip()}")
    return _read_value(sentence, end)


def _is_doubtful(before: str, sentence: str, after: str) -> bool:
    """Return whether the sentence with the answer, or the text after it, asks, hedges, bounds, denies or retracts."""
    whole = before + sentence
    if whole.rstrip(" *\"')").endswith("?") or _DOUBTED.match(after):
        return True
    if any(pattern.search(whole) for pattern in (_HEDGED, _BOUNDED_AFTER)) or _RETRACTED.search(
        f"{sentence}{after[:_SHORT]}"
    ):
        return True
    # "False" alone is an answer.
    return len(sentence.split()) > 1 and _NEGATED.search(_NO_DENIAL.sub("", sentence)) is not None


def _read_value(sentence: str, end: int) -> Found | None:
    """Return the value at the start of *sentence*; a formula there ends at *end*."""
    text = sentence.strip(" *`")
    if end:
        rest = sentence[end:].strip(" *`.")
        unit = re.match(r"(\\?%|°|[A-Za-z]{2,20}\b)", rest)
        if (
            unit
            and unit.group() not in AMBIGUOUS_NAMES
            and (find_unit(unit.group()) or unit.group() in MULTIPLIERS or unit.group()[-1] in "%°")
        ):
            named = unit.group() if unit.group()[-1] in "%°" else f" \\text{{ {unit.group()} }}"
            return Found(sentence[:end].strip(" $") + named)
        return Found(text if _CONTINUED.match(rest) else sentence[:end].strip())
    text = text[:-1] if text.count("!") == 1 and text.endswith("!") else text
    text = re.split(r"\s+(?:because|since|so|as|which|where|when|for)\b|\. (?=[A-Z])", text, maxsplit=1)[0]
    return Found(text) if text else None


def _is_prose(text: str) -> bool:
    """Return whether the text is a sentence: it has several words other than units."""
    if text.endswith("?") or any(pattern.search(text) for pattern in (_NEGATED, _HEDGED, _REJECTED)):
        return True
    words = [
        word for word in re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", _FORMULA.sub(" ", text)) if not find_unit(word)
    ]
    if words and _FORMULA.search(text):
        return True
    return len(words) > MAX_BARE_WORDS or _VERB.search(text) is not None


def _read_conclusion(tail: str) -> Found | None:
    r"""Return the value that the last sentence concludes with: "So there are 42 apples.", "The sum is \\(42\\)."."""
    sentences = [part.strip() for part in _SENTENCE_END.split(tail) if part.strip(" *\n")]
    if not sentences:
        return None
    sentence = sentences[-1].replace("**", "").strip("*_ ")
    if _ONLY_FORMULA.fullmatch(sentence):
        return Found(sentence.rstrip("."))
    if aside := re.search(r"\s*(?:\((?:since|because|as|not)\b[^)]*\)|, not\b[^.]*)\.?\Z", sentence):
        sentence = sentence[: aside.start()] + "."
    is_complete = sentence.endswith((".", "!", "$", ")", "]", "}", "%")) or sentence[-1:].isdigit()
    if not is_complete or sentence.endswith("?") or _NEGATED.search(sentence) or _HEDGED.search(sentence):
        return None
    values = list(_FORMULA.finditer(sentence)) or list(_NUMBER.finditer(sentence))
    if not values or re.search(r"\bor\b", sentence) or _REJECTED.search(sentence) or _BOUNDED_AFTER.search(sentence):
        return None
    last = values[-1]
    before, after = sentence[: last.start()], sentence[last.end() :]
    if _BOUNDED.search(before) or not (_EQUALS.search(before) or "=" in last.group()):
        return None
    if re.search(r"\w", after) and not _CONCLUSION.match(sentence):
        return None
    equation = re.search(r"(\S+)\s*=\s*\Z", before)
    if equation and not re.fullmatch(r"\$?\\?[A-Za-z](?:_\w+)?", equation.group(1)):
        return None
    return Found(last.group())
