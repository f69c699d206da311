"""Visits: a request answered with tools of a session that its caller has opened, and will judge and close."""

from __future__ import annotations

from gymsdk import wire
from gymsdk.episode import play
from gymsdk.servers.app import Refused
from gymsdk.servers.sessions.runs import Lost, Runs
from gymsdk.servers.wire.calling import Line, call
from gymsdk.transcript import Action, Item, Message, Transcript
from gymsdk.types import Episode, Row, Step, Task, Verdict


class Visit:
    """The session at the other end of *line*, as far as it is played from here: its tools are called, no more.

    Without a line there are no tools.
    """

    def __init__(self, name: str, line: Line | None) -> None:
        self.name = name
        self._line = line

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Give the episode that the request in *row* goes on with."""
        task = row if isinstance(row, Task) else Task.model_validate(row)
        params = task.responses_create_params
        return Episode(
            id=id,
            seed=seed,
            task=task,
            row=task.row(),
            environment=self,
            transcript=Transcript(opening=task.input),
            tools=(params.get("tools") or []) if self._line else [],
            repeat=repeat,
            deadline=deadline,
        )

    async def step(self, episode: Episode, action: Action) -> Step:
        """Call a tool; a plain reply ends the visit."""
        if isinstance(action, Message):
            return Step(done=True)
        assert self._line is not None, "only a tool on offer is called"
        return await call(self._line, action, episode.tools, deadline=episode.deadline)

    async def verify(self, episode: Episode) -> Verdict:  # noqa: ARG002 - nothing of it is judged here
        """Give a verdict nobody reads: the caller has the response judged."""
        return Verdict(reward=0.0)

    async def close(self, episode: Episode) -> None:
        """Leave the session as it is."""


async def answered(runs: Runs, request: Item, line: Line | None, *, id: str) -> Item:
    """Give the Response to *request*, all new items its output; raises `Lost`, and `Refused` where it is none."""
    body = {key: value for key, value in request.items() if key not in {"stream", "stream_options"}}
    try:
        task = Task.model_validate({"responses_create_params": body})
    except ValueError:
        raise Refused(422, "`input` must be a string or a list of items, `tools` a list of tools") from None
    async with runs.admission.place():
        visit = Visit(runs.environment.name, line)
        rollout = await play(visit, runs.model, task, id=id or wire.fresh("rollout"), budget=runs.budget)
    if rollout.failure is not None:
        raise Lost(rollout, rollout.failure)
    return rollout.response or wire.response([], model="", status="incomplete", request=body)
