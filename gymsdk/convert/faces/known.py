"""The faces there are, by their paths."""

from __future__ import annotations

from . import chat, messages, responses
from .face import Face

FACES: dict[str, Face] = {face.path: face for face in (responses.FACE, chat.FACE, messages.FACE)}
