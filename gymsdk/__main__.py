"""`python -m gymsdk`: the command line."""

from __future__ import annotations

from gymsdk.cli import main

main()
