"""Tokens: render conversations as text and token ids, and parse the text that a policy generates."""
