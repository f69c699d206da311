"""Words: what stands behind one of NeMo Gym's commands, and what each of them does with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from gymsdk.errors import GymsdkError, UsageError


def carried_out(command: Callable[[Sequence[str]], None], *, usage: str) -> None:
    """Run *command* with this process's words: exit code 2 for wrong ones, 1 for what failed while running."""
    words = sys.argv[1:]
    if {"-h", "--help"} & set(words):
        sys.stdout.write(f"{usage}\n")
        return
    try:
        command(words)
    except GymsdkError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2 if isinstance(error, UsageError) else 1)


def handed_on(command: str, words: Sequence[str]) -> None:
    """Run gymsdk's own *command* with *words*."""
    from gymsdk.cli import main

    # Servers in processes of their own are started with the words of this one.
    sys.argv[:] = ["gymsdk", command, *words]
    main()
