"""The whole of benchmarks/results/README.md."""

from __future__ import annotations

from measured import start_sections, work_sections

HEAD = """\
<!-- made by docs/make_performance.py from benchmarks/results/*.json: do not edit -->
# Measurements

All tables of the benchmarks, for developers. [performance.md](../../docs/performance.md) is the summary. Every table is made
from one file in this folder, which holds every single run; the command above a table repeats it (add
`--json FILE`, `--plot FILE.png`).

- A **trial** runs every configuration once, interleaved with the others. A figure is the median of the trials.
- A **ratio** is the mean of the ratios within trials, in brackets its 95 % interval (Student's t), with three trials
  or more.
- **Ready**: from the launch until the client sees all workers. **End**: from the script's last line until every
  process has exited.
- **Memory** is PSS, in which pages that processes share count once, of all processes of the job.
- **Baseline**: an MPI program that imports what an agent imports; with GPUs it makes one CUDA context. **Quick MPI**:
  the same without the second that Open MPI sleeps in `MPI_Init` where it finds no fast network (its component
  `btl/ofi`, which dask-gpu-mpi leaves out there).
- Machines are named by their GPUs and cores. "2 cores" is an AMD EPYC without GPU. The H100s have 80 GiB and NVLink,
  and driver 580.159.
- dask-gpu-mpi uses TLS, the other programs no encryption, unless a table names the transport.
"""
SECTIONS = (*start_sections.SECTIONS, *work_sections.SECTIONS)


def files() -> set[str]:
    """The names of all files that a section shows."""
    return {table.name for section in SECTIONS for table in section.tables}


def page() -> str:
    """The whole page."""
    return HEAD + "".join(section.text() for section in SECTIONS)
