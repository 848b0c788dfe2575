"""`fenno serve` as a child process on the stub engine: kept up, interrupted, killed, in the background, ports that others hold."""

import http.server
import json
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from stub.harness import Done, Place, Run, side_by_side
from stub.waiting import until

pytestmark = pytest.mark.scenario
# Seconds, the limit of a hang and no measure: a host may stand still for a minute.
LONG = 120.0
# Whoever waited for as long as requests in flight may take would be a hang.
LATE = {"grace": "10min"}


@dataclass
class Story:
    """What came of a scenario. `asked`: what a stranger was asked."""

    place: Place
    done: Done
    asked: list[str] = field(default_factory=list)
    answered: str = ""
    said: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        (path,) = self.place.folder.glob("cache/fenno/serve/*/engine.log")
        return path.read_text()


def ready(run: Run, times: int = 1) -> str:
    """Wait until it has been ready so many times; returns the URL."""
    run.until(lambda said: said.count("ready after") >= times)
    return run.error.read_text().rpartition("ready after")[2].split()[2].removesuffix("/v1")


def ask(url: str, tokens: int = 2, key: str | None = None) -> str:
    """One request. Raises `OSError` when there is no answer."""
    body = json.dumps({"prompt": "a", "max_tokens": tokens}).encode()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers), timeout=LONG) as answer:
        said: str = answer.read().decode()
    return said


def served(place: Place, chosen: Path, number: signal.Signals) -> Story:
    """Serve until ready, answer one request, get a signal."""
    run = place.start("serve", chosen)
    said = ask(ready(run))
    run.signal(number)
    done = run.finish()
    place.empty()
    return Story(place, done, answered=said)


OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB."
TAKEN = (
    "ValueError: Free memory on device cuda:0 (1.0/79.2 GiB) on startup is less than desired GPU memory utilization "
    "(0.9, 71.3 GiB)."
)


def dies_under_load(place: Place) -> Story:
    """The second request of each life is its end; three deaths are a crash loop."""
    run = place.start("serve", place.recipe(env={"STUB_DIE": 1, "STUB_WORDS": OOM}, serve={"deaths": 3}))
    urls = []
    for times in (1, 2, 3):
        urls.append(ready(run, times))
        with pytest.raises(OSError, match="closed connection|reset"):
            ask(urls[-1])
    return Story(place, run.finish(), said=urls)


def never_gets_memory(place: Place) -> Story:
    chosen = place.recipe(env={"STUB_DIE": "start", "STUB_WORDS": TAKEN}, serve={"deaths": 3})
    done = place.fenno("serve", chosen)
    return Story(place, done, said=[place.fenno("status", "--json").out])


def cannot_heal(place: Place) -> Story:
    words = "vllm serve: error: unrecognized arguments: --max-sequences 64"
    return Story(place, place.fenno("serve", place.recipe(env={"STUB_DIE": "start", "STUB_WORDS": words, "STUB_EXIT": 2})))


def hangs(place: Place) -> Story:
    run = place.start("serve", place.recipe(env={"STUB_FREEZE": 2}, serve={"hang": "2s"}))
    ask(ready(run))
    ready(run, 2)
    run.signal(signal.SIGINT)
    return Story(place, run.finish())


def drains(place: Place) -> Story:
    """200 requests are in flight when it is asked to end; the engine makes no step before it has said so."""
    gate = place.folder / "gate"
    chosen = place.recipe(env={"STUB_GATE": gate}, engine={"flags": {"max-num-seqs": 256}}, serve={"grace": "5min"})
    run = place.start("serve", chosen)
    url = ready(run)
    gate.touch()
    with ThreadPoolExecutor(200) as pool:
        answers = [pool.submit(ask, url, 20) for _ in range(200)]
        until(lambda: in_flight(url) == 200)
        run.signal(signal.SIGTERM)
        run.until(lambda said: "ending: " in said)
        gate.unlink()
        complete = sum(not answer.exception() and answer.result().count("tok") == 20 for answer in answers)
    return Story(place, run.finish(), answered=str(complete))


def impatient(place: Place) -> Story:
    """Asked to end twice: the requests in flight, which are never answered, are given up long before the ten minutes they have."""
    gate = place.folder / "gate"
    run = place.start("serve", place.recipe(env={"STUB_GATE": gate}, serve=LATE))
    url = ready(run)
    gate.touch()
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, url) for _ in range(4)]
        until(lambda: in_flight(url) == 4)
        run.signal(signal.SIGINT)
        run.until(lambda said: "ending: 4 requests in flight" in said)
        time.sleep(0.5)
        run.signal(signal.SIGINT)
        done = run.finish()
        place.empty()
    return Story(place, done, answered=str(sum(not answer.exception() for answer in answers)))


def in_flight(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=LONG) as answer:
        lines = answer.read().decode().splitlines()
    return sum(
        int(float(line.split()[-1])) for line in lines if line.startswith(("vllm:num_requests_running", "vllm:num_requests_w"))
    )


def killed_inside(place: Place) -> Story:
    """The engine is killed, then its guard: both are recovered from, and of a guard nothing is left."""
    run = place.start("serve", place.recipe(env={"STUB_STUBBORN": 1}, serve={"grace": "1s"}))
    url = ready(run)
    said = []
    for times, name in ((2, "engine.py"), (3, "guard.py")):
        (victim,) = [each for each in family(run.popen.pid) if name in command_line(each)[1 if name == "engine.py" else 3 :][:1]]
        before = [each for each in family(run.popen.pid) if each.is_running()]
        victim.kill()
        url = ready(run, times)
        said.append(f"{name}: {[each for each in before if alive(each)]}")
    ask(url)
    run.signal(signal.SIGINT)
    return Story(place, run.finish(), said=said)


def command_line(of: psutil.Process) -> list[str]:
    """The words of a process, paths by their last part; none of one that has just ended."""
    try:
        return [Path(word).name for word in of.cmdline()]
    except psutil.NoSuchProcess:
        return []


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def alive(one: psutil.Process) -> bool:
    try:
        return one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def in_the_background(place: Place) -> Story:
    """Detached, looked at, replaced by another recipe, rolled back, its fenno killed, tidied up."""
    (place.folder / "key").write_text("very-secret\n")
    first = place.fenno("serve", place.recipe(), "--detach", "--name", "prod", "--api-key-file", place.folder / "key")
    url = first.document["url"]
    refused = place.fenno("serve", place.recipe(), "--name", "prod")
    seen = place.fenno("status", "prod")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(url)
    said = [first.out, refused.err, seen.out, seen.err, ask(url, key="very-secret")]
    shown = " ".join(word for pid in place.left() for word in command_line(psutil.Process(pid)))
    written = "".join(path.read_text() for path in (place.folder / "cache" / "fenno" / "serve").rglob("*.*") if path.is_file())
    said.append(f"secret seen: {'very-secret' in shown + written + first.err}")
    said.append(f"stop: {place.fenno('stop').code}, left {place.left()}")
    other = place.recipe(name="other", engine={"flags": {"max-num-seqs": 8}})
    assert place.fenno("serve", other, "--detach", "--name", "prod", "--port", url.rpartition(":")[2]).code == 0
    back = place.fenno("rollback")
    said += [back.out, ask(url, key="very-secret")]
    os.kill(back.document["pid"], signal.SIGKILL)
    place.empty()
    gone = place.fenno("status")
    said += [f"after kill -9: {place.left()}, status {gone.code}, {gone.document['servers'][0]['phase']}"]
    said += [f"stop: {place.fenno('stop', 'prod').code}, status {place.fenno('status').code}"]
    return Story(place, first, said=said)


def fails_in_the_background(place: Place) -> Story:
    return Story(place, place.fenno("serve", place.recipe(env={"STUB_DIE": "start", "STUB_WORDS": OOM}), "--detach"))


def planned_with_a_key(place: Place) -> Story:
    (place.folder / "key").write_text("very-secret\n")
    return Story(place, place.fenno("serve", "--dry-run", place.recipe(engine={"api_key_file": str(place.folder / "key")})))


class Stranger(http.server.ThreadingHTTPServer):
    """Somebody else's server: healthy, and it remembers what it was asked."""

    allow_reuse_address = True

    def __init__(self, port: int = 0) -> None:
        self.asked: list[str] = []
        stranger = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stranger.asked.append(f"{self.command} {self.path}")
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            do_POST = do_GET

            def log_message(self, *_: object) -> None: ...

        super().__init__(("127.0.0.1", port), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()

    def alive(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server_port}/mine", timeout=LONG) as answer:
            return bool(answer.status == 200)


def port_held_before(place: Place) -> Story:
    stranger = Stranger()
    done = place.fenno("serve", place.recipe(), "--port", stranger.server_port)
    asked = list(stranger.asked)
    story = Story(place, done, asked=asked, answered="alive" if stranger.alive() else "")
    stranger.stop()
    return story


def port_taken_meanwhile(place: Place) -> Story:
    """The port was free when fenno looked, and is taken before the engine listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    run = place.start("serve", place.recipe(env={"STUB_HANG": 1}), "--port", port).until(lambda said: "the model's config" in said)
    stranger = Stranger(port)
    done = run.finish()
    story = Story(place, done, asked=list(stranger.asked), answered="alive" if stranger.alive() else "")
    stranger.stop()
    return story


SCENARIOS: dict[str, Callable[[Place], Story]] = {
    "killed": lambda place: served(place, place.recipe(env={"STUB_STUBBORN": 1}, serve=LATE), signal.SIGKILL),
    "interrupted": lambda place: served(place, place.recipe(serve=LATE), signal.SIGINT),
    "closed": lambda place: served(place, place.recipe(), signal.SIGHUP),
    "terminated": lambda place: served(place, place.recipe(engine={"scheduler": "token_aware"}), signal.SIGTERM),
    "background": in_the_background,
    "inside": killed_inside,
    "loop": dies_under_load,
    "hang": hangs,
    "drain": drains,
    "impatient": impatient,
    "memory": never_gets_memory,
    "flag": cannot_heal,
    "behind": fails_in_the_background,
    "key": planned_with_a_key,
    "held": port_held_before,
    "taken": port_taken_meanwhile,
    "planned": lambda place: Story(place, place.fenno("serve", "--dry-run", place.recipe(engine={"scheduler": "token_aware"}))),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Story]]:
    with side_by_side(SCENARIOS, tmp_path_factory.mktemp) as tell:
        yield tell


def test_a_dry_run_prints_the_command_that_would_be_run(told: Callable[[str], Story]) -> None:
    story = told("planned")
    assert (story.done.code, story.place.starts()) == (0, [])
    assert all(word in story.done.out for word in ("PYTHONPATH=", "serve stub-model", "--scheduler-cls", "--shutdown-timeout 60"))


def test_an_interrupted_server_has_said_where_it_was_and_ends_with_130(told: Callable[[str], Story]) -> None:
    story = told("interrupted")
    assert story.done.code == 130, story.done.err
    assert "/v1 serves stub-model; Ctrl-C ends it" in story.done.err and "interrupted" in story.done.err
    assert '" tok tok"' in story.answered
    assert (story.place.left(), "Traceback" in story.done.err) == ([], False)
    assert "Shutting down" in story.log, "asked to end, not killed"


def test_a_terminal_that_closes_ends_the_server_in_order(told: Callable[[str], Story]) -> None:
    story = told("closed")
    assert (story.done.code, story.place.left()) == (130, []), story.done.err
    assert "Shutting down" in story.log
    assert json.loads((story.place.folder / "cache/fenno/serve/stub/state.json").read_text())["phase"] == "stopped"


def test_a_recipe_that_asks_for_the_token_aware_order_is_served_with_it(told: Callable[[str], Story]) -> None:
    story = told("terminated")
    assert (story.done.code, story.place.left()) == (130, [])
    (start,) = story.place.starts()
    assert "--scheduler-cls fenno.vllm_plugin.scheduler.TokenAware" in start
    assert "/plugin/fenno" in story.log.partition("comes from")[2].splitlines()[0]


def test_an_engine_that_refuses_to_end_is_gone_after_fenno_was_killed(told: Callable[[str], Story]) -> None:
    story = told("killed")
    assert (story.done.code, story.place.left()) == (-9, [])


def test_an_engine_that_dies_is_started_again_on_its_port_until_that_is_a_crash_loop(told: Callable[[str], Story]) -> None:
    story = told("loop")
    assert (story.done.code, story.place.left(), len(story.place.starts())) == (5, [], 3), story.done.err
    assert len(set(story.said)) == 1, "one port"
    assert "starting it again in 1 s (oom-serving; death 1 of 3 in a row)" in story.done.err
    assert "fenno: a crash loop: 3 deaths in a row" in story.done.err and "GPU out of memory under load" in story.done.err
    assert "(about " in story.done.err, "the second start has an estimate from the first"
    assert len(list(story.place.folder.glob("cache/fenno/serve/stub/engine.log*"))) == 3


def test_memory_that_others_hold_is_waited_for_and_the_loop_is_told(told: Callable[[str], Story]) -> None:
    story = told("memory")
    assert (story.done.code, story.place.left(), len(story.place.starts())) == (5, [], 3), story.done.err
    assert "a crash loop" in story.done.err and "memory-taken ×3" in story.done.err
    (server,) = json.loads(story.said[0])["servers"]
    assert (server["phase"], [death["cause"] for death in server["deaths"]]) == ("failed", ["memory-taken"] * 3)


def test_a_cause_that_cannot_heal_is_not_tried_again(told: Callable[[str], Story]) -> None:
    story = told("flag")
    assert (story.done.code, len(story.place.starts())) == (5, 1)
    assert "it is not started again: starting it again cannot help" in story.done.err and "--max-sequences" in story.done.err


def test_an_engine_that_answers_nothing_is_ended_and_started_again(told: Callable[[str], Story]) -> None:
    story = told("hang")
    assert (story.done.code, story.place.left()) == (130, []), story.done.err
    assert "the engine hangs: not one token for 2 s" in story.done.err and "starting it again in 1 s (hang;" in story.done.err


def test_no_request_in_flight_is_lost_when_it_is_asked_to_end(told: Callable[[str], Story]) -> None:
    story = told("drain")
    assert (story.answered, story.done.code, story.place.left()) == ("200", 130, []), story.done.err
    assert "ending: 200 requests in flight have 5 min to be answered" in story.done.err


def test_who_asks_twice_does_not_wait(told: Callable[[str], Story]) -> None:
    story = told("impatient")
    assert (story.done.code, story.answered, story.place.left()) == (130, "0", []), story.done.err


def test_what_is_killed_inside_is_started_again_and_nothing_is_left(told: Callable[[str], Story]) -> None:
    story = told("inside")
    assert story.said == ["engine.py: []", "guard.py: []"], story.done.err
    assert (story.done.code, story.place.left()) == (130, [])


def test_a_server_in_the_background_is_looked_at_replaced_rolled_back_and_ended(told: Callable[[str], Story]) -> None:
    first, refused, seen, table, answer, secret, stopped, back, again, gone, tidied = told("background").said
    assert json.loads(first)["name"] == "prod"
    assert "prod is served already by pid" in refused
    (server,) = json.loads(seen)["servers"]
    assert (server["phase"], server["healthy"], server["restarts"], server["detached"]) == ("ready", True, 0, True)
    assert server["memory"] > 2**20 and server["running"] == 0
    assert table.splitlines()[1].split()[:2] == ["prod", "ready"]
    assert "tok tok" in answer and "tok tok" in again, "after the way back the key counts again"
    assert (secret, stopped) == ("secret seen: False", "stop: 0, left []")
    assert json.loads(back)["digest"] == json.loads(first)["digest"]
    assert gone == "after kill -9: [], status 1, gone"
    assert tidied == "stop: 0, status 0"


def test_a_start_that_fails_in_the_background_is_told_in_the_foreground(told: Callable[[str], Story]) -> None:
    story = told("behind")
    assert (story.done.code, story.done.out, story.place.left()) == (5, "", [])
    assert "GPU out of memory" in story.done.err and "it is not started again: it has never been ready" in story.done.err


def test_a_dry_run_shows_no_key(told: Callable[[str], Story]) -> None:
    story = told("key")
    assert 'VLLM_API_KEY="$VLLM_API_KEY"' in story.done.out and "secret" not in story.done.out


def test_a_port_that_somebody_holds_is_refused_and_its_holder_is_not_asked_anything(told: Callable[[str], Story]) -> None:
    story = told("held")
    assert (story.done.code, story.asked, story.answered, story.place.starts()) == (5, [], "alive", []), story.done.err
    assert "is held by another program" in story.done.err


def test_a_stranger_that_takes_the_port_is_never_taken_for_the_engine(told: Callable[[str], Story]) -> None:
    story = told("taken")
    assert (story.done.code, set(story.asked), story.answered, story.place.left()) == (5, {"GET /health"}, "alive", []), (
        story.done.err
    )
    assert "is answered by a server that fenno did not start" in story.done.err
