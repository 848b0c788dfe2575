# Sourced by pair.sh and one.sh, with $root and $results set: variables for every child, a log of each part, two models as an engine has to know them.
rm -rf "$results"; mkdir -p "$results"
python=${PYTHON:-python3} work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
exec > >(tee "$results/log.txt") 2>&1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_NO_USAGE_STATS=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
fenno=("$python" -m fenno)
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
recipe() { # NAME MODEL FLAGS: a recipe NAME.yaml
  cat > "$1.yaml" <<Y
name: $1
engine: {model: "$2", flags: {dtype: bfloat16, max-model-len: 4096, skip-tokenizer-init: true, $3}}
Y
}
shape "$work/whole" 64; shape "$work/two" 2
recipe whole "$work/whole" "load-format: dummy"
