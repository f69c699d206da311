"""Format an episode as text for people: messages, tool calls and the outcome."""

from __future__ import annotations

from collections.abc import Iterator

from gymsdk.types import Episode, Item, Rollout, extract_text


class TranscriptPrinter:
    """Prints episodes, each item once; *mark* is put before each line to tell slots apart."""

    def __init__(self, mark: str = "") -> None:
        self._mark = mark
        self._episode: Episode | None = None
        self._shown = 0

    def format(self, episode: Episode | None, rollout: Rollout | None = None) -> str:
        """Return *episode* as text, with its outcome if *rollout* is given."""
        return "\n".join(_format_lines(episode, rollout))

    def print_new(self, episode: Episode | None, rollout: Rollout | None = None) -> None:
        """Print the items of *episode* that are new since the last call."""
        seen = self._shown if episode is self._episode else 0
        lines = _format_lines(episode, rollout)
        if lines[seen:]:
            print("\n".join(self._mark + line for line in lines[seen:]), flush=True)  # noqa: T201  # printing is its purpose
        self._episode, self._shown = episode, len(lines)


def _format_lines(episode: Episode | None, rollout: Rollout | None) -> list[str]:
    said = [*episode.transcript.opening, *episode.transcript.items] if episode else []
    return [*map(_format_item, said), *_format_end(rollout)]


def _format_item(item: Item) -> str:
    kind = item.get("type", "message")
    if kind == "function_call":
        return f"call: {item.get('name')} {item.get('arguments') or '{}'}"
    if kind == "function_call_output":
        return f"output: {_format_content(item.get('output'))}"
    if kind == "reasoning":
        return f"reasoning: {_format_content(item.get('summary') or item.get('content'))}"
    return f"{item.get('role', kind)}: {_format_content(item.get('content'))}"


def _format_content(content: str | list[Item] | None) -> str:
    """Return the text of *content*; other parts appear as their type in brackets."""
    if not isinstance(content, list):
        return extract_text(content)
    return "".join(extract_text([part]) if "text" in part else f"[{part.get('type')}]" for part in content)


def _format_end(rollout: Rollout | None) -> Iterator[str]:
    if rollout is None:
        return
    if rollout.failure:
        yield f"{rollout.outcome} in {rollout.failure.stage}: {rollout.failure.message}"
    else:
        yield f"reward: {rollout.reward:g} (ended: {rollout.ended})"
