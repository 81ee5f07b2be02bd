"""What threads have freed is there for other threads, and is not kept once for each."""

from __future__ import annotations

import subprocess
import sys

import pytest

THREADS, MEBIBYTES = 6, 40
SCRIPT = f"""
import sys, threading
from pathlib import Path

def resident():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) >> 10

if sys.argv[1] == "shared":
    from sparkdl.process.allocator import share_freed_memory
    share_freed_memory()
turn, done, over = threading.Lock(), threading.Semaphore(0), threading.Event()

def work():
    with turn:  # one after another, so that what one frees is enough for the next
        for _ in range(2):
            held = [bytes([1]) * (1 << 20) for _ in range({MEBIBYTES})]
            del held
    done.release()
    over.wait()

large = bytes([1]) * (31 << 20)
del large  # glibc adapts: it then keeps up to twice as much of what is freed
before = resident()
threads = [threading.Thread(target=work) for _ in range({THREADS})]
for thread in threads:
    thread.start()
for _ in threads:
    done.acquire()
print(resident() - before)
over.set()
"""


def kept_mebibytes(how: str) -> int:
    child = [sys.executable, "-c", SCRIPT, how]
    return int(subprocess.run(child, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux, and glibc")
def test_threads_that_share_freed_memory_keep_it_once() -> None:
    assert kept_mebibytes("shared") < 2 * MEBIBYTES
    assert kept_mebibytes("each") > 3 * MEBIBYTES
