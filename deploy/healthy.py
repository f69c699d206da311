#!/usr/bin/env python3
"""Check that the servers at the given ports of this machine are ready: exit with 0, or with 1 and the cause.

usage: healthy PORT...

The requests send the token in the file that GYMSDK_TOKEN_FILE names. The script needs only the standard library.
"""

from __future__ import annotations

import os
import sys
import urllib.request
from pathlib import Path


def main(ports: list[str]) -> int:
    """Check the server at each of *ports*; return the exit code."""
    if not ports:
        sys.stderr.write("usage: healthy PORT...\n")
        return 2
    for port in ports:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/readyz", headers=headers())
        try:
            with urllib.request.urlopen(request, timeout=3):  # noqa: S310  # the scheme is always http
                pass
        except OSError as error:
            sys.stderr.write(f"port {port}: {error}\n")
            return 1
    return 0


def headers() -> dict[str, str]:
    """Return the request headers, with the token if a token file is configured."""
    file = os.environ.get("GYMSDK_TOKEN_FILE")
    return {"Authorization": f"Bearer {Path(file).read_text().strip()}"} if file else {}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
