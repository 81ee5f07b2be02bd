"""Make the README's links whole, for a package index shows it without the files beside it.

Everything else is in setup.cfg.
"""

import configparser
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
RELATIVE_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?://|#)([^)]+)\)")


def long_description() -> str:
    """Return the README with links to the files of this version."""
    settings = configparser.ConfigParser()
    settings.read(HERE / "setup.cfg", encoding="utf-8")
    urls = dict(
        line.split(" = ", 1) for line in settings["metadata"]["project_urls"].split("\n") if line
    )
    version = re.search(r'__version__ = "(.+)"', (HERE / "sparkdl/version.py").read_text())[1]

    def whole(link: re.Match) -> str:
        image, text, path = link.groups()
        return f"{image}{text}({urls['Source']}/{'raw' if image else 'blob'}/v{version}/{path})"

    return RELATIVE_LINK.sub(whole, (HERE / "README.md").read_text(encoding="utf-8"))


setup(long_description=long_description())
