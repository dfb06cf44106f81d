"""Components of Open MPI that stay out of ``MPI_Init``: one that takes a second for nothing, and the network's on one host.

Open MPI's component for one-sided transfers over libfabric sleeps for a second when it is closed, which is inside ``MPI_Init``
wherever it finds no network that it could use (opal/mca/btl/ofi/btl_ofi_component.c, ``mca_btl_ofi_component_close``; seen in 4.1
to 5.0). That is half of the start of a cluster, so such hosts are started without it. Debian's Open MPI leaves it out everywhere.

Those that use UCX start it, which takes another second where that UCX is not MPI's own but the one of ucxx, with CUDA.

The component for TCP makes each rank listen on all interfaces, also where all ranks are on one host and talk through shared
memory. Whoever reaches such a port can end the job, and send it messages as a rank (docs/security.md).
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["fewer_components"]

PREFIX = "OMPI_MCA_"
#: What is left out, by framework; and what is left out beside a UCX that is not MPI's.
LEFT_OUT = {"btl": "^ofi"}
LEFT_OUT_BESIDE_UCX = {"btl": "^ofi,uct", "pml": "^ucx", "osc": "^ucx"}
#: With a parameter of these, or one that begins so, somebody has chosen: a component that one rank leaves out and the others use
#: would keep MPI from starting.
UCX = r"(pml|osc)|(pml_ucx|osc_ucx|opal_common_ucx)_\w+"
CHOSEN = {
    "btl": re.compile(r"btl|(btl_ofi|btl_uct|opal_common_ofi)_\w+"),
    "pml": re.compile(UCX),
    "osc": re.compile(UCX),
}
#: Parameters that name files which are not read here.
FILES_ELSEWHERE = re.compile(r"mca_(base_(param_file|envar_file|override_param_file)|param_files)\w*")
#: Networks that libfabric and UCX drive: InfiniBand, Omni-Path and EFA; Slingshot; Aries; Omni-Path.
NETWORKS = ("/sys/class/infiniband/*", "/sys/class/cxi/*", "/dev/kgni*", "/dev/hfi1*")
#: Where the installation's configuration is, and how the files are called (opal/mca/installdirs, opal/mca/base/mca_base_var.c).
FOLDERS = (("OPAL_SYSCONFDIR", ""), ("OPAL_PREFIX", "etc"))
FILES = "openmpi-mca-params*.conf"
SETTING = re.compile(r"^[^\S\n]*(?:--?mca\s+(\w+)\s|(\w+)\s*=)", re.MULTILINE)


@contextmanager
def fewer_components(
    environ: Mapping[str, str],
    module: str,
    *,
    beside_ucx: bool = False,
    one_host: bool = False,
    networks: tuple[str, ...] = NETWORKS,
) -> Iterator[None]:
    """Initialise MPI in here: Open MPI's components stay out where they can't be used, unless somebody has chosen components.

    Parameters
    ----------
    environ : mapping
        The process's environment.
    module : str
        What is linked to the MPI library: ``importlib.util.find_spec("mpi4py.MPI").origin``.
    beside_ucx : bool
        A UCX is loaded that is not MPI's.
    one_host : bool
        All ranks are on this host.
    networks : tuple of str
        Patterns of files, of which one is there where the components might be used.
    """
    settings: dict[str, str] = {}
    parameters = {name.removeprefix(PREFIX) for name in environ if name.startswith(PREFIX)}
    waits = not any(map(glob.glob, networks))
    if (
        not any(map(FILES_ELSEWHERE.fullmatch, parameters))
        and (waits or one_host)
        and (library := _library_of(module)) is not None
    ):
        parameters |= _configured(environ, library)
        left_out = {} if not waits else LEFT_OUT_BESIDE_UCX if beside_ucx else LEFT_OUT
        for name, value in left_out.items():
            if not any(map(CHOSEN[name].fullmatch, parameters)):
                settings[PREFIX + name] = value
        if one_host and "btl" not in parameters:
            others = settings.get(PREFIX + "btl")
            settings[PREFIX + "btl"] = "^tcp" if others is None else f"{others},tcp"
    os.environ.update(settings)
    try:
        yield
    finally:
        for name in settings:  # they were ours, and are not for the children of the script
            os.environ.pop(name, None)


def _library_of(module: str) -> Path | None:
    """The file of the MPI library that this module loads, where it is Open MPI."""
    with suppress(OSError, StopIteration):
        if not hasattr(ctypes.CDLL(module), "ompi_mpi_comm_world"):
            return None
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            mapped = (line.rstrip("\n").split(maxsplit=5)[-1] for line in file if "/libmpi.so" in line)
            return Path(next(mapped)).resolve()
    return None


def _configured(environ: Mapping[str, str], library: Path) -> set[str]:
    """The parameters in Open MPI's configuration files: the user's, the installation's, the system's."""
    named = [Path(environ[name]) / rest for name, rest in FOLDERS if environ.get(name)]
    beside = [folder / "etc" for folder in list(library.parents)[:4]]
    files = [file for folder in named + beside for file in folder.glob(FILES)]
    if not files:  # not an installation in one place
        files += map(Path, glob.glob(f"/etc/openmpi*/{FILES}"))
    files.append(Path(environ.get("HOME", "/"), ".openmpi", "mca-params.conf"))
    found: set[str] = set()
    for file in files:
        with suppress(OSError):
            text = file.read_text(encoding="utf-8", errors="replace")
            found.update(either or other for either, other in SETTING.findall(text))
    return found
