"""Fails packaging.files: its word list is in the folder but not in the installed files."""

from checks.bases.sums import *
