#!/usr/bin/env bash
# Gathers in FOLDER (15 MB) what h200.sh needs on a host without a network: flash-attn's source archive, and wheels of what fenno's command line
# imports, for Python 3.12 on x86-64 Linux.
# usage: gather.sh FOLDER      (PYTHON: an interpreter with pip and torch: the archive's metadata wants to import it)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
folder=$(realpath -m "$1") python=${PYTHON:-python3}
mkdir -p "$folder"
PYTHONPATH=$PWD "$python" - "$folder" <<'PY'
import sys
from pathlib import Path
from fenno.fa2 import releases, source
newest = releases.release(releases.NEWEST)
source.check(source.fetch(newest, sys.executable, Path(sys.argv[1])), newest)
PY
platforms=$(for n in 39 38 37 36 35 34 33 32 31 28 27 26 24 17 12 5; do printf -- '--platform manylinux_2_%d_x86_64 ' $n; done)
# shellcheck disable=SC2086
"$python" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 \
  --abi abi3 --abi none $platforms --platform manylinux2014_x86_64 --platform manylinux2010_x86_64 -d "$folder" \
  typer click annotated-doc shellingham rich markdown-it-py mdurl pygments pydantic==2.12.5 pydantic-core==2.41.5 annotated-types \
  typing-inspection typing-extensions pyyaml psutil nvidia-ml-py
ls -l "$folder"
