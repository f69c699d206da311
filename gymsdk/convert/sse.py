"""Server-sent events: the frames of a stream as bytes, and JSON whose large pieces are written once."""

from __future__ import annotations

from gymsdk.jsonl import dump_json
from gymsdk.types import Item

HEARTBEAT_FRAME = b": beat\n\n"
"""A comment: no client takes it for an event."""

DONE_FRAME = b"data: [DONE]\n\n"

_BREAKS = {"\x85".encode(): b"\\u0085", "\u2028".encode(): b"\\u2028", "\u2029".encode(): b"\\u2029"}
# JSON escapes the line ends of ASCII; these are more, to clients that split a stream as text.


def dump_line(value: object) -> bytes:
    """Give *value* as JSON in one line, whatever a client takes for the end of a line."""
    data = dump_json(value)
    if not data.isascii():
        for mark, escape in _BREAKS.items():
            data = data.replace(mark, escape)
    return data


def build_frame(data: bytes, event: str = "") -> bytes:
    """Give the frame of *data*, one line, with the name of its *event* where events have names."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), data) if event else b"data: %s\n\n" % data


def splice_json(body: Item, pieces: dict[str, bytes]) -> bytes:
    """Give *body* as JSON in which the keys of *pieces* have these, which are JSON already, for values."""
    if not pieces:
        return dump_line(body)
    head = dump_line({key: value for key, value in body.items() if key not in pieces})
    tail = b",".join(b'"%s":%s' % (key.encode(), piece) for key, piece in pieces.items())
    return b"{%s}" % tail if head == b"{}" else b"%s,%s}" % (head[:-1], tail)


def join_json_list(pieces: list[bytes]) -> bytes:
    """Give the JSON list of *pieces*, which are JSON already."""
    return b"[%s]" % b",".join(pieces)
