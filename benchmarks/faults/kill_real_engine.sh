#!/usr/bin/env bash
# Ends `fenno tune` on the real CPU engine at three moments, counts what is left after ten seconds, and lets the next run go on.
# usage: kill_real_engine.sh OUT_FOLDER      (fenno on the PATH; about six minutes)
set -u
out=$1; mkdir -p "$out"; cd "$out" || exit 1
left() { pgrep -fc "engine/inside/launch.py serve|VLLM::|locustfile.py" || true; }
tune() { exec fenno -v tune cpu-small --target-p95 3s --target-qps 4 --budget 8m --out studies; }
end() { # SIGNAL, a line to wait for, a name
    tune >"$3.json" 2>"$3.log" & local pid=$!
    until grep -q "$2" "$3.log" 2>/dev/null || ! kill -0 $pid 2>/dev/null; do sleep 0.2; done
    sleep 3; local before; before=$(left)
    kill "-$1" $pid; local t0=$SECONDS
    until [ "$(left)" = 0 ] || [ $((SECONDS - t0)) -ge 20 ]; do sleep 0.2; done
    wait $pid; echo "SIG$1 during '$2': exit code $?, $before processes before, $(left) left after $((SECONDS - t0)) s"
}
[ "$(left)" = 0 ] || { echo "an engine runs already: end it first"; exit 2; }
end KILL "loading the weights" start
end KILL "trial 0" measuring
end TERM "trial 0" terminated
end INT "confirming after" interrupted
(tune >last.json 2>last.log); code=$?
echo "the next run: exit code $code; $(grep -m1 study: last.log); trials before it: $(grep -c 'trial 0:' last.log) repeated"
tail -1 last.json | cut -c1-300
