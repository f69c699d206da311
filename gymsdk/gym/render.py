"""An episode as text for people: who said what, which tools were called, how it ended."""

from __future__ import annotations

from collections.abc import Iterator

from gymsdk.types import Episode, Item, Rollout, extract_text


class Screen:
    """Where episodes are shown one after another, each thing said once, after the *mark* that says whose they are."""

    def __init__(self, mark: str = "") -> None:
        self._mark = mark
        self._episode: Episode | None = None
        self._shown = 0

    def text(self, episode: Episode | None, rollout: Rollout | None = None) -> str:
        """Give *episode* so far as text, and how it ended where its *rollout* is there."""
        return "\n".join(_lines(episode, rollout))

    def show(self, episode: Episode | None, rollout: Rollout | None = None) -> None:
        """Print what is new of *episode*."""
        seen = self._shown if episode is self._episode else 0
        lines = _lines(episode, rollout)
        if lines[seen:]:
            print("\n".join(self._mark + line for line in lines[seen:]), flush=True)  # noqa: T201  # this is what a screen is for
        self._episode, self._shown = episode, len(lines)


def _lines(episode: Episode | None, rollout: Rollout | None) -> list[str]:
    said = [*episode.transcript.opening, *episode.transcript.items] if episode else []
    return [*map(_line, said), *_end(rollout)]


def _line(item: Item) -> str:
    kind = item.get("type", "message")
    if kind == "function_call":
        return f"call: {item.get('name')} {item.get('arguments') or '{}'}"
    if kind == "function_call_output":
        return f"output: {_text(item.get('output'))}"
    if kind == "reasoning":
        return f"reasoning: {_text(item.get('summary') or item.get('content'))}"
    return f"{item.get('role', kind)}: {_text(item.get('content'))}"


def _text(content: str | list[Item] | None) -> str:
    """Give the text of *content*, parts of other kinds named in brackets."""
    if not isinstance(content, list):
        return extract_text(content)
    return "".join(extract_text([part]) if "text" in part else f"[{part.get('type')}]" for part in content)


def _end(rollout: Rollout | None) -> Iterator[str]:
    if rollout is None:
        return
    if rollout.failure:
        yield f"{rollout.outcome} in {rollout.failure.stage}: {rollout.failure.message}"
    else:
        yield f"reward: {rollout.reward:g} (ended: {rollout.ended})"
