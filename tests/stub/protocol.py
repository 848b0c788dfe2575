"""The HTTP side: what an OpenAI-compatible server and vLLM's development endpoints answer, over asyncio's own streams."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

from simulator import Request, Simulator

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


class Protocol:
    """Answers connections. `served` counts generation requests; `worn_out` is called when more than STUB_DIE of them have come."""

    def __init__(self, simulator: Simulator, model: str, worn_out: Callable[[], None], shift: float, interval: int) -> None:
        self.simulator, self.model, self.worn_out = simulator, model, worn_out
        self.served = 0
        limit = os.environ.get("STUB_DIE", "")
        self.limit = int(limit) if limit.isdigit() else 0
        self.drains = os.environ.get("STUB_DRAIN") != "never"
        self.status = int(os.environ.get("STUB_STATUS", "200"))
        self.failing = int(os.environ.get("STUB_FAIL") or 1 << 60)
        self.frozen = int(os.environ.get("STUB_FREEZE") or 1 << 60)
        self.key = os.environ.get("VLLM_API_KEY")
        self.open = 0
        self.shift = shift
        self.interval = interval

    async def connection(self, reader: Reader, writer: Writer) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *fields = head.decode().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (f.partition(":") for f in fields)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = first.split(" ", 2)
                self.open += 1
                try:
                    if self.key and path.startswith("/v1") and headers.get("authorization") != f"Bearer {self.key}":
                        plain(writer, json.dumps({"error": "Unauthorized"}), status=401)
                    else:
                        await self.answer(method, path, json.loads(body or b"{}"), reader, writer)
                    await writer.drain()
                finally:
                    self.open -= 1
                if headers.get("connection", "").lower() == "close":
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, method: str, path: str, body: dict[str, Any], reader: Reader, writer: Writer) -> None:
        if path in ("/v1/completions", "/v1/chat/completions") and method == "POST":
            await self.generate("chat" in path, body, reader, writer)
        elif path == "/health":
            plain(writer, "", "text/plain")
        elif path == "/v1/models":
            plain(writer, json.dumps({"object": "list", "data": [{"id": self.model, "object": "model"}]}))
        elif path == "/metrics":
            text = self.simulator.metrics()
            if not self.drains:
                text = text.replace('num_requests_running{engine="0"} 0.0', 'num_requests_running{engine="0"} 1.0')
            plain(writer, text, "text/plain; version=0.0.4")
        elif path == "/reset_prefix_cache" and method == "POST":
            self.simulator.look(at_once=True)
            self.simulator.answer()
            plain(writer, json.dumps({"success": not self.simulator.running}))
        else:
            plain(writer, json.dumps({"detail": "Not Found"}), status=404)

    async def generate(self, chat: bool, body: dict[str, Any], reader: Reader, writer: Writer) -> None:
        self.served += 1
        if self.limit and self.served > self.limit:
            self.worn_out()
        failed = body.get("stream") and self.served % self.failing == 0
        if failed or self.status != 200:
            error = {"message": "EngineCore encountered an issue", "code": 500 if failed else self.status}
            plain(writer, json.dumps({"error": error}), status=error["code"])
            return
        if self.served > self.frozen:
            self.simulator.held += 1
            await asyncio.sleep(600)
        prompt = body.get("prompt", "")
        length = len(prompt) if isinstance(prompt, list) else len(str(prompt or body.get("messages")))
        answer = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
        if body.get("prompt_logprobs") is not None:
            # At once: what these cost is nobody's question.
            choices = [{**choice(chat, " tok" * answer, "length", False), **self.logprobs(str(prompt), answer)}]
            plain(writer, json.dumps({**base(chat, self.model, False), "choices": choices}))
            return
        over = asyncio.get_running_loop().create_future()
        stream = Stream(chat, self.model, length, answer, body, writer) if body.get("stream") else None
        interval = max(self.interval, int(body.get("stream_interval") or 1))

        def token(last: bool) -> bool:
            sends = stream is not None and not writer.is_closing() and stream.token(last, interval)
            if last and not over.done():
                over.set_result(None)
            return sends

        def gone() -> bool:
            left = reader.at_eof() or writer.is_closing()
            if left and not over.done():
                over.set_exception(ConnectionError())
            return left

        if stream:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n")
        self.simulator.add(Request(length, answer, token, gone))
        await over
        if not stream:
            choices = [choice(chat, " tok" * answer, "length", False)]
            plain(writer, json.dumps({**base(chat, self.model, False), "choices": choices}))

    def logprobs(self, prompt: str, answer: int) -> dict[str, Any]:
        """What a request for log-probabilities gets: made up from the letters, and others where STUB_OTHER_OUTPUTS says so."""
        numbers = [-(ord(letter) % 7 + self.shift) for letter in prompt[1:]]
        told = [None, *({str(i): {"logprob": n, "rank": 1, "decoded_token": "x"}} for i, n in enumerate(numbers))]
        return {"prompt_logprobs": told, "logprobs": {"tokens": [" tok"] * answer, "token_logprobs": [-1.0 - self.shift] * answer}}


def plain(writer: Writer, text: str, kind: str = "application/json", status: int = 200) -> None:
    data = text.encode()
    writer.write(f"HTTP/1.1 {status} .\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


def base(chat: bool, model: str, stream: bool) -> dict[str, Any]:
    kind = ("chat.completion" + (".chunk" if stream else "")) if chat else "text_completion"
    return {"id": "cmpl-stub", "object": kind, "created": 0, "model": model}


def choice(chat: bool, text: str, finish: str | None, stream: bool) -> dict[str, Any]:
    said = {("delta" if stream else "message"): {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": 0, **said, "logprobs": None, "finish_reason": finish}


class Stream:
    """One answer as server-sent events, each in an HTTP chunk of its own."""

    def __init__(self, chat: bool, model: str, prompt: int, answer: int, body: dict[str, Any], writer: Writer) -> None:
        self.writer = writer
        self.start, self.chat, self.kept, self.sent = base(chat, model, True), chat, 0, 0
        self.end = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        if (body.get("stream_options") or {}).get("include_usage"):
            counts = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
            self.end = event({**self.start, "choices": [], "usage": counts}) + self.end

    def token(self, last: bool, interval: int) -> bool:
        """One more token. Whether an event was sent: at the first, the last, and as soon as so many are kept, as vLLM does."""
        self.kept += 1
        if self.sent and not last and self.kept < interval:
            return False
        said = choice(self.chat, " tok" * self.kept, "length" if last else None, True)
        self.writer.write(event({**self.start, "choices": [said]}) + (self.end if last else b""))
        self.kept, self.sent = 0, self.sent + 1
        return True


def event(document: dict[str, Any]) -> bytes:
    return chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
