"""Changes of a healthy environment: each is found by its check with the reason, or is no defect."""

from __future__ import annotations

import pytest

from .healthy import HEALTHY

IMPORTS = ("import random", "import asyncio, random, threading, time")
NAMES = ("State, Task", "State, Step, Task")

STEP = """
@hookimpl
async def step(action, state: Shelf):
    BODY


@hookimpl
async def reset"""
RESET = "\n@hookimpl\nasync def reset"


def change(*replacements: tuple[str, str]) -> str:
    source = HEALTHY
    for old, new in (IMPORTS, NAMES, *replacements):
        assert old in source, old
        source = source.replace(old, new)
    return source


def add_step(body: str) -> tuple[str, str]:
    return RESET, STEP.replace("BODY", body)


APPEND = "    state.books.append"
KINDS = (
    ("    book: str\n\n\nclass Shelf", "    book: str\n    kind: int = 0\n\n\nclass Shelf"),
    ("        yield Order.ask(", "        kind = (kind + 1) % 3\n        yield Order.ask("),
    ("book=title[::-1])", "book=title[::-1], kind=kind)"),
)
SEED, FACES, REPLAY = "runtime.seed_control", "runtime.faces_agree", "semantic.replayability"

FOUND = {
    "a tool that blocks the loop": (
        "runtime.blocking",
        [(APPEND, f"    time.sleep(0.06)\n{APPEND}")],
        "tool 'put' held the event loop",
    ),
    "a split that depends on earlier seeds": (
        SEED,
        [
            ('f"{split}:{seed}"', "f'{split}:{SEEN.add(seed) or len(SEEN)}'"),
            ("class Shelf", "SEEN = set()\n\n\nclass Shelf"),
        ],
        "with seed 0, drawn",
    ),
    "a verdict that depends on the clock": (
        SEED,
        [("reward=float(", "reward=time.perf_counter() * float(")],
        "verify.verdict.reward was",
    ),
    "kinds that alternate from a fixed start": (
        SEED,
        [*KINDS, ("    while title :=", "    kind = -1\n    while title :=")],
        "split 'train': 'kind' is 0 in the first task of every seed",
    ),
    "dependence on call ids": (
        FACES,
        [add_step("if isinstance(action, ToolCall):\n        return Step(output=f'{action.call_id} is there')")],
        "over HTTP",
    ),
    "a state that calls do not rebuild": (
        REPLAY,
        [
            ("state.books.append(book)", "state.books.append(book + ' ' * len(LOG)); LOG.append(1)"),
            ("class Shelf", "LOG = []\n\n\nclass Shelf"),
        ],
        "replayed in a new environment: state.books.0 was",
    ),
}
PASSED = {
    "a synchronous tool that blocks": (
        "runtime.blocking",
        [("async def put", "def put"), (APPEND, f"    time.sleep(0.06)\n{APPEND}")],
    ),
    "kinds that alternate from a random start": (
        SEED,
        [*KINDS, ("    while title :=", "    kind = rng.randrange(3)\n    while title :=")],
    ),
    "step rewards": (
        FACES,
        [
            add_step(
                "if isinstance(action, Message):\n"
                "        return Step(messages=['Go on.'], reward=0.25, done=len(state.books) > 0)"
            )
        ],
    ),
    "failing episodes": (FACES, [(APPEND, f"    if len(book) == 10:\n        raise OSError('full')\n{APPEND}")]),
    "broken episodes": (REPLAY, [("return Reset(state=Shelf())", "raise OSError('no shelf')")]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUND)
async def test_a_defect_is_found_with_its_reason(subject, outcome, case):
    check, replacements, expected = FOUND[case]
    result = await outcome(check, subject(change(*replacements), count=3))
    problems = " ".join(finding.problem for finding in result.findings)
    assert all(text in problems for text in ([expected] if isinstance(expected, str) else expected)), result


@pytest.mark.slow
@pytest.mark.parametrize("case", PASSED)
async def test_what_is_no_defect_passes(subject, outcome, case):
    check, replacements = PASSED[case]
    assert (await outcome(check, subject(change(*replacements), count=3))).status == "passed"


async def test_a_close_that_depends_on_a_step_is_found_for_each_ending(subject, outcome):
    result = await outcome("runtime.close_once", subject(change(("state.books.clear()", "state.books.pop()"))))
    problems = " ".join(finding.problem for finding in result.findings)
    assert all(word in problems for word in ("answered with nothing", "cancelled", "out of time", "IndexError"))


async def test_equal_findings_are_reported_once(subject, outcome):
    source = change(("state.books.clear()", "raise OSError('stuck')"))
    result = await outcome("runtime.close_once", subject(source))
    assert len({finding.problem for finding in result.findings}) == len(result.findings) > 0
