"""Watching: how servers are: their health, their figures, their logs."""
