"""The conformance kit: what is wrong with an environment, found before a training run finds it."""
