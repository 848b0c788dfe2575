"""What stands in front of several replicas: nginx's configuration, or the command of vllm-router. Pure functions to text."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from fenno.errors import RecipeError, UsageError
from fenno.export.service import Service
from fenno.export.text import head
from fenno.recipe import Workload
from fenno.units import Address, address

LISTEN = "127.0.0.1:8080"
KEEP_ALIVE = 5  # seconds after which a vLLM closes a connection that nobody uses, unless VLLM_HTTP_TIMEOUT_KEEP_ALIVE is set
AWAY = 5  # seconds for which a replica that did not answer is left alone


def addresses(texts: Sequence[str], port: int) -> list[Address]:
    """Those of the replicas, each once. `port`: where none is said. Raises `UsageError`."""
    if not texts:
        raise UsageError("no replica is named", "--replica HOST:PORT, once for each of them")
    return list(dict.fromkeys(address(text, port) for text in texts))


def nginx(service: Service, replicas: Sequence[Address], listen: Address) -> str:
    """A file for nginx's `conf.d`.

    A request goes to the replica that has the fewest. One that cannot be reached costs no request: the next replica gets it. What
    was sent to a replica already is not sent again, since a request that ends an engine would then end all of them. Raises
    `RecipeError`.
    """
    upstream = f"vllm-{service.label}"
    steps = [
        f"sudo cp {service.name}.nginx.conf /etc/nginx/conf.d/ && sudo nginx -t && sudo systemctl reload nginx",
        "Each replica's own /metrics is what Prometheus scrapes; here they would be those of one replica or another.",
    ]
    lines = [
        f"upstream {upstream} {{",
        # Without a zone, each of nginx's processes would count on its own.
        f"    zone {upstream} 64k;",
        "    least_conn;",
        *(f"    server {replica} max_fails=1 fail_timeout={AWAY}s;" for replica in replicas),
        "    keepalive 64;",
        "    # Before the engine closes it: a request on a connection that is just being closed would be lost.",
        f"    keepalive_timeout {max(1, _keep_alive(service) - 2)}s;",
        "}",
        "server {",
        f"    listen {listen};",
        "    client_max_body_size 64m;",
        f"    location / {{\n{_proxied(service, upstream)}    }}",
        "    location = /metrics { return 404; }",
        "}",
    ]
    return head(service, *steps) + "\n".join(lines) + "\n"


def _proxied(service: Service, upstream: str) -> str:
    """How one request is handed on."""
    directives = [
        f"proxy_pass http://{upstream}",
        "proxy_http_version 1.1",
        'proxy_set_header Connection ""',
        "proxy_set_header Host $host",
        "proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for",
        "proxy_set_header X-Request-Id $request_id",
        # A token goes on when it comes.
        "proxy_buffering off",
        f"proxy_connect_timeout {AWAY}s",
        f"proxy_read_timeout {_patience(service)}s",
        "proxy_next_upstream error timeout",
    ]
    return "".join(f"        {each};\n" for each in directives)


def _keep_alive(service: Service) -> int:
    """Seconds. Raises `RecipeError` for what vLLM would not take either."""
    text = str(service.recipe.engine.env.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE") or KEEP_ALIVE)
    try:
        return int(text)
    except ValueError as error:
        said = f"recipe {service.recipe.name}: VLLM_HTTP_TIMEOUT_KEEP_ALIVE is {text!r}"
        raise RecipeError(said, "it has to be a whole number of seconds, such as 30, in `engine.env`") from error


def _patience(service: Service) -> int:
    """Seconds without a token after which a request is given up: a hang, or a queue too long for the recipe's clients."""
    return math.ceil(max(service.recipe.serve.hang, service.recipe.workload.timeout))


def router(replicas: Sequence[Address], listen: Address, patience: int, policy: str) -> list[str]:
    """The command of vllm-router. `patience`: seconds that the replicas may take to start."""
    return [
        "vllm-router",
        *("--host", listen.bare, "--port", str(listen.port)),
        *("--worker-urls", *(f"http://{replica}" for replica in replicas)),
        *("--policy", policy),
        *("--worker-startup-timeout-secs", str(patience), "--worker-startup-check-interval", "2"),
        *("--health-check-interval-secs", str(AWAY)),
        # The router's own minute would leave a replica alone that has long been started again.
        *("--cb-timeout-duration-secs", str(AWAY)),
    ]


def policy(workload: Workload) -> str:
    """Where prompts begin alike, one replica has the beginning in its cache; else a replica that has less to do is the better one.

    By its cache the router balances only from 64 requests of difference on.
    """
    return "cache_aware" if workload.shared_prefix or workload.turns != 1 else "power_of_two"


def script(service: Service, replicas: Sequence[Address], listen: Address) -> str:
    """A shell script that becomes vllm-router."""
    argv = router(replicas, listen, service.start_after, policy(service.recipe.workload))
    flags = [index for index, word in enumerate(argv) if word.startswith("--")]
    parts = [shlex.join(argv[begin:end]) for begin, end in zip([0, *flags], [*flags, len(argv)], strict=True)]
    steps = [f"pip install vllm-router && sh {service.name}.router.sh"]
    return head(service, *steps) + "exec " + " \\\n    ".join(parts) + "\n"
