"""Errors that pass between processes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from gymsdk.errors import EpisodeError, Failed, Unscorable, WorkerLost, describe_exception, list_setting_errors


@pytest.mark.parametrize("kind", [EpisodeError, Failed, Unscorable, WorkerLost])
def test_an_episode_error_is_unchanged_between_processes(kind: type[EpisodeError]) -> None:
    error = kind("busy", kind="model_rate_limited", retryable=True, stage="model", retry_after=2.5)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), vars(again)) == ("busy", vars(error))
    assert vars(error)["retry_after"] == 2.5


def test_an_error_in_code_without_a_file_is_described_inside_a_package_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ZeroDivisionError) as error:
        exec("1 / 0", {})
    assert describe_exception(error.value).startswith("ZeroDivisionError: division by zero (")


@pytest.mark.parametrize("value", [457, 1.1, False])
def test_a_number_in_place_of_a_text_asks_for_quotes(value: object) -> None:
    class Settings(BaseModel):
        name: str

    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"name": value})
    [(location, message)] = list_setting_errors(caught.value)
    assert location == ("name",)
    assert message.endswith("; if the text itself is meant, put it in quotes")
