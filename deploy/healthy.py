#!/usr/bin/env python3
"""Whether the servers at some ports of this machine can be used: exit code 0, or 1 and why not.

usage: healthy PORT...

Carries the token in the file that GYMSDK_TOKEN_FILE names. Needs nothing but Python.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path


def main(ports: list[str]) -> int:
    """Ask each of *ports*, and give the exit code."""
    if not ports:
        sys.stderr.write("usage: healthy PORT...\n")
        return 2
    for port in ports:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/readyz", headers=headers())
        try:
            with urllib.request.urlopen(request, timeout=3):  # noqa: S310  # of http
                pass
        except OSError as error:
            sys.stderr.write(f"port {port}: {error}\n")
            return 1
    return 0


def headers() -> dict[str, str]:
    """Give what the request carries."""
    file = os.environ.get("GYMSDK_TOKEN_FILE")
    return {"Authorization": f"Bearer {Path(file).read_text().strip()}"} if file else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
