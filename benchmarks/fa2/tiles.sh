#!/usr/bin/env bash
# One GPU host without a network: every possible tile size for heads of 128 in bfloat16 (a Llama-3-70B: 64 heads over 8, no soft cap), built,
# checked and timed. 311 s on 16 cores.
# usage: tiles.sh FOLDER RESULTS      FOLDER is what gather.sh made; RESULTS gets log.txt and tiles.json
# PATCH=1: the tile of few rows instead, by the patch in patches/flash-attn: the patched source built and verified (patched.json). Not run on a GPU yet.
# needs: what h200.sh needs
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$(realpath "$1") results=$(realpath -m "$2") arch=${ARCH:-sm_90}
work=${TMPDIR:-/tmp}/fenno-fa2-tiles
rm -rf "$work"; mkdir -p "$results" "$work/model" "$work/site"
exec > >(tee "$results/log.txt") 2>&1
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
python3 -c 'import typer, rich, pydantic, yaml, psutil, packaging, pynvml' 2>/dev/null || {
  for wheel in "$folder"/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
  export PYTHONPATH="$PYTHONPATH:$work/site"
}
[ ! -d "$folder/include" ] || export CPLUS_INCLUDE_PATH="$folder/include${CPLUS_INCLUDE_PATH:+:$CPLUS_INCLUDE_PATH}"
cat > "$work/model/config.json" <<'J'
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8,
 "torch_dtype": "bfloat16"}
J
echo "$(date -u +%F) $(nproc) cores, nvcc $(nvcc --version | grep -om1 'V[0-9.]\+')"
source=$(echo "$folder"/flash_attn-*.tar.gz) option=--tiles name=tiles
if [ -n "${PATCH:-}" ]; then
  tar xf "$source" -C "$work"
  source=$(echo "$work"/flash_attn-*) option=--verify name=patched
  python3 -m fenno patch apply --source "$source" || exit 1
fi
python3 -m fenno build-fa2 --model "$work/model" --arch "$arch" --source "$source" --python "$(command -v python3)" --out "$work/out" \
  "$option" --json > "$results/$name.json"
echo "== $SECONDS s, exit code $?"
rm -rf "$work"
