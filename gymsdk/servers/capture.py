"""Write the model calls of rollouts to files, for NeMo Gym's collector and for trainers.

`CapturingModel` writes requests and responses, to analyze rollouts. `TokenCapturingModel` writes the token ids of calls
whose path asks for it, to train on rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gymsdk import jsonl, responses, tracing
from gymsdk.edge.app import ID_PATTERN
from gymsdk.errors import EpisodeError, Failed
from gymsdk.locks import hold_lock
from gymsdk.once import OnceLogger
from gymsdk.tokens.capture import Lineage, TokenCaptureFolder, build_entry
from gymsdk.tokens.history import compute_digest, compute_opening, find_history
from gymsdk.types import Episode, Item, Model, is_policy_item

log = logging.getLogger("gymsdk")

MAX_WRITE_SECONDS = 5.0
"""Seconds that an episode waits for one of its model calls to be written."""


class CapturingModel:
    """Captures the calls of a model.

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
            # Several servers may write the same rollout's file.
            with (self._folder / f"{rollout}.capture.jsonl").open("ab") as file, hold_lock(file):
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
    name = (episode.id if episode else "") or tracing.get_rollout_id()
    return name if re.fullmatch(ID_PATTERN, name) else None


class TokenCapturingModel:
    """Captures the token ids of a model, for the rollouts that ask for it.

    A request asks for it with a path that begins with `/ng-rollout/ID/training-token-capture`. If the agent returned
    the conversation without token ids, those of the call that the request continues come from the folder, so that
    the call continues on exactly the tokens that the policy sampled.
    """

    captures_tokens = True

    def __init__(self, model: Model, folder: TokenCaptureFolder) -> None:
        """Capture the token ids of calls of `model` in `folder`."""
        self._model = model
        self._folder = folder
        self._once = OnceLogger(log)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __repr__(self) -> str:
        return repr(self._model)

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the model's response after its token ids are written.

        If they cannot be written, the rollout is marked as incomplete, and the response is returned anyway.

        Raises:
            Failed: The call cannot be registered: the rollout was read already, or the disk refuses to write.
        """
        rollout = tracing.get_captured_rollout()
        if not rollout:
            return await self._model.respond(request, episode=episode)
        try:
            call = await asyncio.to_thread(self._begin, rollout, request)
        except (OSError, ValueError) as error:
            message = f"the token ids of rollout {rollout} cannot be captured: {error}"
            raise Failed(message, kind="token_capture_failed", retryable=True) from error
        try:
            response = await self._model.respond(call.request, episode=episode)
        except BaseException:
            # The agent gets no answer, so no call is missing.
            await asyncio.shield(asyncio.to_thread(self._withdraw, call))
            raise
        await asyncio.shield(asyncio.to_thread(self._write, call, response))
        if call.lineage.status == "unresolved" and response["output"]:
            response["output"][-1][responses.BROKEN_FIELD] = True
            self._warn_of_broken_chain(rollout, call.lineage)
        return response

    def _warn_of_broken_chain(self, rollout: str, lineage: Lineage) -> None:
        reason = "several calls fit" if lineage.reason == "ambiguous" else "the agent edited the conversation"
        self._once.warn(
            "rollout %s: a conversation does not continue a captured call, because %s; such calls are marked, and"
            " trainers mask their rollouts (this warning is not repeated)",
            rollout,
            reason,
        )

    def _begin(self, rollout: str, request: Item) -> _CapturedCall:
        """Register a call, and add the token ids of the call that it continues to its request."""
        items = responses.get_input_items(request)
        end = max((index for index, item in enumerate(items, 1) if is_policy_item(item)), default=0)
        call_id = os.urandom(16).hex()
        conversation = _compute_digest(items[:end], request) if end else None
        opening = None if end else compute_opening(items, request.get("instructions"), request.get("tools"))
        lineage = self._folder.begin_call(rollout, call_id, conversation, opening)
        if lineage.parent is not None and find_history(items) is None:
            carrier = items[end - 1] | lineage.parent.tokens | {responses.TURNS_FIELD: lineage.parent.turns}
            request = request | {"input": [*items[: end - 1], carrier, *items[end:]]}
        return _CapturedCall(rollout, call_id, request, lineage)

    def _write(self, call: _CapturedCall, response: Item) -> None:
        """Write the token ids of a call, or mark the rollout as incomplete."""
        try:
            items = [*responses.get_input_items(call.request), *(response.get("output") or [])]
            entry = build_entry(call.rollout, call.id, response, call.lineage, _compute_digest(items, call.request))
            if entry is None:
                raise ValueError("the model returned no token ids")  # noqa: TRY301 - all failures end alike
            self._folder.put(entry)
        except (Failed, OSError, ValueError, TypeError) as error:
            log.warning("a model call of rollout %s has no token capture: %s", call.rollout, error)
            try:
                self._folder.mark_incomplete(call.rollout, call.id)
            except (OSError, ValueError) as second:
                # The call remains begun and without an entry, which says the same.
                log.warning("the token capture of rollout %s was not marked as incomplete: %s", call.rollout, second)

    def _withdraw(self, call: _CapturedCall) -> None:
        try:
            self._folder.withdraw_call(call.rollout, call.id)
        except OSError as error:
            log.warning("the failed call of rollout %s counts as missing in its token capture: %s", call.rollout, error)


class _CapturedCall(NamedTuple):
    """A call that `TokenCapturingModel` has registered.

    Attributes:
        rollout: The id of the rollout.
        id: The id of the call.
        request: The request, with the token ids of the call that it continues.
        lineage: Which call it continues.
    """

    rollout: str
    id: str
    request: Item
    lineage: Lineage


def _compute_digest(items: Sequence[Item], request: Item) -> str:
    return compute_digest(items, request.get("instructions"), request.get("tools"))
