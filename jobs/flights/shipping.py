"""Makes a package that lies beside a job importable on the executors."""

import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession


@contextmanager
def shipped(spark: SparkSession, package: Path) -> Iterator[None]:
    """Send a package's modules to the executors, and keep the archive while they may ask for it.

    Args:
        spark: the session.
        package: folder of the package; modules of subpackages go too.
    """
    with tempfile.TemporaryDirectory(prefix="job-package-") as folder:
        archive = Path(folder) / f"{package.name}.zip"
        with zipfile.ZipFile(archive, "w") as file:
            for module in sorted(package.rglob("*.py")):
                file.write(module, module.relative_to(package.parent))
        spark.sparkContext.addPyFile(str(archive))
        yield
