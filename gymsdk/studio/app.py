"""The HTTP API of the viewer, and its pages. `gymsdk view` serves it on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import re
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from gymsdk import jsonl
from gymsdk.edge.app import HostCheck
from gymsdk.errors import GymsdkError, UsageError
from gymsdk.http.pages import LOOPBACK_NAMES
from gymsdk.line import StoredRollout
from gymsdk.runs.filters import Filter, build_filter, parse_condition
from gymsdk.runs.lenses import LENSES
from gymsdk.runs.queries import MAX_HITS, MAX_PHRASE_HITS, MAX_ROWS, RunQueries
from gymsdk.runs.records import list_verdict_names
from gymsdk.runs.schema import MAX_INTEGER
from gymsdk.studio.library import Library, OpenRun
from gymsdk.studio.security import ApiAccess, SecurityHeaders, build_policy, find_inline_scripts
from gymsdk.types import Item, Row, pair_outputs

if TYPE_CHECKING:
    from gymsdk.studio.player import Player

STATIC = Path(__file__).parent / "static"

MAX_ITEM_BYTES = 1_000_000
"""The most bytes of items that an answer has; the page asks for more of a longer transcript."""

MAX_OUTPUT_BYTES = 16_000_000
"""The most bytes of an answer that ends with the outputs of its tool calls."""

MAX_BODY_BYTES = 100_000
"""The largest body of a request."""

EVENT_SECONDS = 15.0
"""How often a stream of events sends a comment, by which both sides notice a lost connection."""

ROLLOUT_KEYS = ("responses_create_params", "response")
"""The keys of a line with items, which are sent apart from the rest."""

MAX_FIGURES = 500
"""The largest number of figures that one request asks for."""

MAX_TOKENS = 2000
"""The number of tokens of an answer, unless the request asks for fewer or more."""

DecodeToken = Callable[[int], str]

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(
    library: Library, token: SecretStr, *, player: Player | None = None, decode: DecodeToken | None = None
) -> Starlette:
    """Return the viewer.

    Args:
        library: The runs. The app starts and stops its background thread.
        token: The token that each request of the API needs. The pages themselves hold no data.
        player: Plays rollouts again when a page asks for it; without one, nothing is played.
        decode: Returns the text of a token id; without it, the pages show the ids.
    """
    page = (STATIC / "index.html").read_text(encoding="utf-8")

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        library.start()
        yield
        # It waits for the background thread.
        await run_in_threadpool(library.stop)

    async def show_page(_: Request) -> Response:
        return HTMLResponse(page)

    async def show_icon(_: Request) -> Response:
        return FileResponse(STATIC / "icon.svg", media_type="image/svg+xml")

    api = StudioApi(library, player, decode)
    endpoints = [Route(f"/{path}", endpoint, methods=[method]) for method, path, endpoint in api.list_endpoints()]
    routes = [
        Route("/", show_page),
        Route("/favicon.ico", show_icon),
        Mount("/api", routes=endpoints, middleware=[Middleware(ApiAccess, token)]),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    # The outermost first: rejected requests get the security headers, too.
    middleware = [
        Middleware(SecurityHeaders, build_policy(find_inline_scripts(page))),
        Middleware(HostCheck, LOOPBACK_NAMES),
    ]
    handlers = {GymsdkError: _handle_error, sqlite3.Error: _handle_error, HTTPException: _handle_http_error}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers, lifespan=lifespan)


class StudioApi:
    """The endpoints below `/api`. Errors are `{"detail": …}`.

    Args:
        player: Plays rollouts again.
        decode: Returns the text of a token id.
    """

    def __init__(self, library: Library, player: Player | None = None, decode: DecodeToken | None = None) -> None:
        self._library = library
        self._player = player
        self._decode = decode

    def list_endpoints(self) -> list[tuple[str, str, Endpoint]]:
        """Return the method, the path and the function of each endpoint."""
        return [
            ("GET", "runs", self._build_endpoint(self.list_runs)),
            ("GET", "runs/{run}", self._build_endpoint(self.get_run)),
            ("GET", "runs/{run}/rows", self._build_endpoint(self.list_rows)),
            ("GET", "runs/{run}/facets", self._build_endpoint(self.count_facets)),
            ("GET", "runs/{run}/tasks", self._build_endpoint(self.list_tasks)),
            ("GET", "runs/{run}/tools", self._build_endpoint(self.list_tools)),
            ("GET", "runs/{run}/failures", self._build_endpoint(self.list_failures)),
            ("GET", "runs/{run}/rollouts/{id}", self._build_endpoint(self.get_rollout)),
            ("GET", "runs/{run}/rollouts/{id}/items", self._build_endpoint(self.list_items)),
            ("GET", "runs/{run}/rollouts/{id}/tokens", self._build_endpoint(self.list_tokens)),
            ("GET", "runs/{run}/notes", self._build_endpoint(self.list_notes)),
            ("POST", "runs/{run}/notes", self.add_note),
            ("POST", "runs/{run}/rollouts/{id}/replay", self.replay),
            ("POST", "runs/{run}/rollouts/{id}/branch", self.branch),
            ("GET", "condition", self._build_endpoint(self.check_condition)),
            ("GET", "compare", self._build_endpoint(self.compare)),
            ("GET", "events", self.stream_events),
        ]

    def list_runs(self, _: Request) -> list[Row]:
        """Return descriptions of the runs that need no index of their lines."""
        return [_describe_in_list(run) for run in self._library.list_runs()]

    def get_run(self, request: Request) -> Row:
        """Return a run with its summary and settings."""
        run = self._get_run(request)
        with run.use() as queries:
            bad = queries.list_bad_lines()
            figures = queries.list_figures()
        about = run.source.read_about()
        details = {key: about.get(key) for key in ("command", "python", "platform", "settings", "resumed")}
        return (
            describe_run(run)
            | details
            | {
                "state": run.build_state(),
                "summary": run.compute("summary", RunQueries.summarize),
                "figures": figures,
                "bad_lines": bad + run.notes.list_bad_lines(),
                "notes_beside_run": run.notes.is_beside_run,
                **run.compute("lenses", describe_lenses),
            }
        )

    def list_rows(self, request: Request) -> Row:
        """Return a page of the chosen rollouts, and their number."""
        run, chosen = self._get_run(request), _parse_filter(request)
        query = request.query_params
        offset, limit = _parse_integer(request, "offset"), _parse_integer(request, "limit", 100)
        sort, descending = query.get("sort") or "id", query.get("desc") in {"1", "true"}
        total = run.compute(f"count {chosen}", lambda queries: queries.count(chosen))
        with run.use() as queries:
            rows = queries.list_rows(
                chosen, sort=sort, descending=descending, offset=offset, limit=min(limit, MAX_ROWS)
            )
            add_figures(queries, rows, _parse_names(query.get("figures")))
        is_cut = bool(chosen.search) and run.compute(f"cut {chosen.search}", lambda queries: _is_cut(queries, chosen))
        return {"total": total, "offset": offset, "rows": rows, "is_cut": is_cut}

    def count_facets(self, request: Request) -> Any:
        """Return the values of the facets with their counts, and the histogram of rewards."""
        return self._compute(request, "facets", RunQueries.count_facets)

    def list_tasks(self, request: Request) -> Any:
        """Return the tasks with their rewards, the hardest first."""
        offset, limit = (_parse_integer(request, name) for name in ("offset", "limit"))
        groups = self._compute(request, "tasks", RunQueries.list_groups)
        return {"total": len(groups), "offset": offset, "tasks": groups[offset : offset + (limit or MAX_ROWS)]}

    def list_tools(self, request: Request) -> Any:
        """Return the tools."""
        return self._compute(request, "tools", RunQueries.list_tools)

    def list_failures(self, request: Request) -> Any:
        """Return the kinds of failures."""
        return self._compute(request, "failures", RunQueries.list_failures)

    def get_rollout(self, request: Request) -> Row:
        """Return a rollout: its row, its line without the conversation, and the first items."""
        row, stored, figures = self._read_rollout(request)
        items, total = _cut_items(_list_items(stored), 0, None)
        rest = {key: value for key, value in stored.line.items() if key not in ROLLOUT_KEYS}
        response = stored.line.get("response")
        params = stored.line.get("responses_create_params")
        rest["response"] = _without(response, "output", "tools") if isinstance(response, dict) else None
        rest["responses_create_params"] = _without(params, "input") if isinstance(params, dict) else None
        return {
            "row": row,
            "figures": figures,
            "verdict": list_verdict_names(stored),
            "line": rest,
            "items": items,
            "total_items": total,
            "opening": len(stored.opening),
            "can_play": self._player is not None,
            "has_tokenizer": self._decode is not None,
        }

    def list_items(self, request: Request) -> Row:
        """Return further items of a rollout's conversation."""
        _, stored, _ = self._read_rollout(request)
        start, count = (_parse_integer(request, name) for name in ("from", "n"))
        items, total = _cut_items(_list_items(stored), start, count or None)
        return {"from": start, "items": items, "total_items": total}

    def list_tokens(self, request: Request) -> list[str]:
        """Return the texts of the tokens that the policy sampled for an item."""
        if self._decode is None:
            raise HTTPException(404, "this viewer has no tokenizer; start it with `gymsdk view --tokenizer NAME`")
        _, stored, _ = self._read_rollout(request)
        number, start, count = (_parse_integer(request, name) for name in ("item", "from", "n"))
        items = _list_items(stored)
        ids = items[number].get("generation_token_ids") if number < len(items) else None
        if not ids:
            raise HTTPException(404, f"item {number} has no token ids")
        return [self._decode(token) for token in ids[start : start + (count or MAX_TOKENS)]]

    def list_notes(self, request: Request) -> list[Row]:
        """Return the annotations of a run."""
        return [note.model_dump() for note in self._get_run(request).notes.read()]

    async def add_note(self, request: Request) -> Response:
        """Store an annotation."""
        run = await run_in_threadpool(self._get_run, request)
        row = await _read_json(request)
        note = await run_in_threadpool(run.notes.add, row)
        await run_in_threadpool(run.index.update_lines)
        return _build_json(note.model_dump())

    async def replay(self, request: Request) -> Response:
        """Play a rollout again, and compare it with the stored one."""
        player, run = self._get_player(), await run_in_threadpool(self._get_run, request)
        body = await _read_json(request)
        force = bool(body.get("force"))
        return _build_json(await player.replay(run.source.path, request.path_params["id"], force=force))

    async def branch(self, request: Request) -> Response:
        """Continue a rollout differently; the answer names the new run."""
        player, run = self._get_player(), await run_in_threadpool(self._get_run, request)
        folder, results = await player.branch(run.source.path, request.path_params["id"], await _read_json(request))
        written = await run_in_threadpool(self._library.add, folder)
        return _build_json({"run": written.key, "folder": str(folder), "rollouts": results})

    def check_condition(self, request: Request) -> Row:
        """Return the field, the operator and the value of a condition in text, or the error in the text."""
        try:
            return {"condition": parse_condition(request.query_params.get("text") or "")}
        except UsageError as error:
            return {"error": str(error)}

    def compare(self, request: Request) -> Row:
        """Return the comparison of two runs."""
        names = (request.query_params.get(name) or "" for name in ("a", "b"))
        first, second = (self._find_run(name) for name in names)
        return self._library.compare(first, second)

    async def stream_events(self, request: Request) -> Response:
        """Stream the states of a run while it grows, as server-sent events.

        A page that connects again sends the id of the last state that it has, and gets the next one only.
        """
        run = await run_in_threadpool(self._find_run, request.query_params.get("run") or "")

        known = request.headers.get("last-event-id")

        async def stream() -> AsyncIterator[bytes]:
            version, last = -1, known
            while not self._library.is_stopped:
                # The id is a hash of the state, so that a page that connects again gets no state that it has.
                state = await run_in_threadpool(_dump_state, run)
                identifier = hashlib.blake2b(state, digest_size=8).hexdigest() if state else last
                if identifier is not None and identifier != last:
                    last = identifier
                    yield b"event: state\nid: " + identifier.encode() + b"\ndata: " + state + b"\n\n"
                else:
                    # A comment: without it, neither side notices a lost connection.
                    yield b": still here\n\n"
                version = await asyncio.to_thread(self._library.wait, version, EVENT_SECONDS)

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _build_endpoint(self, build: Callable[[Request], Any]) -> Endpoint:
        """Return the endpoint that answers with the result of *build*, which runs in a thread."""

        async def answer(request: Request) -> Response:
            return _build_json(await run_in_threadpool(build, request))

        return answer

    def _get_run(self, request: Request) -> OpenRun:
        return self._find_run(request.path_params["run"])

    def _find_run(self, key: str) -> OpenRun:
        run = self._library.get(key)
        if run is None:
            raise HTTPException(404, f"there is no run {key!r}; reload the list of runs")
        return run

    def _get_player(self) -> Player:
        if self._player is None:
            raise HTTPException(403, "this viewer plays nothing; start it with `gymsdk view --play`")
        return self._player

    def _compute(self, request: Request, name: str, build: Callable[[RunQueries, Filter], Any]) -> Any:
        chosen = _parse_filter(request)
        return self._get_run(request).compute(f"{name} {chosen}", lambda queries: build(queries, chosen))

    def _read_rollout(self, request: Request) -> tuple[Row, StoredRollout, dict[str, float]]:
        run, name = self._get_run(request), request.path_params["id"]
        with run.use() as queries:
            row = queries.find(name)
            if row is None:
                raise HTTPException(404, f"the run {run.key!r} has no rollout {name!r}")
            return row, queries.read(row["id"]), queries.get_figures(row["id"])


def _dump_state(run: OpenRun) -> bytes:
    """Return the state of a run as JSON; empty if its index cannot be read, which the background thread logs."""
    try:
        return jsonl.dump_portable_json(run.build_state())
    except (GymsdkError, OSError, sqlite3.Error):
        return b""


def describe_run(run: OpenRun) -> Row:
    """Describe a run, without an index of its lines unless they were changed after its metrics were written."""
    about = run.source.read_about()
    settings = about.get("settings") or {}
    metrics = run.source.read_metrics()
    scored, mean = _sum_metrics(metrics) if run.source.are_metrics_current() else run.count_rewards()
    return {
        "run": run.key,
        "name": run.source.name,
        "path": str(run.source.path),
        "model": settings.get("model"),
        "environments": list(settings.get("environments") or {}),
        "started": about.get("started"),
        "asked": run.source.count_inputs(),
        "scored": scored or None,
        "mean": mean,
        "accuracy": [shown for entry in metrics for shown in _list_accuracy(entry)],
        "is_finished": bool(metrics),
        "bad_files": _list_bad_files(run),
    }


def _sum_metrics(metrics: Sequence[Row]) -> tuple[int, float | None]:
    """Return the number and the mean of the rewards of all environments."""
    counts: list[tuple[int, float]] = []
    for entry in metrics:
        count = (entry.get("outcomes") or {}).get("scored")
        mean = (entry.get("agent_metrics") or {}).get("mean/reward")
        if jsonl.is_finite_number(mean) and jsonl.is_finite_number(count) and isinstance(count, int) and count > 0:
            counts.append((count, mean))
    scored = sum(count for count, _ in counts)
    return scored, sum(count * mean for count, mean in counts) / scored if scored else None


def _list_accuracy(metrics: Row) -> Iterator[Row]:
    """Yield pass@k, majority@k and vote@k of an environment, for the most rollouts of a task."""
    values = metrics.get("agent_metrics") or {}
    for name in ("pass", "majority", "vote"):
        sizes = [int(match[1]) for key in values if (match := re.fullmatch(rf"{name}@(\d+)/accuracy", key))]
        value = values[f"{name}@{max(sizes)}/accuracy"] if sizes and max(sizes) > 1 else None
        if jsonl.is_finite_number(value):
            yield {"environment": metrics.get("environment"), "name": f"{name}@{max(sizes)}", "value": value}


def _describe_in_list(run: OpenRun) -> Row:
    """Describe a run; if that fails, with the error alone, because it must not hide the other runs."""
    try:
        return describe_run(run)
    except Exception as error:  # noqa: BLE001  # other programs may have written anything into the run's files
        unknown = dict.fromkeys(("model", "started", "asked", "scored", "mean"))
        bad = [{"file": run.source.path.name, "message": str(error) or type(error).__name__}]
        named = {"run": run.key, "name": run.key, "path": str(run.source.path), "environments": [], "accuracy": []}
        return named | unknown | {"is_finished": False, "bad_files": bad}


def _list_bad_files(run: OpenRun) -> list[Row]:
    """Return the files of a run that cannot be read, and the error of the thread that follows the run."""
    own = [{"file": run.source.path.name, "message": f"the run cannot be followed: {run.error}"}] if run.error else []
    return run.source.list_bad_files() + own


def add_figures(queries: RunQueries, rows: list[Row], names: list[str]) -> None:
    """Add the figures *names* to *rows*, as `figures`."""
    if not names:
        return
    values = queries.list_figure_values([row["id"] for row in rows], names)
    for row in rows:
        row["figures"] = values.get(row["id"], {})


def describe_lenses(queries: RunQueries) -> Row:
    """Return the saved filters, and the components of the reward that rise with the length of the rollouts."""
    components = [
        {"name": component.name, "r": component.correlation} for component in queries.find_length_components()
    ]
    lenses = [{"name": lens.name, "title": lens.title, "rule": lens.rule} for lens in LENSES.values()]
    return {"lenses": lenses, "length_components": components}


def _is_cut(queries: RunQueries, chosen: Filter) -> bool:
    """Return whether a search found so many rollouts that it stopped."""
    return len(queries.search(chosen.search)) in {MAX_HITS, MAX_PHRASE_HITS}


def _parse_filter(request: Request) -> Filter:
    conditions = _parse_json(request.query_params.get("where") or "[]", "where")
    if not isinstance(conditions, list) or not all(isinstance(condition, list | str) for condition in conditions):
        raise UsageError(
            "`where` must be a list of conditions, each as text or as a list of a field, an operator and a value"
        )
    return build_filter(conditions, request.query_params.get("q") or "")


def _parse_names(text: str | None) -> list[str]:
    names = _parse_json(text or "[]", "figures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError("`figures` must be a list of names")
    if len(names) > MAX_FIGURES:
        raise UsageError(f"`figures` has {len(names):,} names; at most {MAX_FIGURES} are possible")
    return names


def _parse_json(text: str, name: str) -> Any:
    """Return the JSON value of the query parameter *name*, without unpaired surrogates."""
    try:
        return jsonl.parse_json(text, strict=True)
    except ValueError as error:
        raise UsageError(f"`{name}` is not JSON: {error}") from None


def _parse_integer(request: Request, name: str, default: int = 0) -> int:
    """Return the query parameter *name*; a negative number counts as 0."""
    text = request.query_params.get(name) or ""
    try:
        number = max(0, int(text)) if text else default
    except ValueError:
        raise UsageError(f"`{name}` must be a whole number, got {text[:80]!r}") from None
    if number > MAX_INTEGER:
        raise UsageError(f"`{name}` must be a whole number of at most 64 bits, got {text[:80]!r}")
    return number


def _list_items(stored: StoredRollout) -> list[Item]:
    return [*stored.opening, *stored.output]


def _cut_items(items: list[Item], start: int, count: int | None) -> tuple[list[Item], int]:
    """Return items from *start* and the number of all.

    They are as many as fit into `MAX_ITEM_BYTES`, but at least one, and the outputs of their calls as far as these fit
    into `MAX_OUTPUT_BYTES`: a page would show a call without its output otherwise.
    """
    pairs = pair_outputs(items)
    size, last, end = 0, start, len(items) if count is None else min(len(items), start + count)
    for index in range(start, end):
        size += len(jsonl.dump_portable_json(items[index]))
        if size > (MAX_ITEM_BYTES if index > last else MAX_OUTPUT_BYTES) and index > start:
            end = index
            break
        last = max(last, pairs.get(index, start))
    return items[start:end], len(items)


def _without(value: Row, *keys: str) -> Row:
    return {key: field for key, field in value.items() if key not in keys}


async def _read_json(request: Request) -> Row:
    body = b""
    try:
        async for chunk in request.stream():
            body += chunk
            # While reading: a client may announce no length, or a wrong one.
            if len(body) > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES:,} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "the client disconnected before the end of the body") from None
    try:
        value = jsonl.parse_json(body)
    except ValueError as error:
        raise UsageError(f"the body is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError("the body must be a JSON object")
    return value


def _build_json(value: Any, status: int = 200) -> Response:
    return Response(jsonl.dump_portable_json(value), status, media_type="application/json")


async def _handle_error(_: Request, error: Exception) -> Response:
    return _build_json({"detail": str(error)}, 400 if isinstance(error, UsageError) else 500)


async def _handle_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "only HTTP errors are registered"
    return _build_json({"detail": error.detail}, error.status_code)
