"""A real S3 protocol server on loopback with TLS, in a process of its own, that can be made slow and unreliable.

``python tests/s3.py DIRECTORY`` serves until its standard input ends; the certificate is written to DIRECTORY.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote

KEY, SECRET = "testing", "testing-secret"


class S3Server:
    """The server's process, and what it is told.

    Attributes:
        environment: what finds it: ``AWS_*`` and ``SSL_CERT_FILE``.
    """

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.endpoint = self._process.stdout.readline().strip()
        assert self.endpoint, "the server did not start"
        certificate = str(directory / "ca.pem")
        self._context = ssl.create_default_context(cafile=certificate)
        self.environment = {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CA_BUNDLE": certificate,
            "SSL_CERT_FILE": certificate,
        }

    def set(self, **settings: Any) -> None:
        """Change what :class:`Unreliable` does; what is not named goes back to normal."""
        self._control(settings)

    def requests(self) -> list[dict[str, Any]]:
        """Those since the last call: method, path, range, status, and how many were under way as it came."""
        found: list[dict[str, Any]] = self._control(None)
        return found

    def __enter__(self) -> S3Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def _control(self, settings: Mapping[str, Any] | None) -> Any:
        data = None if settings is None else json.dumps(settings).encode()
        with urllib.request.urlopen(f"{self.endpoint}/_control", data, context=self._context) as answer:
            return json.loads(answer.read())


class Unreliable:
    """Stands before the server: latency, dropped connections, errors, a log; and it serves byte ranges itself, fast.

    Settings: ``latency`` in seconds; ``drop`` and ``unavailable``: how many of the requests to come lose their
    connection, or get a 503; ``truncate``: all byte ranges lie behind the end; ``match``: a regular expression of
    "METHOD /path" that the faults are meant for.
    """

    def __init__(self, app: Callable[..., Iterable[bytes]]) -> None:
        self.app = app
        self.lock = threading.Lock()
        self.settings: dict[str, Any] = {}
        self.log: list[dict[str, Any]] = []
        self.objects: dict[str, bytes] = {}
        self.under_way = 0

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], unquote(environ["PATH_INFO"])
        if path == "/_control":
            return self._control(environ, start_response)
        entry = {
            "method": method,
            "path": path,
            "range": environ.get("HTTP_RANGE"),
            "agent": environ.get("HTTP_USER_AGENT", ""),
            "status": None,
        }
        with self.lock:
            self.under_way += 1
            entry["under_way"] = self.under_way
            self.log.append(entry)
            fault = self._fault(f"{method} {path}")
        try:
            time.sleep(self.settings.get("latency", 0))
            return self._answer(environ, start_response, entry, fault)
        finally:
            with self.lock:
                self.under_way -= 1

    def _answer(
        self, environ: dict[str, Any], start_response: Callable[..., Any], entry: dict[str, Any], fault: str | None
    ) -> Iterable[bytes]:
        method, path = entry["method"], entry["path"]
        if fault == "drop":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            return []
        if fault == "truncate":
            return _answer(start_response, "416 Range Not Satisfiable", _error("InvalidRange"), "application/xml")
        if fault == "unavailable":
            return _answer(start_response, "503 Slow Down", _error("SlowDown"), "application/xml")
        if f"Credential={KEY}/" not in environ.get("HTTP_AUTHORIZATION", ""):
            return _answer(start_response, "403 Forbidden", _error("InvalidAccessKeyId"), "application/xml")
        if method != "GET":
            self.objects.clear()
        elif path in self.objects and (bounds := re.fullmatch(r"bytes=(\d+)-(\d+)", entry["range"] or "")):
            first, last = map(int, bounds.groups())
            whole = self.objects[path]
            if last < len(whole):
                entry["status"] = 206
                place = ("Content-Range", f"bytes {first}-{last}/{len(whole)}")
                return _answer(start_response, "206 Partial Content", whole[first : last + 1], "binary/x", place)
        elif entry["range"] is not None:
            self._keep(path)

        def noting(status: str, *rest: Any) -> Any:
            entry["status"] = int(status.split()[0])
            return start_response(status, *rest)

        return self.app(environ, noting)

    def _keep(self, path: str) -> None:
        from moto.s3.models import s3_backends

        bucket, _, key = path.lstrip("/").partition("/")
        for account in s3_backends.values():
            for backend in account.values():
                if bucket in backend.buckets and key in backend.buckets[bucket].keys:
                    self.objects[path] = backend.buckets[bucket].keys[key].value

    def _fault(self, request: str) -> str | None:
        if re.search(self.settings.get("match", ""), request):
            if self.settings.get("truncate"):
                return "truncate"
            for fault in ("drop", "unavailable"):
                if self.settings.get(fault, 0) > 0:
                    self.settings[fault] -= 1
                    return fault
        return None

    def _control(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        with self.lock:
            answer: Any = None
            if environ["REQUEST_METHOD"] == "POST":
                self.settings = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            else:
                answer, self.log = self.log, []
        return _answer(start_response, "200 OK", json.dumps(answer).encode(), "application/json")


def _answer(
    start_response: Callable[..., Any], status: str, body: bytes, kind: str, *headers: tuple[str, str]
) -> list[bytes]:
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body))), *headers])
    return [body]


def _error(code: str) -> bytes:
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


def serve(directory: Path) -> None:
    """Serve until the standard input ends."""
    import trustme
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"  # connections are kept
        disable_nagle_algorithm = True

        def log(self, *_: object) -> None:
            pass

    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    application = Unreliable(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet, ssl_context=context)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # connections that were dropped on purpose
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"https://127.0.0.1:{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    # moto must take every request for its own, whatever the caller's variables say
    for name in ("AWS_ENDPOINT_URL", "AWS_PROFILE"):
        os.environ.pop(name, None)
    serve(Path(sys.argv[1]))
