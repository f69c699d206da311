from __future__ import annotations

import pytest

from .healthy import HEALTHY

FACES = "runtime.faces_agree"
PAYING = HEALTHY.replace(
    "@hookimpl\nasync def reset",
    """@hookimpl
async def step(action, state: Shelf):
    if isinstance(action, Message):
        return Step(messages=["Go on."], reward=0.25, done=len(state.books) > 0)


@hookimpl
async def reset""",
).replace("State, Task", "State, Step, Task")


@pytest.mark.slow
@pytest.mark.parametrize("source", [HEALTHY, PAYING])
async def test_a_healthy_environment_passes(subject, outcome, source):
    assert (await outcome(FACES, subject(source))).status == "passed"


@pytest.mark.slow
async def test_failing_episodes_agree(subject, outcome):
    source = HEALTHY.replace(
        "    state.books.append", "    if len(book) == 10:\n        raise OSError('full')\n    state.books.append"
    )
    assert (await outcome(FACES, subject(source))).status == "passed"


@pytest.mark.slow
async def test_dependence_on_the_thread_is_found_on_every_interface(subject, outcome):
    source = HEALTHY.replace(
        "Reset(state=Shelf())", "Reset(state=Shelf(), messages=[threading.current_thread().name])"
    ).replace("import random", "import random, threading")
    result = await outcome(FACES, subject(source))
    reported = " ".join(finding.problem for finding in result.findings)
    assert "through Env" in reported
    assert "through VectorEnv" in reported


@pytest.mark.slow
async def test_dependence_on_call_ids_is_found_over_http(subject, outcome):
    step = """
@hookimpl
async def step(action):
    if isinstance(action, ToolCall):
        return Step(output=f"{action.call_id} is put on the shelf")


@hookimpl
async def reset"""
    source = HEALTHY.replace("\n@hookimpl\nasync def reset", step).replace("State, Task", "State, Step, Task")
    result = await outcome(FACES, subject(source))
    assert "over HTTP" in " ".join(finding.problem for finding in result.findings)
