"""The `gymsdk` field of requests, which gymsdk's own clients send, and of the answers of servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, get_args

from gymsdk.episode_record import EpisodeRecord
from gymsdk.line import HOST, describe_writer, get_object, parse_record
from gymsdk.types import EndReason, Item, Row


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request says about the episode of its row.

    Attributes:
        seed: The seed of the episode; by default the row determines it.
        repeat: Which repeat of the task this is, from 0.
        ended: Why the episode of the response ended.
        budget: The limits of the episode, the fields of `Budget`; a server checks them.
        echo: Whether the answer of `/verify` contains the row and the response, which can be megabytes with token ids.
    """

    seed: int | None = None
    repeat: int | None = None
    ended: EndReason | None = None
    budget: Any = None
    echo: bool = True

    @classmethod
    def parse(cls, body: Row) -> Self | None:
        """Return the options of a request, `None` if it has none; values of a wrong type count as absent."""
        given = body.get(HOST)
        if not isinstance(given, dict):
            return None
        return cls(
            seed=_get_integer(given.get("seed")),
            repeat=_get_integer(given.get("repeat")),
            ended=next((reason for reason in get_args(EndReason) if reason == given.get("ended")), None),
            budget=given.get("budget"),
            echo=given.get("echo") is not False,
        )

    def to_field(self) -> Row:
        """Return the field for the body of a request."""
        names = ("seed", "repeat", "ended", "budget")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {HOST: given | ({} if self.echo else {"echo": False})}


@dataclass(frozen=True, slots=True)
class OpenedEpisode:
    """What `/seed_session` answers to gymsdk's own clients.

    Attributes:
        opening: The items that the policy sees before its first turn.
        tools: The schemas of the tools that the episode offers; `None` if the answer has none.
    """

    opening: list[Item]
    tools: list[Item] | None = None

    @classmethod
    def parse(cls, body: Row) -> Self | None:
        """Return the opened episode, `None` for other servers, which may echo the field of the request."""
        given = body.get(HOST)
        if not isinstance(given, dict) or "opening" not in given:
            return None
        return cls(given["opening"], given.get("tools"))


def describe_opened(seed: int, opening: Sequence[Item], tools: Sequence[Item]) -> Row:
    """Return the field for the answer to `/seed_session`."""
    return {HOST: {"seed": seed, "opening": opening, "tools": tools}}


def build_verified_fields(reward: float, components: Row, fields: Row, details: Row, record: EpisodeRecord) -> Row:
    """Return the fields that a server adds to a verified row.

    Args:
        reward: The reward.
        components: The parts of the reward.
        fields: The other fields of the verdict.
        details: What gymsdk says about the episode.
        record: The rewards of the steps, and the calls of judges and user models.
    """
    parts = {"reward_components": components} if components else {}
    host = {
        **describe_writer(),
        **details,
        **record.to_fields(),
        "outcome": "scored",
        "verdict": list(fields),
    }
    return {**fields, "reward": reward, **parts, HOST: host}


def build_record_field(record: EpisodeRecord | None) -> Row:
    """Return the field that a server adds to an answer without a reward: the record of its episode, if it has one."""
    # Without `outcome`: an answer with that key counts as a line of gymsdk, whose `failure_kind` is a field of its row.
    fields = {} if record is None else record.to_fields()
    return {HOST: fields} if fields else {}


def parse_record_field(body: Row) -> EpisodeRecord | None:
    """Return the record of an episode in a server's answer without a reward, `None` if there is none."""
    host = get_object(body, HOST)
    return parse_record(host) if host else None


def _get_integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
