"""Fails packaging.metadata: it declares neither its dependency on gymsdk nor its Python version."""

from checks.bases.sums import *
