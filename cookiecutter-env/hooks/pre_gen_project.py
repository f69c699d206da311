"""The check of what the template was told, before it writes a file; `gymsdk new` makes the same one."""

import json
import re
import sys

NAME = r"(?!(?i:gym-env-))(?!.*-v[0-9]+\Z)[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?"

# JSON within JSON: whatever was typed, this is a program.
name = json.loads({{cookiecutter.name | jsonify | jsonify}})
author = json.loads({{cookiecutter.author | jsonify | jsonify}})

if not re.fullmatch(NAME, name):
    sys.exit(
        f"Error: {name!r} is not a valid environment name; use 1 to 64 letters, digits, `-`, `_` and `.`, a letter or"
        " digit at both ends, without `gym-env-` before it and without a version such as `-v2` behind it"
    )
if not author.strip() or not author.isprintable():
    sys.exit("Error: the author is one line of text; write a name, as in 'Ada Lovelace'")
