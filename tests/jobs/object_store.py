"""A store of objects in memory, called as pyarrow's file systems are, that dies when told to."""

from __future__ import annotations

import io
from typing import Any

from pyarrow import fs


class Killed(BaseException):
    """The process was killed; it does nothing any more, not even clear up."""


class ObjectStore:
    """Objects by name; no directory is renamed, and a rename is a copy and a deletion.

    Args:
        dies_after: changes after which the process is killed; None for never.
    """

    def __init__(self, dies_after: int | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.dies_after = dies_after
        self.changes = 0

    def change(self) -> None:
        """Called before each change."""
        if self.dies_after is not None and self.changes >= self.dies_after:
            raise Killed
        self.changes += 1

    def get_file_info(self, which: Any) -> Any:
        if not isinstance(which, fs.FileSelector):
            return self._info(which)
        inside = {
            name[len(which.base_dir) + 1 :].split("/")[0]
            for name in self.objects
            if name.startswith(f"{which.base_dir}/")
        }
        return [self._info(f"{which.base_dir}/{name}") for name in sorted(inside)]

    def _info(self, path: str) -> fs.FileInfo:
        if path in self.objects:
            return fs.FileInfo(path, fs.FileType.File, size=len(self.objects[path]))
        has_any = any(name.startswith(f"{path}/") for name in self.objects)
        return fs.FileInfo(path, fs.FileType.Directory if has_any else fs.FileType.NotFound)

    def create_dir(self, path: str, *, recursive: bool = True) -> None:
        """There are none."""

    def open_output_stream(self, path: str) -> Any:
        store = self

        class Stream(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    octets = self.getvalue()
                    super().close()
                    store.change()
                    store.objects[path] = octets

            def __exit__(self, *error: Any) -> None:
                super().close() if error[0] else self.close()

        return Stream()

    def open_input_stream(self, path: str) -> Any:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return io.BytesIO(self.objects[path])

    def move(self, source: str, target: str) -> None:
        assert source in self.objects, "directories cannot be renamed"
        assert target not in self.objects
        self.change()
        self.objects[target] = self.objects[source]
        self.delete_file(source)

    def delete_file(self, path: str) -> None:
        self.change()
        del self.objects[path]

    def delete_dir(self, path: str) -> None:
        for name in sorted(name for name in self.objects if name.startswith(f"{path}/")):
            self.delete_file(name)
