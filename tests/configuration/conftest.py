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
Complaints: TypeAlias = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is read in; nothing of the environment is set."""
    for variable in ("BASE_URL", "API_KEY", "MODEL", "TOKEN_FILE", "INSECURE"):
        monkeypatch.delenv(f"GYMSDK_{variable}", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(folder: Path) -> Write:
    """Write a file into the folder; nobody else may read it."""

    def to(name: str, text: str) -> Path:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
        return path

    return to


@pytest.fixture
def complaints(write: Write) -> Complaints:
    """Give the lines that are told of a configuration which is wrong."""

    def of(text: str, *overrides: str, name: str = "a.yaml") -> list[str]:
        write(name, text)
        with pytest.raises(BadConfig) as caught:
            config.load_config([name], overrides)
        return str(caught.value).splitlines()

    return of


def shown(deployment: Deployment) -> dict[str, tuple[object, str]]:
    """Give every setting that is shown, by its dotted name, and its place."""
    return {".".join(each.path): (each.value, str(each.place)) for each in deployment.settings}
