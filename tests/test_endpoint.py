"""What an endpoint refuses and how it counts is found out before a run, on servers of several kinds."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fenno.errors import LoadError
from fenno.load import endpoint, job
from fenno.load import plan as plans
from fenno.load.plan import Plan
from fenno.recipe import Workload

Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]


def by_words(text: str) -> int:
    """A tokenizer of words: a letter behind a space is one token, letters in a row are one together."""
    return len(text.split())


def usage(path: str, body: dict[str, Any], count: Callable[[str], int], template: int = 11) -> str:
    content = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    counts = {"prompt_tokens": count(content) + template, "completion_tokens": body["max_tokens"]}
    return f'data: {{"choices": []}}\n\ndata: {json.dumps({"choices": [], "usage": counts})}\n\ndata: [DONE]\n\n'


@contextlib.contextmanager
def serving(answer: Answer) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server on which every path is answered by a function; yields its address and the bodies that it was sent."""
    seen: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            seen.append({"path": self.path, "headers": dict(self.headers), **body})
            status, value = answer(self.path, body)
            data = (value if isinstance(value, str) else json.dumps(value)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def plan(url: str, **change: Any) -> Plan:
    workload = Workload(**change.pop("traffic", {}))
    return Plan(**{"url": url, "model": "m", "workload": workload, "duration": 1.0, "rate": 1.0, "timeout": 5.0, **change})


def fitted(answer: Answer, **change: Any) -> tuple[Plan, list[dict[str, Any]]]:
    with serving(answer) as (url, seen):
        return endpoint.fitted(plan(url, **change)), seen


def plain(path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """A server that is no vLLM: no /tokenize, no lengths, all fields taken."""
    return (200, usage(path, body, by_words)) if path.startswith("/v1/c") else (404, {"detail": "Not Found"})


def refusing(*names: str, status: int = 400) -> Answer:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        bad = next((name for name in names if name in body), None)
        return (status, {"error": {"message": f"Unrecognized request argument supplied: {bad}"}}) if bad else plain(path, body)

    return answer


@pytest.mark.parametrize(
    ("names", "left", "exact"),
    [
        ((), ("ignore_eos", "min_tokens"), True),
        (("min_tokens",), ("ignore_eos",), True),
        (("ignore_eos", "min_tokens"), (), False),
    ],
)
@pytest.mark.parametrize("status", [400, 422])
def test_refused_fields_are_left_out_and_said(names: tuple[str, ...], left: tuple[str, ...], exact: bool, status: int) -> None:
    found, seen = fitted(refusing(*names, status=status))
    assert (found.forced, found.exact) == (left, exact)
    sent = [body for body in seen if body["path"] == "/v1/completions"]
    assert len(sent) == 1 + len(names), "one probe, and one more for each field that was refused"
    assert job.asked(found)["refused"] == list(names)
    flags = job.flags(found, {"prompt_mismatch": None, "mix_p": None})
    assert flags == ([] if exact else ["the server refuses ignore_eos and min_tokens: answers may be shorter than asked for"])


def test_a_probe_is_just_like_the_requests_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FENNO_TEST_KEY", "k")
    change: dict[str, Any] = {"headers": {"X-Team": "a"}, "extra_body": {"top_k": 1}, "api_key_env": "FENNO_TEST_KEY"}
    _, seen = fitted(plain, **change)
    sent = next(body for body in seen if body["path"] == "/v1/completions")
    assert (sent["headers"]["X-Team"], sent["headers"]["Authorization"]) == ("a", "Bearer k")
    assert (sent["top_k"], sent["stream"], sent["min_tokens"]) == (1, True, 2)


@pytest.mark.parametrize(("status", "words"), [(401, "wrong key"), (404, "no such model"), (400, "top_k")])
def test_a_request_that_is_refused_for_another_reason_is_an_error_with_the_servers_words(status: int, words: str) -> None:
    with pytest.raises(LoadError, match=f"the server refuses such a request: .*{status}.*{words}"):
        fitted(lambda path, body: (status, {"error": words}))


@pytest.mark.parametrize("status", [429, 500])
def test_a_server_in_trouble_is_left_to_the_run(status: int) -> None:
    assert fitted(lambda path, body: (status, ""), endpoint="chat")[0].exact


@pytest.mark.parametrize(("joint", "count"), [(" ", by_words), ("", len)])
@pytest.mark.parametrize("tokenize", [True, False])
def test_chat_prompts_are_as_long_as_asked_for_by_the_servers_count(
    joint: str, count: Callable[[str], int], tokenize: bool
) -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize" and tokenize:
            return 200, {"count": count(body["messages"][0]["content"]) + 11, "max_model_len": 4096, "tokens": []}
        return (200, usage(path, body, count)) if path.startswith("/v1/c") else (404, "")

    found, _ = fitted(answer, endpoint="chat")
    assert (found.joint, found.overhead) == (joint, 11)
    for request in (r for r, _ in zip(plans.requests(found), range(20), strict=False)):
        assert count(request.body["messages"][0]["content"]) + 11 == request.prompt_tokens


def test_a_tokenizer_that_counts_letters_unevenly_leaves_the_prompts_as_they_are() -> None:
    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (200, usage(path, body, lambda text: len(text) // 3)) if path.startswith("/v1/c") else (404, "")

    found, _ = fitted(answer, endpoint="chat")
    assert (found.joint, found.overhead) == (" ", 0)


def long_model(most: int) -> Answer:
    return lambda path, body: (
        (200, {"data": [{"id": "other", "max_model_len": 1}, {"id": "m", "max_model_len": most}]})
        if path == "/v1/models"
        else plain(path, body)
    )


def test_requests_that_the_server_cannot_hold_are_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="class long may need 960 tokens, and the server's max-model-len is 900"):
        fitted(long_model(900))
    assert fitted(long_model(960))[0]
    with pytest.raises(LoadError, match="class short may need 1536 tokens"):
        fitted(long_model(1024), endpoint="chat", traffic={"turns": 3})
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": i, "input_length": 100 * i, "output_length": 50} for i in range(1, 11)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(LoadError, match="2 of the 10 requests of .* longer than .* 850: the longest has 1050 tokens"):
        fitted(long_model(850), rate=None, traffic={"trace": str(trace)})
