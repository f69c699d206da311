"""Fails runtime.prompts: a row has no prompt, and `reset` adds none."""

from checks.bases.sums import *

PROMPT = ""
