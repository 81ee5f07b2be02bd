"""What blocks beside a service costs neither the other jobs nor the end of the process."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest
from every_row import every
from subprocesses import printed_by
from toys import sparkdl_threads

from sparkdl.transport.daemon_pool import DaemonPool

WAIT_S = 20.0

HANGING = """
import threading
from sparkdl.transport.service import Service
started = threading.Event()
def hang():
    started.set()
    threading.Event().wait()
with Service("127.0.0.1") as service:
    service.elsewhere(hang, lambda done: None)
    assert started.wait(20)
print("ended")
"""
FINISHING = """
import threading, time
from sparkdl.transport import daemon_pool
from sparkdl.transport.daemon_pool import DaemonPool
daemon_pool.EXIT_S = 60.0
started = threading.Event()
def finish():
    started.set()
    time.sleep(0.3)
    print("finished", flush=True)
pool = DaemonPool(1, "sparkdl-test")
pool.submit(finish)
assert started.wait(20)
"""


@pytest.mark.gate
def test_a_job_that_hangs_does_not_keep_the_process_from_ending() -> None:
    assert printed_by("-c", HANGING, timeout=60) == "ended\n"


def test_a_job_that_is_about_to_end_may_do_so_before_the_process() -> None:
    assert printed_by("-c", FINISHING, timeout=60) == "finished\n"


def test_a_job_that_hangs_keeps_no_other_waiting_while_there_are_threads() -> None:
    pool, release = DaemonPool(2, "sparkdl-test"), threading.Event()
    hanging = pool.submit(lambda: release.wait(WAIT_S))
    assert [pool.submit(lambda each=each: each).result(WAIT_S) for each in range(9)] == [*range(9)]
    release.set()
    assert hanging.result(WAIT_S)
    pool.close()


def test_it_has_no_more_threads_than_it_may_and_none_once_closed() -> None:
    pool, together = DaemonPool(3, "sparkdl-three"), threading.Barrier(3)
    jobs = [pool.submit(lambda: together.wait(WAIT_S)) for _ in range(9)]
    assert {job.result(WAIT_S) for job in jobs} == {0, 1, 2}
    threads = [each for each in sparkdl_threads() if each.name.startswith("sparkdl-three")]
    assert len(threads) == 3
    pool.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@every("cancels", [False, True])
def test_what_was_not_begun_is_still_done_after_the_close_unless_cancelled(cancels: bool) -> None:
    pool, release = DaemonPool(1, "sparkdl-test"), threading.Event()
    begun = threading.Event()

    def hang() -> None:
        begun.set()
        release.wait(WAIT_S)

    hanging = pool.submit(hang)
    waiting = pool.submit(lambda: "done")
    assert begun.wait(WAIT_S)
    pool.close(cancel=cancels)
    release.set()
    hanging.result(WAIT_S)
    if cancels:
        with pytest.raises(CancelledError):
            waiting.result(WAIT_S)
    else:
        assert waiting.result(WAIT_S) == "done"
