"""A systemd unit read as systemd reads it, as far as fenno writes units; the tests compare this with systemd's own reading."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SEQUENCES = {"n": "\n", "t": "\t"}


class Unit:
    """`settings`: every key's values, in their order."""

    def __init__(self, text: str) -> None:
        self.settings: dict[str, list[str]] = {}
        for line in text.replace("\\\n", " ").splitlines():
            if line and line[0] not in "#[":
                key, _, value = line.partition("=")
                self.settings.setdefault(key, []).append(value)

    def one(self, key: str) -> str:
        (value,) = self.settings[key]
        return value

    def argv(self, key: str) -> list[str]:
        """A command as it would be run: without a variable of ours in it, so that only $$ is left of dollars."""
        words = split(self.one(key))
        assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", " ".join(words)), "systemd would put a variable there"
        return [word.replace("$$", "$") for word in words]

    def environment(self) -> dict[str, str]:
        return dict(split(value)[0].partition("=")[::2] for value in self.settings["Environment"])

    def credentials(self) -> dict[str, str]:
        return dict(value.replace("%%", "%").partition(":")[::2] for value in self.settings.get("LoadCredential", []))


def split(value: str) -> list[str]:
    """A setting's words; a doubled percent sign is one."""
    assert not re.search(r"(?<!%)(%%)*%(?!%)", value), "systemd would put a specifier there"
    return [word.replace("%%", "%") for word in unquoted(value)]


def unquoted(text: str) -> list[str]:
    """Words that are bare, or in double quotes with backslashes."""
    found = re.findall(r'"((?:[^"\\]|\\.)*)"|(\S+)', text)
    return [bare or re.sub(r"\\(.)", lambda c: SEQUENCES.get(c[1], c[1]), quoted) for quoted, bare in found]


def verified(file: Path) -> list[str]:
    """The command of the unit in `file` as systemd has read it. Fails on every word of complaint."""
    check = ["systemd-analyze", "verify", "--man=no", str(file)]
    plain = subprocess.run(check, capture_output=True, text=True, timeout=120)
    assert (plain.returncode, plain.stderr) == (0, "")
    told = subprocess.run(["env", "SYSTEMD_LOG_LEVEL=debug", *check], capture_output=True, text=True, timeout=120).stdout
    found = re.search(r"-> ExecStart:\n\s+Command Line: (.*)\n", told)
    assert found, told
    return [word.replace("$$", "$") for word in unquoted(found[1])]
