"""Encode server-sent events, and JSON whose large values are already encoded."""

from __future__ import annotations

from gymsdk.jsonl import dump_json
from gymsdk.types import Item

HEARTBEAT_FRAME = b": beat\n\n"
"""A comment, which clients do not treat as an event."""

DONE_FRAME = b"data: [DONE]\n\n"

# JSON escapes the line breaks of ASCII. Clients that split a stream as text also break lines at these characters.
_LINE_BREAKS = {"\x85".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}


def dump_line(value: object) -> bytes:
    """Return *value* as JSON without any character that a client may treat as a line break."""
    data = dump_json(value)
    if not data.isascii():
        for character, escape in _LINE_BREAKS.items():
            data = data.replace(character, escape)
    return data


def build_frame(data: bytes, event: str = "") -> bytes:
    """Return the frame of an event with one line of *data*, and the name of the *event* if it has one."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), data) if event else b"data: %s\n\n" % data


def splice_json(body: Item, encoded: dict[str, bytes]) -> bytes:
    """Return *body* as JSON, with the values of the keys in *encoded* replaced by that JSON."""
    if not encoded:
        return dump_line(body)
    head = dump_line({key: value for key, value in body.items() if key not in encoded})
    tail = b",".join(b'"%s":%s' % (key.encode(), value) for key, value in encoded.items())
    return b"{%s}" % tail if head == b"{}" else b"%s,%s}" % (head[:-1], tail)


def join_json_list(encoded: list[bytes]) -> bytes:
    """Return the JSON list of values that are already JSON."""
    return b"[%s]" % b",".join(encoded)
