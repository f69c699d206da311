"""Local workers: warm processes that run offloaded calls, one each, and are replaced when one is lost.

Each worker is a pebble pool of its own: in a shared one, a worker that dies idle breaks the pool, and one that dies
while it holds the channel's lock hangs its neighbours.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import signal
import sys
import threading
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

import cloudpickle
from pebble import ProcessExpired, ProcessPool

from gymsdk import nursery, worker
from gymsdk.errors import BudgetSpent, Failed, WorkerLost
from gymsdk.threads import Permits, Threads, settle
from gymsdk.workers import Work
