"""A server behind TLS with a certificate authority of its own: every question goes to it with that authority."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from stub import tls

from fenno.engine import metrics, server, watch
from fenno.errors import EngineError
from fenno.load import job
from fenno.recipe import Recipe

ANSWERS = {"/v1/models": b'{"data": [{"id": "safe"}]}', "/metrics": b"vllm:num_requests_running 3.0\n"}


class Secure(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = ANSWERS[self.path]
        self.send_response(200 if self.headers["X-Team"] == "search" else 403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tls.certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def url(authority: Path) -> Iterator[str]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority, authority.with_name("key.pem"))
    with ThreadingHTTPServer(("127.0.0.1", 0), Secure) as http:
        http.socket = context.wrap_socket(http.socket, server_side=True)
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"https://localhost:{http.server_port}"
        http.shutdown()


@pytest.fixture
def trusting(url: str, authority: Path) -> Recipe:
    return job.of_url(url, None, "completions", None).with_engine(ca_file=str(authority))


def test_its_models_and_its_metrics_are_read(trusting: Recipe, tmp_path: Path) -> None:
    team = {"X-Team": "search"}
    with server.serving(trusting, tmp_path, headers=team) as running:
        assert running.model == "safe"
        seen = watch.look(running)
        assert (seen.metrics.running, seen.error) == (3.0, "")
    assert metrics.scrape(running.url, ca_file=trusting.engine.ca_file, headers=team).running == 3.0


def test_without_the_authority_it_is_not_trusted(url: str, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="certificate"), server.serving(job.of_url(url, None, "completions", None), tmp_path):
        pass


def test_the_traffic_has_the_authority_too(trusting: Recipe, authority: Path) -> None:
    assert job.plan(trusting).ca_file == str(authority)


def test_a_server_that_wants_a_header_answers_only_with_it(trusting: Recipe, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="403"), server.serving(trusting, tmp_path):
        pass
