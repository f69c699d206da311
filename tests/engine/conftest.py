"""What the tests of a launched vLLM share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .fakes import SOURCE, Fake


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """A `vllm` beside the Python that runs."""
    beside = tmp_path / "bin"
    beside.mkdir()
    (beside / "vllm").write_text(SOURCE)
    (beside / "vllm").chmod(0o755)
    (beside / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("FAKE_VLLM", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    made = Fake(tmp_path)
    made.first("")
    return made
