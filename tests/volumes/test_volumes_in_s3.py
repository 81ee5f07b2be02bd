"""Volumes in an object store, of which a server in memory speaks as much of S3 as is asked for."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import numpy as np
import pytest
import tensorstore
from test_transform_volume import CHUNK, SIZES, expected, image, model_of
from volume_case import Edges

from sparkdl.durable import lease
from sparkdl.errors import ConfigError, DataError, InUseError
from sparkdl.volumes.records import alone

_BUCKET = "/bucket/"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]

    def do_PUT(self) -> None:
        octets = self.rfile.read(int(self.headers["Content-Length"]))
        self.objects[self._key()] = octets
        self._answer(200, b"", octets)

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            prefix = query.get("prefix", [""])[0]
            found = [key for key in sorted(self.objects) if key.startswith(prefix)]
            listed = "".join(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size></Contents>"
                for key in found
            )
            text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{listed}</ListBucketResult>"
            self._answer(200, text.encode())
        elif self._key() in self.objects:
            octets = self.objects[self._key()]
            self._answer(200, octets, octets)
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self.objects.pop(self._key(), None)
        self._answer(204, b"")

    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).removeprefix(_BUCKET)

    def _answer(self, status: int, body: bytes, of: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.md5(of).hexdigest()}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def object_store() -> Iterator[tuple[str, dict[str, bytes]]]:
    """An empty bucket named ``bucket``: its endpoint, and its objects by key."""
    objects: dict[str, bytes] = {}
    handler = type("Handler", (_Handler,), {"objects": objects})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", objects
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.nightly
@pytest.mark.usefixtures("spark")
def test_a_volume_in_s3_at_an_endpoint_is_predicted_and_what_is_done_is_not_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with object_store() as (endpoint, objects):

        def place(path: str) -> dict[str, Any]:
            store = {"driver": "s3", "bucket": "bucket", "path": path, "endpoint": endpoint}
            store |= {"aws_region": "us-east-1", "aws_credentials": {"type": "anonymous"}}
            return {"driver": "zarr3", "kvstore": store}

        source, target, module = place("in.zarr/"), place("out.zarr/"), Edges()
        made = tensorstore.open(source, create=True, dtype="uint8", shape=image().shape)
        made.result().write(image()).result()
        model = model_of(module)
        done = model.transform_volume(source, target, chunk=CHUNK, **SIZES)
        assert done.computed == done.chunks == 6
        wanted = expected(image()[None], module)
        del objects["out.zarr/.sparkdl/chunks/3"]
        again = model.transform_volume(source, target, **SIZES)
        assert (again.computed, again.chunk) == (1, CHUNK)
        monkeypatch.setattr(lease, "RENEWED_EVERY_S", 0.5)
        with alone(target, "another"), pytest.raises(InUseError, match=r"out\.zarr.*written by"):
            model.transform_volume(source, target, **SIZES)
        assert not [name for name in objects if "in-use" in name]
        found = tensorstore.open(target).result().read().result()
        assert np.abs(found - wanted).max() < 1e-3
        with pytest.raises(ConfigError, match=r"in\.zarr.*transform_volume has not made it"):
            model.transform_volume(source, source, **SIZES)
        with pytest.raises(DataError, match=r"nowhere.*cannot be opened.*does not exist"):
            model.transform_volume(place("nowhere/"), place("other/"), **SIZES)
