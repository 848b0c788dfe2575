"""The arguments of `vllm serve` as the engine reads them: imported by the scripts beside it. Standard library and vLLM only."""

from __future__ import annotations

from typing import Any


def engine_args(words: list[str]) -> Any:
    """vLLM's `EngineArgs` for `vllm serve WORDS`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = ServeSubcommand().subparser_init(FlexibleArgumentParser().add_subparsers())
    args = parser.parse_args(words)
    args.model = getattr(args, "model_tag", None) or args.model
    return EngineArgs.from_cli_args(args)
