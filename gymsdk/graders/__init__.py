"""Graders: functions that compare a reply with an expected answer, usable without an environment."""
