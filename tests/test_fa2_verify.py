"""Whether a wheel answers right: the calls that show it, the judgement, and the harness itself against other arithmetic."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import sys
import types
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fa2_made import stand_in
from test_fa2 import GEMMA_2, GROK_2, LLAMA_3_70B, planned

from fenno.errors import BuildError
from fenno.fa2 import verify
from fenno.fa2.verify import Case

PLAIN = Case("whole", 1, 64, 64, 64, 8, 128, "bf16")


def test_every_mask_cache_and_batch_is_compared_with_the_models_own_heads_and_features() -> None:
    found = verify.cases(planned(GROK_2))
    assert {case.kind for case in found} == {"whole", "uneven", "cache", "paged", "append"}
    assert {(case.heads, case.kv_heads, case.head_dim, case.dtype) for case in found} == {(64, 8, 128, "bf16")}
    assert {case.softcap for case in found} == {0.0, 30.0}
    assert {(case.window, case.alibi) for case in found} == {(0, False)}
    assert {case.batch for case in found if case.kind == "paged"} == {1, 8, 64}
    assert {case.causal for case in found} == {True, False}
    gemma = verify.cases(planned(GEMMA_2))
    assert {(case.softcap, case.window) for case in gemma} == {(0.0, 0), (30.0, 0), (0.0, 256), (30.0, 256)}
    assert len(set(gemma)) == len(gemma)


def test_what_was_left_out_has_to_be_refused() -> None:
    told = [str(case) for case in verify.refused(planned(LLAMA_3_70B))]
    assert [word.partition(", ")[2] for word in told] == [
        *["head size 32 bf16", "head size 128 fp16", "head size 128 bf16, soft cap 30"],
        *["head size 128 bf16, window 256", "head size 128 bf16, ALiBi"],
    ]
    assert all(case.keys > verify.WINDOW for case in verify.refused(planned(LLAMA_3_70B))), "a wider window would be none"
    assert "soft cap" not in " ".join(str(case) for case in verify.refused(planned(GROK_2)))


FAILED = {"case": asdict(PLAIN), "failed": "x"}
HEAD = {"gpu": "H200", "torch": "2.11", "flash_attn": "x"}


def test_an_output_is_wrong_when_it_is_farther_off_than_plain_torch_would_be() -> None:
    right = {"case": asdict(PLAIN), "error": 0.02, "plain": 0.01}
    rows = [HEAD, right, {"refused": asdict(PLAIN), "said": "lacks it"}]
    assert verify.faults(rows) == []
    assert verify.summary(rows, [])["worst"] == 2
    assert "1 outputs against float64, the worst 2.00 times" in verify.lines(verify.summary(rows, []))[0]
    assert verify.faults([HEAD, {**right, "error": 0.04}]) == [f"{PLAIN}: wrong by 0.04, where plain torch is by 0.01"]
    assert verify.faults([HEAD, {**right, "error": 1e30}]) != []
    assert verify.faults([HEAD, {"case": asdict(PLAIN), "failed": "no kernel image"}]) == [f"{PLAIN}: no kernel image"]
    assert verify.faults([HEAD, {"refused": asdict(PLAIN), "said": None}]) == [f"{PLAIN}: was left out, and yet it answers"]


def test_a_wheel_of_which_every_call_fails_says_why_and_is_not_timed(tmp_path: Path) -> None:
    answers = "; ".join(f"echo '{json.dumps(row)}'" for row in (HEAD, FAILED, {"done": True}))
    python = stand_in(tmp_path / "python", f"echo $* >> {tmp_path}/calls; cat > /dev/null; {answers}")
    found = verify.run(planned(GROK_2), wheel(tmp_path), python, tmp_path / "unpacked")
    assert (found["worst"], found["faults"], found["timings"]) == (None, [f"{PLAIN}: x"], [])
    told = verify.lines(found)
    assert told[0].startswith("verified on H200: 0 outputs against float64; ") and told[1] == f"  WRONG: {PLAIN}: x"
    assert len((tmp_path / "calls").read_text().splitlines()) == 1, "what is wrong is not timed"


# In place of the interpreter: right answers, and times by the names of the libraries.
TIMES = """
import json, os, sys
asked = json.load(sys.stdin)
if "verify.py" in sys.argv[1]:
    print(json.dumps({"gpu": "H200", "torch": "x", "flash_attn": "x"}))
    for case in asked["cases"]:
        print(json.dumps({"case": case, "variant": {}, "error": 0.001, "plain": 0.001}))
else:
    assert all(os.path.isfile(path) for path in asked["libraries"].values())
    print(json.dumps({"first_call_ms": {}, "launch_us": {}}))
    for case in asked["shapes"]:
        taken = {"fenno": 99.0 if case["softcap"] else 101.0, "stock": 100.0, "sdpa": 80.0}
        times = {name: {"low": t, "median": t, "high": t} for name, t in taken.items() if name in [*asked["libraries"], "sdpa"]}
        print(json.dumps({"shape": case, "times": times}))
print(json.dumps({"done": True}))
"""


def test_a_wheel_is_timed_beside_the_same_units_with_stock_flags_when_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "answers.py").write_text(TIMES)
    python, made = stand_in(tmp_path / "python", f'exec {sys.executable} {tmp_path}/answers.py "$1"'), planned(GROK_2)
    alone = verify.run(made, wheel(tmp_path), python, tmp_path / "alone")
    beside = verify.run(made, wheel(tmp_path), python, tmp_path / "beside", lambda: wheel(tmp_path))
    assert [set(row["times"]) for row in alone["timings"][1:]] == [{"fenno", "sdpa"}] * len(verify.timed_shapes(made))
    assert [set(row["times"]) for row in beside["timings"][1:]] == [{"fenno", "stock", "sdpa"}] * len(verify.timed_shapes(made))
    assert alone["against_stock"] is None
    assert beside["against_stock"] == {"shapes": 18, "lowest": 0.99, "highest": 1.01}
    assert "with stock flags" not in " ".join(verify.lines(alone))
    assert verify.lines(beside)[-1] == (
        "  beside the same units with stock flags: 0.990 to 1.010 of their time, on the 18 shapes of 50 us and more"
    )


def test_nothing_is_built_to_time_a_wheel_against_that_is_wrong(tmp_path: Path) -> None:
    answers = "; ".join(f"echo '{json.dumps(row)}'" for row in (HEAD, FAILED, {"done": True}))
    python = stand_in(tmp_path / "python", f"cat > /dev/null; {answers}")
    found = verify.run(planned(GROK_2), wheel(tmp_path), python, tmp_path / "x", lambda: pytest.fail("it was built"))
    assert found["faults"]


def test_a_model_with_a_soft_cap_is_timed_without_it_too_and_short_calls_are_not_judged() -> None:
    assert {case.softcap for case in verify.timed_shapes(planned(GROK_2))} == {0.0, verify.CAP}
    assert verify.timed_shapes(planned(LLAMA_3_70B)) == verify.shapes(planned(LLAMA_3_70B))
    pairs = ((10.0, 20.0), (49.0, 49.9), (51.0, 50.0), (99.0, 100.0))
    rows = [{"times": {"fenno": {"median": fenno}, "stock": {"median": stock}}} for fenno, stock in pairs]
    assert verify.against_stock(rows) == {"shapes": 2, "lowest": 0.99, "highest": 1.02}
    assert verify.against_stock(rows[:2]) is None


def wheel(tmp_path: Path) -> Path:
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as made:
        made.writestr("flash_attn_2_cuda.cpython-312.so", "")
        made.writestr("flash_attn/__init__.py", "")
    return tmp_path / "x.whl"


def test_without_a_gpu_the_import_is_all_that_is_verified_and_that_is_said(tmp_path: Path) -> None:
    answer = json.dumps({**HEAD, "gpu": None})
    python = stand_in(tmp_path / "python", f"cat > {tmp_path}/asked; echo '{answer}'; echo '{{\"done\": true}}'")
    found = verify.run(planned(GROK_2), wheel(tmp_path), python, tmp_path / "unpacked")
    assert (found["gpu"], found["compared"], found["faults"], found["timings"]) == (None, 0, [], [])
    assert verify.lines(found) == [
        "verified: it imports, and its library is whole; outputs and times are skipped: torch sees no GPU here"
    ]
    assert len(json.loads((tmp_path / "asked").read_text())["cases"]) == len(verify.cases(planned(GROK_2)))


@pytest.mark.parametrize(
    ("step", "says"),
    [
        ("echo 'ImportError: undefined symbol: x' >&2; exit 1", "does not run under .*: ImportError: undefined symbol: x"),
        (f"echo '{json.dumps(HEAD)}'; exit 134", "the verification died after the import"),
        (f"echo '{json.dumps(HEAD)}'; echo '{json.dumps(FAILED)}'; exit 134", f"died after {PLAIN}"),
    ],
)
def test_a_wheel_that_does_not_import_or_dies_is_one_sentence(step: str, says: str, tmp_path: Path) -> None:
    python = stand_in(tmp_path / "python", f"cat > /dev/null; {step}")
    with pytest.raises(BuildError, match=says):
        verify.run(planned(GROK_2), wheel(tmp_path), python, tmp_path / "unpacked")


def test_times_are_told_with_their_quartiles() -> None:
    times = {"fenno": {"low": 99.0, "median": 100.0, "high": 101.0}, "sdpa": {"low": 119.0, "median": 120.0, "high": 121.0}}
    rows = [{"first_call_ms": {"fenno": 30.0}, "launch_us": {"fenno": 9.0}}, {"shape": asdict(PLAIN), "times": times}]
    told = [line for row in rows for line in verify.timing_lines(row)]
    assert told == [
        "  fenno: first call 30.0 ms, launch 9.0 us",
        f"  {PLAIN}: fenno 100.0 us (99.0 to 101.0), sdpa 120.0 us (119.0 to 121.0)",
    ]


def other_arithmetic(torch: Any) -> types.ModuleType:
    """flash_attn's three calls by torch's own attention in float64, sequence by sequence, with masks written out."""

    def one(q: Any, k: Any, v: Any, causal: bool, softcap: float, window_size: tuple[int, int], alibi_slopes: Any) -> Any:
        shift, far = k.shape[0] - q.shape[0], 10**9
        right = 0 if causal else window_size[1] if window_size[1] >= 0 else far
        left = window_size[0] if window_size[0] >= 0 else far
        mask = torch.full((q.shape[1], q.shape[0], k.shape[0]), -math.inf, dtype=torch.float64)
        for i in range(q.shape[0]):
            for j in range(max(0, i + shift - left), min(k.shape[0], i + shift + right + 1)):
                mask[:, i, j] = 0.0 if alibi_slopes is None else -alibi_slopes.double() * abs(i + shift - j)
        q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
        k, v = (t.repeat_interleave(q.shape[0] // k.shape[0], 0) for t in (k, v))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        return (torch.softmax(scores + mask, -1) @ v).transpose(0, 1)

    def whole(q: Any, k: Any, v: Any, **more: Any) -> Any:
        return torch.stack([one(*parts, **more) for parts in zip(q, k, v, strict=True)])

    def varlen(q: Any, k: Any, v: Any, ends: Any, ends_k: Any, longest: int, longest_k: int, **more: Any) -> Any:
        sizes = ends.diff().tolist()
        return torch.cat([one(*parts, **more) for parts in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)])

    def cached(q: Any, kc: Any, vc: Any, k: Any = None, v: Any = None, **more: Any) -> Any:
        outs, cache_seqlens, block_table = [], more.pop("cache_seqlens"), more.pop("block_table", None)
        for i, filled in enumerate(cache_seqlens.tolist()):
            keys, values = (t[block_table[i]].flatten(0, 1) if block_table is not None else t[i] for t in (kc, vc))
            keys, values = keys[:filled], values[:filled]
            if k is not None:
                keys, values = torch.cat([keys, k[i]]), torch.cat([values, v[i]])
            outs.append(one(q[i], keys, values, **more))
        return torch.stack(outs)

    made = types.ModuleType("flash_attn")
    made.flash_attn_func, made.flash_attn_varlen_func, made.flash_attn_with_kvcache = whole, varlen, cached  # type: ignore[attr-defined]
    return made


def inside_verify(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script that runs under the wheel's interpreter, as a module."""
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "flash_attn", other_arithmetic(torch))
    spec = importlib.util.spec_from_file_location("fa2_inside_verify", verify.INSIDE / "verify.py")
    assert spec is not None and spec.loader is not None
    inside = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(inside)
    return inside


@pytest.mark.scenario
def test_after_a_call_that_takes_the_gpu_nothing_more_is_called_or_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    inside, torch = inside_verify(monkeypatch), pytest.importorskip("torch")

    def illegal(*given: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")

    inside.compare = illegal
    monkeypatch.setattr(inside.flash_attn, "__file__", "x", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    asked = {"cases": [asdict(PLAIN)] * 2, "refused": [asdict(PLAIN)], "variants": [{}]}
    rows = []
    for usable in (illegal, lambda: None):
        monkeypatch.setattr(torch.cuda, "synchronize", usable)
        monkeypatch.setattr(inside, "answer", illegal)
        monkeypatch.setattr(inside, "tensors", lambda case: {})
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(asked)))
        inside.main()
        rows.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert [next(iter(row)) for row in rows[0]] == ["gpu", "case", "done"]
    assert [next(iter(row)) for row in rows[1]] == ["gpu", "case", "case", "refused", "done"], "refused is not lost"
    assert verify.faults(rows[0]) == [f"{PLAIN}: CUDA error: an illegal memory access was encountered"]


ALL = {"softcap": 3.0, "window": 4, "alibi": True}
SMALL = Case("whole", 2, 9, 9, 4, 2, 16, "bf16")


@pytest.mark.scenario
@pytest.mark.parametrize("change", [{}, {"softcap": 3.0}, {"window": 4}, {"alibi": True}, ALL], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        replace(SMALL, causal=False),
        replace(SMALL, queries=3),
        replace(SMALL, kind="uneven"),
        replace(SMALL, kind="cache", batch=3, queries=2, keys=40),
        replace(SMALL, kind="append", queries=1, keys=40),
        replace(SMALL, kind="paged", queries=1, keys=300),
    ],
    ids=lambda case: f"{case.kind}-{case.queries}-{case.causal}",
)
def test_the_reference_agrees_with_other_arithmetic_on_every_kind_of_call(
    case: Case, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = inside_verify(monkeypatch)
    inside.DEVICE = "cpu"
    found = inside.compare(asdict(replace(case, **change)))
    assert found["error"] < 1e-6
    assert 1e-4 < found["plain"] < 0.1, "bfloat16 is off by some thousandths"
