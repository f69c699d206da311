"""Attacks that print what a grader reads from the standard output of a program, in place of solving the task.

A grader that runs a reply beside its tests, and searches the output for `PASS` or a score, takes the words of the reply
for those of the tests, also in a sandbox. The attacks print usual words, and those for which the environment's source
searches.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from gymsdk import responses
from gymsdk.checks.attack import Attack, TaskView, Turns, build_call_turn, format_turns
from gymsdk.checks.clues import fill_values
from gymsdk.checks.forms import get_last_reply, write_in_form
from gymsdk.environment import Environment
from gymsdk.rollouts.fingerprint import get_called_name

USUAL_OUTPUTS = (
    "PASS",
    "PASSED",
    "passed",
    "OK",
    "ok",
    "True",
    "true",
    "1",
    "1.0",
    "100",
    "success",
    "All tests passed",
    "1 passed in 0.01s",
    '{"passed": true, "success": true, "ok": true, "score": 1.0, "reward": 1.0, "failed": 0, "errors": 0}',
    '{"passed": 1, "total": 1, "score": 1, "reward": 1}',
)
"""What test programs print if everything is right."""

SEARCHING_CALLS = frozenset(
    {"startswith", "endswith", "split", "partition", "rpartition", "removeprefix", "removesuffix", "index", "find"}
    | {"rfind", "count", "search", "match", "fullmatch", "findall", "finditer", "compile", "print", "write", "echo"}
)
"""The functions whose texts an environment may search for, or may let a test program print."""

MAX_WORDS = 16
"""How many words of the environment's source are tried."""

MAX_KEYS = 32
"""How many keys of objects the forged result has."""

MAX_WORD_CHARS = 80
MAX_TOOLS = 4

_PATTERN_PART = re.compile(r"\([^()]*\)|\[[^\[\]]*\][*+]?|\\[dwS][*+]?|\\s[*+?]?|[\^$]")

FIX_FORGERY = (
    "take the verdict from where the reply cannot write, such as a file or a pipe of the grader's own, or print a"
    " random word that the reply does not know; do not search standard output, and do not trust the exit code"
)


def build_forgeries(environment: Environment) -> list[Attack]:
    """Return the attacks that print what the grader of *environment* may read."""
    outputs = list(dict.fromkeys([*find_searched_words(environment), *USUAL_OUTPUTS]))
    programs = [
        _build_attack(f"replies a program that prints {output[:40]!r}", _reply_program(write, output))
        for write in (_print_and_stop, _print_errors_and_stop)
        for output in outputs
    ]
    everything = "\n".join([*outputs, "1.0"])
    forms = [
        _build_attack("replies a program that prints every word of success", _reply_program(write, everything, place))
        for write in (_print, _print_and_stop, _print_and_kill)
        for place in range(len(FRAMES))
    ]
    forms += [
        _build_attack("answers with a program that prints every word of success", _answer_program(write, everything))
        for write in (_print, _print_and_stop, _print_and_kill)
    ]
    calls = [
        _build_attack("calls a tool with a program that prints every word of success", _call(write, everything, place))
        for write in (_print, _print_and_stop)
        for place in range(MAX_TOOLS)
    ]
    return [*programs, *forms, *calls]


def _build_attack(name: str, script: Callable[[TaskView], Turns]) -> Attack:
    return Attack(name, script, FIX_FORGERY, 1)


def _print(text: str) -> str:
    return f"print({text!r})"


def _print_and_stop(text: str) -> str:
    return f"print({text!r}, flush=True)\nraise SystemExit(0)"


def _print_errors_and_stop(text: str) -> str:
    # Programs of unittest report on standard error.
    return f"import sys\nprint({text!r}, file=sys.stderr, flush=True)\nraise SystemExit(0)"


def _print_and_kill(text: str) -> str:
    # Tests that catch `SystemExit` do not run either. A grader that runs the reply in this process must survive.
    guard = f"if os.getpid() != {os.getpid()}:\n    os._exit(0)"
    return f"import os\nprint({text!r}, flush=True)\n{guard}"


FRAMES: tuple[Callable[[str], str], ...] = (
    lambda code: f"```python\n{code}\n```",
    lambda code: code,
    lambda code: f"<answer>{code}</answer>",
    lambda code: f"<code>{code}</code>",
    lambda code: json.dumps({"code": code}),
)
"""The forms of a reply with code. Other attacks take the form of the oracle's reply."""


_FRAME_START = re.compile(r"```\w*\n|<(\w+)>")


def _reply_program(write: Callable[[str], str], text: str, place: int | None = None) -> Callable[[TaskView], Turns]:
    """Build the script that replies a program in the frame at *place*, by default in that of the oracle."""

    def script(view: TaskView) -> Turns:
        output = _drop_answers(text, view)
        code = write(output)
        reply = _frame_as_oracle(view, code) if place is None else FRAMES[place](code)
        return [[responses.build_message(reply, id="msg_0")]] if output else []

    return script


def _frame_as_oracle(view: TaskView, code: str) -> str:
    start = _FRAME_START.search(get_last_reply(view.own))
    if start is None:
        return FRAMES[0](code)
    return f"{start[0]}{code}\n" + ("```" if start[1] is None else f"</{start[1]}>")


def _answer_program(write: Callable[[str], str], text: str) -> Callable[[TaskView], Turns]:
    def script(view: TaskView) -> Turns:
        output = _drop_answers(text, view)
        return write_in_form(view, write(output), calls=True) if output else []

    return script


def _call(write: Callable[[str], str], text: str, place: int) -> Callable[[TaskView], Turns]:
    def script(view: TaskView) -> Turns:
        output = _drop_answers(text, view)
        if place >= len(view.tools) or not output:
            return []
        tool = view.tools[place]
        values: dict[str, object] = {"string": write(output), "integer": 1, "number": 1.0, "boolean": True}
        arguments = json.dumps(fill_values((tool.get("parameters") or {}) | {"type": "object"}, values))
        return [build_call_turn((str(tool["name"]), arguments)), [responses.build_message("Done.", id="msg_0")]]

    return script


def _drop_answers(text: str, view: TaskView) -> str:
    """Return the lines of *text* that no field of the row and no reply of the oracle has: they may be right answers."""
    row = {key: value for key, value in view.task.row().items() if key != "responses_create_params"}
    known = "\n".join([json.dumps(row, default=str, ensure_ascii=False), *format_turns(view.own)])
    lines = (line for line in text.split("\n") if not re.search(rf"(?<!\w){re.escape(line)}(?!\w)", known))
    return "\n".join(lines)


def find_searched_words(environment: Environment) -> list[str]:
    """Return the texts for which the source of *environment* searches, and what its test programs print.

    The first one is an object with the keys that the source reads.
    """
    module = inspect.getmodule(environment.plugin if inspect.ismodule(environment.plugin) else type(environment.plugin))
    file = Path(getattr(module, "__file__", None) or os.devnull)
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    sources = [path.read_bytes() for path in files]
    keys = list(dict.fromkeys(key for source in sources for key in _iter_keys(source)))[:MAX_KEYS]
    score = [json.dumps({key: 0 if re.search("fail|error", key) else 1 for key in keys})] if keys else []
    found = (word for source in sources for word in _iter_words(source))
    return [*score, *list(dict.fromkeys(found))[:MAX_WORDS]]


def _iter_keys(source: bytes) -> Iterator[str]:
    """Yield the keys that *source* reads from objects: a test program may print its result as such an object."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        key = node.slice if isinstance(node, ast.Subscript) else None
        if isinstance(node, ast.Call) and get_called_name(node) == "get" and node.args:
            key = node.args[0]
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def _iter_words(source: bytes | str) -> Iterator[str]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from _read_texts([node.left, *node.comparators])
        elif isinstance(node, ast.Call) and get_called_name(node) in SEARCHING_CALLS:
            yield from _read_texts(node.args)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            # The program of the tests.
            yield from _iter_words(node.value)


def _read_texts(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        values = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(
            value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else "1.0"
            for value in values
        )
        is_text = any(isinstance(value, ast.Constant) and isinstance(value.value, str) for value in values)
        # A fence or a closing tag would end the program of the attack.
        if is_text and 1 < len(text) <= MAX_WORD_CHARS and not re.search(r"\n|```|</", text.strip()):
            yield from _complete(text.strip())


def _complete(text: str) -> Iterator[str]:
    """Yield *text*; with a score if it announces one, or if it is a pattern of one."""
    if re.search(r"[\\()\[\]^$]", text):
        yield re.sub(r"\\(.)", r"\1", _PATTERN_PART.sub(_replace_part, text))
    elif text.endswith((":", "=")):
        yield from (f"{text}1.0", f"{text} 1")
    else:
        yield text


def _replace_part(match: re.Match[str]) -> str:
    """Return text that fits a part of a regular expression."""
    part = match[0]
    return "" if part in "^$" else " " if part.startswith("\\s") else "1"
