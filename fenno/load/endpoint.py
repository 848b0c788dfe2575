"""What an endpoint takes and how it counts, asked before a run, and the plan that fits it."""

from __future__ import annotations

import json
import random
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fenno.engine import http
from fenno.errors import LoadError
from fenno.load import plan as plans
from fenno.load import prompts, trace
from fenno.load.plan import Plan
from fenno.recipe import greatest

JOINTS = (" ", "", "\n")  # what may stand between letters so that each is a token: most tokenizers; those of bytes; others
COUNTED = (16, 47, 120)  # letters in the texts that are counted


def fitted(plan: Plan) -> Plan:
    """The plan without what the server refuses, with prompts on chat as long as asked for by the server's own count.

    Raises `LoadError` when the server refuses such requests altogether, or when some would be longer than it allows.
    """
    check_lengths(plan, limit(plan))
    plan = forced(plan)
    return counted(plan) if plan.endpoint == "chat" and not plan.workload.prompts else plan


def check(plan: Plan) -> None:
    """What can be known before a client is started. Raises `LoadError` or `UsageError`."""
    plan.api_key()
    if plan.workload.prompts:
        prompts.load(Path(plan.workload.prompts))
    parts = urlsplit(plan.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=min(10.0, plan.timeout)).close()
    except OSError as error:
        raise LoadError(
            f"nothing answers at {plan.url}: {error.strerror or error}", "is the server running, and is the port right?"
        ) from error


def limit(plan: Plan) -> int | None:
    """The server's `max-model-len`; None where it does not say."""
    try:
        models = json.loads(_call(plan, "/v1/models")).get("data") or ()
        mine = next((m.get("max_model_len") for m in models if m.get("id") == plan.model), None)
    except (http.Refused, ValueError, AttributeError):
        return None
    return mine if isinstance(mine, int) else None


def check_lengths(plan: Plan, most: int | None) -> None:
    """Raise `LoadError` when a request may need more than `most` tokens, prompt and answer together."""
    if most is None or plan.workload.prompts:
        return
    hint = "start the server with a larger --max-model-len, or choose shorter lengths"
    if plan.workload.trace:
        needs = [entry.prompt_tokens + entry.output_tokens for entry in trace.load(Path(plan.workload.trace))]
        over = sum(need > most for need in needs)
        if over:
            what = f"{over} of the {len(needs)} requests of {plan.workload.trace} are longer than the server's max-model-len {most}"
            raise LoadError(f"{what}: the longest has {max(needs)} tokens with its answer", hint)
        return
    turns = greatest(plan.workload.turns)
    for cls in plan.workload.classes:
        need = turns * cls.longest
        if need > most:
            raise LoadError(f"class {cls.name} may need {need} tokens, and the server's max-model-len is {most}", hint)


def forced(plan: Plan) -> Plan:
    """The plan without the fields that the server names when it refuses a request with them."""
    while True:
        try:
            _send(plan, "a", 2)
            return plan
        except http.Refused as refused:
            if refused.status is None or not 400 <= refused.status < 500 or refused.status == 429:
                return plan  # nothing is known of the fields: the run itself will tell
            left = tuple(name for name in plan.forced if name not in str(refused))
            if left == plan.forced or not plan.workload.ignore_eos:
                raise LoadError(
                    f"the server refuses such a request: {refused}", "see what it says, and change the request"
                ) from refused
            plan = replace(plan, forced=left)


def counted(plan: Plan) -> Plan:
    """The plan with what makes each letter one token, and the number of tokens that the chat template adds."""
    for joint in JOINTS:
        found = {_count(plan, joint.join(_letters(size)), size) for size in COUNTED}
        if len(found) == 1 and (overhead := found.pop()) is not None:
            return replace(plan, joint=joint, overhead=overhead)
    return plan  # every prompt is compared with the server's count after the run


def _letters(size: int) -> list[str]:
    rng = random.Random(f"letters/{size}")
    return [chr(rng.randrange(97, 123)) for _ in range(size)]


def _count(plan: Plan, text: str, letters: int) -> int | None:
    """By how many tokens a prompt is more than its letters; None where the server tells no count."""
    message = {"model": plan.model, "messages": [{"role": "user", "content": text}]}
    try:
        count = json.loads(_call(plan, "/tokenize", message)).get("count")
    except (http.Refused, ValueError, AttributeError):
        count = None
    if count is None:
        try:
            count = _usage(_send(plan, text, 1)).get("prompt_tokens")
        except http.Refused:
            return None
    return count - letters if isinstance(count, int) and count >= letters else None


def _send(plan: Plan, text: str, tokens: int) -> str:
    """One request just like those of the run."""
    asked = {"messages": [{"role": "user", "content": text}]} if plan.endpoint == "chat" else {"prompt": text}
    return _call(plan, plan.path, plans.body(plan, asked, tokens))


def _usage(stream: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for line in stream.splitlines():
        if line.startswith("data: {"):
            try:
                found = json.loads(line[6:]).get("usage") or found
            except ValueError:
                continue
    return found


def _call(plan: Plan, path: str, body: dict[str, Any] | None = None) -> str:
    base = plan.url.rstrip("/").removesuffix("/v1")
    return http.call(base + path, body, timeout=plan.timeout, key=plan.api_key(), headers=plan.headers, ca_file=plan.ca_file)
