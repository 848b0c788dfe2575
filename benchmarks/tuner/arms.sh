#!/usr/bin/env bash
# Two models on two GPUs of one host, side by side and with 16 cores each: for each `fenno tune` at a rate that the defaults do not
# hold, then what cold starts hold with plain flags, the tuned setting before the defaults where the search has not confirmed it.
# On one GPU, one model after the other. Everything that was measured lands in RESULTS, as soon as it is there.
# usage: two.sh RESULTS DEADLINE [COMMAND...]
# DEADLINE: a file with the epoch second at which all has to be over; COMMAND: what has the GPUs before, its folder as last argument.
# AFTER: a command that has the first GPU after the first search, with a folder and its seconds as last arguments.
set -uo pipefail
results=$(realpath -m "$1") deadline=$(realpath -m "$2"); shift 2
here=$(dirname "$(realpath "$0")")
export PYTHON=${PYTHON:-python3} HF_HUB_OFFLINE=1
mkdir -p "$results"
left() { echo $(($(cat "$deadline") - $(date +%s) - ${1:-0})); }
stamp() { echo "$(date +%s) $(left) $*" >>"$results/stamps"; }
# The least of two numbers of seconds.
least() { echo $(($1 < $2 ? $1 : $2)); }

# A model's engine, load client and judge on a GPU and cores of their own.
alone() { # GPU MODEL
    local first=$((16 * $1)) last=$((16 * $1 + 15))
    [ "$(nproc)" -gt "$last" ] || { first=0; last=$(($(nproc) - 1)); }
    export CUDA_VISIBLE_DEVICES=$1
    taskset -cp "$first-$last" "$BASHPID" >/dev/null
    stamp "$2 begins on GPU $1, cores $first to $last"
    "$2"
    stamp "$2 ended"
}

# The search: a budget in seconds that leaves the rest of the time to what comes after.
tuned() { # NAME RECIPE RATE MOST REST OPTION...
    local name=$1 recipe=$2 rate=$3 seconds; seconds=$(least "$4" "$(left "$5")"); shift 5
    stamp "$name: fenno tune at $rate requests/s, $seconds s"
    mkdir -p "$results/$name"
    RECIPE=$recipe OUT=$results/$name STUDIES=$work/studies-$name timeout -k 20 $((seconds + 30)) \
        "$here/h200.sh" "$rate" "${seconds}s" "$@" || echo "$name: exit code $?"
}
held() { # NAME RECIPE FIRST STEP MOST FLAG...
    local name=$1 recipe=$2 first=$3 step=$4 seconds; seconds=$(least "$5" "$(left 5)"); shift 5
    [ "$seconds" -gt "${LEAST:-140}" ] || { stamp "$name: $seconds s are too few"; return 0; }
    stamp "$name: capacity from $first requests/s, $seconds s"
    RECIPE=$recipe STEP=$step OUT=$results TMPDIR=$work timeout -k 10 "$seconds" "$here/capacity.sh" "$name" "$first" $((seconds - 5)) "$@" \
        || echo "$name: exit code $?"
}
grok() {
    tuned grok-tune "${GROK:-gpu-grok2-9b}" "${GROK_RATE:-100}" 660 190 --confirm quick
    if [ -n "${AFTER:-}" ] && [ "$(left)" -gt 150 ]; then
        local seconds; seconds=$(least 300 "$(left 30)")
        stamp "after it, $seconds s: $AFTER"
        timeout -k 10 $((seconds + 25)) $AFTER "$results/after" "$seconds" || echo "after: exit code $?"
    fi
    held grok-defaults "${GROK:-gpu-grok2-9b}" "${GROK_FIRST:-58}" 1.1 400
}
dense() {
    tuned dense-tune "${DENSE:-gpu-llama3-8b}" "${DENSE_RATE:-72}" 480 380 --confirm off
    held dense-api4 "${DENSE:-gpu-llama3-8b}" "${DENSE_FIRST:-80}" 1.15 $(($(left) / 2)) "api-server-count: 4"
    held dense-defaults "${DENSE:-gpu-llama3-8b}" "${DENSE_LOW:-58}" 1.1 400
}

prepare() {
    { nvidia-smi; nvidia-smi topo -m; lscpu; free -g; "$PYTHON" -m pip list; } >"$results/host.txt" 2>&1
    timeout 60 "$PYTHON" -m compileall -q -j 8 "${SITE:-$work}" >/dev/null 2>&1
    # What the engine can be told is asked once and kept; the studies find it there.
    timeout 90 "$PYTHON" -m fenno recipe lint gpu-llama3-8b >"$results/lint.txt" 2>&1
    stamp "prepared"
}

work=$(mktemp -d)
cd "$work" || exit 1
stamp "begins"
prepare &
if [ $# -gt 0 ]; then
    timeout "${BEFORE:-120}" "$@" "$results/before" >"$results/before.out" 2>&1
    stamp "what came before ended with exit code $?"
fi
wait
if [ "${GPUS:-$(nvidia-smi -L | wc -l)}" -gt 1 ]; then
    alone 0 grok >"$results/grok.out" 2>&1 &
    alone 1 dense >"$results/dense.out" 2>&1 &
    wait
else
    (alone 0 grok) >"$results/grok.out" 2>&1
    (alone 0 dense) >"$results/dense.out" 2>&1
fi
stamp "ended"
