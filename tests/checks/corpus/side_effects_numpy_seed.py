"""Fails runtime.side_effects: `reset` seeds the global generator of numpy."""

import numpy as np
from checks.bases.sums import *


@hookimpl
async def reset(seed):
    np.random.seed(seed)  # noqa: NPY002  # the defect
    return Reset()
