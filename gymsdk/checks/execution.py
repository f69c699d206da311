"""Check that no reply and no argument of a tool is executed as code.

The check sends programs that do nothing but record that they ran. Each program is a file in a temporary folder, and the
reply holds a short expression or command that runs the file, because graders often truncate a reply before they run it.
"""

from __future__ import annotations

import builtins
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gymsdk import responses
from gymsdk.checks.attack import Attack, TaskView, Turns, build_call_turn, build_policy, open_tasks, run_attacks
from gymsdk.checks.clues import fill_values
from gymsdk.checks.phases import describe_task, sample_tasks
from gymsdk.checks.programs import (
    CODES,
    MAX_EMBEDDINGS,
    USUAL_CODES,
    Payload,
    ReplyForm,
    embed_in_reply,
    list_reply_forms,
    parse_object,
)
from gymsdk.checks.report import Check, Finding, NotApplicable
from gymsdk.checks.subject import Subject
from gymsdk.environment import Environment
from gymsdk.types import extract_text
from gymsdk.workers.offload import get_executor

MAX_TASKS = 4
"""How many tasks are opened, of which each form takes a sample."""

MAX_TOOLS = 8
"""How many tools of a task are called with code."""

MAX_ARGUMENTS = 6
"""How many text arguments of the oracle's calls are replaced by code."""

MAX_LISTED_FORMS = 3
"""How many further forms that were executed a finding names."""

CONFIRMATIONS = 2
"""How often a reply that was executed is sent again, to see whether its process keeps changes for later replies."""

MARK = "gymsdk_check_mark"
"""The name of the environment variable and of the attributes that a program sets."""

PROGRAM = """\
def mark():
    import builtins, json, os, sys
    report = {{"process": os.getpid(), "earlier": getattr(builtins, {mark!r}, None), "modules": []}}
    os.environ[{mark!r}] = {number!r}
    setattr(builtins, {mark!r}, {number!r})
    for name, module in list(sys.modules.items()):
        if name == {package!r} or name.startswith({package!r} + "."):
            setattr(module, {mark!r}, {number!r})
            report["modules"].append(name)
    try:
        report["output"] = [os.fstat(1).st_dev, os.fstat(1).st_ino, os.fstat(1).st_rdev]
    except OSError:
        report["output"] = None
    with open({record!r} + ".part", "w") as file:
        json.dump(report, file)
    os.replace({record!r} + ".part", {record!r})
mark()
"""
"""The program sets a variable and attributes, and writes a record of its process."""

# The record must not be read before it is complete.
SHELL_PROGRAM = "printf '{{\"process\": %s}}' \"$$\" > '{record}.part' && mv '{record}.part' '{record}'\n"

FIX = (
    "treat a reply as data, never as code; if the task is to write code, run it in a sandbox: a container, or another"
    " machine or user, without network and secrets. See docs/safety.md"
)


@dataclass(frozen=True, slots=True)
class Sent:
    """A program that was sent.

    Attributes:
        payload: The program.
        form: How it was sent.
        view: The view of its task.
        script: Builds the same turns with another program.
    """

    payload: Payload
    form: str
    view: TaskView
    script: Callable[[TaskView], Turns]


@dataclass(frozen=True, slots=True)
class Execution:
    """A program that ran, and the record that it wrote."""

    sent: Sent
    record: dict[str, Any]

    @property
    def outlives_reply(self) -> bool:
        """Whether the process had been marked before, so that the changes of one reply reach the next."""
        return self.record.get("earlier") is not None


@dataclass
class Programs:
    """The programs of one run of the check.

    Attributes:
        folder: The temporary folder.
        package: The package of the environment. The programs mark its modules.
        output: What identifies the file behind the standard output of this process; `None` if it is closed.
        sent: The programs that were sent.
    """

    folder: Path
    package: str
    output: list[int] | None
    sent: list[Sent] = field(default_factory=list)

    def add(self, form: str, view: TaskView, script: Callable[[TaskView], Turns]) -> Payload:
        """Write the files of a new program, and return how to run it."""
        number = str(len(self.sent))
        payload = Payload(str(self.folder / number))
        record = _get_record_file(payload)
        program = PROGRAM.format(mark=MARK, number=number, package=self.package, record=record)
        Path(payload.file).write_text(program, encoding="utf-8")
        Path(payload.shell_file).write_text(SHELL_PROGRAM.format(record=record))
        self.sent.append(Sent(payload, form, view, script))
        return payload

    def list_executions(self) -> list[Execution]:
        """Return the programs that ran and could write to the folder, in the order in which they were sent."""
        # A record exists only once it is complete: a program renames it after the last byte.
        records = ((sent, Path(_get_record_file(sent.payload))) for sent in self.sent)
        return [Execution(sent, json.loads(record.read_bytes())) for sent, record in records if record.exists()]


def _get_record_file(payload: Payload) -> str:
    return f"{payload.file}.out"


def _identify_output() -> list[int] | None:
    try:
        status = os.fstat(1)
    except OSError:
        return None
    return [status.st_dev, status.st_ino, status.st_rdev]


@contextmanager
def open_programs(environment: Environment) -> Iterator[Programs]:
    """Yield an empty set of programs; at the end, remove their files and marks."""
    module = inspect.getmodule(environment.plugin if inspect.ismodule(environment.plugin) else type(environment.plugin))
    package = module.__name__.partition(".")[0] if module else environment.name
    # A short path: graders often truncate a reply before they run it.
    with TemporaryDirectory(prefix="g") as folder:
        programs = Programs(Path(folder), package, _identify_output())
        try:
            yield programs
        finally:
            _remove_marks(programs)


def _remove_marks(programs: Programs) -> None:
    os.environ.pop(MARK, None)
    package = programs.package
    modules = [name for name in sys.modules if name == package or name.startswith(f"{package}.")]
    for module in (builtins, *(sys.modules[name] for name in modules)):
        if hasattr(module, MARK):
            delattr(module, MARK)
    # A worker process is reused, and its marks would count as those of an earlier reply in the next run.
    if any(execution.record["process"] != os.getpid() for execution in programs.list_executions()):
        _end_workers()


def _end_workers() -> None:
    """End the local workers, which may be marked; the next call starts new ones."""
    from gymsdk.workers.processes import ProcessExecutor

    executor = get_executor()
    if isinstance(executor, ProcessExecutor):
        executor.close()


def build_attacks(programs: Programs) -> tuple[list[Attack], list[Attack]]:
    """Return the policies that send a program: those to play on every task, and those to play on one task."""
    forms = list(list_reply_forms())
    usual = [_build_reply_attack(programs, form) for form in forms if form.is_usual]
    others = [
        *(_build_reply_attack(programs, form) for form in forms if not form.is_usual),
        *(_build_embedding_attack(programs, code, place) for code in USUAL_CODES for place in range(MAX_EMBEDDINGS)),
        *(_build_call_attack(programs, code, place) for code in CODES for place in range(MAX_TOOLS)),
        *(_build_argument_attack(programs, code, place) for code in CODES for place in range(MAX_ARGUMENTS)),
    ]
    return usual, others


def _build_reply_attack(programs: Programs, form: ReplyForm) -> Attack:
    def script(view: TaskView) -> Turns:
        payload = programs.add(f"a reply that is {form.name}", view, script)
        return _finish_with(view, form.write(payload, view.prompt))

    return Attack(form.name, script, FIX)


def _build_embedding_attack(programs: Programs, code: str, place: int) -> Attack:
    """Build the attack that replies as the oracle does, with code in one place of the reply."""

    def script(view: TaskView) -> Turns:
        reply = _get_last_reply(view)
        if not reply or len(embed_in_reply(reply, "")) <= place:
            return []
        payload = programs.add(f"a reply that has the oracle's form and contains {code}", view, script)
        return _finish_with(view, embed_in_reply(reply, CODES[code](payload, view.prompt))[place])

    return Attack(code, script, FIX)


def _build_call_attack(programs: Programs, code: str, place: int) -> Attack:
    """Build the attack that calls one tool with code in all of its text arguments."""

    def script(view: TaskView) -> Turns:
        if place >= len(view.tools):
            return []
        tool = view.tools[place]
        payload = programs.add(f"an argument of the tool {tool['name']!r} that is {code}", view, script)
        values = {"string": CODES[code](payload, view.prompt), "integer": 1, "number": 1.0, "boolean": True}
        arguments = json.dumps(fill_values((tool.get("parameters") or {}) | {"type": "object"}, values))
        return [build_call_turn((str(tool["name"]), arguments)), [responses.build_message("Done.", id="msg_0")]]

    return Attack(code, script, FIX)


def _build_argument_attack(programs: Programs, code: str, place: int) -> Attack:
    """Build the attack that plays as the oracle does, with code in place of one text argument of a call."""

    def script(view: TaskView) -> Turns:
        found = [
            (turn, number, key)
            for turn, items in enumerate(view.own)
            for number, item in enumerate(items)
            if item.get("type") == "function_call"
            for key, value in parse_object(item["arguments"]).items()
            if isinstance(value, str)
        ]
        if place >= len(found):
            return []
        turn, number, key = found[place]
        call = view.own[turn][number]
        payload = programs.add(f"the argument {key!r} of the tool {call['name']!r} that is {code}", view, script)
        arguments = parse_object(call["arguments"]) | {key: CODES[code](payload, view.prompt)}
        changed = [*view.own[turn]]
        changed[number] = call | {"arguments": json.dumps(arguments)}
        return [*view.own[:turn], changed, *view.own[turn + 1 :]]

    return Attack(code, script, FIX)


def _finish_with(view: TaskView, text: str) -> Turns:
    """Return the oracle's turns with *text* in place of its last reply; only *text* if there is no oracle."""
    ends_with_reply = any(item.get("type") == "message" for item in view.own[-1]) if view.own else False
    before = view.own[:-1] if ends_with_reply else view.own
    return [*before, [responses.build_message(text, id="msg_0")]]


def _get_last_reply(view: TaskView) -> str:
    items = view.own[-1] if view.own else []
    return "".join(extract_text(item.get("content")) for item in items if item.get("type") == "message")


async def _check_execution(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        views = await open_tasks(subject, environment, sample_tasks(subject.tasks, MAX_TASKS))
        if not views:
            raise NotApplicable("no task of the environment could be opened; give it a `tasks` hook or data/*.jsonl")
        with open_programs(environment) as programs:
            usual, others = build_attacks(programs)
            await run_attacks(subject, environment, usual, views)
            # Tasks may execute different forms, so the other forms are spread over all tasks.
            for number, view in enumerate(views):
                await run_attacks(subject, environment, others[number :: len(views)], [view])
            if executions := programs.list_executions():
                await _send_again(subject, environment, executions[0])
            executions = programs.list_executions()
            is_host_marked = hasattr(builtins, MARK)
    return [_build_finding(executions, programs, is_host_marked=is_host_marked)] if executions else []


async def _send_again(subject: Subject, environment: Environment, execution: Execution) -> None:
    """Send an executed program again, one at a time, so that its process finds the marks that it keeps."""
    for _ in range(CONFIRMATIONS):
        turns = execution.sent.script(execution.sent.view)
        await subject.play_script(environment, build_policy(turns), execution.sent.view.task, turns=len(turns))


def _build_finding(executions: Sequence[Execution], programs: Programs, *, is_host_marked: bool) -> Finding:
    """Return the finding with the worst effect of all *executions*, and the other forms that were executed."""
    worst = next((execution for execution in executions if execution.outlives_reply), None) or max(
        executions, key=lambda execution: len(execution.record)
    )
    forms = [form for form in dict.fromkeys(execution.sent.form for execution in executions) if form != worst.sent.form]
    more = f"; the same holds for {'; '.join(forms[:MAX_LISTED_FORMS])}" if forms else ""
    rest = f"; and {len(forms) - MAX_LISTED_FORMS} more forms" if len(forms) > MAX_LISTED_FORMS else ""
    effects = _describe_effects(worst, programs, is_host_marked=is_host_marked)
    return Finding(
        problem=f"the environment executes {worst.sent.form}: {effects}{more}{rest}",
        task=describe_task(worst.sent.view.task),
    )


def _describe_effects(worst: Execution, programs: Programs, *, is_host_marked: bool) -> str:
    modules = worst.record.get("modules", [])
    parts = ["the code wrote a file"]
    if "modules" in worst.record:
        parts.append("set an environment variable")
    if modules:
        parts.append(f"changed the grader ({modules[0]}) and the built-in functions")
    if worst.record.get("output") == programs.output:
        parts.append("could write to the standard output of gymsdk")
    effects = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    if is_host_marked:
        return f"{effects}, in the process that runs gymsdk and grades all later replies"
    if worst.outlives_reply:
        return f"{effects}, in a worker process that is reused, so that the change reached the grading of later replies"
    return f"{effects}, in a child process with the rights of this user"


CHECKS = (
    Check(
        id="semantic.code_execution",
        requirement="no reply and no argument of a tool is executed as code",
        why="code that a policy wrote can change the grader, which then gives later replies full marks, and can read"
        " keys, the home folder and the network; gymsdk has no sandbox",
        fix=FIX,
        run=_check_execution,
    ),
)
