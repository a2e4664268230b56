"""The fake Hub's server: reads a request, lets a fault strike, finds the route, answers and keeps a log."""

from __future__ import annotations

import base64
import json
import re
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    from fake_hub import FakeHub


@dataclass(frozen=True)
class Call:
    """One request that was answered; ``status`` is 0 if the connection was dropped instead."""

    method: str
    path: str
    query: str
    status: int
    headers: Mapping[str, str]


@dataclass(frozen=True)
class Request:
    """What a route gets: the Hub and the request."""

    hub: FakeHub
    headers: Mapping[str, str]
    query: Mapping[str, list[str]]
    body: bytes

    def json(self) -> Any:
        """The body."""
        return json.loads(self.body)


@dataclass(frozen=True)
class Answer:
    """What a route returns."""

    status: int = 200
    body: Any = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Route = tuple[str, str, Callable[..., Answer]]


def decode(text: str) -> bytes:
    """Base64 as requests carry it."""
    return base64.b64decode(text, validate=True)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: FakeHub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no fault of the server."""
        error = sys.exception()
        if not isinstance(error, OSError):
            self.hub.crashes.append(traceback.format_exc())


class Handler(BaseHTTPRequestHandler):
    """Reads a request, lets a fault strike, finds the route and answers."""

    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the call log is ``FakeHub.log``."""

    def _answer(self) -> None:
        hub = self.server.hub
        body = self._body()
        address = urlsplit(self.path)
        with hub.lock:
            striking = [f for f in hub.faults if f.strikes(self.command, address.path)]  # every one counts
        fault = striking[0] if striking else None
        if fault is not None:
            fault.reached.set()
            if fault.kind == "hold":
                fault.release.wait()
                fault = None
        if fault is not None and fault.kind == "drop":
            return self._drop()
        if fault is not None and fault.kind == "status":
            return self._send(Answer(fault.status, {"error": "injected"}, headers=dict(fault.headers)))
        try:
            with hub.lock:
                answer = self._route(hub, address.path, parse_qs(address.query), body)
        except Exception:
            hub.crashes.append(traceback.format_exc())
            answer = Answer(500, {"error": "the fake Hub broke"})
        if fault is not None:
            return self._drop()
        return self._send(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_CONNECT = do_PATCH = _answer

    def _route(self, hub: FakeHub, path: str, query: dict[str, list[str]], body: bytes) -> Answer:
        from fake_hub_routes import ROUTES

        for method, pattern, function in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and method == self.command.replace("HEAD", "GET"):
                request = Request(hub, self.headers, query, body)
                return function(request, **{name: unquote(text) for name, text in found.groupdict().items()})
        hub.unknown.append(f"{self.command} {self.path}")
        return Answer(404, {"error": "no route"})

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            size = int(self.headers.get("Content-Length") or 0)
            if len(body := self.rfile.read(size)) < size:
                raise ConnectionError("the client has gone")
            return body
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, answer: Answer) -> None:
        self._note(answer.status)
        data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        headers = {"Content-Length": str(len(data)), **answer.headers}
        self.send_response(answer.status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _drop(self) -> None:
        self._note(0)
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def _note(self, status: int) -> None:
        address = urlsplit(self.path)
        call = Call(self.command, address.path, address.query, status, dict(self.headers))
        self.server.hub.log.append(call)
