from __future__ import annotations

import pytest

from .healthy import HEALTHY

BLOCKING = "runtime.blocking"


async def test_a_healthy_environment_passes(subject, outcome):
    assert (await outcome(BLOCKING, subject(HEALTHY))).status == "passed"


@pytest.mark.slow
async def test_a_tool_that_blocks_the_loop_is_named(subject, outcome):
    source = HEALTHY.replace("    state.books.append", "    time.sleep(0.06)\n    state.books.append")
    result = await outcome(BLOCKING, subject(source.replace("import random", "import random, time"), count=3))
    assert "tool 'put' held the event loop" in result.findings[0].problem


@pytest.mark.slow
async def test_a_synchronous_tool_may_block(subject, outcome):
    source = HEALTHY.replace("async def put", "def put").replace(
        "    state.books.append", "    time.sleep(0.06)\n    state.books.append"
    )
    assert (
        await outcome(BLOCKING, subject(source.replace("import random", "import random, time"), count=3))
    ).status == "passed"
