"""A healthy environment: a shelf that a policy puts books on, with state, tools and a verdict."""

from __future__ import annotations

from pathlib import Path

BASES = Path(__file__).parent / "bases"

HEALTHY = (BASES / "shelf.py").read_text()
