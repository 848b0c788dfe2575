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
results=$(realpath -m "$1")/$part python=${PYTHON:-python3}
rm -rf "$results"; mkdir -p "$results"
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
exec > >(tee "$results/log.txt") 2>&1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
cd "$work"   # not the checkout: vLLM's children would import from it
run() { # NAME SECONDS COMMAND...: its output, its log, a line in index.txt
  local name=$1 seconds=$2 began=$SECONDS code; shift 2
  timeout -k 3 "$seconds" "$@" > "$results/$name.out" 2> "$results/$name.log"; code=$?
  echo "$name: exit code $code after $((SECONDS - began)) s, at $SECONDS s" | tee -a "$results/index.txt"
}
shape() { # FOLDER LAYERS: a Llama with Grok-2's KV heads, as far as an engine has to know it
  mkdir -p "$1"
  cat > "$1/config.json" <<J
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": $2,
 "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 1024, "max_position_embeddings": 4096,
 "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
J
}
shape "$work/whole" 64; shape "$work/two" 2
cat > "$work/whole.yaml" <<Y
name: kv-pair
engine: {model: $work/whole, flags: {load-format: dummy, dtype: bfloat16, max-model-len: 4096, skip-tokenizer-init: true}}
Y
cat > "$work/tp2.yaml" <<Y
name: tp2
engine: {model: "dummy:grok2-9b", flags: {load-format: dummy, dtype: bfloat16, max-model-len: 4096, tensor-parallel-size: 2}}
host: {gpus: 2, gpu_memory: 100GiB}
Y
fenno=("$python" -m fenno)

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
