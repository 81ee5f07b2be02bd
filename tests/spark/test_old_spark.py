"""A Spark that is too old is one sentence, whatever is imported first."""

from __future__ import annotations

from pathlib import Path

from subprocesses import printed_by

SCRIPT = """
import sparkdl
told = {}
for name in sparkdl.__all__:
    try:
        getattr(sparkdl, name)
    except Exception as error:
        told[name] = f"{type(error).__name__}: {error}"
print(len(told), *set(told.values()), sep="\\n")
print("TorchEstimator" in told, "LAMB" in told)
"""


def test_spark_3_4_is_refused_by_every_name_that_needs_spark(tmp_path: Path) -> None:
    (tmp_path / "pyspark").mkdir()
    (tmp_path / "pyspark" / "__init__.py").write_text("__version__ = '3.4.4'")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    count, *told, which = printed_by("-c", path + SCRIPT).splitlines()
    assert int(count) >= 10
    assert len(told) == 1
    found = f"3.4.4 ({tmp_path}/pyspark): "
    words = f"SetupError: sparkdl needs Spark 3.5 or newer, and this is Spark {found}"
    assert told[0].startswith(words)
    assert which == "True False"
