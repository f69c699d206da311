"""Nodes: many processes and one head: who is where, and how an episode finds its way."""
