from __future__ import annotations

from .healthy import HEALTHY

REPLAY = "semantic.replayability"


async def test_a_healthy_environment_passes(subject, outcome):
    assert (await outcome(REPLAY, subject(HEALTHY))).status == "passed"


async def test_a_state_that_calls_do_not_rebuild_is_found(subject, outcome):
    source = HEALTHY.replace("state.books.append(book)", "state.books.append(book + ' ' * len(LOG)); LOG.append(1)")
    result = await outcome(REPLAY, subject(source.replace("class Shelf", "LOG = []\n\n\nclass Shelf")))
    assert "replayed in a new environment: state.books.0 was" in result.findings[0].problem


async def test_broken_episodes_are_not_replayed(subject, outcome):
    source = HEALTHY.replace("return Reset(state=Shelf())", "raise OSError('no shelf')")
    assert (await outcome(REPLAY, subject(source))).status == "passed"
