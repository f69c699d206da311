"""Tell the user if the token limit of a reply ends nearly all episodes, which then cannot succeed."""

from __future__ import annotations

from dataclasses import dataclass, field

from gymsdk.line import StoredRollout, get_object
from gymsdk.responses import NO_USAGE
from gymsdk.types import Item, Rollout

MIN_EPISODES = 16
"""How many episodes are needed for a conclusion."""

MIN_SHARE = 0.9
"""The share of the episodes from which the limit is reported."""

MAX_NORMAL_SHARE = 0.5
"""The share of the episodes up to which a batch counts as normal again."""

MAX_SHOWN = 2
"""How many different limits the sentence names."""

SERVER_LIMIT = "the model server's own limit"
"""The description of a limit that the requests do not set."""


def is_prompt_too_long(response: Item | None) -> bool:
    """Return whether a prompt did not fit into the model's context; only then does the server add a message."""
    details = (response or {}).get("incomplete_details")
    return isinstance(details, dict) and bool(details.get("message"))


@dataclass(slots=True)
class TokenLimitCounter:
    """Counts the episodes whose last reply ended at the token limit.

    Attributes:
        setting: The setting with which the user raises the limit.
        episodes: The number of episodes.
        cut: How many of them ended with a reply at the limit.
        replies: The number of replies.
        tokens: The number of tokens of all replies.
        limits: The limits of the replies; `None` stands for the model server's own limit.
    """

    setting: str
    episodes: int = 0
    cut: int = 0
    replies: int = 0
    tokens: int = 0
    limits: set[int | None] = field(default_factory=set)

    def add(self, *, is_cut: bool, replies: int, tokens: int, limit: int | None) -> None:
        """Count an episode.

        Args:
            is_cut: Whether its last reply ended at the limit.
            replies: The number of its replies.
            tokens: The number of tokens of these replies.
            limit: The limit of a reply, if the requests set one.
        """
        self.episodes += 1
        self.cut += is_cut
        self.replies += replies
        self.tokens += tokens
        self.limits.add(limit)

    def add_rollout(self, rollout: Rollout) -> None:
        """Count a scored rollout; others say why they failed."""
        if rollout.verdict is None:
            return
        self.add(
            is_cut=rollout.ended == "tokens" and not is_prompt_too_long(rollout.response),
            replies=rollout.turns,
            tokens=rollout.usage.get("policy", NO_USAGE).output_tokens,
            limit=_get_limit(rollout.row["responses_create_params"]),
        )

    def add_stored(self, stored: StoredRollout) -> None:
        """Count a stored rollout with a reward."""
        self.add(
            is_cut=stored.ended == "tokens" and not is_prompt_too_long(stored.response),
            replies=stored.turns,
            tokens=get_object(stored.usage, "policy").get("output_tokens", 0),
            limit=_get_limit(stored.params),
        )

    @property
    def share(self) -> float:
        """The share of the episodes that ended with a reply at the limit."""
        return self.cut / self.episodes if self.episodes else 0.0

    def describe(self) -> str:
        """Return a sentence for the user if nearly all episodes ended at the limit, otherwise an empty string."""
        if self.episodes < MIN_EPISODES or self.share < MIN_SHARE:
            return ""
        limits = sorted(SERVER_LIMIT if tokens is None else f"{tokens} tokens" for tokens in self.limits)
        shown = " or ".join(limits) if len(limits) <= MAX_SHOWN else "that of the row"
        mean = f"; the mean length of a reply is {self.tokens / self.replies:.0f}" if self.tokens else ""
        return (
            f"{self.cut} of {self.episodes} episodes ended because a reply reached its token limit ({shown}{mean});"
            f" raise the limit with {self.setting}"
        )


def _get_limit(params: Item) -> int | None:
    limit = params.get("max_output_tokens")
    return limit if isinstance(limit, int) else None
