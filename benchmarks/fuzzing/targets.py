"""The servers that `fuzz.py` sends requests to, with valid requests of each route and each form of the protocol."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gymsdk import load, responses

from .client import Client
from .mutations import HttpRequest

ENVIRONMENTS = ("math", "multineedle", "tool_call")
TTL_SECONDS = 15
IDS = {"rollout_id": "r1", "attempt": 0}
TASK_ID = {"taskset": "t", "task_id": "1"}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOKENS = {"prompt_token_ids": [1, 2], "generation_token_ids": [3], "generation_log_probs": [-0.5]}
CALL = responses.build_function_call("get_weather", {"city": "Rome"}, "c1")
ITEMS = [
    {"role": "system", "content": "be brief"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}],
    },
    responses.build_reasoning("hmm"),
    CALL | TOKENS,
    responses.build_function_call_output("c1", "sunny"),
    responses.build_message("done"),
    {"role": "user", "content": "more"},
]
PARAMS = {
    "input": ITEMS,
    "instructions": "help",
    "tools": [WEATHER],
    "tool_choice": "auto",
    "temperature": 0.5,
    "top_p": 0.9,
    "max_output_tokens": 20,
    "metadata": {"extra_body": "{}", "chat_template_kwargs": "{}"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "reasoning": {"effort": "low"},
}
CHAT = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:,"}}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "ok"},
        {"role": "user", "content": "more"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}},
    "max_tokens": 20,
    "stop": ["x"],
    "logprobs": True,
    "stream_options": {"include_usage": True},
}
MESSAGES = {
    "model": "m",
    "max_tokens": 20,
    "system": [{"type": "text", "text": "be brief"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hmm", "signature": ""},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "ok"}]}],
        },
        {
            "role": "user",
            "content": [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}],
        },
    ],
    "tools": [{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}],
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 10},
    "stop_sequences": ["x"],
}
GYMSDK_FIELDS = {"seed": 1, "repeat": 0, "budget": {"turns": 2, "tools": 3, "seconds": 5.0}}
NUMBERS = {"_ng_task_index": 1, "_ng_rollout_index": 0, "_ng_attempt_index": 0, "_ng_rollout_id": "r1"}
RPC = {"jsonrpc": "2.0", "id": 1}


@dataclass(frozen=True)
class Target:
    """A server.

    Attributes:
        name: Its name.
        url: Its address.
        cases: Its valid requests, as sequences: the last request of each is mutated, and some of the others.
        headers: Headers of every request.
        after: A request that restores the server after each case, if one is needed.
        weight: How often cases of this server are played.
    """

    name: str
    url: str
    cases: tuple[tuple[HttpRequest, ...], ...]
    headers: tuple[tuple[str, str], ...] = ()
    after: HttpRequest | None = None
    weight: int = 1


def post(path: str, body: Any, **more: Any) -> HttpRequest:
    """Return a POST request."""
    return HttpRequest("POST", path, body, route=more.pop("route", f"POST {path}"), **more)


def get(path: str, *parameters: str, route: str = "", **query: str) -> HttpRequest:
    """Return a GET request with the names of its query parameters."""
    return HttpRequest("GET", path, query=tuple(query.items()), route=route or f"GET {path}", parameters=parameters)


def build_row(name: str) -> dict[str, Any]:
    """Return a task of an environment, as a row with all fields of the host."""
    row = next(iter(load(name).tasks("validation"))).row()
    # A prompt of many lines would get most of the mutations.
    row["responses_create_params"] = {"input": [{"role": "user", "content": "go"}], "tools": [WEATHER]}
    return row


def list_resources(name: str) -> Iterator[tuple[HttpRequest, ...]]:
    """Yield the requests of a resources server."""
    row = build_row(name)
    environment = load(name)
    response = responses.build_response(
        [CALL, responses.build_function_call_output("c1", "x"), *ITEMS[-2:-1]], model="m"
    )
    typed = {"resources_session_id": "s1", "episode_id": IDS, "task_id": TASK_ID, "task_data": row}
    closing = {"resources_session_id": "s1", "episode_id": IDS}
    seed, typed_seed, reset = post("/seed_session", row), post("/seed_session", typed), post("/reset", row | NUMBERS)
    verify = post("/verify", {**row, **NUMBERS, "gymsdk": GYMSDK_FIELDS, "response": response})
    verify_only = post("/verify", {**row, "response": {"output": [responses.build_message("7")]}})
    step = post("/step", {"response": response, "_ng_step_request_id": "u"})
    close_typed, close, aggregate = post("/close_session", closing), post("/close_session", {}), _aggregate(row)
    tools = [post(f"/{tool}", _arguments(environment.tools[tool].schema)) for tool in sorted(environment.tools)[:4]]
    tools += [post("/nope", {}, route="POST /{tool}")]
    yield from (
        (request,) for request in (seed, typed_seed, reset, verify, verify_only, step, close_typed, close, aggregate)
    )
    yield from ((seed, tool) for tool in tools)
    yield from ((seed, tools[0], verify), (seed, verify), (seed, verify_only, tools[0]), (seed, close, tools[0]))
    yield from (
        (typed_seed, tools[0], verify),
        (typed_seed, close_typed),
        (typed_seed, typed_seed),
        (typed_seed, verify),
    )
    yield from ((reset, step), (reset, step, step), (reset, post("/close", {})), (reset, post("/close", {}), step))
    yield from ((seed, step), (reset, tools[0]), (typed_seed, close_typed, tools[0]), (get("/reverify_mode"),))
    call = {"name": "get_weather", "arguments": {"city": "x"}}
    for method, params in (("initialize", {"protocolVersion": "2025-06-18"}), ("tools/list", {}), ("tools/call", call)):
        yield (seed, post("/mcp", {**RPC, "method": method, "params": params}, route=f"POST /mcp {method}"))
    yield from ((get(path),) for path in ("/", "/readyz", "/metrics", "/openapi.json"))


def list_agent(name: str) -> Iterator[tuple[HttpRequest, ...]]:
    """Yield the requests of an agent and of an environment server."""
    row = {**build_row(name), **NUMBERS, "gymsdk": GYMSDK_FIELDS, "agent_ref": {"name": f"{name}_simple_agent"}}
    access = {"kind": "direct_http", "name": "n", "base_url": "http://127.0.0.1:9", "cookies": {}, "headers": {}}
    ids = {"agent_session_id": "s", "episode_id": IDS}
    opening = {**ids, "task_id": TASK_ID, "tool_accesses": [access]}
    open_session, open_toolless = (
        post("/v1/agent_sessions", opening),
        post("/v1/agent_sessions", {**opening, "tool_accesses": []}),
    )
    respond, close = post("/v1/responses", PARAMS), post("/v1/agent_sessions/close", ids)
    yield from ((request,) for request in (post("/run", row), respond, open_session, close, _aggregate(row)))
    yield from ((open_session, respond), (open_toolless, respond), (open_session, close), (open_session, close, close))
    yield (open_session, open_session)


def list_environment_server(name: str) -> Iterator[tuple[HttpRequest, ...]]:
    """Yield the requests of an environment server."""
    row = {**build_row(name), **NUMBERS, "gymsdk": GYMSDK_FIELDS}
    data = {"task_data": build_row(name), "responses_create_params": PARAMS, "agent_timeout_seconds": 5.0}
    episode = {"episode_id": IDS, "task": {"task_id": TASK_ID, "task_input": data}}
    yield from ((post("/run", row),), (post("/run", episode, route="POST /run episode"),), (_aggregate(row),))


def list_model() -> Iterator[tuple[HttpRequest, ...]]:
    """Yield the requests of a model server."""
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("responses", PARAMS),
        ("chat/completions", CHAT),
        ("messages", MESSAGES),
    )
    for path, body in bodies:
        yield (post(f"/v1/{path}", body),)
        yield (post(f"/v1/{path}", {**body, "stream": True}, route=f"POST /v1/{path} stream"),)
        yield (post(f"/ng-rollout/r1/training-token-capture/v1/{path}", body, route=f"POST /v1/{path}"),)
    yield (post("/v1/responses", {"input": "hi"}),)
    yield (post("/v1/messages/count_tokens", MESSAGES),)
    yield from ((get("/v1/models"),), (get("/v1/models/m", route="GET /v1/models/{model}"),))


def list_pauses() -> Iterator[tuple[HttpRequest, ...]]:
    """Yield the requests that pause a model."""
    yield from ((post("/pause", {"wait_seconds": 0.0, "max_seconds": 1.0}),), (post("/resume", {}),), (get("/pause"),))


def list_policy(url: str) -> Iterator[tuple[HttpRequest, ...]]:
    """Yield the requests of the policy endpoint at a URL."""
    yield from list_model()
    chat = {"messages": CHAT["messages"], "tools": CHAT["tools"]}
    yield (post("/tokenize", {**chat, "add_generation_prompt": True, "chat_template_kwargs": {}}),)
    yield (post("/tokenize", {"prompt": "hi", "return_token_strs": True}),)
    yield (post("/detokenize", {"tokens": [1, 2, 3]}),)
    sent = HttpRequest("POST", "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})
    ids = orjson.loads(Client(url).send(sent).body)["tokens"]
    yield (post("/v1/completions", {"prompt": ids, "max_tokens": 5, "logprobs": 1, "stop": ["x"], "n": 1}),)
    yield (post("/v1/chat/completions/render", chat),)
    yield (post("/inference/v1/generate", {"token_ids": ids, "sampling_params": {"max_tokens": 5, "logprobs": 0}}),)
    generated = {"request_id": "g", "choices": [{"token_ids": ids, "finish_reason": "stop"}], "usage": {}}
    derender = {"generate_response": generated, "chat_request": chat, "prompt_token_ids": ids}
    yield (post("/v1/chat/completions/derender", derender),)
    yield from ((get(path),) for path in ("/version", "/health", "/metrics"))


def list_head() -> Iterator[tuple[HttpRequest, ...]]:
    """Yield the requests of a head."""
    paths = ("/", "/readyz", "/global_config_dict_yaml", "/server_instances", "/nodes", "/metrics", "/openapi.json")
    yield from ((get(path),) for path in paths)
    service = {
        "id": "abc",
        "name": "other",
        "kind": "resources_servers",
        "implementation": "other",
        "host": "127.0.0.1",
        "port": 9,
        "pid": 5,
        "started": 1.0,
        "fields": {"a": 1},
    }
    registration = {
        "services": [service],
        "loads": {"other": {"sessions": 1}},
        "expected": ["other"],
        "exits": {},
        "restarts": {"other": 5},
        "supervisor": "s",
        "seconds": 5.0,
    }
    register = HttpRequest("PUT", "/nodes/n1", registration, route="PUT /nodes/{node}")
    remove = HttpRequest("DELETE", "/nodes/n1", route="DELETE /nodes/{node}")
    yield from ((register,), (register, remove), (remove,), (register, get("/nodes")), (register, get("/metrics")))
    yield (register, get("/global_config_dict_yaml"))
    restart = post("/servers/none/restart", {}, route="POST /servers/{name}/restart", parameters=("drain",))
    yield from ((restart,), (register, restart))


def list_viewer(run: str) -> Iterator[tuple[HttpRequest, ...]]:
    """Yield the requests of a viewer."""
    base, common = f"/api/runs/{run}", ("where", "q")
    yield (get("/api/runs"),)
    yield (get(base, route="GET /api/runs/{run}"),)
    yield (
        get(f"{base}/rows", *common, "offset", "limit", "sort", "desc", "figures", route="GET /api/runs/{run}/rows"),
    )
    for name in ("facets", "tasks", "tools", "failures"):
        yield (get(f"{base}/{name}", *common, "offset", "limit", route=f"GET /api/runs/{{run}}/{name}"),)
    yield (get(f"{base}/rollouts/0:0", route="GET /api/runs/{run}/rollouts/{id}"),)
    yield (get(f"{base}/rollouts/0:0/items", "from", "n", route="GET /api/runs/{run}/rollouts/{id}/items"),)
    tokens = get(f"{base}/rollouts/0:0/tokens", "item", "from", "n", route="GET /api/runs/{run}/rollouts/{id}/tokens")
    yield (tokens,)
    yield (get(f"{base}/notes", route="GET /api/runs/{run}/notes"),)
    note = {"id": "0:0", "item": 1, "tags": ["a"], "text": "b", "author": "c"}
    yield (post(f"{base}/notes", note, route="POST /api/runs/{run}/notes"), get(f"{base}/notes"))
    yield (post(f"{base}/notes", note, route="POST /api/runs/{run}/notes"),)
    replay = post(f"{base}/rollouts/0:0/replay", {"force": False}, route="POST /api/runs/{run}/rollouts/{id}/replay")
    branch = {"turn": 0, "say": "hello", "model": "", "repeats": 1, "force": True}
    yield (replay,)
    yield (post(f"{base}/rollouts/0:0/branch", branch, route="POST /api/runs/{run}/rollouts/{id}/branch"),)
    say = orjson.dumps([responses.build_message("x"), CALL]).decode()
    yield (
        post(f"{base}/rollouts/0:0/branch", {**branch, "say": say}, route="POST /api/runs/{run}/rollouts/{id}/branch"),
    )
    yield (get("/api/compare", "a", "b", a=run, b=run),)
    yield (get("/api/events", "run", run=run),)
    yield from ((get(path),) for path in ("/", "/favicon.ico", "/static/icon.svg"))


def _aggregate(row: dict[str, Any]) -> HttpRequest:
    scored = {
        **row,
        "reward": 1.0,
        "response": {"usage": {"total_tokens": 3}},
        "_ng_task_index": 0,
        "_ng_rollout_index": 1,
    }
    return post("/aggregate_metrics", {"verify_responses": [scored, {"reward": 0.5, "mask_sample": False}]})


def _arguments(schema: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"string": "x", "integer": 1, "number": 1.5, "boolean": True, "array": [1]}
    properties = schema["parameters"].get("properties", {})
    return {name: values.get(str(parameter.get("type")), "x") for name, parameter in properties.items()}


@contextmanager
def start(command: list[str], log: Path, cwd: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start `gymsdk` with a command; yield the process and its first line of output."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cwd / "cache"), "GYMSDK_API_KEY": "x"}
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "gymsdk", *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            cwd=cwd,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.terminate()
            process.communicate(timeout=60)


@contextmanager
def serve_all(folder: Path) -> Iterator[tuple[list[Target], dict[str, int]]]:
    """Start all servers; yield them, and the process ids by the names of their logs."""
    script = folder / "script.jsonl"
    turns = [{"calls": [{"name": name, "arguments": {"city": "x"}}]} for name in ("nope", "get_weather")]
    script.write_bytes(b"".join(orjson.dumps(turn) + b"\n" for turn in turns))
    targets: list[Target] = []
    processes: dict[str, int] = {}
    with ExitStack() as stack:

        def run(name: str, *command: str) -> str:
            process, line = stack.enter_context(start([*command], folder / f"{name}.log", folder))
            processes[name] = process.pid
            return line

        kinds = ("vllm", "nemo-rl")
        endpoints = [
            run(f"policy-{kind}", "policy", "serve", "random", "--port", "0", "--engine", kind) for kind in kinds
        ]
        bases = [next(word for word in line.split() if word.startswith("http")) for line in endpoints]
        for kind, base in zip(kinds, bases, strict=True):
            url = base.removesuffix("/v1")
            targets.append(Target(f"policy {kind}", url, tuple(list_policy(url)), weight=3))
        vllm = ("--model", "vllm/policy", "--base-url", bases[0], "--timeout", "20")
        deployments = {
            "serve": (*ENVIRONMENTS, "--model", "scripted/random", "--mcp"),
            "script": ("tool_call", "--model", f"scripted/script:{script}"),
            "chat": ("tool_call", *vllm, "--api", "chat"),
            "responses": ("tool_call", *vllm, "--api", "responses"),
            "tokens": ("multineedle", *vllm, "--token-ids"),
            "workers": ("tool_call", "--model", "scripted/random", "--workers", "2"),
        }
        for name, options in deployments.items():
            served = orjson.loads(run(name, "serve", *options, "--port", "0", "--json", "--ttl", str(TTL_SECONDS)))
            targets += _list_targets(name, served)
        played = ["rollout", "tool_call", "math", "--split", "train", "--limit", "5", "--model", "scripted/oracle:0.5"]
        subprocess.run(
            [sys.executable, "-m", "gymsdk", *played, "--output", str(folder / "run")],
            check=True,
            capture_output=True,
            cwd=folder,
        )
        address = run("view", "view", str(folder / "run"), "--no-browser", "--port", "0", "--play")
        base, _, token = address.partition("/#token=")
        headers = (("authorization", f"Bearer {token}"),)
        targets.append(Target("viewer", base, tuple(list_viewer("run")), headers, weight=6))
        yield targets, processes


def _list_targets(deployment: str, served: dict[str, Any]) -> Iterator[Target]:
    if deployment == "serve":
        yield Target("head", served["head"], tuple(list_head()), weight=3)
    for name, server in served["servers"].items():
        environment = next((candidate for candidate in ENVIRONMENTS if name.startswith(candidate)), "")
        if name == environment:
            cases = list_resources(environment)
        elif name.endswith("_environment_server"):
            cases = list_environment_server(environment)
        elif name.endswith("_simple_agent"):
            cases = list_agent(environment)
        else:
            cases = list_model()
            yield Target(f"{deployment} pause", server["url"], tuple(list_pauses()), after=post("/resume", {}))
        yield Target(f"{deployment} {name}", server["url"], tuple(cases))
