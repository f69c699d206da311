"""The floor: what an environment does where its author leaves it to the host."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gymsdk import tools
from gymsdk.complaints import INTERRUPTS, raised
from gymsdk.errors import Failed
from gymsdk.plugins.hookspecs import hookimpl
from gymsdk.rows import read
from gymsdk.transcript import Action, Message
from gymsdk.types import Claims, Config, Reset, Row, State, Step, Task, Verdict

Run = Callable[[str, Callable[..., Any], dict[str, Any]], Awaitable[Any]]
"""Runs an author's function under its episode's deadline: what to call it in a message, the function, its arguments."""


class Floor:
    """The built-in plugin beneath every environment.

    *toolbox* is filled once the author's `tools` have answered; *run* runs them; *data* is the package's folder
    of task files.
    """

    def __init__(self, run: Run, data: Path | None) -> None:
        self.toolbox: Mapping[str, tools.Tool] = {}
        self._run = run
        self._data = data

    @hookimpl
    def reset(self) -> Reset:
        """Open with the row's own prompt, every tool on offer."""
        return Reset()

    @hookimpl
    async def step(self, task: Task, state: State, action: Action, config: Config, shared: Any) -> Step:
        """Run the tool of that name; end the episode on a plain reply."""
        if isinstance(action, Message):
            return Step(done=True)
        tool = self.toolbox.get(action.name)
        if tool is None:
            # A row may list tools of its own; that it is on offer was checked before.
            return Step(output=tools.refusal(f"The tool {action.name!r} cannot be run here; go on without it."))
        try:
            arguments = tool.parse_arguments(action.arguments)
        except tools.WrongArguments as error:
            return Step(output=tools.refusal(str(error)))
        except INTERRUPTS:
            raise
        except BaseException as error:
            message = f"tool {action.name!r}: a validator of its arguments raised {raised(error, tool.function)}"
            raise Failed(message, kind="tool_raised") from error
        given = {"task": task, "state": state, "config": config, "shared": shared}
        asked = {name: given[name] for name in tool.host_parameters}
        value = await self._run(f"tool {action.name!r}", tool.function, {**arguments, **asked})
        try:
            return Step(output=tools.written(value))
        except TypeError as error:
            raise Failed(f"tool {action.name!r} {error}", kind="tool_bad_answer") from error

    @hookimpl
    def verify(self) -> Verdict:
        """Judge an episode paid by its steps: nothing is added."""
        return Verdict(reward=0.0)

    @hookimpl
    def claims(self) -> Claims:
        """Claim a best reward of 1 and nothing by chance."""
        return Claims()

    @hookimpl
    def tasks(self, split: str) -> Iterator[Row]:
        """Read the package's `data/<split>.jsonl`."""
        return (row for _, row in read(self.get_task_file(split)))

    def get_task_file(self, split: str) -> Path:
        """Give where the package would keep *split*."""
        return (self._data or Path("data")) / f"{split}.jsonl"

    def list_splits(self) -> tuple[str, ...]:
        """Give the splits the package has files for."""
        return tuple(sorted(path.stem for path in self._data.glob("*.jsonl"))) if self._data else ()
