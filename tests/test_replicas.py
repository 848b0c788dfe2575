"""Several replicas behind one address: what is written for nginx and vllm-router, and what a replica costs that is killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stub.harness import ENGINE
from stub.waiting import until

from fenno.engine import http as small
from fenno.engine.server import claim_port
from fenno.errors import RecipeError, UsageError
from fenno.export import make, replicas, service
from fenno.export.make import Asked
from fenno.recipe import Recipe, Workload
from fenno.units import Address

RECIPE = Recipe.model_validate({"name": "a.recipe", "engine": {"model": "org/model"}, "workload": {"timeout": "200s"}})
REPLICAS = (Address("10.0.0.1", 8000), Address("[fd00::1]", 8001))


def program(name: str) -> str | None:
    """On the path, or beside this interpreter."""
    return shutil.which(name) or shutil.which(name, path=Path(sys.executable).parent)


def configured(folder: Path, text: str) -> list[str]:
    """The command of an nginx of its own that reads one file as its `conf.d` would hold it."""
    (folder / "replicas.conf").write_text(text)
    where = {name: folder / name for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")}
    temporary = "".join(f"{name}_temp_path {path};" for name, path in where.items())
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;"
        f"events {{}} http {{ {temporary} access_log off; include {folder}/replicas.conf; }}"
    )
    return [program("nginx") or "", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def test_a_replica_is_behind_it_once_and_none_is_refused() -> None:
    assert [str(each) for each in replicas.addresses(["h", "h:8000", "g"], 8000)] == ["h:8000", "g:8000"]
    with pytest.raises(UsageError, match="no replica is named"):
        make.make(RECIPE, Asked("nginx"), None, "me", print)


def test_the_command_of_vllm_router_is_this_list() -> None:
    listen = Address("[::1]", 8080)
    wanted = [
        *("vllm-router", "--host", "::1", "--port", "8080"),
        *("--worker-urls", "http://10.0.0.1:8000", "http://[fd00::1]:8001", "--policy", "power_of_two"),
        *("--worker-startup-timeout-secs", "600", "--worker-startup-check-interval", "2"),
        *("--health-check-interval-secs", "5", "--cb-timeout-duration-secs", "5"),
    ]
    assert replicas.router(REPLICAS, listen, 600, "power_of_two") == wanted
    text = make.make(RECIPE, Asked("vllm-router", replica=("10.0.0.1", "[fd00::1]:8001"), listen="[::1]:8080"), None, "me", print)
    assert shlex.split(text.replace("\\\n", ""), comments=True) == ["exec", *wanted]


@pytest.mark.parametrize(
    ("workload", "policy"),
    [({}, "power_of_two"), ({"shared_prefix": 0.5}, "cache_aware"), ({"endpoint": "chat", "turns": 3}, "cache_aware")],
)
def test_where_prompts_begin_alike_the_router_goes_by_the_cache(workload: dict[str, Any], policy: str) -> None:
    assert replicas.policy(Workload.model_validate(workload)) == policy


def test_nginx_passes_tokens_on_as_they_come_and_sends_no_request_twice() -> None:
    text = make.make(RECIPE, Asked("nginx", replica=("10.0.0.1", "[fd00::1]:8001"), listen="0.0.0.0:80"), None, "me", print)
    directives = re.findall(r"^ *([a-z_]+ ?[^{}\n]*);", text, re.MULTILINE)
    assert {"proxy_buffering off", "proxy_http_version 1.1", "least_conn", "listen 0.0.0.0:80", "keepalive 64"} < set(directives)
    assert [line for line in directives if line.startswith("server ")] == [
        "server 10.0.0.1:8000 max_fails=1 fail_timeout=5s",
        "server [fd00::1]:8001 max_fails=1 fail_timeout=5s",
    ]
    assert "proxy_read_timeout 200s" in directives, "the recipe's clients wait as long"
    assert "proxy_next_upstream error timeout" in directives, "with non_idempotent a request that ends an engine would end all"


@pytest.mark.parametrize(("env", "seconds"), [({}, 3), ({"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "30"}, 28)])
def test_nginx_closes_an_idle_connection_before_the_engine_does(env: dict[str, str], seconds: int) -> None:
    recipe = RECIPE.model_copy(update={"engine": RECIPE.engine.model_copy(update={"env": env})})
    assert f"keepalive_timeout {seconds}s;" in replicas.nginx(service.of(recipe), REPLICAS, Address("h", 80))


def test_a_keep_alive_that_is_no_number_is_a_mistake_of_the_recipe() -> None:
    recipe = RECIPE.model_copy(update={"engine": RECIPE.engine.model_copy(update={"env": {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "5s"}})})
    with pytest.raises(RecipeError, match="VLLM_HTTP_TIMEOUT_KEEP_ALIVE is '5s'"):
        replicas.nginx(service.of(recipe), REPLICAS, Address("h", 80))


@pytest.mark.skipif(not program("nginx"), reason="no nginx on this host")
def test_nginx_itself_takes_the_file(tmp_path: Path) -> None:
    argv = configured(tmp_path, replicas.nginx(service.of(RECIPE), REPLICAS, Address("127.0.0.1", 8080)))
    done = subprocess.run([*argv, "-t"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@dataclass
class Replica:
    """A stub engine that serves a model of its own name, so that every answer says whose it is."""

    name: str
    port: int
    child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, ENGINE, "serve", "model", "--served-model-name", self.name]
        argv += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.child = subprocess.Popen(argv, stdout=subprocess.DEVNULL, env={**os.environ, "STUB_BASE_MS": "20"})
        until(lambda: answers(self.port))

    def kill(self) -> None:
        if self.child:
            self.child.kill()
            self.child.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(small.Refused):
        small.call(f"http://127.0.0.1:{port}/health", timeout=10)
        return True
    return False


class Stream:
    """One streamed answer, read line by line. `replica`: whose its last event was; `whole`: whether it came to its end."""

    def __init__(self, port: int, tokens: int) -> None:
        self.replica, self.whole = "", False
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        body = json.dumps({"model": "model", "prompt": "x", "max_tokens": tokens, "stream": True})
        self.connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        self.response = self.connection.getresponse()

    def lines(self) -> Iterator[str]:
        with contextlib.suppress(http.client.HTTPException, ConnectionError):
            while self.response.status == 200 and (line := self.response.readline()):
                if line.startswith(b"data: "):
                    yield line[6:].decode().strip()

    def first(self) -> Stream:
        """Read until a token says whose it is."""
        for data in self.lines():
            self.replica = json.loads(data)["model"]
            break
        return self

    def rest(self) -> Stream:
        for data in self.lines():
            self.whole = data == "[DONE]"
        self.connection.close()
        return self


def asked(port: int, count: int, tokens: int) -> list[Stream]:
    """So many streams at the same time, each with its first token."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: Stream(port, tokens).first(), range(count)))


@contextlib.contextmanager
def proxied(name: str, folder: Path, behind: list[Replica]) -> Iterator[int]:
    """What an export says, running; gives its port."""
    port = claim_port(None)
    named = tuple(f"127.0.0.1:{replica.port}" for replica in behind)
    text = make.make(RECIPE, Asked(name, replica=named, listen=f"127.0.0.1:{port}"), None, "me", print)
    argv = configured(folder, text) if name == "nginx" else ["sh", "-c", text]
    path = f"{Path(program(name) or '').parent}:{os.environ['PATH']}"
    with (folder / "proxy.log").open("wb") as log:
        child = subprocess.Popen(argv, stdout=log, stderr=log, env={**os.environ, "PATH": path}, start_new_session=True)
    try:
        until(lambda: answers(port), told=(folder / "proxy.log").read_text)
        yield port
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


@pytest.mark.scenario
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.skipif(not program(name), reason=f"no {name} on this host")) for name in make.PROXIES],
)
def test_a_replica_that_is_killed_under_load_costs_its_own_requests_in_flight_and_no_other(name: str, tmp_path: Path) -> None:
    behind = [Replica(each, claim_port(None)) for each in ("a", "b")]
    with contextlib.ExitStack() as stack:
        for replica in behind:
            stack.callback(replica.kill)
            replica.start()
        port = stack.enter_context(proxied(name, tmp_path, behind))
        streams = asked(port, 24, tokens=400)
        assert {stream.replica for stream in streams} == {"a", "b"}, "both take their share"
        behind[0].kill()
        later = [stream.rest() for stream in asked(port, 24, tokens=2)]
        assert [(stream.replica, stream.whole) for stream in later] == [("b", True)] * 24
        assert [stream.rest().whole for stream in streams] == [stream.replica == "b" for stream in streams]
        behind[0].start()
        until(lambda: {stream.replica for stream in asked(port, 8, tokens=2)} == {"a", "b"}, told=lambda: "it is not asked again")
