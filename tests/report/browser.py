"""A headless Chromium, over the pipe of its DevTools protocol: pages as a reader has them."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0
OPTIONS = [
    "--headless",
    "--no-sandbox",  # which root has not
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--no-default-browser-check",
    "--remote-debugging-pipe",
]


def chromium() -> str | None:
    """Where there is one; None if nowhere."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@contextlib.contextmanager
def opened(program: str) -> Iterator[Browser]:
    """A browser with a profile of its own, which is gone afterwards."""
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for pipe in (os.pipe(), os.pipe()) for end in pipe]
    reads, told, hears, writes = ends

    def at_three_and_four() -> None:  # where Chromium expects them
        os.dup2(reads, 3)
        os.dup2(writes, 4)

    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=at_three_and_four,
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        try:
            yield Browser(told, hears)
        finally:
            process.kill()
            process.wait(DEADLINE_S)
            os.close(told)
            os.close(hears)


class Browser:
    """One page of a browser.

    Args:
        told: descriptor of the pipe that it is told on.
        hears: of the one that it answers on.

    Attributes:
        asked_for: URLs that the page has asked for, by the protocol's own word.
    """

    def __init__(self, told: int, hears: int) -> None:
        self._told, self._hears = told, hears
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self._seen: set[str] = set()
        self.asked_for: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Network", "Runtime"):
            self._call(f"{domain}.enable")

    def open(self, path: Path, width: int, scheme: str) -> None:
        """Load a file at a width, for a reader who prefers ``light`` or ``dark``."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        self._call("Emulation.setScrollbarsHidden", hidden=True)  # which take a part of the width
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=media)
        self.asked_for.clear()
        self._seen.discard("Page.loadEventFired")
        self._call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + DEADLINE_S
        while "Page.loadEventFired" not in self._seen:
            self._message(deadline)

    def value(self, script: str) -> Any:
        """What an expression of JavaScript comes to on the page."""
        found = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def picture(self, target: Path) -> None:
        """Write the whole page as PNG."""
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        target.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._told, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select(
                [self._hears], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready, f"the browser has said nothing for {DEADLINE_S:g} s"
            found = os.read(self._hears, 1 << 20)
            assert found, "the browser has ended"
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(line)
        self._seen.add(message.get("method", ""))
        if message.get("method") == "Network.requestWillBeSent":
            self.asked_for.append(message["params"]["request"]["url"])
        return dict(message)
