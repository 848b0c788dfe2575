"""Files as people read them: where they come from at the top, YAML without aliases, several lines as several lines."""

from __future__ import annotations

from typing import Any

import yaml

from fenno.export.service import Service


def head(service: Service, *lines: str) -> str:
    """The comment at the top of a file."""
    version = f", for vLLM {service.version}" if service.version else ""
    first = f"Made by `fenno export` from recipe {service.name} ({service.recipe.digest()}){version}."
    return "".join(f"# {line}\n" for line in (first, *lines))


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _string)


def dumped(*documents: Any) -> str:
    """YAML of one document or several. A line is never broken."""
    return str(yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000))
