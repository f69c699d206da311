"""What a bench found of one environment's servers, as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gymsdk.bench.figures import Load, Served


def text(served: Served) -> str:
    """Give what was found: a column for each load, and beneath what went wrong."""
    columns = [dict(_figures(each)) for each in served.loads]
    names = list(dict.fromkeys(name for column in columns for name in column))
    cells = [["at once", *(str(each.at_once) for each in served.loads)]]
    cells += [[name, *(column.get(name, "") for column in columns)] for name in names]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join([*_head(served), *(_line(row, widths) for row in cells), *_told(served.loads), ""])


def _head(served: Served) -> Iterator[str]:
    yield f"{served.environment}: played by {served.model or 'nobody knows whom'}"
    if served.ready is not None:
        yield f"ready in {served.ready:.2f} s ({served.ready_cpu:.2f} s of CPU), with {served.ready_memory:.0f} MB"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(row, widths, strict=True)
    return "  ".join([f"{first[0]:<{first[1]}}", *(f"{cell:>{width}}" for cell, width in rest)]).rstrip()


def _figures(load: Load) -> Iterator[tuple[str, str]]:
    yield "rollouts", f"{load.rollouts:,}"
    yield "rollouts a second", f"{load.rate:,.1f}"
    if load.latency is not None:
        for name, value in load.latency:
            yield f"{name}, ms", f"{value:,.1f}"
    for name, spent in load.cpu.items():
        yield f"CPU of the {name}, ms a rollout", f"{spent:.2f}"
    for name, memory in load.memory.items():
        for when, megabytes in (("before", memory.before), ("halfway", memory.half), ("after", memory.after)):
            yield f"memory of the {name} {when}, MB", f"{megabytes:,.0f}"
    yield "model calls a rollout", f"{load.calls:.2f}"
    for name, number in load.requests.items():
        yield f"requests to {name} a rollout", f"{number:.2f}"
    if load.reward is not None:
        yield "mean reward", f"{load.reward:.3f}"
    if load.wrong is not None:
        yield "rewards unlike the recording's", f"{load.wrong:,}"
    for kind, count in load.failures.items():
        yield f"no reward: {kind}", f"{count:,}"
    yield "left open", f"{load.open:,}"


def _told(loads: Sequence[Load]) -> Iterator[str]:
    yield from dict.fromkeys(f"{kind}: {message}" for load in loads for kind, message in load.messages.items())
    for load in loads:
        if load.wrong and load.expected is not None and load.reward is not None:
            yield (
                f"WRONG REWARDS: at {load.at_once} at once {load.wrong} of {load.rollouts} differ from the recording;"
                f" the mean is {load.reward:.4f} where it should be {load.expected:.4f}"
            )
    if any(load.wrong is None for load in loads):
        yield "whether the rewards are right is not known: --model names the scripted policy they are to be held to"
