"""A systemd unit that runs the engine itself, as `fenno serve` would start it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from fenno.engine import command
from fenno.export.service import Secret, Service, from_files
from fenno.export.text import head

CREDENTIALS = "/etc/credstore"  # systemd's own folder for them, from version 254 on


def unit(service: Service, executable: str, distribution: str, *, user: str, plugin_at: str) -> str:
    """The unit's text. `user`: who it runs as; `plugin_at`: the plugin's folder on the host."""
    made = service.command(executable, distribution, plugin_at=plugin_at)
    variables = {"PATH": _path(executable), **made.env}
    lines = [
        head(service, *_steps(service)),
        *_unit(service),
        "",
        "[Service]",
        "Type=exec",
        f"User={user}",
        *(f"Environment={quoted(f'{key}={value}')}" for key, value in variables.items() if value is not None),
        *(f"LoadCredential={each.variable}:{plain(_file(service, each))}" for each in service.secrets),
        f"ExecStart={_lines([*from_files(service.secrets, '$CREDENTIALS_DIRECTORY'), *made.argv])}",
        *_life(service),
        "LimitNOFILE=65536",
        "LimitMEMLOCK=infinity",
        "# A core file would be as large as all that the engine holds in memory.",
        "LimitCORE=0",
        "NoNewPrivileges=yes",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _steps(service: Service) -> Iterator[str]:
    """What to do with the file."""
    yield f"sudo cp {service.name}.service /etc/systemd/system/ && sudo systemctl daemon-reload"
    yield f"sudo systemctl enable --now {service.name}"
    if missing := [_file(service, each) for each in service.secrets if not each.file]:
        yield f"Before that, as root alone may read them, each with its value alone: {', '.join(missing)}"


def _path(executable: str) -> str:
    """Where programs are looked for: beside the interpreter too, which has the ones that compile kernels."""
    return f"{PurePath(executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _file(service: Service, secret: Secret) -> str:
    return secret.file or f"{CREDENTIALS}/{service.name}.{secret.variable}"


def _unit(service: Service) -> Iterator[str]:
    serve = service.recipe.serve
    yield "[Unit]"
    yield f"Description={plain(f'vLLM: recipe {service.name}')}"
    yield "Wants=network-online.target"
    yield f"After=network-online.target{' nvidia-persistenced.service' if service.gpus else ''}"
    yield f"# {serve.deaths} starts within {serve.deaths} times what counts as a stable life: a crash loop, which ends."
    yield f"StartLimitBurst={serve.deaths}"
    yield f"StartLimitIntervalSec={round(serve.deaths * serve.stable)}"


def _life(service: Service) -> Iterator[str]:
    """Its start is over when it answers, and its end when the requests in flight have been."""
    health = f"http://{command.address(service.recipe.engine.flags)}:{service.port}/health"
    again = ["--retry-connrefused", "--retry-delay", "1", "--retry", str(service.start_after)]
    yield f"ExecStartPost={_words(['curl', '-sf', '--output', '/dev/null', '--connect-timeout', '2', *again, health])}"
    yield f"TimeoutStartSec={service.start_after}"
    yield "Restart=always"
    yield "RestartSec=5"
    yield "# A flag that this vLLM does not have: no restart heals that."
    yield "RestartPreventExitStatus=2"
    yield "# To the first process alone: the others would drop the requests in flight."
    yield "KillMode=mixed"
    yield "KillSignal=SIGTERM"
    yield f"TimeoutStopSec={service.stop_after}"


def _lines(argv: Sequence[str]) -> str:
    """A command with every flag on a line of its own."""
    flags = [index for index, word in enumerate(argv) if word.startswith("--")]
    parts = [argv[begin:end] for begin, end in zip([0, *flags], [*flags, len(argv)], strict=True)]
    return " \\\n    ".join(_words(part) for part in parts if part)


def _words(argv: Sequence[str]) -> str:
    return " ".join(quoted(word.replace("$", "$$")) for word in argv)


def quoted(word: str) -> str:
    """One word as systemd reads it: percent signs doubled, since they begin specifiers, and in double quotes where need be."""
    word = plain(word)
    if re.fullmatch(r"[\w@%+=:,./$-]+", word, re.ASCII):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'


def plain(text: str) -> str:
    """Text in which systemd finds no specifier."""
    return text.replace("%", "%%")
