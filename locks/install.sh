#!/usr/bin/env bash
# Make .venv with the CPU engine from the locks: locks/install.sh PYTHON TORCH_INDEX GOAL   (called by the Makefile; GOAL is for hints)
# A .venv without its stamp was interrupted half-way and is made again from nothing; pip's cache still has the downloads.
set -euo pipefail
python=$1 torch_index=$2 goal=$3
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/.engine
trap 'exit 130' INT TERM

wanted='import platform, sys; sys.exit((*sys.version_info[:2], sys.platform, platform.machine()) != (3, 11, "linux", "x86_64"))'
if ! "$python" -c "$wanted" 2>/dev/null; then
    echo "The CPU engine's lock is for Python 3.11 on x86_64 Linux, and '$python' is not that: make $goal PYTHON=/path/to/python3.11" >&2
    exit 2
fi

# Two makes at once: the second waits, and finds the work done.
exec 9<locks/cpu.txt
flock 9
[[ $stamp -nt locks/cpu.txt && $stamp -nt locks/torch-cpu.txt ]] && exit

echo "Installing the CPU engine into .venv: 2.6 GB on disk, a few minutes the first time ..."
"$python" -m venv --clear .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check install -qq --no-compile --no-deps --require-hashes "$@"; }
if ! pip ${torch_index:+--index-url "$torch_index"} -r locks/torch-cpu.txt; then
    echo "torch's CPU build is not where pip looks: give the address of PyTorch's index of CPU builds: make $goal TORCH_INDEX=ADDRESS" >&2
    exit 1
fi
pip -r locks/cpu.txt
# On every core here, instead of by the three processes of the first engine start. A package's broken example is no failure.
.venv/bin/python -m compileall -q -j 0 .venv/lib >/dev/null || true
touch "$stamp"
echo "Installed in $SECONDS s."
