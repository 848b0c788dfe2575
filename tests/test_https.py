"""A server behind TLS with a certificate authority of its own: every question goes to it with that authority."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from stub import tls
from stub.harness import Place

from fenno.engine import metrics, server, watch
from fenno.errors import EngineError
from fenno.load import job, raw
from fenno.recipe import Recipe

ANSWERS = {"/v1/models": b'{"data": [{"id": "safe"}]}', "/metrics": b"vllm:num_requests_running 3.0\n"}


TOKEN = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'


class Secure(BaseHTTPRequestHandler):
    """A server for one team, which wants `top_k` in every question."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(ANSWERS[self.path], "application/json")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer(TOKEN * asked["max_tokens"] + b"data: [DONE]\n\n", "text/event-stream", asked.get("top_k") == 1)

    def answer(self, body: bytes, kind: str, good: bool = True) -> None:
        self.send_response(200 if good and self.headers["X-Team"] == "search" else 403)
        self.send_header("Content-Type", kind)
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


@pytest.mark.scenario
@pytest.mark.timeout(300)  # seven starts of locust, one after the other, on a host that may be busy
def test_a_comparison_of_such_servers_is_given_what_they_want(url: str, authority: Path, tmp_path: Path) -> None:
    wanted = ("--header", "X-Team: search", "--ca-file", authority, "--extra-body", '{"top_k": 1}')
    place, times = Place(tmp_path), ("--rate", 20, "--duration", "1s", "--warmup", "200ms", "--rounds", 3)
    found = place.fenno("compare", url, url, *times, *wanted, "--json")
    assert found.code in (0, 4), found.err  # this host may have been too busy to measure
    blocks = [path.parent for path in place.folder.rglob("asked.json")]
    assert len(blocks) >= 6
    for block in blocks:
        assert {r.outcome for r in raw.records(block)} <= {"ok", "cancelled"}
        assert any(r.counted for r in raw.records(block))
    refused = place.fenno("compare", url, url, *times, *wanted[:4])
    assert refused.code == 5 and "403" in refused.err
