"""Fails packaging.import: the import seeds the global generator of numpy."""

import numpy as np
from checks.bases.sums import *

np.random.seed(0)  # noqa: NPY002  # the defect
