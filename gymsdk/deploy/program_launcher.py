"""`python -m gymsdk.deploy.program_launcher` becomes a program whose environment variables may hold secrets.

It reads a line of JSON from standard input: `command`, `folder` and `variables`, and runs the command in the folder.
The command line of a process is visible to all users of a machine; standard input is not.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Replace this process by the program."""
    # Read without a buffer, which would be lost.
    line = b""
    while not line.endswith(b"\n") and (part := os.read(sys.stdin.fileno(), 65_536)):
        line += part
    launch = json.loads(line)
    os.chdir(launch["folder"])
    os.environ.update(launch["variables"])
    os.execv(launch["command"][0], launch["command"])  # noqa: S606 - our own command


if __name__ == "__main__":
    main()
