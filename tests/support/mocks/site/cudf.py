"""An emulated cuDF, for jobs that have this folder on PYTHONPATH: it writes down what dask-cuda's CUDFSetup asks of it."""

from typing import Any

options: dict[str, Any] = {}
set_option = options.__setitem__
