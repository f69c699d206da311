"""Store the token ids of model calls in files, one file for each rollout, as NeMo Gym 0.7 does.

Many agents keep only the texts of the model's answers. For a trainer that uses such an agent, the model server writes
the token ids of each call to a folder, and the trainer reads them after the rollout. The files of the
rollout `ID` are:

- `ID.tokens.jsonl`: one JSON object for each call, written before the agent gets the answer;
- `ID.tokens.intents`: the id of each call, written before the call. A call without an entry was lost, and a reader
  must not train on the rollout;
- `ID.tokens.state.json`: whether a reader has frozen the rollout or a call could not be written;
- `ID.tokens.lock`: the lock that readers and writers of the rollout hold.

The names, the fields and the meaning of the files are those of `nemo_gym.token_id_capture` 0.7.0.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from struct import pack
from typing import Any, BinaryIO, Literal, NamedTuple

import orjson

from gymsdk.convert.tokens import ENGINE_FIELDS
from gymsdk.errors import Failed, UsageError
from gymsdk.locks import hold_lock
from gymsdk.responses import TOKEN_FIELDS
from gymsdk.tokens.history import Opening
from gymsdk.types import Item

SCHEMA_VERSION = 1
"""The version of the entries that NeMo Gym 0.7 reads."""

CONVERSATION_FIELD = "gymsdk_conversation_digest"
"""The field of an entry with the digest of the conversation up to and including the call, by which the next call of the
conversation finds it. Readers ignore unknown fields."""

OPENING_FIELD = "gymsdk_opening_digests"
"""The field of an entry without turns of the policy in its prompt, by which a conversation is recognized that an agent
starts anew."""

ROLLOUT_ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
"""The ids of rollouts that can be stored. They are parts of file names."""

MAX_ROLLOUTS = 4096
"""The number of rollouts whose calls are kept in memory. For other rollouts the file is read again."""

DIGEST_VERSION = 1
DIGEST_DOMAIN = b"nemo-gym-tokens"


class ParentCall(NamedTuple):
    """The call that a request continues.

    Attributes:
        call_id: Its id.
        tokens: Its token fields.
        turns: The positions in its prompt at which earlier turns of the policy begin and end, in a row.
    """

    call_id: str
    tokens: Item
    turns: list[int]


class Lineage(NamedTuple):
    """Which call of the rollout a call continues.

    Attributes:
        status: `root` for the first call of a conversation, `resolved` if the call before is known, else `unresolved`.
        parent: The call before.
        reason: Why the call before is not known: `no_match` or `ambiguous`.
        opening: The digests of a call without turns of the policy.
    """

    status: Literal["root", "resolved", "unresolved"]
    parent: ParentCall | None = None
    reason: str = ""
    opening: Opening | None = None


@dataclass(slots=True)
class _Calls:
    """The calls of one rollout, read from its file up to *size*."""

    key: tuple[int, ...] = ()
    """The device, the inode, and the times of the file."""
    size: int = 0
    last: tuple[int, bytes] = (0, b"")
    """The offset of the last line, and its digest."""
    digests: dict[str, bytes] = field(default_factory=dict)
    offsets: dict[str, dict[str, int]] = field(default_factory=dict)
    turns: dict[str, tuple[str | None, int, int]] = field(default_factory=dict)
    openings: dict[str, set[str]] = field(default_factory=dict)

    def add(self, entry: Item, line: bytes, offset: int) -> None:
        call_id = entry["model_call_id"]
        self.turns[call_id] = (entry.get("parent_call_id"), len(entry[TOKEN_FIELDS[0]]), entry["cum_len"])
        if digests := entry.get(OPENING_FIELD):
            opening = Opening(*digests)
            self.openings.setdefault(opening.setting, set()).add(opening.messages)
        self.digests[call_id] = sha256(line).digest()
        self.last = offset, self.digests[call_id]
        if key := entry.get(CONVERSATION_FIELD):
            self.offsets.setdefault(key, {})[call_id] = offset

    def continues(self, path: Path, status: os.stat_result) -> bool:
        """Return whether the file still begins with the calls that were read."""
        key = _build_key(status)
        if key[:2] != self.key[:2] or status.st_size <= self.size:
            return key == self.key and status.st_size == self.size
        # Another process has added calls.
        offset, digest = self.last
        with path.open("rb") as file:
            file.seek(offset)
            return not self.size or sha256(file.read(self.size - offset).strip()).digest() == digest

    def find_last(self, call_ids: Iterable[str]) -> str | None:
        """Return the call that continues all others of *call_ids*, directly or not, or `None`."""
        expected = set(call_ids)
        for call_id in expected:
            before, parent = {call_id}, self.turns[call_id][0]
            while parent is not None and parent in self.turns:
                before.add(parent)
                parent = self.turns[parent][0]
            if expected <= before:
                return call_id
        return None

    def list_turns(self, call_id: str | None) -> list[int]:
        """Return the positions at which the turns up to and including that of a call begin and end, in a row."""
        turns: list[int] = []
        while call_id in self.turns:
            call_id, begin, end = self.turns[call_id]
            turns = [begin, end, *turns]
        return turns

    def has_restarted(self, opening: Opening) -> bool:
        """Return whether the agent began a conversation before, with other messages than those of *opening*."""
        known = self.openings.get(opening.setting)
        return known is not None and opening.messages not in known


class TokenCaptureFolder:
    """The folder with the token ids of rollouts. Several processes can write to it.

    All methods block, because they wait for the disk.

    Args:
        folder: The folder; it is created if it does not exist.

    Raises:
        UsageError: The folder cannot be created, or no file can be written in it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise UsageError(f"{folder}: token ids cannot be written there ({reason}); name another folder") from error
        self._folder = folder
        self._rollouts: dict[str, _Calls] = {}
        self._rollouts_lock = threading.Lock()

    def begin_call(
        self, rollout: str, call_id: str, conversation: str | None = None, opening: Opening | None = None
    ) -> Lineage:
        """Write that a call is about to be made, and return which call it continues.

        Args:
            rollout: The id of the rollout.
            call_id: The id of the new call.
            conversation: The digest of the conversation up to the last turn of the policy; `None` without a turn.
            opening: The digests of a request without a turn of the policy.

        Raises:
            Failed: A reader has frozen the rollout.
            OSError: The file cannot be written.
        """
        with self._lock(rollout):
            self._check_open(rollout)
            if conversation is not None:
                lineage = self._find_parent(rollout, conversation)
            elif opening is not None and self._read_calls(rollout).has_restarted(opening):
                # The agent replaced the turns of the policy, for example by a summary.
                lineage = Lineage("unresolved", reason="no_match", opening=opening)
            else:
                lineage = Lineage("root", opening=opening)
            _append(self._path(rollout, "intents"), call_id.encode() + b"\n")
        return lineage

    def withdraw_call(self, rollout: str, call_id: str) -> None:
        """Remove what `begin_call` wrote, because the call failed and the agent got no answer."""
        path = self._path(rollout, "intents")
        with self._lock(rollout):
            lines = path.read_bytes().splitlines(keepends=True)
            self._replace(path, b"".join(line for line in lines if line.strip() != call_id.encode()))

    def put(self, entry: Item) -> None:
        """Write the entry of a call. The same entry again changes nothing.

        Args:
            entry: The entry, as `build_entry` returns it.

        Raises:
            Failed: A reader has frozen the rollout, or the call has another entry already.
            OSError: The file cannot be written.
        """
        rollout, call_id = entry["rollout_id"], entry["model_call_id"]
        line = orjson.dumps(entry, option=orjson.OPT_SORT_KEYS)
        path = self._path(rollout, "jsonl")
        with self._lock(rollout):
            self._check_open(rollout)
            calls = self._read_calls(rollout)
            known = calls.digests.get(call_id)
            if known is not None:
                if known != sha256(line).digest():
                    message = f"the call {call_id} of rollout {rollout} was captured with other tokens already"
                    raise Failed(message, kind="token_capture_failed")
                return
            offset = calls.size
            status = _append(path, line + b"\n")
            calls.key, calls.size = _build_key(status), status.st_size
            calls.add(entry, line, offset)

    def mark_incomplete(self, rollout: str, call_id: str = "") -> None:
        """Write that a call is missing, so that no reader trains on the rollout.

        Raises:
            OSError: The file cannot be written.
        """
        with self._lock(rollout):
            state = self._read_state(rollout)
            state |= {"incomplete": True, "version": state.get("version", 0) + 1}
            self._replace(self._path(rollout, "state.json"), orjson.dumps(state, option=orjson.OPT_SORT_KEYS))
            _append(self._path(rollout, "incomplete"), call_id.encode() + b"\n")

    def _find_parent(self, rollout: str, conversation: str) -> Lineage:
        calls = self._read_calls(rollout)
        offsets = calls.offsets.get(conversation)
        if not offsets:
            intents = self._path(rollout, "intents")
            # Without an earlier call, the turns of the policy are examples in the first prompt.
            is_first = not calls.digests and not (intents.exists() and intents.stat().st_size)
            return Lineage("root" if is_first else "unresolved", reason="" if is_first else "no_match")
        with self._path(rollout, "jsonl").open("rb") as file:
            entries = [_read_entry(file, offset) for offset in offsets.values()]
        # A call with an empty reply to an empty message has the text of the call before it.
        last = calls.find_last(entry["model_call_id"] for entry in entries)
        entries = [entry for entry in entries if last in (None, entry["model_call_id"])]
        entry = min(entries, key=lambda candidate: candidate["model_call_id"])
        if any(candidate["digest"] != entry["digest"] for candidate in entries):
            # The answers have the same text, so the request does not show which of them the agent kept.
            return Lineage("unresolved", reason="ambiguous")
        tokens = {key: entry[key] for key in TOKEN_FIELDS}
        turns = calls.list_turns(entry.get("parent_call_id"))
        return Lineage("resolved", ParentCall(entry["model_call_id"], tokens, turns))

    def _path(self, rollout: str, kind: str) -> Path:
        assert ROLLOUT_ID_PATTERN.fullmatch(rollout), "callers check the ids of rollouts"
        return self._folder / f"{rollout}.tokens.{kind}"

    @contextmanager
    def _lock(self, rollout: str) -> Iterator[None]:
        with self._path(rollout, "lock").open("a+b") as file, hold_lock(file):
            yield

    def _read_state(self, rollout: str) -> dict[str, Any]:
        path = self._path(rollout, "state.json")
        state: dict[str, Any] = orjson.loads(path.read_bytes()) if path.exists() else {}
        # A reader that finds a state expects all of its fields.
        defaults = {"frozen": False, "retired": False, "incomplete": False, "snapshot_id": "", "version": 0}
        return defaults | {"entry_digests": {}, "indexed_size": 0} | state

    def _check_open(self, rollout: str) -> None:
        state = self._read_state(rollout)
        if state["frozen"] or state["retired"]:
            message = f"the token capture of rollout {rollout} has ended; use another id for a new rollout"
            raise Failed(message, kind="token_capture_failed")

    def _read_calls(self, rollout: str) -> _Calls:
        """Return the calls of the rollout. Other processes may have added calls, which are read from the file."""
        path = self._path(rollout, "jsonl")
        calls = self._get_calls(rollout)
        if not path.exists():
            return self._reset_calls(rollout)
        status = path.stat()
        if not calls.continues(path, status):
            calls = self._reset_calls(rollout)
        if calls.size < status.st_size:
            with path.open("rb") as file:
                file.seek(calls.size)
                lines = file.read().splitlines(keepends=True)
            if not lines[-1].endswith(b"\n"):
                # A process was killed while it wrote the line. The call is known from the intents.
                os.truncate(path, status.st_size - len(lines.pop()))
            for line in lines:
                calls.add(_parse_entry(line, path), line.strip(), calls.size)
                calls.size += len(line)
        calls.key = _build_key(path.stat())
        return calls

    def _get_calls(self, rollout: str) -> _Calls:
        with self._rollouts_lock:
            # The rollouts used last are at the end.
            calls = self._rollouts.pop(rollout) if rollout in self._rollouts else _Calls()
            self._rollouts[rollout] = calls
            if len(self._rollouts) > MAX_ROLLOUTS:
                del self._rollouts[next(iter(self._rollouts))]
        return calls

    def _reset_calls(self, rollout: str) -> _Calls:
        with self._rollouts_lock:
            calls = self._rollouts[rollout] = _Calls()
        return calls

    def _replace(self, path: Path, content: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix=".tokens-", delete=False) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)  # noqa: PTH105 - the name of a temporary file is a string


def build_entry(rollout: str, call_id: str, response: Item, lineage: Lineage, conversation: str) -> Item | None:
    """Return the entry of a call, `None` if the response has no token ids.

    Args:
        rollout: The id of the rollout.
        call_id: The id of the call.
        response: The Response; its last output item carries the token fields.
        lineage: Which call the call continues.
        conversation: The digest of the conversation, including the response.
    """
    output = response.get("output") or [{}]
    tokens = {key: output[-1].get(key) for key in ENGINE_FIELDS}
    if any(tokens[key] is None for key in TOKEN_FIELDS):
        return None
    ids = [*tokens[TOKEN_FIELDS[0]], *tokens[TOKEN_FIELDS[1]]]
    return {
        "schema_version": SCHEMA_VERSION,
        "rollout_id": rollout,
        "model_call_id": call_id,
        "model": response.get("model") or "",
        **tokens,
        "output_items": [{key: value for key, value in item.items() if key not in ENGINE_FIELDS} for item in output],
        "token_item_index": len(output) - 1,
        "response_id": response.get("id"),
        "created_at": time.time(),
        "cum_len": len(ids),
        "digest": compute_token_digest(ids),
        "parent_call_id": lineage.parent.call_id if lineage.parent else None,
        "parent_resolution": lineage.status,
        "parent_resolution_reason": lineage.reason,
        CONVERSATION_FIELD: conversation,
    } | ({OPENING_FIELD: list(lineage.opening)} if lineage.opening else {})


def compute_token_digest(ids: list[int]) -> str:
    """Return the digest of token *ids*, as NeMo Gym computes it to compare a prompt with the call before."""
    encoded = pack(f">BQ{len(ids)}Q", DIGEST_VERSION, len(ids), *ids) if ids else b""
    return sha256(DIGEST_DOMAIN + encoded).hexdigest()


def _build_key(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _append(path: Path, line: bytes) -> os.stat_result:
    """Append *line* to the file and wait until the disk has it; return the file's status."""
    with path.open("ab") as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno())


def _parse_entry(line: bytes, path: Path) -> Item:
    """Return the entry in *line* of the file; raises `Failed` if it is damaged."""
    try:
        entry: Item = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        message = f"{path} has a line that is not JSON ({error}); delete the files of the rollout, and play it again"
        raise Failed(message, kind="token_capture_failed") from error
    return entry


def _read_entry(file: BinaryIO, offset: int) -> Item:
    file.seek(offset)
    entry: Item = orjson.loads(file.readline())
    return entry
