#!/usr/bin/env bash
# `fenno tune` on one GPU under the article's mix. Everything that was measured lands in $OUT, also where this is ended (TERM) before its time.
# usage: h200.sh RATE BUDGET [more options of fenno tune]      (PYTHON: an interpreter with vLLM and fenno; RECIPE: another recipe)
set -euo pipefail
rate=$1 budget=$2; shift 2
out=${OUT:-$PWD/out}; studies=${STUDIES:-/tmp/studies}
export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
mkdir -p "$out"
# Raw records and logs, without the plugin's copy.
trap 'tar -C "$studies" --exclude=plugin --exclude="*.pyc" -czf "$out/studies.tar.gz" . || true' EXIT
trap 'exit 143' TERM
rc=0
"${PYTHON:-python3}" -m fenno -v tune "${RECIPE:-gpu-grok2-9b}" --target-p95 800ms --target-qps "$rate" --budget "$budget" --out "$studies" "$@" \
    >"$out/result.json" 2> >(tee "$out/tune.log" >&2) || rc=$?
cat "$out/result.json"
exit $rc
