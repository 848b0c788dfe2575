#!/usr/bin/env bash
# The largest steady rate of gpu-grok2-9b under its target after one cold start with plain flags, as `fenno loadtest
# --find-capacity` finds it. Everything that was measured lands in $OUT.
# usage: capacity.sh NAME FIRST SECONDS [FLAG: VALUE]...     (PYTHON: an interpreter with vLLM and fenno; RECIPE: another recipe;
# STEP: the factor from one rate to the next, WARMUP: as in the recipe)
# FIRST: the rate that is tried first; SECONDS: when the search has to end, start included; flags are laid over the recipe's.
set -euo pipefail
name=$1 first=$2 seconds=$3; shift 3
out=${OUT:-$PWD/out} python=${PYTHON:-python3} work=$(mktemp -d)
export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
mkdir -p "$out"
"$python" - "$work/$name.yaml" "$@" <<'PY'
import os, sys, yaml
from fenno import recipe
chosen = yaml.safe_load(recipe.find(os.environ.get("RECIPE", "gpu-grok2-9b")).read_text())
chosen["engine"]["flags"] |= dict(yaml.safe_load(flag).popitem() for flag in sys.argv[2:])
# Long enough for an answer of 512 tokens at 60 ms a token; a queue that still grows afterwards is seen, and said.
if os.environ.get("WARMUP"):
    chosen["search"]["warmup"] = os.environ["WARMUP"]
open(sys.argv[1], "w").write(yaml.safe_dump(chosen, sort_keys=False))
PY
rc=0
"$python" -m fenno -v loadtest "$work/$name.yaml" --find-capacity --rate "$first" --step "${STEP:-2}" --target p95_ttft=800ms --budget "${seconds}s" \
    --out "$work/records" --json >"$out/$name.json" 2> >(tee "$out/$name.log" >&2) || rc=$?
cp "$work/$name.yaml" "$out/"
echo "$name: exit code $rc, $(tail -c 400 "$out/$name.log" | tail -1)"
exit $rc
