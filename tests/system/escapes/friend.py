"""A web server of this machine that walled programs with a network may reach, at an address of its own.

A bare interpreter runs it, with the address. It prints a JSON object with its port. It answers a request with the
number of bytes that it got, and one for ``/302/<URL>`` with a redirect. It ends when its standard input ends, and then
prints a JSON list of the paths that were asked for.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    """Answers every request."""

    protocol_version = "HTTP/1.1"
    timeout = 10

    def answer(self):
        """Read the body, and answer."""
        asked.append(self.path)
        left = size = int(self.headers.get("content-length", 0))
        while left > 0 and (chunk := self.rfile.read(min(left, 1 << 16))):
            left -= len(chunk)
        _, status, target = (self.path.removeprefix(f"http://{self.headers.get('host')}") + "//").split("/", 2)
        self.send_response(int(status) if status.isdigit() else 200)
        self.send_header("Location", unquote(target.rstrip("/")))
        text = str(size).encode()
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = answer

    def log_message(self, format, *arguments):
        """Write nothing."""


class Server(ThreadingHTTPServer):
    """Takes it calmly when a client goes away."""

    daemon_threads = True
    request_queue_size = 512

    def handle_error(self, request, client_address):
        """Write nothing."""


def main(address):
    """Serve, say where, and wait for the end of the standard input."""
    server = Server((address, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(json.dumps({"port": server.server_port}), flush=True)
    sys.stdin.buffer.read()
    print(json.dumps(asked), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
