#!/usr/bin/env bash
# What needs two GPUs of one host: the KV cache moved between them, `fenno doctor` beside what vLLM decides there, the contiguous cache on one of
# them, and the plan of layouts and blocks beside engines that are really started. Every part has a limit of its own, and none spoils another.
# usage: pair.sh RESULTS [a|c|b]
#   a: transfers, doctor, plan, caches;  c: the same without the doctor;  b (after one of them): engines started by the plan
#   RESULTS/a, b and c get the files; index.txt there has each part's exit code and seconds. LIMIT: seconds for all of it (180, 150 and 108;
#   on a host that reads vLLM from a slow disk for the first time, 90 were too few: its import took a minute).
# needs: python3 with vLLM, transformers and what fenno imports on PYTHONPATH; two GPUs with NVLink; timeout. NVLink multicast stays off.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd) part=${2:-a}
results=$(realpath -m "$1")/$part
. "$root/benchmarks/kv/parts.sh"
cat > "$work/tp2.yaml" <<Y
name: tp2
engine: {model: "dummy:grok2-9b", flags: {load-format: dummy, dtype: bfloat16, max-model-len: 4096, tensor-parallel-size: 2}}
host: {gpus: 2, gpu_memory: 100GiB}
Y

if [ "$part" != b ]; then
  limit=${LIMIT:-$([ "$part" = a ] && echo 180 || echo 150)}
  left() { local left=$((limit - SECONDS)); [ $left -gt "$1" ] && echo $left || echo "$1"; }
  # First the links, with nothing else on the GPUs; beside them what needs the processor alone.
  run plan "$(left 15)" "${fenno[@]}" patch-kv plan whole.yaml & jobs=$!
  run transfers 32 "$python" "$root/benchmarks/kv/pair.py" "$results/transfers.json"
  if [ "$part" = a ]; then
    run doctor 10 "${fenno[@]}" -v doctor
    run doctor-tp2 35 "${fenno[@]}" -v doctor tp2.yaml --deep
  fi
  # Then the caches, on a GPU each, and vLLM's own word on its all-reduce.
  CUDA_VISIBLE_DEVICES=1 run cache "$(left 15)" "$python" "$root/benchmarks/kv/cache.py" --device cuda --dtype bfloat16 --out "$results/cache.json" &
  jobs+=" $!"
  for model in Llama Qwen2 Mixtral Gemma2; do
    CUDA_VISIBLE_DEVICES=0 run "same-$model" "$(left 15)" "$python" "$root/benchmarks/kv/same.py" $model --device cuda --out "$results/same-$model.json" &
    jobs+=" $!"
  done
  run all-reduce "$(left 15)" "$python" "$root/benchmarks/kv/all_reduce.py" "$results/all-reduce.json" & jobs+=" $!"
  wait $jobs
  [ "$(left 0)" -lt 45 ] || run bench "$(left 0)" "${fenno[@]}" patch-kv bench whole.yaml --batch 8 --tokens 256
else
  limit=${LIMIT:-108}
  for plan in "$results"/../{c,a}/plan.out; do [ -s "$plan" ] && break; done
  if [ ! -s "$plan" ]; then
    plan=$results/plan.out
    run plan 60 "${fenno[@]}" patch-kv plan whole.yaml
  fi
  left=$((limit - SECONDS))
  run starts "$left" "$python" "$root/benchmarks/kv/starts.py" "$plan" "$work/two" "$results" --limit $((left - 8)) --gpus "${GPUS:-2}"
fi
grep -h "apart by" "$results"/same-*.out 2> /dev/null
cat "$results"/{transfers,all-reduce,cache,starts}.out 2> /dev/null
echo "done after $SECONDS s"
