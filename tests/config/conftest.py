"""Fixtures for the tests of the configuration: a working folder, and files in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from gymsdk import config
from gymsdk.config.model import Deployment
from gymsdk.errors import BadConfig

Write: TypeAlias = Callable[..., Path]
ReadErrors: TypeAlias = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of the test, with no gymsdk variable set."""
    for variable in ("BASE_URL", "API_KEY", "MODEL", "TOKEN_FILE", "INSECURE"):
        monkeypatch.delenv(f"GYMSDK_{variable}", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Write:
    """Return a function that writes a file into the folder with permissions for its owner only."""

    def write_file(name: str, text: str) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
        return path

    return write_file


@pytest.fixture
def read_errors(write: Write) -> ReadErrors:
    """Return a function that gives the error messages of an invalid configuration."""

    def read(text: str, *overrides: str, name: str = "a.yaml") -> list[str]:
        write(name, text)
        with pytest.raises(BadConfig) as caught:
            config.load_config([name], overrides)
        return str(caught.value).splitlines()

    return read


def list_settings(deployment: Deployment) -> dict[str, tuple[object, str]]:
    """Return every shown setting by its dotted name, with its value and its place."""
    return {".".join(setting.path): (setting.value, str(setting.place)) for setting in deployment.settings}
