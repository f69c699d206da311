"""List the messages of a stored version that the package no longer has.

usage: python tests/stored/messages.py [--write] FOLDER      (in the root of the project; FOLDER holds messages.txt)

A message is a text of at least four words in the code, in one piece, with `{}` for each value. Wording may change; a
change of the structure, on the other hand, should lose no message without a decision. The script prints the messages
that are gone; with --write it stores the messages of today.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MIN_WORDS = 4


def iter_texts(tree: ast.Module) -> Iterator[str]:
    """Yield the texts of a module, without docstrings; an f-string is one text."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            skipped.update(map(id, node.values))
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)  # type: ignore[misc]  # constants of an f-string are texts
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def find_messages(package: Path) -> set[str]:
    """Return the messages in the modules of *package*."""
    texts = {text for path in package.rglob("*.py") for text in iter_texts(ast.parse(path.read_text()))}
    return {
        text
        for text in texts
        if "\n" not in text and sum(word[0].isalpha() for word in text.replace("{}", " ").split()) >= MIN_WORDS
    }


def main() -> int:
    *options, folder = sys.argv[1:]
    path, found = Path(folder) / "messages.txt", find_messages(Path("gymsdk"))
    if options == ["--write"]:
        path.write_text("".join(f"{message}\n" for message in sorted(found)))
        return 0
    gone = [message for message in path.read_text().splitlines() if message not in found]
    sys.stdout.writelines(f"{message}\n" for message in gone)
    return int(bool(gone))


if __name__ == "__main__":
    sys.exit(main())
