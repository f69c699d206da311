"""Fails semantic.verifier_determinism (and runtime.seed_control, runtime.episode_isolation, runtime.faces_agree,
runtime.side_effects, semantic.replayability): each verdict contains a new random number.
"""

from checks.bases.sums import *


class Sampled(Verdict):
    shade: float


@hookimpl
def verify(task: Sum, transcript):
    return Sampled(reward=grade(task, transcript).reward, shade=random.random())
