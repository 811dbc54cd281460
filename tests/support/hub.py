"""A Hugging Face hub on loopback, with one model: its branch main and tag v2."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

REVISION = "0123456789abcdef0123456789abcdef01234567"
PIECE = 2**16
SECONDS_APART = 0.01


@contextmanager
def hub_with(model: str, folder: Path) -> Iterator[str]:
    """Serves the files of a folder as model `owner/name`, in pieces; yields the hub's address."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}

    class Hub(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            name = path.removeprefix(f"/{model}/resolve/{REVISION}/")
            if path in {f"/api/models/{model}/revision/{name}" for name in ("main", "v2")}:
                self._answer(_json({"id": model, "sha": REVISION, "siblings": []}))
            elif path == f"/api/models/{model}/tree/{REVISION}":
                self._answer(_json([_entry(*file) for file in files.items()]))
            elif name in files:
                oid = sha1(files[name], usedforsecurity=False).hexdigest()
                self._answer(files[name], {"ETag": f'"{oid}"', "X-Repo-Commit": REVISION})
            else:
                self.send_response(404)
                if "/revision/" in path:
                    self.send_header("X-Error-Code", "RevisionNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()

        def _answer(self, content: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(200)
            for header in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(*header)
            self.end_headers()
            if self.command == "HEAD":
                return
            for begin in range(0, len(content), PIECE):
                self.wfile.write(content[begin : begin + PIECE])
                time.sleep(SECONDS_APART)

        def log_message(self, *_args: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _json(content: object) -> bytes:
    return json.dumps(content).encode()


def _entry(name: str, content: bytes) -> dict[str, object]:
    oid = sha1(content, usedforsecurity=False).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": oid}
