"""A server that speaks as much of S3's protocol as tensorstore asks for; objects are in memory."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

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
