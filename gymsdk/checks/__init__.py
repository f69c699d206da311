"""The conformance kit: find defects of an environment before a training run does."""
