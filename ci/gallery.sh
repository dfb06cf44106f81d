#!/usr/bin/env bash
# ci/gallery.sh [PYTEST-ARGUMENT...]: every example of docs/gallery.md by a real job, on the CPU. By hand: it installs the libraries that the
# examples use (the extra `gallery`, and dask-jobqueue for one of the scripts "before") into an environment of its own, .venv/gallery, of
# about 2 GB. In the environments of ci/test.sh and ci/matrix.sh the tests skip what is not installed there.
# PYTHON names the Python to build on (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPATH
env=.venv/gallery
bash ci/env.sh mpich "$env" test gpu gallery
"$env/bin/python" -m pip install -qq --disable-pip-version-check dask-jobqueue
export PATH=$PWD/$env/bin:$PATH
exec "$env/bin/python" -m pytest -q tests/pure/test_gallery.py tests/mpi/test_gallery.py "$@"
