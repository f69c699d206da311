"""Fixtures for the tests of a launched vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .fakes import SOURCE, FakeVllm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    """A fake `vllm` program in the folder of `sys.executable`."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    (bin_folder / "vllm").write_text(SOURCE)
    (bin_folder / "vllm").chmod(0o755)
    (bin_folder / "python").symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(bin_folder / "python"))
    monkeypatch.setenv("FAKE_VLLM", str(tmp_path))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    vllm = FakeVllm(tmp_path)
    vllm.set_startup_code("")
    return vllm
