"""Check the answers to the prompts before the template writes a file. `gymsdk new` makes the same check."""

import json
import re
import sys

NAME = r"(?!(?i:gym-env-))(?!.*-v[0-9]+\Z)[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?"

# Encode each answer as JSON twice, so that every input results in valid Python code.
name = json.loads({{cookiecutter.name | jsonify | jsonify}})
author = json.loads({{cookiecutter.author | jsonify | jsonify}})

if not re.fullmatch(NAME, name):
    sys.exit(
        f"Error: {name!r} is not a valid environment name; use 1 to 64 letters, digits, `-`, `_` and `.`, with a"
        " letter or digit at both ends, without the prefix `gym-env-` and without a version suffix such as `-v2`"
    )
if not author.strip() or not author.isprintable():
    sys.exit("Error: the author must be one line of text; write a name such as 'Ada Lovelace'")
