#!/usr/bin/env bash
# One GPU host without a network: builds the trimmed wheel for the shape of a Llama-3-70B and a Grok, verifies and times it, and holds it against
# the same units built with stock flags: `fenno build-fa2 --stock`, with both builds at once.
# usage: h200.sh FOLDER RESULTS
#   FOLDER   what gather.sh made. With Python 3.12's headers as its "include": for a host that lacks Python.h. With built.tar, trimmed.json,
#            stock.json and others.json of an earlier run's RESULTS: nothing is built again.
#   RESULTS  gets log.txt, trimmed.json, verified.json, logits.json, stock.json, others.json, release.json, built.tar (8 files, under 16 MB each)
# needs: python3 3.12 with torch for CUDA 13, ninja and setuptools >= 70.1 (transformers for the logits), nvcc 13 and g++, an sm_90 GPU,
#   16 cores, 64 GB of memory, 10 GB of disk under TMPDIR (/tmp). LIMIT: seconds after which it waits no longer for stock units (500).
# CONFIG: another model's config.json; then it is these two builds and the times alone (LIMIT=210 for heads of 64):
#   {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$(realpath "$1") results=$(realpath -m "$2") limit=${LIMIT:-500} arch=${ARCH:-sm_90}
work=${TMPDIR:-/tmp}/fenno-fa2-h200 python=$(command -v python3)
rm -rf "$work"; mkdir -p "$results" "$work/model" "$work/site" "$work/out"
exec > >(tee "$results/log.txt") 2>&1
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
say() { echo "== $SECONDS s: $*"; }
ended() { kill -TERM "$same" "$others" 2>/dev/null; wait "$same" "$others" 2>/dev/null; }
# fenno's own imports; packages that are there already come first.
python3 -c 'import typer, rich, pydantic, yaml, psutil, packaging, pynvml' 2>/dev/null || {
  for wheel in "$folder"/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
  export PYTHONPATH="$PYTHONPATH:$work/site"
}
[ ! -d "$folder/include" ] || export CPLUS_INCLUDE_PATH="$folder/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}"
archive=$(echo "$folder"/flash_attn-*.tar.gz)
cat > "$work/model/config.json" <<'J'
{"architectures": ["Grok1ForCausalLM"], "model_type": "git", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
 "head_dim": 128, "attn_logit_softcapping": 30.0, "torch_dtype": "bfloat16"}
J
[ -z "${CONFIG:-}" ] || cp "$CONFIG" "$work/model/config.json"
[ ! -f "$folder/built.tar" ] || tar xf "$folder/built.tar" -C "$work/out"
say "$(date -u +%F) $(uname -r), $(nproc) cores, $(nvcc --version | grep -om1 'V[0-9.]\+'), $(g++ -dumpfullversion)"
python3 -c 'import torch; print("torch", torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")'

say "stock units in the background"
units() { exec python3 benchmarks/fa2/stock.py "$work/model" "$arch" "$archive" "$work/out/$1" "$1" > "$results/$2.json" 2> "$work/$1.log"; }
units same stock & same=$!
others=$same
[ -n "${CONFIG:-}" ] || { units others others & others=$!; }
say "the trimmed wheel, beside them"
build=(python3 -m fenno build-fa2 --model "$work/model" --arch "$arch" --source "$archive" --python "$python" --out "$work/out/trimmed" --json)
"${build[@]}" > "$results/trimmed.json" || { say "the build failed"; ended; exit 1; }
[ ! -f "$folder/built.tar" ] || { wait "$same" "$others"; cp "$folder"/{trimmed,stock,others}.json "$results"; }
if [ -z "${CONFIG:-}" ]; then
  say "transformers"
  wheel=$(echo "$work"/out/trimmed/*/*.whl)
  python3 -m zipfile -e "$wheel" "$work/unpacked"
  PYTHONPATH="$work/unpacked:$PYTHONPATH" timeout 120 python3 benchmarks/fa2/logits.py > "$results/logits.json" || say "the logits failed"
  cat "$results/logits.json"
fi
say "wait for the stock units until $limit s"
while { kill -0 "$same" || kill -0 "$others"; } 2>/dev/null && [ "$SECONDS" -lt "$limit" ]; do sleep 1; done
ended
tail -n 1 "$work"/*.log
(cd "$work/out" && tar cf "$results/built.tar" $(find . -name '*.whl'))
[ -n "${CONFIG:-}" ] || python3 benchmarks/fa2/release.py "$results"/{trimmed,stock,others}.json > "$results/release.json" || say "no extrapolation"
stock=
# Where --stock looks for what was built before; without a wheel it would build it anew.
for made in "$work"/out/same/*/*.whl; do [ ! -f "$made" ] || { mv "$(dirname "$made")" "$work/out/trimmed/"; stock=--stock; }; done
say "verify, ${stock:-not against stock flags: they did not get ready}"
"${build[@]}" --verify $stock > "$results/verified.json" || say "THE VERIFICATION FAILED"
say "done"
rm -rf "$work"
