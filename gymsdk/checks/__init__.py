"""The conformance kit: find what is wrong with an environment before a training run does."""
