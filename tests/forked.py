"""Processes that are forked from one that has imported what ``run_world`` needs.

One that is spawned imports torch again, in several seconds of processor time.
"""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
# As ``run_world`` has it: who starts the first process decides for all.
FORKED.set_forkserver_preload(["sparkdl.testing", "pandas"])
