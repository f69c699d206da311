"""Model-call capture in NeMo Gym 0.7's format: appends every model call of a rollout to the rollout's file.

NeMo Gym's collector reads the file `DIR/ROLLOUT.capture.jsonl` if it has the same `model_call_capture_dir`.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import time
from pathlib import Path
from typing import Any

from gymsdk import context, jsonl
from gymsdk.errors import EpisodeError
from gymsdk.servers.routing import ID_PATTERN
from gymsdk.types import Episode, Item, Model

MAX_WRITE_SECONDS = 5.0
"""Seconds that an episode waits for one of its model calls to be written."""

log = logging.getLogger("gymsdk")


class CapturingModel:
    """A model whose calls are captured.

    A call is captured if it belongs to a rollout: a rollout of this process, or one that the request's path names.
    """

    def __init__(self, model: Model, server: str, folder: Path) -> None:
        """Capture calls of `model`, served by the model server `server`, in files in `folder`."""
        self._model = model
        self._server = server
        self._folder = folder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __repr__(self) -> str:
        return repr(self._model)

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the model's response and capture the call, whether it succeeds or fails."""
        rollout = _rollout_id(episode)
        if rollout is None:
            return await self._model.respond(request, episode=episode)
        began, started = time.time(), time.perf_counter()
        response: Item | None = None
        failure_kind: str | None = None
        try:
            response = await self._model.respond(request, episode=episode)
        except EpisodeError as error:
            failure_kind = error.kind
            raise
        else:
            return response
        finally:
            milliseconds = (time.perf_counter() - started) * 1e3
            exchange = self._build_exchange(request, response, failure_kind)
            times = {"started_at": began, "completed_at": time.time(), "latency_ms": round(milliseconds, 2)}
            await self._write(rollout, exchange | times)

    async def _write(self, rollout: str, exchange: Item) -> None:
        """Append a call to the rollout's file within a time limit: a slow disk must not hold up an episode."""
        try:
            async with asyncio.timeout(MAX_WRITE_SECONDS):
                await asyncio.shield(asyncio.to_thread(self._append, rollout, exchange))
        except TimeoutError:
            log.warning("a model call of rollout %s was not captured in %s in time", rollout, self._folder)

    def _build_exchange(self, request: Item, response: Item | None, failed: str | None) -> Item:
        unfinished = "cancelled" if response is None and failed is None else None
        return {
            # The response's own id, because an agent reports the call under that id.
            "model_call_id": (response or {}).get("id") or f"call-{os.urandom(8).hex()}",
            "dialect": "responses",
            "model_ref": {"type": "responses_api_models", "name": self._server},
            "latency_ttft_ms": None,
            "status_code": None if response is None else 200,
            "error_category": failed or unfinished,
            "request": request,
            "response": response,
        }

    def _append(self, rollout: str, exchange: Item) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"{rollout}.capture.jsonl").open("ab") as file:
                # Several servers may write the same rollout's file.
                fcntl.flock(file.fileno(), fcntl.LOCK_EX)
                file.write(jsonl.dump_row(exchange))
        except (OSError, ValueError, TypeError) as error:
            log.warning("a model call of rollout %s was not captured in %s: %s", rollout, self._folder, error)
            self._mark_incomplete(rollout)

    def _mark_incomplete(self, rollout: str) -> None:
        try:
            (self._folder / f"{rollout}.capture.incomplete").touch()
        except OSError as error:
            log.warning("the capture of rollout %s was not marked as incomplete: %s", rollout, error)


def _rollout_id(episode: Episode | None) -> str | None:
    log_context = context.get_log_context()
    name = (episode.id if episode else "") or (log_context.rollout if log_context else "")
    return name if re.fullmatch(ID_PATTERN, name) else None
