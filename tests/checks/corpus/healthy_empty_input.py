"""Fails nothing: rows have no prompt, `reset` writes it."""

from checks.bases.unprompted import *
