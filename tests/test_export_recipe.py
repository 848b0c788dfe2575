"""Production files from a recipe, checked by what will read them: systemd, compose's and Kubernetes' schemas, a PromQL parser."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema
from jsonschema import Draft202012Validator
from stub.harness import Place
from stub.unit import Unit, verified
from stub.waiting import until

from fenno import recipe as recipes
from fenno.engine import http, plugin
from fenno.engine.catalogue import Catalogue, Flag, Identity
from fenno.engine.server import claim_port
from fenno.errors import FennoError, RecipeError, UsageError
from fenno.export import alerts, compose, grafana, kubernetes, make, service, systemd
from fenno.export.make import Asked
from fenno.export.service import Service
from fenno.recipe import Recipe

# Everything that some reader of the file takes for itself, and a name that is nothing to a shell.
NASTY = {"hf-overrides": '{"a b": "100% $HOME ${HOME} $(HOME) \\\\ \'\\n"}', "chat-template": "{% if a %}\n\t{{ b }}{% endif %}"}
PLAIN = {"enforce-eager": True, "enable-prefix-caching": False, "max-num-seqs": 64}
TARGETS = {"p95_ttft": "800ms", "p99_e2el": "20s", "p99_gap": "1s", "qps": 40, "memory": "85%", "availability": "99.5%"}
EMBEDDED = sorted(recipes.embedded())
systemd_here = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze on this host")


def a_recipe(**parts: Any) -> Recipe:
    data = {"name": "a.recipe", "engine": {"model": "org/model", "flags": PLAIN}, "targets": TARGETS}
    return Recipe.model_validate({**data, **{key: {**data.get(key, {}), **value} for key, value in parts.items()}})


def catalogue(version: str = "0.32.0", platform: str = "cuda") -> Catalogue:
    """An engine that has every flag of these recipes."""
    names = {*NASTY, *PLAIN, "scheduler-cls", "shutdown-timeout", *recipes.PARALLEL}
    names |= {flag for path in recipes.embedded().values() for flag in recipes.load(path).engine.flags}
    flags = {name: Flag(None, None, None, isinstance(PLAIN.get(name), bool) or name == "enforce-eager") for name in names}
    return Catalogue(Identity(sys.executable, "vllm", version, "3.11", None, "/nowhere"), platform, flags, {})


def unit(made: Service) -> str:
    return systemd.unit(made, sys.executable, "vllm", user="root", plugin_at="/opt/plugin")


def compose_file(made: Service, image: str = "an/image:1") -> dict[str, Any]:
    document = yaml.safe_load(compose.text(made, image))
    Draft202012Validator(get_builtin_schema("vendor.compose-spec")).validate(document)
    return dict(document)


def objects(made: Service, **given: Any) -> dict[str, Any]:
    """By kind; those of Kubernetes itself hold to its schema, where nothing unknown is allowed."""
    asked = {"claim": None, "own_image": False, "plugin": {}, "monitor": False, **given}
    found = [*yaml.safe_load_all(kubernetes.text(made, "an/image:1", **asked))]
    for each in found:
        if "monitoring.coreos.com" not in each["apiVersion"]:
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)
    return {each["kind"]: each for each in found}


def container(made: Service, **given: Any) -> dict[str, Any]:
    (only,) = objects(made, **given)["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(only)


@pytest.mark.parametrize("name", EMBEDDED)
def test_what_is_made_of_an_embedded_recipe_passes_its_readers(name: str, tmp_path: Path) -> None:
    made = service.of(recipes.load(recipes.embedded()[name]), catalogue())
    compose_file(made)
    claim = "models" if made.model.startswith("/") else None
    objects(made, claim=claim, plugin=kubernetes.plugin_files(plugin.install(tmp_path)), monitor=True)
    if shutil.which("systemd-analyze"):
        file = tmp_path / f"{name}.service"
        file.write_text(unit(made))
        assert verified(file) == Unit(file.read_text()).argv("ExecStart")


@systemd_here
def test_systemd_reads_every_word_as_it_was_meant(tmp_path: Path) -> None:
    made = service.of(a_recipe(engine={"flags": NASTY, "env": {"A": '50% of "$x"\\'}, "api_key_file": "/run/the key"}))
    file = tmp_path / "a.service"
    file.write_text(unit(made))
    wanted = [*service.from_files(made.secrets, "$CREDENTIALS_DIRECTORY"), *made.command(sys.executable).argv]
    assert set(NASTY.values()) < set(wanted)
    assert verified(file) == wanted == Unit(file.read_text()).argv("ExecStart")
    assert Unit(file.read_text()).environment()["A"] == '50% of "$x"\\'


def expanded(text: str) -> str:
    """What compose and Kubernetes make of text that holds no variable of ours."""
    assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", text)
    return text.replace("$$", "$")


def test_containers_get_every_word_as_it_was_meant() -> None:
    made = service.of(a_recipe(engine={"flags": NASTY, "env": {"A": "$x $(y)"}}))
    wanted = made.command().argv[4:]
    inside = compose_file(made)["services"]["vllm"]
    pod = container(made)
    assert [expanded(word) for word in inside["command"]] == ["org/model", "--host", "0.0.0.0", *wanted[3:]]
    assert pod["args"] == inside["command"]
    assert expanded(inside["environment"]["A"]) == "$x $(y)"
    assert {"name": "A", "value": "$$x $$(y)"} in pod["env"]


def test_a_key_and_other_secrets_are_in_no_file(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("hidden1\n")
    made = service.of(a_recipe(engine={"env": {"HF_TOKEN": "hidden2"}, "api_key_file": str(key)}))
    texts = {to: make.make(made.recipe, Asked(to, image="an/image:1" if to in ("compose", "k8s") else None), None, "me", print)
             for to in ("compose", "k8s", "prometheus", "grafana")}  # fmt: skip
    texts["systemd"] = unit(made)
    assert not [to for to, text in texts.items() if "hidden" in text]
    assert Unit(texts["systemd"]).credentials() == {"VLLM_API_KEY": str(key), "HF_TOKEN": "/etc/credstore/a.recipe.HF_TOKEN"}
    assert compose_file(made)["secrets"] == {"VLLM_API_KEY": {"file": str(key)}, "HF_TOKEN": {"environment": "HF_TOKEN"}}
    wanted = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": "a-recipe", "key": name}}} for name in ("HF_TOKEN", "VLLM_API_KEY")
    ]
    assert [each for each in container(made)["env"] if "valueFrom" in each] == wanted


def test_an_engine_does_not_start_with_an_empty_key(tmp_path: Path) -> None:
    made = service.of(a_recipe(engine={"api_key_env": "MY_KEY"}))
    shown = [sys.executable, "-c", "import os; print(os.environ['VLLM_API_KEY'])"]

    def run(before: list[str], **env: str) -> tuple[int, str, str]:
        done = subprocess.run([*before, *shown], capture_output=True, text=True, env={"PATH": os.environ["PATH"], **env})
        return int(done.returncode != 0), done.stdout, done.stderr.strip().rpartition(": ")[2]

    from_files, file = service.from_files(made.secrets, str(tmp_path)), tmp_path / "VLLM_API_KEY"
    assert run(from_files) == (1, "", "No such file or directory")
    file.write_text("\n")
    assert run(from_files) == (1, "", "VLLM_API_KEY is empty")
    file.write_text("a $key\n")
    assert run(from_files) == (0, "a $key\n", "")
    (*in_pod, _, _) = map(expanded, container(made)["command"])
    assert run(in_pod, VLLM_API_KEY="") == (1, "", "is empty")
    assert run(in_pod, VLLM_API_KEY="a $key") == (0, "a $key\n", "")


def test_requests_in_flight_have_the_recipes_grace_and_starts_its_patience() -> None:
    made = service.of(
        a_recipe(engine={"ready_timeout": "20min"}, serve={"grace": "2min", "hang": "1min", "deaths": 3, "stable": "5min"})
    )
    found, inside, pod = Unit(unit(made)), compose_file(made)["services"]["vllm"], container(made)
    for argv in (found.argv("ExecStart"), inside["command"], pod["args"]):
        assert argv[argv.index("--shutdown-timeout") + 1] == "120"
    assert (found.one("TimeoutStopSec"), found.one("TimeoutStartSec"), found.one("KillMode")) == ("135", "1200", "mixed")
    assert (found.one("StartLimitBurst"), found.one("StartLimitIntervalSec")) == ("3", "900")
    assert (inside["stop_grace_period"], inside["healthcheck"]["start_period"], inside["healthcheck"]["retries"]) == (
        "135s",
        "1200s",
        6,
    )
    spec = objects(made)["Deployment"]["spec"]["template"]["spec"]
    before = int(pod["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] == before + 135
    probes = {
        name: pod[f"{name}Probe"]["failureThreshold"] * pod[f"{name}Probe"]["periodSeconds"] for name in ("startup", "liveness")
    }
    assert probes == {"startup": 1200, "liveness": 60}


@pytest.mark.parametrize(
    ("parts", "known", "gpus", "image"),
    [
        ({}, catalogue(), 1, "vllm/vllm-openai:v0.32.0"),
        ({}, catalogue(platform="cpu"), 0, "vllm/vllm-openai-cpu:v0.32.0"),
        ({"host": {"gpus": 8}}, catalogue(platform="cpu"), 8, "vllm/vllm-openai:v0.32.0"),
        ({"host": {"gpus": 0}}, None, 0, ""),
        (
            {"engine": {"flags": {"tensor-parallel-size": 4, "data-parallel-size": 2}}},
            catalogue("0.24.1+cu129"),
            8,
            "vllm/vllm-openai:v0.24.1",
        ),
    ],
)
def test_gpus_and_the_image_follow_from_recipe_and_engine(parts: Any, known: Catalogue | None, gpus: int, image: str) -> None:
    made = service.of(a_recipe(**parts), known)
    assert (made.gpus, service.image(made, None)) == (gpus, image)
    devices = (
        compose_file(made)["services"]["vllm"].get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    )
    assert [device["count"] for device in devices] == ([gpus] if gpus else [])
    assert container(made)["resources"].get("limits", {}) == ({"nvidia.com/gpu": str(gpus)} if gpus else {})


def test_a_nightly_build_has_no_image() -> None:
    with pytest.raises(UsageError, match="no release"):
        service.image(service.of(a_recipe(), catalogue("0.33.0rc1.dev3")), None)


def a_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_container_sees_what_is_named_of_this_hosts_disk_at_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draft, template = a_model(tmp_path / "model"), a_model(tmp_path / "draft"), tmp_path / "chat.jinja"
    template.write_text("")
    (tmp_path / "downloads").mkdir()
    monkeypatch.chdir(tmp_path)
    flags = {
        "chat-template": "./chat.jinja",
        "speculative-config": json.dumps({"model": str(draft)}),
        "download-dir": "./downloads",
    }
    inside = compose_file(service.of(a_recipe(engine={"model": "model", "flags": flags})))["services"]["vllm"]
    mounts = {each["source"]: each["read_only"] for each in inside["volumes"] if isinstance(each, dict)}
    assert mounts == {str(model): True, str(template): True, str(draft): True, str(tmp_path / "downloads"): False}
    assert all(each["source"] == each["target"] for each in inside["volumes"] if isinstance(each, dict))
    assert {str(model), str(template), str(tmp_path / "downloads")} < set(inside["command"])


def test_a_downloaded_models_links_lead_somewhere_in_the_container_too(tmp_path: Path) -> None:
    model, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    model.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1234").write_text("{}")
    (model / "config.json").symlink_to("../../blobs/1234")
    inside = compose_file(service.of(a_recipe(engine={"model": str(model)})))["services"]["vllm"]
    assert {each["target"] for each in inside["volumes"] if isinstance(each, dict)} == {str(model), str(blobs)}


def test_pods_need_a_claim_or_an_image_for_a_folder(tmp_path: Path) -> None:
    model = a_model(tmp_path / "model")
    made = service.of(a_recipe(engine={"model": str(model)}))
    with pytest.raises(UsageError, match="pods cannot read") as refused:
        objects(made)
    assert "--claim" in refused.value.hint
    assert "model" not in {mount["name"] for mount in container(made, own_image=True)["volumeMounts"]}
    mounts = {mount["name"]: mount for mount in container(made, claim="models")["volumeMounts"]}
    assert mounts["model"] == {"name": "model", "mountPath": str(model), "readOnly": True}
    hub = objects(service.of(a_recipe()), claim="models")["Deployment"]["spec"]["template"]["spec"]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}} in hub["volumes"]
    other = a_recipe(engine={"model": str(model), "flags": {"chat-template": str(model / "config.json")}})
    with pytest.raises(UsageError, match="config.json"):
        objects(service.of(other), claim="models")


def test_pods_find_the_plugin_as_it_would_lie_in_a_folder(tmp_path: Path) -> None:
    files = kubernetes.plugin_files(plugin.install(tmp_path))
    made = service.of(a_recipe(engine={"scheduler": "token_aware", "env": {"PYTHONPATH": "/mine", "VLLM_PLUGINS": "other"}}))
    found = objects(made, plugin=files)
    (volume,) = (v for v in found["Deployment"]["spec"]["template"]["spec"]["volumes"] if v["name"] == "plugin")
    data = found["ConfigMap"]["data"]
    assert {item["path"]: data[item["key"]] for item in volume["configMap"]["items"]} == files
    assert all(re.fullmatch(r"[A-Za-z0-9][-._A-Za-z0-9]*", key) for key in data)
    # Beyond 256 KiB `kubectl apply` has no room to remember it.
    assert sum(map(len, data.values())) < 200_000
    variables = {each["name"]: each["value"] for each in container(made, plugin=files)["env"]}
    assert (variables["PYTHONPATH"], variables["VLLM_PLUGINS"]) == ("/opt/fenno:/mine", "other,fenno")
    assert made.arguments("0.0.0.0").count(plugin.SCHEDULER) == 1


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"model": None, "url": "http://127.0.0.1:1"}, "started by somebody else"),
        ({"flags": {"ssl-certfile": "/x"}}, "plain HTTP"),
        ({"flags": {"no-such-flag": 1}}, "has no flag"),
    ],
)
def test_what_no_format_can_express_is_refused(engine: Any, said: str) -> None:
    with pytest.raises(RecipeError, match=said) as refused:
        service.of(a_recipe(engine=engine), catalogue())
    assert refused.value.hint


def refused(asked: Asked, recipe: Recipe) -> FennoError:
    with pytest.raises(FennoError) as error:
        make.make(recipe, asked, None, "me", print)
    return error.value


def test_an_option_of_another_format_a_missing_folder_and_a_plugin_without_a_place_are_refused() -> None:
    assert "systemd, compose" in refused(Asked("helm"), a_recipe()).hint
    assert "k8s" in refused(Asked("compose", claim="x", image="an/image:1"), a_recipe()).hint
    missing = a_recipe(engine={"model": "/nowhere/model"})
    assert "no model folder" in str(refused(Asked("compose", image="an/image:1"), missing))
    # A volume or an image may have it.
    assert "/nowhere/model" in make.make(missing, Asked("k8s", image="an/image:1"), None, "me", print)
    steered = a_recipe(engine={"scheduler": "token_aware"})
    assert "-o DIR" in refused(Asked("compose", image="an/image:1"), steered).hint


def test_vllms_own_image_is_refused_for_an_engine_with_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fenno.engine.catalogue.read", lambda python, say: catalogue())
    patched = a_recipe(engine={"patches": "./mine"})
    assert "--image" in refused(Asked("compose"), patched).hint
    assert "own/image:1" in make.make(patched, Asked("compose", image="own/image:1"), None, "me", print)
    assert "ExecStart" in make.make(patched, Asked("systemd"), None, "me", print)


def test_the_plugin_lies_beside_the_file(tmp_path: Path) -> None:
    steered = a_recipe(engine={"scheduler": "token_aware"})
    text = make.make(steered, Asked("compose", image="an/image:1"), tmp_path / "out" / "a.yaml", "me", print)
    inside = yaml.safe_load(text)["services"]["vllm"]
    (mount,) = (each for each in inside["volumes"] if isinstance(each, dict))
    assert (tmp_path / "out" / mount["source"] / "fenno" / "vllm_plugin" / "scheduler.py").is_file()
    assert inside["environment"]["PYTHONPATH"] == mount["target"]


def expressions(made: Service) -> list[str]:
    """Every query of the rules and of the dashboard, with what Grafana would put in."""
    rules = [rule["expr"] for rule in alerts.group(made)["rules"]]
    panels = json.loads(grafana.text(made))["panels"]
    shown = [target["expr"].replace("$__rate_interval", "5m") for panel in panels for target in panel["targets"]]
    return [*rules, *shown]


def test_every_target_that_the_engine_can_answer_for_has_an_alert() -> None:
    made = service.of(a_recipe(targets={"p99.9_ttft": "2s", "classes": {"short": {"p95_ttft": "300ms"}}}))
    rules = {rule["alert"]: rule["expr"] for rule in alerts.group(made)["rules"]}
    assert set(rules) == {
        "VllmDown",
        "VllmHangs",
        "VllmPreempts",
        "VllmSlowP95Ttft",
        "VllmSlowP99_9Ttft",
        "VllmSlowP99E2el",
        "VllmAboveRate",
        "VllmErrors",
    }
    assert rules["VllmSlowP95Ttft"].startswith("histogram_quantile(0.95,") and rules["VllmSlowP95Ttft"].endswith(" > 0.8")
    assert rules["VllmSlowP99_9Ttft"].startswith("histogram_quantile(0.999,")
    assert rules["VllmAboveRate"].endswith(" > 40") and rules["VllmErrors"].endswith(" > 0.005")
    left = re.findall(r"^# No rule: (\S+):", alerts.text(made), re.MULTILINE)
    assert left == ["p99_gap", "short:p95_ttft", "memory"]


def test_every_query_is_promql() -> None:
    for expression in expressions(service.of(a_recipe())):
        promql_parser.parse(expression)


ANSWERED, BUCKET = "http_requests_total", "vllm:time_to_first_token_seconds_bucket"
# Of each alert: what is scraped every 15 s when it has to fire, and when it must not. "0+7x200" grows by 7 each time.
SEEN: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "VllmDown": ({"up": "0x200"}, {"up": "1x200"}),
    "VllmHangs": (
        {"vllm:num_requests_running": "3x200", "vllm:generation_tokens_total": "7x200"},
        {"vllm:num_requests_running": "0x200", "vllm:generation_tokens_total": "7x200"},
    ),
    "VllmPreempts": (
        {"vllm:num_preemptions_total": "0+1x200", "vllm:kv_cache_usage_perc": "0.99x200"},
        {"vllm:num_preemptions_total": "7x200", "vllm:kv_cache_usage_perc": "0.99x200"},
    ),
    "VllmSlowP95Ttft": (
        {f'{BUCKET}{{le="0.5"}}': "0+5x200", f'{BUCKET}{{le="1"}}': "0+9x200", f'{BUCKET}{{le="+Inf"}}': "0+9x200"},
        {f'{BUCKET}{{le="0.5"}}': "0+9x200", f'{BUCKET}{{le="1"}}': "0+9x200", f'{BUCKET}{{le="+Inf"}}': "0+9x200"},
    ),
    "VllmAboveRate": ({"vllm:request_success_total": "0+700x200"}, {"vllm:request_success_total": "0+500x200"}),
    "VllmErrors": (
        {f'{ANSWERED}{{handler="/v1/completions",status="{status}"}}': "0+9x200" for status in ("2xx", "5xx")},
        {f'{ANSWERED}{{handler="/v1/completions",status="{status}"}}': "0+9x200" for status in ("2xx", "4xx")},
    ),
}


@pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool on this host")
def test_each_alert_fires_for_its_reason_and_not_beside_it(tmp_path: Path) -> None:
    made = service.of(a_recipe())
    (tmp_path / "a.rules.yaml").write_text(alerts.text(made))
    rules = {rule["alert"]: rule for rule in alerts.group(made)["rules"]}

    def case(name: str, series: dict[str, str], fires: bool) -> dict[str, Any]:
        labels = {"severity": rules[name]["labels"]["severity"], **({"job": made.name} if name == "VllmDown" else {})}
        wanted = [{"exp_labels": labels, "exp_annotations": rules[name]["annotations"]}] if fires else []
        scraped = [{"series": re.sub(r"^([\w:]+)\{?", rf'\1{{job="{made.name}",', each).rstrip("}") + "}", "values": value}
                   for each, value in series.items()]  # fmt: skip
        alert = {"eval_time": "30m", "alertname": name, "exp_alerts": wanted}
        return {"interval": "15s", "input_series": scraped, "alert_rule_test": [alert]}

    cases = [case(name, series, fires) for name, seen in SEEN.items() for series, fires in zip(seen, (True, False), strict=True)]
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump({"rule_files": ["a.rules.yaml"], "tests": cases}))
    done = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_metric_in_a_query_is_one_that_the_installed_engine_has() -> None:
    # Its source is read, nothing of it imported.
    found = util.find_spec("vllm")
    if found is None or not found.origin:
        pytest.skip("no vLLM is installed here")
    source = (Path(found.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    there = set(re.findall(r'name="(vllm:\w+)"', source))
    asked = {name for expression in expressions(service.of(a_recipe())) for name in re.findall(r"vllm:\w+", expression)}
    assert {re.sub(r"(?<!tokens)_total$|_(bucket|sum|count)$", "", name) for name in asked} - there <= {
        f"{name}_total" for name in there
    }


def test_the_dashboards_panels_are_apart_and_show_the_targets() -> None:
    panels = json.loads(grafana.text(service.of(a_recipe())))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    for a, b in itertools.combinations(places, 2):
        assert a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"] or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    limits = [panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["value"] for panel in panels]
    assert limits[:4] == [0.8, None, 20.0, 40.0]
    assert panels[0]["title"] == "Time to first token (P95 ≤ 0.8 s)"


def test_a_dashboard_draws_no_percentile_as_a_target_under_a_goodput_target() -> None:
    panel = json.loads(grafana.text(service.of(a_recipe().with_targets(goodput=15))))["panels"][0]
    assert panel["title"] == "Time to first token"
    assert [step["value"] for step in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]] == [None]


def test_names_that_others_do_not_take_are_made_so() -> None:
    made = service.of(a_recipe().model_copy(update={"name": "4.bit_model."}))
    assert made.label == "vllm-4-bit-model"
    assert compose_file(made)["name"] == objects(made)["Service"]["metadata"]["name"] == made.label


@contextlib.contextmanager
def running(place: Place, argv: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A command of an export as its supervisor would start it: with the variables it names, and no more of ours than must be."""
    name, _, mark = place.mark.partition("=")
    with (place.folder / "engine.log").open("wb") as log:
        child = subprocess.Popen(
            argv, env={"PATH": os.environ["PATH"], name: mark, **env}, stdout=log, stderr=log, cwd=place.folder
        )
        try:
            yield child
        finally:
            child.kill()
            child.wait()


def asks(port: int, key: str | None = None) -> int:
    """The status of a question that needs the key; 0 while nobody answers."""
    try:
        http.call(f"http://127.0.0.1:{port}/v1/models", key=key, timeout=60)
    except http.Refused as error:
        return error.status or 0
    return 200


@pytest.mark.scenario
@pytest.mark.skipif(not shutil.which("curl"), reason="no curl on this host")
def test_a_units_command_serves_with_its_key_and_plugin_and_ends_at_one_signal(tmp_path: Path) -> None:
    place, port, key = Place(tmp_path), claim_port(None), tmp_path / "the key"
    key.write_text("hidden\n")
    flags = {"port": port, "max-num-seqs": 64, "hf-overrides": NASTY["hf-overrides"]}
    recipe = place.recipe(engine={"flags": flags, "scheduler": "token_aware", "api_key_file": str(key)})
    done = place.fenno("export", recipe, "--to", "systemd", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    unit = Unit((tmp_path / "out" / "stub.service").read_text())
    # As systemd does: what is loaded lies in a folder of its own, under the variable's name.
    (credentials := tmp_path / "credentials").mkdir()
    for variable, file in unit.credentials().items():
        shutil.copyfile(file, credentials / variable)
    with running(place, unit.argv("ExecStart"), {**unit.environment(), "CREDENTIALS_DIRECTORY": str(credentials)}) as engine:
        subprocess.run(unit.argv("ExecStartPost"), check=True, timeout=60)
        assert (asks(port), asks(port, "hidden")) == (401, 200)
        assert f"comes from {tmp_path}/out/plugin/fenno" in (tmp_path / "engine.log").read_text()
        assert NASTY["hf-overrides"] in Path(f"/proc/{engine.pid}/cmdline").read_text().split("\0")
        engine.terminate()
        assert engine.wait(120) == 0


@pytest.mark.scenario
def test_a_compose_files_command_becomes_healthy(tmp_path: Path) -> None:
    place, port = Place(tmp_path), claim_port(None)
    recipe = place.recipe(engine={"flags": {"port": port, "max-num-seqs": 64}, "scheduler": "token_aware", "api_key_env": "MY_KEY"})
    done = place.fenno("export", recipe, "--to", "compose", "-o", tmp_path / "out")
    assert done.code == 0, done.err
    document = yaml.safe_load((tmp_path / "out" / "stub.compose.yaml").read_text())
    inside = document["services"]["vllm"]
    assert inside["image"] == "vllm/vllm-openai-cpu:v0.32.0"
    assert document["secrets"] == {"VLLM_API_KEY": {"environment": "MY_KEY"}}
    # What the image and compose would bring: `vllm` on the path, the secret as a file, the plugin where it is mounted.
    (tmp_path / "vllm").symlink_to(place.python)
    (tmp_path / "VLLM_API_KEY").write_text("hidden")
    argv = [expanded(word).replace(compose.SECRETS, str(tmp_path)) for word in (*inside["entrypoint"], *inside["command"])]
    env = {**inside["environment"], "PYTHONPATH": str(tmp_path / "out" / "plugin"), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    program, *check = inside["healthcheck"]["test"][1:]
    assert program == "python3"
    with running(place, argv, env) as engine:
        until(
            lambda: subprocess.run([sys.executable, *check], stderr=subprocess.DEVNULL).returncode == 0 or engine.poll() is not None
        )
        assert (asks(port), asks(port, "hidden")) == (401, 200)
        engine.terminate()
        assert engine.wait(120) == 0


@pytest.mark.scenario
def test_vllms_own_config_is_what_would_be_on_the_command_line(tmp_path: Path) -> None:
    place = Place(tmp_path)
    recipe = place.recipe(
        engine={"flags": {"enable-prefix-caching": False, "max-num-seqs": 64}, "env": {"HF_TOKEN": "hidden", "A": "b c"}}
    )
    done = place.fenno("export", recipe, "--to", "vllm-config")
    assert done.code == 0, done.err
    assert "hidden" not in done.out
    line, secrets = done.out.splitlines()[1:3]
    assert "A='b c'" in line and line.endswith("serve --config stub.vllm.yaml")
    assert secrets == "# It has to find HF_TOKEN in its environment."
    keys = {"model": "stub-model", "host": "127.0.0.1", "no-enable-prefix-caching": True, "max-num-seqs": 64}
    assert yaml.safe_load(done.out) == {**keys, "shutdown-timeout": 60, "port": 8000}
