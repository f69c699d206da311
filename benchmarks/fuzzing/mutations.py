"""Mutate requests at random: nodes of JSON bodies, raw bytes, query parameters, paths, methods and headers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

RAW_MARK = "@raw@"
"""Marks a string that stands in the body without quotation marks, for values that Python does not write."""

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 2**70, 10**4000, 0.5, -0.0, 1e308, 5e-324),
    *(RAW_MARK + text for text in ("NaN", "-Infinity", "1e999", "1" * 5000, "[" * 2000 + "]" * 2000)),
    *("", " ", "x", "x y", "\u0000", "\ud800", "\udfff\ud800", "a\u202eb", "é" * 50, "a" * 100_000, "\r\nx: y"),
    *("{}", "[]", "null", "NaN", "1", "-1", "1e999", "../../x", "%00", "0-0", "r1", "{", '{"a":', "<think>", "data:,"),
    *(
        [],
        [None],
        [[]],
        [{}],
        [1, "a", None],
        [[[[[[]]]]]],
        {},
        {"": None},
        {"a": {"b": [{}]}},
        {"type": 3, "name": []},
    ),
)

KEY_VALUES: dict[str, tuple[Any, ...]] = {
    "role": ("user", "assistant", "system", "developer", "tool", "critic", "function", "Assistant", "assistant\u0000"),
    "type": (
        *("message", "function_call", "function_call_output", "reasoning", "item_reference", "computer_call", "weird"),
        *("custom_tool_call", "web_search_call", "mcp_call", "input_text", "output_text", "input_image", "input_file"),
        *("refusal", "text", "image_url", "tool_use", "tool_result", "thinking", "function", "custom", "summary_text"),
    ),
    "name": (
        "get_weather",
        "seed_session",
        "verify",
        "nope",
        "a/b",
        "..",
        "mcp__tool_call__get_weather",
        "get weather",
    ),
    "content": (
        *([{"type": "input_text"}], [{"type": "input_text", "text": 5}], [{"type": "input_image", "image_url": 3}]),
        *([{"type": "input_image", "image_url": {"url": None}}], [{"type": "refusal", "refusal": []}], ["text"]),
        *([{"type": "output_text", "text": None}], [{"type": "image_url", "image_url": "x"}], [{"type": []}]),
        *([{"type": "tool_result", "tool_use_id": 3, "content": [{}]}], [{"type": "input_file", "file_id": {}}]),
        *([{"type": "text", "text": {"a": 1}}, None], [{"text": "x"}], [{"type": "thinking", "thinking": 1}]),
    ),
    "arguments": ("", "{", "[]", "1", '{"city":', {"city": "x"}, '"\\ud800"', "[" * 5000),
    "tool_choice": ("required", "nope", {"type": "function"}, {"type": "function", "name": "nope"}, {"type": "tool"}),
    "tools": (
        *([{}], [{"type": "web_search"}], [{"type": "function"}], [{"type": "function", "name": "f"}] * 2),
        *([{"type": "function", "name": "f", "parameters": {"enum": 5}}], [{"type": "function", "function": None}]),
        *([{"type": "function", "name": "f", "parameters": {"type": "object", "properties": [1]}}], [{"name": "f"}]),
        *([{"type": "function", "name": "f", "parameters": {"type": "array", "items": [{}]}}], [{"name": "", "x": 1}]),
    ),
}
"""Values for the fields that the servers read most."""

KEYS = (
    "type",
    "role",
    "content",
    "name",
    "tools",
    "input",
    "gymsdk",
    "seed",
    "budget",
    "metadata",
    "stream",
    "a" * 300,
)
CONTENT_TYPES = (
    "text/plain",
    "application/json; charset=utf-16",
    "multipart/form-data; boundary=x",
    "\xff",
    "",
    "a/b,c",
)
HEADERS = (
    *(("content-encoding", value) for value in ("gzip", "br", "\xe9", "identity")),
    *(("accept", value) for value in ("text/event-stream", "\xff", "*")),
    *(("cookie", value) for value in ("a", "=", "\xff=\xfe", "ResourcesServer___tool_call=x", "a=b; " * 500)),
    *(("x-request-id", value) for value in ("\xff", "a" * 3000, " ")),
    *(("x-gymsdk-forwarded", "1"), ("x-gymsdk-client", "1"), ("anthropic-version", "x"), ("range", "bytes=5-1")),
    *(("traceparent", "00-zz"), ("x-nemo-gym-session-token", "\xe9"), ("last-event-id", "\xff"), ("expect", "x")),
    *(("if-modified-since", "\xff"), ("if-none-match", "*"), ("x-forwarded-prefix", "//x"), ("te", "trailers")),
)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW")
PREFIXES = (
    "/ng-rollout/r1",
    "/ng-rollout/r1/training-token-capture",
    "/ng-rollout/%ff",
    "/ng-rollout/..",
    "/ng-rollout//",
)
PATH_PARTS = (
    "%00",
    "%ff",
    "%ed%a0%80",
    "..",
    "%2e%2e",
    "%2F",
    "//",
    "é",
    "a" * 5000,
    ";x=1",
    "%",
    "\\",
    "?",
    "#x",
    "~1",
)
QUERY_VALUES = (
    *(
        "",
        "-1",
        "0",
        "1",
        "1.5",
        "1e3",
        "9" * 18,
        "9" * 19,
        "9" * 30,
        "-" + "9" * 30,
        "9" * 5000,
        "nan",
        "inf",
        "٣",
        "1_0",
    ),
    *(
        "x",
        "null",
        "true",
        "[]",
        "{}",
        "[[]]",
        "[1]",
        "\x00",
        "a\x00b",
        "\ud800",
        "'",
        '"',
        "a" * 20_000,
        "%",
        "_",
        "\\",
    ),
    *("id", "figure:", "figure:x", "reward", "../x", "#1", "0:0", "#" + "9" * 30, "9" * 30 + ":0", "²:0", "#²", "٣:٣"),
    *('[["reward","=",[]]]', '[["reward","in",[]]]', '[["reward","=",[1]]]', '[["reward",[],1]]', '[[{},"=",1]]'),
    *('[["lens","=",[]]]', '[["lens","=",{}]]', '[["lens","=","x"]]', '[["tool","in",["a"]]]', '[["tool","=",true]]'),
    *(
        '[["id","=",' + "9" * 30 + "]]",
        '[["id","in",[' + "9" * 30 + "]]]",
        '[["tool","<",null]]',
        '[["prompt","contains",null]]',
    ),
    *('[["figure:","=",1]]', '[["figure:x","in",[null]]]', '[["prompt","=","\\u0000"]]', '[["prompt","=","\\ud800"]]'),
    *(
        "[" + '["id","=",1],' * 2000 + '["id","=",1]]',
        '[["id","in",[' + "1," * 40_000 + "1]]]",
        '["\\ud800"]',
        "[" * 5000,
    ),
    *(
        "*",
        '"',
        "a OR b",
        "NEAR(",
        "a*",
        "^",
        "-",
        "(",
        "a\nb",
        "\ufeff",
        "K" * 70_000,
        "\u0130",
        "ß",
        "NOT a",
        "a AND",
        "a " * 400,
        "ab " * 5000,
    ),
)


@dataclass(frozen=True)
class HttpRequest:
    """A request.

    Attributes:
        method: The method.
        path: The path, percent-encoded or not, without the query.
        body: The JSON body, or `None`.
        query: The query parameters.
        headers: Further headers.
        raw: The bytes of the body, instead of `body`.
        route: The path of the valid request, for the figures.
    """

    method: str
    path: str
    body: Any = None
    query: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    raw: bytes | None = None
    route: str = ""
    parameters: tuple[str, ...] = field(default=(), repr=False)

    @property
    def content(self) -> bytes:
        """The bytes of the body."""
        return self.raw if self.raw is not None else b"" if self.body is None else dump(self.body)

    @property
    def target(self) -> str:
        """The path and the query."""
        pairs = "&".join(f"{key}={quote(value, safe='', errors='surrogatepass')}" for key, value in self.query)
        return self.path + (f"?{pairs}" if pairs else "")


def dump(body: Any) -> bytes:
    """Return a body as JSON, with its marked strings unquoted."""
    try:
        text = json.dumps(body)
    except ValueError:  # an integer that Python does not write
        text = json.dumps(_mark_large(body))
    while (start := text.find(f'"{RAW_MARK}')) >= 0:
        end = text.index('"', start + 1)
        text = text[:start] + text[start + 1 + len(RAW_MARK) : end] + text[end + 1 :]
    return text.encode()


def _mark_large(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mark_large(node) for key, node in value.items()}
    if isinstance(value, list):
        return [_mark_large(node) for node in value]
    return f"{RAW_MARK}{'9' * 4400}" if isinstance(value, int) and abs(value) > 10**4300 else value


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every node of a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, node in inner:
        yield from list_paths(node, (*path, key))


def get(value: Any, path: tuple[Any, ...]) -> Any:
    """Return the node at a path."""
    for key in path:
        value = value[key]
    return value


def delete(body: Any, path: tuple[Any, ...]) -> Any:
    """Return the value without the node at a path."""
    changed = deepcopy(body)
    del get(changed, path[:-1])[path[-1]]
    return changed


def put(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    """Return the value with another node at a path."""
    if not path:
        return deepcopy(value)
    changed = deepcopy(body)
    get(changed, path[:-1])[path[-1]] = deepcopy(value)
    return changed


def mutate_body(body: Any, rng: random.Random) -> Any:
    """Return the body with one node changed."""
    paths = list(list_paths(body))
    path = rng.choice(paths)
    if rng.random() < 0.4:
        path = rng.choice([candidate for candidate in paths if candidate and candidate[-1] in KEY_VALUES] or paths)
    kind = rng.random()
    if path and kind < 0.15:
        return delete(body, path)
    if kind < 0.25 and isinstance(get(body, path), list) and (values := get(body, path)):
        return put(body, path, [*values, *rng.choices([*values, *VALUES], k=rng.randint(1, 3))])
    if kind < 0.35 and isinstance(get(body, path), dict):
        return put(body, (*path, rng.choice(KEYS)), _choose_value("", rng))
    if kind < 0.42:
        return put(body, path, rng.choice(([get(body, path)], {"a": get(body, path)}, [[get(body, path)]])))
    if kind < 0.5:
        return put(body, path, get(body, rng.choice(paths)))
    return put(body, path, _choose_value(path[-1] if path else "", rng))


def _choose_value(key: Any, rng: random.Random) -> Any:
    known = KEY_VALUES.get(key, ()) if isinstance(key, str) else ()
    return rng.choice(known if known and rng.random() < 0.6 else VALUES)


def _mutate_raw(request: HttpRequest, rng: random.Random) -> HttpRequest:
    content = request.content
    position = rng.randint(0, len(content))
    texts: tuple[bytes, ...] = (
        content[:position],
        content[:position] + rng.randbytes(3) + content[position:],
        content.decode().encode("utf-16"),
        b"\xef\xbb\xbf" + content,
        content + content,
        b"[" * 50_000,
        b'{"a":1,"a":2' + (b"," if content[1:2] == b'"' else b"") + content[1:],
        b"",
        b"null",
        b"\xff",
    )
    return replace(request, raw=rng.choice(texts))


def _mutate_query(request: HttpRequest, rng: random.Random) -> HttpRequest:
    names = request.parameters or ("drain", "x")
    chosen = rng.sample(names, rng.randint(1, min(2, len(names))))
    return replace(request, query=(*request.query, *((name, rng.choice(QUERY_VALUES)) for name in chosen)))


def _mutate_path(request: HttpRequest, rng: random.Random) -> HttpRequest:
    if rng.random() < 0.4:
        return replace(request, path=rng.choice(PREFIXES) + request.path)
    parts = request.path.split("/")
    index = rng.randrange(1, len(parts)) if len(parts) > 1 else 0
    parts[index] = rng.choice((*PATH_PARTS, *(quote(value[:300], errors="surrogatepass") for value in QUERY_VALUES)))
    return replace(request, path="/".join(parts))


def _mutate_headers(request: HttpRequest, rng: random.Random) -> HttpRequest:
    header = ("content-type", rng.choice(CONTENT_TYPES)) if rng.random() < 0.2 else rng.choice(HEADERS)
    return replace(request, headers=(*request.headers, header))


def mutate(request: HttpRequest, rng: random.Random) -> HttpRequest:
    """Return the request with one to three changes."""
    query: list[Callable[[HttpRequest, random.Random], HttpRequest]] = [_mutate_query] * (
        12 if request.parameters else 1
    )
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if request.body is not None and request.raw is None and rng.random() < 0.8:
            request = replace(request, body=mutate_body(request.body, rng))
        elif rng.random() < 0.1:
            request = replace(request, method=rng.choice(METHODS))
        else:
            others = [*query, *[_mutate_path] * 3, *[_mutate_headers] * 3]
            others += [_mutate_raw] * 3 if request.body is not None and request.raw is None else []
            request = rng.choice(others)(request, rng)
    return request


def list_smaller(request: HttpRequest) -> Iterator[HttpRequest]:
    """Yield requests with a part less, for a search of the smallest request that fails."""
    yield from (
        replace(request, headers=request.headers[:i] + request.headers[i + 1 :]) for i in range(len(request.headers))
    )
    yield from (replace(request, query=request.query[:i] + request.query[i + 1 :]) for i in range(len(request.query)))
    if request.body is not None and request.raw is None:
        yield from (replace(request, body=delete(request.body, path)) for path in list_paths(request.body) if path)
