"""The page's files over HTTP without an engine: for what needs none, and for answers that no working one gives."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import forerun

PAGE = Path(forerun.__file__).parent / "serve" / "page"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'"

Answer = tuple[int, list[dict[str, Any]]]
"""A status and the events of a stream; one with an error's status is sent as plain JSON."""
Script = Callable[[dict[str, Any], str | None], Answer]
"""What is answered to a request's body and its key."""


@contextmanager
def page_files(script: Script | None = None, info: dict[str, Any] | None = None) -> Iterator[str]:
    """The address of a server for the page's files; completions are answered by the script, or not at all."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/page/info" and info is not None:
                self.reply(200, json.dumps(info).encode(), "application/json")
                return
            name = "index.html" if self.path == "/" else self.path.removeprefix("/page/")
            file = PAGE / name
            if file.parent == PAGE and file.is_file():
                self.reply(200, file.read_bytes(), TYPES[file.suffix])
            else:
                self.reply(404, b"{}", "application/json")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if script is None:
                self.reply(404, b"{}", "application/json")
                return
            status, events = script(body, (self.headers["authorization"] or "").removeprefix("Bearer ") or None)
            if status != 200:
                self.reply(status, json.dumps(events[0]).encode(), "application/json")
                return
            lines = [json.dumps(event) if event else "[DONE]" for event in events]
            self.reply(200, "".join(f"data: {line}\n\n" for line in lines).encode(), "text/event-stream")

        def reply(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.send_header("content-security-policy", POLICY)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Tests have their own output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
