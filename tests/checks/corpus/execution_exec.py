"""Fails semantic.code_execution: `verify` executes the reply in this process."""

from checks.bases.executed import *

execute = exec
