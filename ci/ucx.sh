#!/usr/bin/env bash
# ci/ucx.sh DIR: puts UCX's packages into DIR, for PYTHONPATH: what tests/ucx needs beside an environment of ci/env.sh.
# Without what they depend on, which that environment has, or which is for GPUs. Linux only: there are no other wheels.
# Made again when this file changes. PYTHON names the Python whose wheels are taken (default: python3).
set -euo pipefail
[[ $# -eq 1 ]] || { echo "usage: ci/ucx.sh DIR" >&2; exit 2; }
dir=$1 python=${PYTHON:-python3} stamp=$1/made-from
key=$({ cat "${BASH_SOURCE[0]}"; "$python" -VV; } | sha256sum | cut -d' ' -f1)
if [[ -e $stamp && $(< "$stamp") == "$key" ]]; then
  echo "ucx: $dir is up to date"
  exit 0
fi
rm -rf "$dir"
# versions as in the extra cuda13 of pyproject.toml
"$python" -m pip install -qq --disable-pip-version-check --no-deps --only-binary=:all: --target "$dir" \
  'distributed-ucxx-cu13==0.52.*' 'ucxx-cu13==0.52.*' 'libucxx-cu13==0.52.*' 'libucx-cu13<1.22' 'rmm-cu13==26.10.*' 'librmm-cu13==26.10.*' \
  'rapids-logger==0.3.*'
echo "$key" > "$stamp"
echo "ucx: made $dir in $SECONDS s"
