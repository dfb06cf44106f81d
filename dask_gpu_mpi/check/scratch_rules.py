"""The rules of `check` about the local directory of each rank."""

from __future__ import annotations

from collections.abc import Iterator

from dask_gpu_mpi.base.sizes import format_bytes
from dask_gpu_mpi.machine.scratch import Scratch, exposed_text

from .report import Evidence, Finding, Level

__all__ = ["check_scratch"]

#: File systems that nodes share, by the kernel's names: what people call them.
NETWORK = {
    "nfs": "NFS", "nfs4": "NFS", "lustre": "Lustre", "gpfs": "GPFS (Spectrum Scale)", "mmfs": "GPFS (Spectrum Scale)",
    "beegfs": "BeeGFS", "fhgfs": "BeeGFS", "cifs": "CIFS", "smb3": "CIFS", "ceph": "CephFS", "fuse.ceph": "CephFS",
    "glusterfs": "GlusterFS", "fuse.glusterfs": "GlusterFS", "fuse.sshfs": "sshfs", "panfs": "PanFS", "wekafs": "WekaFS",
    "pvfs2": "OrangeFS", "afs": "AFS", "9p": "9P", "dvs": "DVS (Cray)",
}  # fmt: skip
#: File systems in memory.
IN_MEMORY = frozenset({"tmpfs", "ramfs"})
#: Bytes of scratch without which not even logs and sockets have room.
LEAST_SCRATCH = 100 * 1024**2
#: Bytes of a local directory's name beyond which the fork server's socket moves to /tmp (`forkserver.become_fork_server`).
LONGEST_SCRATCH = 107 - len("/dgm-0123456789abcdef/fork-server")
NODE_LOCAL = "choose a node-local directory with local_directory (--local-directory) or TMPDIR"


def check_scratch(evidence: Evidence) -> Iterator[Finding]:
    """Local directories must be writable, local, and large enough."""
    observations = evidence.observations.values()
    found = [
        Finding(level, "scratch", text, fix, (observed.rank,))
        for observed in observations
        for level, text, fix in _flaws(
            observed.scratch, observed.inventory.memory if observed.inventory else 0
        )
    ]
    yield from found
    if not found:
        paths = list(dict.fromkeys(observed.scratch.path for observed in observations))
        named = ", ".join(paths[:2]) + (" and others" if len(paths) > 2 else "")
        least = max(0, min(observed.scratch.free for observed in observations))
        yield Finding("ok", "scratch", f"{named}: local, writable, {format_bytes(least)} free at least")


def _flaws(scratch: Scratch, memory: int) -> Iterator[tuple[Level, str, str]]:
    """What is wrong with a local directory, and the fix; `memory` bytes of its node are the job's (0: unknown)."""
    path, where = scratch.path, f"{scratch.path} is on"
    if scratch.error:
        yield "error", f"{path} can't be written ({scratch.error})", NODE_LOCAL
        return
    if scratch.exposed:
        yield "warning", exposed_text(scratch.exposed), f"chmod +t {scratch.exposed}, or {NODE_LOCAL}"
    if scratch.ignored:
        found = f"TMPDIR={scratch.ignored} can't be written; using {path} instead"
        yield "warning", found, "make that directory on every node, or unset TMPDIR"
    if kind := NETWORK.get(scratch.filesystem):
        found = f"{where} {kind} ({scratch.mount}), which all nodes share: workers that spill wait for it"
        yield "warning", found, NODE_LOCAL
    if scratch.filesystem in IN_MEMORY:
        found = (
            f"{where} {scratch.filesystem} ({scratch.mount}), which is memory: spilling there frees nothing"
        )
        yield "warning", found, NODE_LOCAL
    elif 0 <= scratch.free < LEAST_SCRATCH:
        yield "error", f"{path} has only {format_bytes(scratch.free)} free", NODE_LOCAL
    elif LEAST_SCRATCH <= scratch.free < memory:
        # Rounded, so that nodes that are alike share a line.
        sizes = f"about {scratch.free / 2**30:.0f} of {memory / 2**30:.0f} GiB"
        found = f"{path} has less space free than the node has memory, {sizes}: workers that spill much may fill it"
        yield "warning", found, NODE_LOCAL
    if (length := len(path.encode())) > LONGEST_SCRATCH:
        found = (
            f"{path} is too long for a socket ({length} of {LONGEST_SCRATCH} bytes): other programs' may fail"
        )
        yield "warning", found, "choose a shorter one"
