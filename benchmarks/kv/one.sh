#!/usr/bin/env bash
# What one GPU can tell of the KV cache: the contiguous cache beside transformers' two, the plan of layouts and blocks beside engines that are
# really started, and `fenno patch-kv verify` of a sound model and of one with a NaN in it. Every part has a limit of its own.
# usage: one.sh RESULTS [SITE26]
#   RESULTS/one gets the files; index.txt there has each part's exit code and seconds. SITE26: a folder with vLLM 0.26, of which the plan alone
#   is asked. LIMIT: seconds for all of it (240).
# needs: python3 with vLLM, transformers and what fenno imports on PYTHONPATH; one GPU; timeout.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd) limit=${LIMIT:-240}
results=$(realpath -m "$1")/one site26=${2:-}
. "$root/benchmarks/kv/parts.sh"
left() { local left=$((limit - SECONDS - ${1:-0})); echo $((left > 15 ? left : 15)); }
here=$root/benchmarks/kv

# The cache's steps first, with nothing else on the GPU; a plan takes the processor alone.
run plan "$(left)" "${fenno[@]}" patch-kv plan whole.yaml & jobs=$!
if [ -n "$site26" ]; then
  PYTHONPATH="$site26:$PYTHONPATH" run plan-0.26 "$(left)" "${fenno[@]}" patch-kv plan whole.yaml & jobs+=" $!"
fi
# With torch's own choice of attention kernels a step of two of the caches takes ten times as long: two lengths tell that.
steps=("$python" "$here/cache.py" --device cuda --dtype bfloat16)
run cache "$(left 130)" "${steps[@]}" --no-cudnn --out "$results/cache.json"
run cache-cudnn "$(left 90)" "${steps[@]}" --tokens 1024 8192 --out "$results/cache-cudnn.json"
wait $jobs

# Then all that has no time to measure, at once.
memory="enforce-eager: true, gpu-memory-utilization: 0.1, kv-cache-memory-bytes: 2147483648"
recipe sound "$work/whole" "load-format: dummy, $memory"
recipe spoilt "$work/spoilt" "$memory"
"$python" "$here/spoilt.py" "$work/two/config.json" "$work/spoilt" > "$results/spoilt-model.out" 2>&1
run verify-sound "$(left)" "${fenno[@]}" patch-kv verify sound.yaml & jobs=$!
run verify-spoilt "$(left)" "${fenno[@]}" patch-kv verify spoilt.yaml & jobs+=" $!"
run starts "$(left)" "$python" "$here/starts.py" "$results/plan.out" "$work/two" "$results" --limit "$(left 8)" --gpus 1 & jobs+=" $!"
for model in Llama Qwen2 Mixtral Gemma2; do
  run "same-$model" "$(left)" "$python" "$here/same.py" $model --device cuda --out "$results/same-$model.json" & jobs+=" $!"
done
wait $jobs
cat "$results"/{cache,cache-cudnn,starts,verify-sound,verify-spoilt}.out
grep -h "apart by" "$results"/same-*.out
echo "done after $SECONDS s"
