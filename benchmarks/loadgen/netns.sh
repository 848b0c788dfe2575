#!/bin/sh
# What a master learns of a worker on another network whose monotonic clock is 5000 s ahead: `sh benchmarks/loadgen/netns.sh [10s]`
#
# Two network namespaces with a link between them; master, server and one worker in the first, the other worker in the second.
# Needs root, iproute2 and util-linux. Prints how far each worker's clock was ahead, and within what that was known.
set -eu
folder=$(mktemp -d)
near="ip netns exec fenno-near" far="ip netns exec fenno-far" loadtest="python -m fenno loadtest" server=
ended() {
    [ -z "$server" ] || kill "$server" || true
    ip netns del fenno-near || true
    ip netns del fenno-far || true
    rm -r "$folder"
}
trap ended EXIT
ip netns add fenno-near
ip netns add fenno-far
ip link add near netns fenno-near type veth peer name far netns fenno-far
ip -n fenno-near addr add 10.77.0.1/24 dev near
ip -n fenno-far addr add 10.77.0.2/24 dev far
for end in near far; do
    ip -n fenno-$end link set $end up
    ip -n fenno-$end link set lo up
done

$near python -m fenno.load.calibration --host 10.77.0.1 --port 8123 --log "$folder/log" >"$folder/server" &
server=$!
until grep -q listening "$folder/server"; do sleep 0.1; done
$near $loadtest --worker 10.77.0.1:5557 --out "$folder/near" &
$far unshare --time --monotonic 5000 $loadtest --worker 10.77.0.1:5557 --out "$folder/far" &
$near $loadtest http://10.77.0.1:8123 --master --workers 2 --bind 10.77.0.1:5557 --rate 60 --duration "${1:-10s}" \
    --out "$folder/master" >"$folder/told" || true
python -c 'import json, sys; [print(worker) for worker in json.load(sys.stdin)["client"]["workers"]]' <"$folder/told"
