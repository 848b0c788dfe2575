"""A command line becomes a recipe that starts the same server."""

import pytest

from fenno import recipe
from fenno.engine import convert
from fenno.errors import UsageError


def test_a_serve_command_becomes_a_recipe_that_loads() -> None:
    words = "-- A=1 vllm serve org/Model-7B --max-model-len 4096 -tp 2 --enforce-eager --no-enable-prefix-caching".split()
    words += ["--gpu-memory-utilization=0.85", "--port", "9000", "--api-key", "secret", "--trust-remote-code"]
    data = convert.from_command(words)
    assert data["engine"]["flags"] == {
        "max-model-len": 4096,
        "tensor-parallel-size": 2,
        "enforce-eager": True,
        "enable-prefix-caching": False,
        "gpu-memory-utilization": 0.85,
    }
    text = convert.to_yaml(data)
    assert "secret" not in text
    made = recipe.parse(text, "made")
    assert (made.name, made.engine.model, made.engine.env) == ("model-7b", "org/Model-7B", {"A": "1"})
    assert made.engine.trust_remote_code


def test_the_older_module_form_is_understood() -> None:
    words = "/opt/py/bin/python3 -m vllm.entrypoints.openai.api_server --model /models/x --max_num_seqs 64".split()
    engine = convert.from_command(words)["engine"]
    assert engine == {"model": "/models/x", "python": "/opt/py/bin/python3", "flags": {"max-num-seqs": 64}}


@pytest.mark.parametrize("words", [[], ["--"], ["sglang", "serve", "x"], ["vllm", "bench", "x"], ["vllm", "serve", "--seed", "1"]])
def test_what_does_not_start_vllm_is_refused(words: list[str]) -> None:
    with pytest.raises(UsageError):
        convert.from_command(words)


def test_secrets_of_a_command_line_are_inherited_by_the_recipe() -> None:
    words = "HF_TOKEN=hidden A=b vllm serve m --hf-token hidden2".split()
    text = convert.to_yaml(convert.from_command(words), words)
    assert "hidden" not in text
    assert "# Left out: --hf-token." in text and "# Not written down: HF_TOKEN." in text
    assert recipe.parse(text, "made").engine.env == {"HF_TOKEN": None, "A": "b"}


@pytest.mark.parametrize("flag", [
    "--ssl-keyfile-password hidden", "--ssl-keyfile-password=1234", "--ssl_keyfile_password hidden", "--api_key hidden 1234",
    "--otlp-traces-endpoint http://u:hidden@h", "--middleware a redis://:hidden@h", '--kv-transfer-config {"u":"amqp://u:hidden@h"}',
])  # fmt: skip
def test_a_flag_that_is_a_secret_or_holds_one_is_left_out_and_named(flag: str) -> None:
    plain = "--allow-credentials --ssl-keyfile k.pem --dbo-prefill-token-threshold 9"
    words = ["vllm", "serve", "m", *flag.split(" "), *plain.split(" ")]
    text = convert.to_yaml(convert.from_command(words), words)
    name = flag.lstrip("-").replace("=", " ").split(" ")[0].replace("_", "-")
    assert "hidden" not in text and "1234" not in text and f"# Left out: --{name}." in text
    kept = {"allow-credentials": True, "ssl-keyfile": "k.pem", "dbo-prefill-token-threshold": 9}
    assert recipe.parse(text, "made").engine.flags == kept


def test_short_flags_end_the_one_before_and_what_is_left_out_is_said() -> None:
    words = "vllm serve m -q awq -O3 --seed -1 --port 8000 --api-key=secret".split()
    data = convert.from_command(words)
    assert data["engine"]["flags"] == {"quantization": "awq", "optimization-level": 3, "seed": -1}
    text = convert.to_yaml(data, words)
    assert "# Left out: --api-key, --port." in text and "secret" not in text
