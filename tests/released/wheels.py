"""NeMo Gym as it was released: wheels from the package index, unpacked like a checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

VERSIONS = ("0.4.0", "0.7.0")


def checkout(version: str, folder: Path) -> Path:
    """Download the wheel of *version* into *folder*, unpack it there, and return the root of what it holds."""
    words = ["download", "--no-deps", "--ignore-requires-python", "--dest", str(folder), f"nemo-gym=={version}"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    root = folder / "checkout"
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(root)
    return root
