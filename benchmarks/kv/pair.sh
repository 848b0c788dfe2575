#!/usr/bin/env bash
# What needs two GPUs of one host: the KV cache moved between them, `fenno doctor` beside what vLLM decides there, the contiguous cache on one of
# them, and the plan of layouts and blocks beside engines that are really started. Every part has a limit of its own, and none spoils another.
# usage: pair.sh RESULTS [a|b]       a (90 s): transfers, doctor, caches, and the plan;  b (120 s, after a): engines started by that plan
#   RESULTS/a and RESULTS/b get the files; index.txt there has each part's exit code and seconds.
# needs: python3 with vLLM, transformers and what fenno imports on PYTHONPATH; two GPUs with NVLink; timeout. NVLink multicast stays off.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd) part=${2:-a}
results=$(realpath -m "$1")/$part python=${PYTHON:-python3}
first=${FIRST:-$(realpath -m "$1")/a}
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

if [ "$part" = a ]; then
  # First the links, with nothing else on the GPUs; beside them what needs the processor alone.
  run plan 60 "${fenno[@]}" patch-kv plan whole.yaml & plan=$!
  run transfers 32 "$python" "$root/benchmarks/kv/pair.py" "$results/transfers.json"
  # The doctor's copies come long before the bench is through with asking vLLM.
  run bench 45 "${fenno[@]}" patch-kv bench whole.yaml --batch 8 --tokens 256 & bench=$!
  run doctor 10 "${fenno[@]}" -v doctor
  run doctor-tp2 35 "${fenno[@]}" -v doctor tp2.yaml --deep
  wait $bench
  # Then the caches, on a GPU each, and vLLM's own word on its all-reduce.
  left=$((88 - SECONDS)); [ $left -gt 15 ] || left=15
  CUDA_VISIBLE_DEVICES=1 run cache $left "$python" "$root/benchmarks/kv/cache.py" --device cuda --dtype bfloat16 --out "$results/cache.json" & jobs=$!
  for model in Llama Qwen2 Mixtral Gemma2; do
    CUDA_VISIBLE_DEVICES=0 run "same-$model" $left "$python" "$root/benchmarks/kv/same.py" $model --device cuda --out "$results/same-$model.json" &
    jobs+=" $!"
  done
  run all-reduce $left "$python" "$root/benchmarks/kv/all_reduce.py" "$results/all-reduce.json" & jobs+=" $!"
  wait $plan $jobs
else
  limit=${LIMIT:-110}
  run starts "$limit" "$python" "$root/benchmarks/kv/starts.py" "$first/plan.out" "$work/two" "$results" --limit $((limit - 8)) --gpus "${GPUS:-2}"
fi
grep -h "apart by" "$results"/same-*.out 2> /dev/null
cat "$results"/{transfers,all-reduce,cache,starts}.out 2> /dev/null
echo "done after $SECONDS s"
