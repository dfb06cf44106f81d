#!/usr/bin/env bash
# ci/gallery.sh [PYTEST-ARGUMENT...]: every example of docs/gallery.md by a real job, on the CPU. By hand: it installs the libraries that the
# examples use (the extra `gallery`, and dask-jobqueue for one of the scripts "before") into an environment of its own, .venv/gallery, of
# about 2 GB. In the environments of ci/matrix.sh the tests skip what is not installed there.
# PyTorch comes from its own index of CPU wheels: their version, like 2.13.0+cpu, counts as newer than the same one without +cpu, which
# brings some GB of CUDA libraries. PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS names another source of such wheels, and PIP_CONSTRAINT pins one.
# PYTHON names the Python to build on (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPATH
env=.venv/gallery
export PIP_EXTRA_INDEX_URL=${PIP_EXTRA_INDEX_URL:-https://download.pytorch.org/whl/cpu}
bash ci/env.sh mpich "$env" test gpu gallery
"$env/bin/python" -m pip install -qq --disable-pip-version-check dask-jobqueue
export PATH=$PWD/$env/bin:$PATH
exec "$env/bin/python" -m pytest -q tests/mpi/test_gallery.py "$@"
