"""The dashboard from another host: the ssh line that the job prints, as it stands, and what a browser loads through it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ROOT
from support.bed.hosts import TestBed
from support.jobs.clusters import CLIENT, until
from support.jobs.mpi import Mpi
from support.mocks.gpus import GIB, SimHost, make_gpus

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/bin:/sbin")

pytestmark = [
    pytest.mark.skipif(
        SSHD is None or shutil.which("ssh") is None, reason="no sshd (openssh-server) or no ssh"
    ),
    pytest.mark.skipif(shutil.which("chromedriver") is None, reason="no chromedriver"),
]

#: Runs where the user's computer is: loads pages, and prints what is on them and what the browser complained of.
BROWSER = Path(__file__).parent / "scripts" / "opens_dashboard.py"
SCRIPT = CLIENT + "client.gather(client.map(lambda x: x + 1, range(10)))\ntell(up=True)\ngo_on()\n"


@contextlib.contextmanager
def ssh_servers(bed: TestBed, folder: Path, *names: str) -> Iterator[Path]:
    """An sshd on each of these hosts, with keys of their own; gives a folder with the ``ssh`` that gets in."""
    assert SSHD is not None
    for key in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True, timeout=30
        )
    public = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text("".join(f"{name} {public}\n" for name in names))
    (folder / "server").write_text(
        f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/user.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin yes\nAllowTcpForwarding yes\n"
    )
    (folder / "client").write_text(
        f"IdentityFile {folder}/user\nIdentitiesOnly yes\nUserKnownHostsFile {folder}/known\nBatchMode yes\n"
        "StrictHostKeyChecking yes\nExitOnForwardFailure yes\nConnectTimeout 20\n"
    )
    programs = folder / "bin"
    programs.mkdir()
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/client "$@"\n')
    (programs / "ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own empty folder
    with contextlib.ExitStack() as stack:
        for name in names:
            line = bed.on(name, [SSHD, "-D", "-e", "-f", str(folder / "server")])
            log = stack.enter_context(open(folder / f"{name}.log", "wb"))
            stack.enter_context(ended(subprocess.Popen(line, stdout=log, stderr=log)))
        for name in names:
            until(lambda name=name: b"listening" in (folder / f"{name}.log").read_bytes(), 20)
        yield programs


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """End it, whatever happens."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@pytest.mark.timeout(240)
def test_the_page_through_the_printed_tunnel(mpirun: Mpi, hosts: TestBed, tmp_path: Path) -> None:
    """From h1, which can reach the job's first node, h2, by way of the login host, h3."""
    pytest.importorskip("selenium")
    gpus = {name: SimHost(make_gpus(1, host=name, memory=80 * GIB)) for name in ("h2", "h3")}
    env = {"PBS_JOBID": "1.h3", "PBS_O_HOST": "h3"}
    job = mpirun.start(SCRIPT, 2, command=[], env=env, gpus=gpus, bed=hosts, hosts=["h2", "h3"])
    job.wait_for("FACTS")
    printed = re.search(r"from your computer: (.*)\n.*dashboard at (\S+)", job.stderr)
    assert printed is not None
    assert printed[1] == "ssh -N -L 8787:127.0.0.1:8787 -J h3 h2"

    with ssh_servers(hosts, tmp_path, "h2", "h3") as programs:
        path = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        tunnel = subprocess.Popen(hosts.on("h1", ["bash", "-c", f"exec {printed[1]}"]), env=path)
        with ended(tunnel):
            probe = hosts.on("h1", ["bash", "-c", "exec 3<> /dev/tcp/127.0.0.1/8787"])
            until(lambda: subprocess.run(probe, capture_output=True, timeout=10).returncode == 0, 30)
            browser = hosts.on("h1", [sys.executable, str(BROWSER), printed[2]])
            path["PYTHONPATH"] = str(ROOT / "tests")
            done = subprocess.run(browser, env=path, capture_output=True, text=True, timeout=150)
            assert tunnel.poll() is None
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.partition("FOUND ")[2])

    assert found["status"]["title"] == "Dask: Status"
    assert "CPU" in found["status"]["text"].split()  # a tab that bokeh draws
    assert "/gpu" in found["status"]["links"]  # the page of the GPUs, in the navigation
    assert all(page["drawn"] and all(page["drawn"]) and page["errors"] == [] for page in found.values()), (
        found
    )
    for name in ("individual-gpu-memory", "individual-gpu-utilization", "gpu"):
        (workers, indices) = found[name]["rows"][0]
        assert (len(set(workers)), len(indices)) == (2, 2), found[name]
    job.go_on()
