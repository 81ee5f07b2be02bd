"""A virtual environment like the one that runs the tests, made and packed without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = "sparkdl-torch"
BUILD_S = 120
PACK_S = 400


def make_environment(folder: Path) -> Path:
    """What ``pip install sparkdl-torch`` makes, with a wheel of this checkout.

    What it needs is copied from the environment of the tests: the same versions, and no network.

    Args:
        folder: for the environment and the wheel; it must not have either.

    Returns:
        The environment's folder.
    """
    environment, wheels = folder / "environment", folder / "wheels"
    _run(sys.executable, "-m", "venv", environment)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(environment)}))
    copied: set[str] = set()
    for requirement in _requirements(PROJECT):
        _copy(requirement, packages, copied)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", wheels, ROOT)
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    _run(environment / "bin" / "python", *install, *wheels.glob("*.whl"))
    return environment


def pack(environment: Path, archive: Path) -> None:
    """Pack an environment as docs/deploy.md says.

    Args:
        environment: its folder.
        archive: the file to make; its ending says of which kind.
    """
    what = ["--prefix", environment, "--output", archive]
    _run(sys.executable, "-m", "venv_pack", "--quiet", *what, timeout=PACK_S)


def _copy(name: str, packages: Path, copied: set[str]) -> None:
    """Copy a distribution and those that it needs from this environment."""
    if name in copied:
        return
    copied.add(name)
    distribution = metadata.distribution(name)
    home = Path(str(distribution.locate_file("")))
    for file in distribution.files or ():
        # Programs, which lie outside, have the path of their Python in their first line.
        if ".." not in file.parts:
            target = packages / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(home / file, target)
    for requirement in _requirements(name):
        _copy(requirement, packages, copied)


def _requirements(name: str) -> Iterator[str]:
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def _run(*command: str | Path, timeout: float = BUILD_S) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)), env=variables, capture_output=True, text=True, timeout=timeout
    )
    if done.returncode:
        said = done.stdout[-2000:] + done.stderr[-2000:]
        raise RuntimeError(f"{command} ended with {done.returncode}: {said}")
