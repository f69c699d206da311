"""Download released NeMo Gym wheels from the package index and unpack them like a checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

VERSIONS = ("0.4.0", "0.7.0")


def checkout(version: str, folder: Path) -> Path:
    """Download the wheel of *version* into *folder*, unpack it there, and return the root of its files."""
    arguments = ["download", "--no-deps", "--ignore-requires-python", "--dest", str(folder), f"nemo-gym=={version}"]
    completed = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert completed.returncode == 0, completed.stdout + completed.stderr
    root = folder / "checkout"
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root)
    return root
