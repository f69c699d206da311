"""Fails runtime.side_effects: a child process prints to the standard output of the host."""

import subprocess
import sys

from checks.bases.sums import *


@hookimpl
def reset():
    subprocess.run([sys.executable, "-S", "-c", "print('graded')"], check=True)
    return Reset()
