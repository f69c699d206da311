"""Tokens: a conversation as text and as the ids a policy sees, turn after turn, exactly."""
