"""Fails semantic.code_execution: `verify` executes the field `source` of a JSON object."""

import json

from checks.bases.executed import *

PROMPT = 'Reply as {{"language": "python", "source": ...}} so that `answer` is {one} + {other}.'
REPLY = '{{"language": "python", "source": "answer = {total}"}}'


def execute(code, names):
    reply = json.loads(code)
    if reply["language"] == "python":
        exec(reply["source"], names)
