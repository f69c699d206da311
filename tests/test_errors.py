"""Errors on their way between processes."""

from __future__ import annotations

import pickle

import pytest

from gymsdk.errors import EpisodeError, Failed, Unscorable, WorkerLost


@pytest.mark.parametrize("kind", [EpisodeError, Failed, Unscorable, WorkerLost])
def test_an_error_of_an_episode_stays_whole_between_processes(kind: type[EpisodeError]) -> None:
    error = kind("busy", kind="model_rate_limited", retryable=True, stage="model", retry_after=2.5)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), vars(again)) == ("busy", vars(error))
    assert vars(error)["retry_after"] == 2.5
