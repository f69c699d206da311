"""Fails packaging.import: importing it prints a greeting."""

from checks.bases.sums import *

print("Welcome to the additions!")
