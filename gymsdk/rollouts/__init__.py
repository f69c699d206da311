"""Runs: play many episodes, write the rollouts to a folder, and summarize, profile and verify them again."""
