"""The master of a load test on several hosts: it hands out the plan, says when to begin, and keeps what the workers record.

It sends no traffic. In its folder every worker's files lie beside each other, all stamps on this host's clock, as if they were
processes of this host: what reads a run need not know of hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import gevent

from fenno import __version__
from fenno.load import client, hosts
from fenno.load import plan as plans
from fenno.load.client import ClientState
from fenno.load.hosts import KIND, PATIENCE, TICK
from fenno.load.plan import Plan
from fenno.load.sender.spool import give_up
from fenno.load.sender.wire import monotonic

LEAD = 1.0  # seconds from when all are ready to the first request


@dataclass
class Peer:
    """A worker, by locust's name for it. `silent`: seconds since it was last heard."""

    id: str
    name: str
    folder: str
    index: int = -1
    ready: bool = False
    lost: bool = False
    silent: float = 0.0
    sizes: dict[str, int] = field(default_factory=dict)  # of the copies of its files


class Master:
    """`folder`: the run's."""

    def __init__(self, runner: Any, plan: Plan, folder: Path) -> None:
        self.runner, self.plan, self.folder = runner, plan, folder
        self._peers: dict[str, Peer] = {}
        self._told = {"stop": False, "everyone": False}
        self._begun = False
        runner.register_message(KIND, self._take)
        self._guard_door()
        gevent.spawn(self._watch).link_exception(lambda _: os._exit(70))

    def _guard_door(self) -> None:
        """Let no more workers in than the plan has: locust would share the users out anew, in the middle of a run."""
        inner = self.runner.handle_message

        def handle(client_id: str, msg: Any) -> None:
            full = len(self.runner.clients) >= self.plan.processes
            if msg.type == "client_ready" and full and client_id not in self.runner.clients:
                self.runner.send_message("ack", {"index": -1}, client_id)  # so that it listens; its "hello" is refused
            else:
                inner(client_id, msg)

        self.runner.handle_message = handle

    def begin(self) -> None:
        """Called by locust once all workers are there, and holds the start up until each has the plan and knows the time."""
        while len(self._peers) < self.plan.processes:
            gevent.sleep(TICK)
        files = {name: path.read_bytes() for name, path in hosts.given(self.plan).items()}
        for index, peer in enumerate(self._peers.values()):
            peer.index = index
            self._send(peer, "plan", index=index, plan=plans.dump(self.plan), files=files)
        while not all(peer.ready for peer in self._peers.values()):
            gevent.sleep(TICK)
        at = monotonic() + LEAD
        for peer in self._peers.values():
            self._send(peer, "start", at=at)
        self._begun = True

    def _call_off(self, why: str) -> NoReturn:
        """End before the beginning."""
        for peer in self._peers.values():
            self._send(peer, "refused", why=f"the load test was called off: {why}")
        gevent.sleep(0.5)  # the messages leave in zmq's own thread
        with contextlib.suppress(OSError):
            print(why, file=sys.stderr, flush=True)
        os._exit(70)

    def _watch(self) -> None:
        """What ends the traffic is told to all, and who is lost is put in its state; before the start either ends everything."""
        while True:
            gevent.sleep(TICK)
            if (self.folder / "stop").exists():
                self._tell("stop") if self._begun else self._call_off("it was ended before it began")
            if all((self.folder / f"enough-{index}").exists() for index in range(self.plan.processes)):
                self._tell("everyone", count=self.plan.processes)
            self._listen()

    def _listen(self) -> None:
        """Find who has left, or is silent for too long."""
        for peer in self._peers.values():
            peer.silent += TICK
            left = peer.id not in self.runner.clients
            if (left or peer.silent > PATIENCE) and not peer.lost and not self._over(peer):
                peer.lost = True
                why = f"the worker {peer.name} {'left' if left else f'was not heard of for {PATIENCE} s'}"
                self._lose(why, peer) if self._begun else self._call_off(why)

    def _over(self, peer: Peer) -> bool:
        state = client.last(self.folder / f"client-{peer.index}.jsonl")
        return state is not None and state.phase not in client.LIVE

    def _lose(self, why: str, peer: Peer) -> None:
        """Put the loss in the worker's state, and end the run: what is sent without it is not what was planned."""
        state = client.last(self.folder / f"client-{peer.index}.jsonl") or ClientState()
        since = monotonic() - state.start if state.start is not None else None
        when = f"{since:.1f} s after the window began" if since is not None and since > 0 else "before the window began"
        kept = f"what it had sent is kept, and the rest lies on its host in {peer.folder}"
        lost = replace(state, phase="lost", reason=f"{why}, {when}: {kept}", end=state.end or monotonic())
        self._append(f"client-{peer.index}.jsonl", f"\n{lost.dump()}\n".encode())  # what came last may end within a line
        (self.folder / "stop").touch()

    def _tell(self, kind: str, **data: Any) -> None:
        """Tell all workers, once."""
        if not self._told[kind]:
            self._told[kind] = True
            for peer in self._peers.values():
                self._send(peer, kind, **data)

    def _send(self, peer: Peer, kind: str, **data: Any) -> None:
        self.runner.send_message(KIND, {"kind": kind, **data}, peer.id)

    def _take(self, msg: Any, **_: Any) -> None:
        """A message of a worker's, in the greenlet that reads them all."""
        data, now = msg.data, monotonic()
        peer = self._peers.get(msg.node_id)
        if peer is None:
            if data["kind"] == "hello":
                self._greet(msg.node_id, data)
            return
        peer.silent = 0.0
        match data["kind"]:
            case "time?":
                self._send(peer, "time", asked=data["asked"], told=now)
            case "ready":
                peer.ready = True
            case "unfit":
                self._call_off(f"the worker {peer.name} cannot take part: {data['why']}")
            case "enough":
                (self.folder / f"enough-{peer.index}").touch()
            case "bytes":
                self._keep(peer, data["name"], data["at"], data["data"])

    def _greet(self, identity: str, data: dict[str, Any]) -> None:
        peer = Peer(identity, data["name"], data["folder"])
        if data["version"] != __version__:
            self._send(peer, "refused", why=f"the master has fenno {__version__}, and this worker {data['version']}")
        elif identity not in self.runner.clients:
            self._send(peer, "refused", why=f"the load test has all its {self.plan.processes} workers")
        else:
            self._peers[identity] = peer

    def _keep(self, peer: Peer, name: str, at: int, data: bytes) -> None:
        """Append to the copy of a worker's file, if it goes on where that ends; say where it ends now."""
        if peer.lost or not re.fullmatch(rf"client-{peer.index}\.jsonl|records-[\w-]+\.jsonl", name):
            return
        size = peer.sizes.get(name, 0)
        if at == size:
            self._append(name.replace("records-", f"records-{peer.index}-"), data)
            peer.sizes[name] = size = size + len(data)
        self._send(peer, "copied", name=name, size=size)
        state = client.last(self.folder / name) if name.startswith("client-") else None
        if state is not None and state.phase == "gone":
            (self.folder / "stop").touch()  # the others may reach the server still: without this one it is another load

    def _append(self, name: str, data: bytes) -> None:
        try:
            with (self.folder / name).open("ab") as file:
                file.write(data)
        except OSError as error:
            give_up(error)


def of(runner: Any, plan: Plan, folder: Path) -> Master | None:
    """The master that this process is; None in a run of one host."""
    if plan.bind is None or type(runner).__name__ != "MasterRunner":
        return None
    return Master(runner, plan, folder)
