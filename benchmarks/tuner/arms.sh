#!/usr/bin/env bash
# Both arms of a model after cold starts with plain flags: what vLLM's defaults hold, then `fenno tune` at GAIN times that, confirmed, then
# what its winner holds. Each phase has a limit, what it measured lies in RESULTS as soon as it has ended, and RESULTS/MODEL/summary.txt says what is
# known so far. Several models: each with a GPU and 16 cores of its own, as many side by side as there are GPUs.
# usage: arms.sh RESULTS SECONDS MODEL=RATE...     (PYTHON: an interpreter with vLLM and fenno; SITE: packages to compile first;
# GAIN: 1.2 unless given; GPUS: how many to use; LEAST: seconds without which no engine is started)
# SECONDS: when all has to be over; MODEL: a recipe's name or file; RATE: what its defaults are tried at first.
# example: arms.sh out 1450 gpu-grok2-9b=58. On one H200, by what each phase took before: 60 s to prepare, 300 for the defaults, 500 for
# the search with its cold start, 300 for the winner; the limits leave room for 1,450.
set -uo pipefail
results=$(realpath -m "$1") deadline=$(($(date +%s) + $2)); shift 2
here=$(dirname "$(realpath "$0")") work=$(mktemp -d)
export PYTHON=${PYTHON:-python3} HF_HUB_OFFLINE=1 LEAST=${LEAST:-150}
mkdir -p "$results"
left() { echo $((deadline - $(date +%s) - ${1:-0})); }
stamp() { echo "$(date +%s) $(left) $*" | tee -a "$results/stamps"; }
# The least of two numbers of seconds.
least() { echo $(($1 < $2 ? $1 : $2)); }

# What a capacity search has seen held, in requests a second; another number where that is nothing.
held() { # FILE OTHERWISE
    "$PYTHON" - "$@" <<'PY'
import json, sys
try:
    found = json.load(open(sys.argv[1]))["capacity"]["held"]
except (OSError, ValueError, KeyError):
    found = None
print(f"{found or float(sys.argv[2]):.3f}")
PY
}

# What a setting holds after a cold start.
capacity() { # NAME RECIPE FIRST STEP SECONDS FLAG...
    local name=$1 recipe=$2 first=$3 step=$4 seconds=$5; shift 5
    [ "$seconds" -gt "$LEAST" ] || { stamp "$name: $seconds s are too few"; return 0; }
    stamp "$name: capacity from $first requests/s, $seconds s"
    RECIPE=$recipe STEP=$step OUT=$out TMPDIR=$work timeout -k 10 "$seconds" \
        "$here/capacity.sh" "$name" "$first" $((seconds - 10)) "$@" || stamp "$name: exit code $?"
}

# The search at a rate, and the cold start that confirms it.
tuned() { # RECIPE RATE SECONDS
    [ "$3" -gt "$LEAST" ] || { stamp "tune: $3 s are too few"; return 0; }
    stamp "tune: $2 requests/s, $3 s"
    local studies=$work/studies-$(basename "$out")
    RECIPE=$1 OUT=$out/tune STUDIES=$studies timeout -k 40 $(($3 + 15)) "$here/h200.sh" "$2" "$3s" || stamp "tune: exit code $?"
    [ ! -f "$studies"/*/tuned.yaml ] || cp "$studies"/*/tuned.yaml "$out/winner.yaml"
}

summary() { (cd "$work" && "$PYTHON" - "$out") >"$out/summary.txt" 2>&1 <<'PY'
import json, math, pathlib, sys
from fenno.tune.capacity import Most, gain
out, found = pathlib.Path(sys.argv[1]), {}
for name in ("defaults", "winner", "tune/result"):
    try:
        found[name] = json.loads((out / f"{name}.json").read_text())
        print(f"{name}: {found[name]['sentence']}")
    except (OSError, ValueError, KeyError):
        print(f"{name}: not known")
arms = [Most("qps", f["held"] or 0.0, f["held"] or 0.0, f["lost"] or math.inf) for n in ("winner", "defaults") if (f := found.get(n, {}).get("capacity"))]
if len(arms) == 2 and arms[1].value:
    print("winner against defaults: {:+.0%}, {:+.0%} at least, {:+.0%} at most".format(*gain(*arms)))
PY
}

# A model's three phases, with an end of their own.
model() { # RECIPE FIRST END
    local recipe=$1 first=$2 after=$((deadline - $3)) rate; out=$results/$(basename "$recipe" .yaml)
    mkdir -p "$out"
    capacity defaults "$recipe" "$first" 1.1 "$(least 350 "$(left $((after + 2 * LEAST)))")"; summary
    rate=$("$PYTHON" -c 'import sys; print(f"{float(sys.argv[1]) * float(sys.argv[2]):.1f}")' "$(held "$out/defaults.json" "$first")" "${GAIN:-1.2}")
    tuned "$recipe" "$rate" "$(least 640 "$(left $((after + 60)))")"; summary
    if [ -f "$out/winner.yaml" ]; then
        capacity winner "$out/winner.yaml" "$rate" 1.15 "$(left $((after + 5)))"
    else # not known which: what a fast GPU waits for first
        capacity winner "$recipe" "$(held "$out/defaults.json" "$first")" 1.2 "$(left $((after + 5)))" "api-server-count: 4"
    fi
    summary
    stamp "$(basename "$out"): $(tail -1 "$out/summary.txt")"
}

# One GPU's models one after the other, with 16 cores where there are so many.
alone() { # GPU MODEL=RATE...
    local gpu=$1 from=$((16 * $1)) to=$((16 * $1 + 15)) one; shift
    [ "$(nproc)" -gt "$to" ] && taskset -cp "$from-$to" "$BASHPID" >/dev/null
    export CUDA_VISIBLE_DEVICES=$gpu
    while [ $# -gt 0 ]; do
        one=$1
        model "${one%=*}" "${one##*=}" $(($(date +%s) + $(left) / $#))
        shift
    done
}

prepare() {
    { nvidia-smi; nvidia-smi topo -m; lscpu; free -g; "$PYTHON" -m pip list; } >"$results/host.txt" 2>&1
    timeout 60 "$PYTHON" -m compileall -q -j 8 "${SITE:-$work}" >/dev/null 2>&1
    # What the engine can be told is asked once and kept; loads and studies find it there.
    timeout 90 "$PYTHON" -m fenno recipe lint gpu-llama3-8b >"$results/lint.txt" 2>&1
    stamp "prepared"
}

cd "$work" || exit 1
stamp "begins"
prepare
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
[ "$gpus" -gt 0 ] || stamp "there is no GPU"
for ((gpu = 0; gpu < gpus; gpu++)); do
    mine=()
    for ((n = gpu + 1; n <= $#; n += gpus)); do mine+=("${!n}"); done
    [ ${#mine[@]} -eq 0 ] || (alone "$gpu" "${mine[@]}") >"$results/gpu$gpu.out" 2>&1 &
done
wait
stamp "ended"
