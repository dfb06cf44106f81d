"""The generator of job scripts: what it writes, refuses, quotes and submits."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import tempfile
from pathlib import Path

import dask.config
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpu_mpi.options.resolve import resolve
from dask_gpu_mpi.sites.batch import SYSTEMS
from dask_gpu_mpi.sites.jobscript import SCRIPTED, JobRequest, format_of, render, template
from support.jobs.processes import run_python
from support.mocks.batch import ENVIRON, FakeBatch, directives, requested, script

LAUNCHERS = [(system, launcher) for system in SCRIPTED for launcher in format_of(system).templates]
SHAPE = "--nodes 2 --gpus-per-node 4 --time 01:30:10"
HOSTILE = 'it\'s "$(touch gone)" `touch gone` \\ $HOME; * ~ ! #\t\r\n#SBATCH --nodes=99\n#PBS -q evil\n\x1b é \udcff'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the script of these jobs."""
    (tmp_path / "my.py").touch()
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_systems_with_templates() -> None:
    modules = {name: importlib.import_module(f"dask_gpu_mpi.sites.{name}") for name in SYSTEMS}
    assert tuple(name for name, module in modules.items() if hasattr(module, "FORMAT")) == SCRIPTED


@pytest.mark.parametrize(("system", "launcher"), LAUNCHERS)
def test_script_is_the_template_but_for_directives_and_settings(system: str, launcher: str) -> None:
    made = script(f"{system} {SHAPE} --launcher {launcher}")
    text = template(format_of(system).templates[launcher])
    prefix = format_of(system).prefix
    expected = {
        "# 2 nodes, 4 GPUs and 1 rank on each. Made by dask-gpu-mpi jobscript.",
        "program=(my.py)",
        *(f"export DGM_{each}" for each in (f"LAUNCHER={launcher}", "EXPECT_GPUS=4", "RANKS_PER_NODE=1")),
    }
    new = set(made.splitlines()) - set(text.splitlines())
    assert {line for line in new if not line.startswith(prefix)} <= expected
    assert made.startswith("#!/bin/bash\n")
    # batch systems read directives up to the first command
    assert len(directives(made, prefix)) == made.count(f"\n{prefix}")
    assert made.endswith(text.partition("\nset --")[2])


def test_module_that_can_not_be_loaded_ends_the_job(batch: FakeBatch) -> None:
    batch.answers["module"] = ("", 1)
    (batch.directory / "setup").write_text("touch here\n")  # a file of the user's may need the modules
    made = script(f"slurm {SHAPE} --module cuda --setup {batch.directory}/setup")
    assert "\ntype -t module > /dev/null || source /etc/profile\n" in made
    (batch.directory / "job").write_text(made)
    ran = batch.run(batch.directory / "job", (), ENVIRON["slurm"])
    assert (ran.rc, ran.program()) == (2, None)
    assert not (batch.directory / "here").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (f"slurm {SHAPE} --account abc --partition gpu,gpu2 --ranks-per-node 2",
         "--nodes=2 --ntasks-per-node=2 --gpus-per-node=4 --time=01:30:10 --account=abc --partition=gpu,gpu2 "
         "--exclusive --mem=0"),
        (f"slurm {SHAPE} --shared --cpus-per-node 16 --ranks-per-node 2 --mem 64G -C 'a&b' --mail-user a@b.c -q debug -o %x.log",
         "--cpus-per-task=8 --mem=65536M '--constraint=a&b' --mail-user=a@b.c --mail-type=END,FAIL --qos=debug --output=%x.log"),
        (f"pbs {SHAPE} --account abc --queue gpu --cpus-per-node 32 --directive '-l filesystems=home:eagle'",
         "'-l select=2:ncpus=32:mpiprocs=1:ngpus=4' '-l place=scatter:excl' '-l walltime=01:30:10' '-A abc' '-q gpu' "
         "'-l filesystems=home:eagle'"),
        (f"pbs {SHAPE} --shared --cpus-per-node 16 --mem 64G --mail-user a@b.c -q gpu -o logs/",
         "'-l select=2:ncpus=16:mpiprocs=1:ngpus=4:mem=65536mb' '-l place=scatter:shared' '-M a@b.c' '-m ae' '-q gpu' "
         "'-o logs/'"),
        (f"lsf {SHAPE} --account abc --queue gpu --ranks-per-node 2",
         """'-n 4' '-R "span[ptile=2]"' '-gpu "num=4:mode=shared:j_exclusive=yes"' '-W 01:31' '-P abc' '-q gpu' -x"""),
        (f"lsf {SHAPE} --shared --cpus-per-node 16 --mem 64G --mail-user a@b.c --output %J.out",
         """'-n 32' '-R "span[ptile=16] rusage[mem=65536MB/host]"' '-u a@b.c' '-N' '-o %J.out'"""),
        (f"lsf {SHAPE} --shared --cpus-per-gpu 8", "'-n 64'"),
        (f"flux {SHAPE} --account abc --queue gpu", "--nodes=2 --exclusive --time-limit=5410s --bank=abc --queue=gpu"),
        (f"flux {SHAPE} --shared --cpus-per-gpu 8", "--cores-per-slot=32"),
        (f"flux {SHAPE} --shared --cpus-per-node 16 --constraint 'a|b'",
         "--nslots=2 --cores-per-slot=16 --gpus-per-slot=4 '--requires=a|b'"),
    ],
)  # fmt: skip
def test_directives(words: str, expected: str) -> None:
    found = requested(words)
    assert set(shlex.split(expected)) <= set(found)
    assert len({re.split("[= ]", line.replace("-l ", "-l", 1))[0] for line in found}) == len(found)


@pytest.mark.parametrize(
    ("words", "there", "gone"),
    [
        ("slurm --gpus-per-node a100:4", "--gpus-per-node=a100:4", "--gpus-per-node=4"),
        ("slurm --directive=--gres=gpu:gh200:4,nvme:9", "--gres=gpu:gh200:4,nvme:9", "--gpus-per-node"),
        ("slurm --directive=--gres=nvme:9", "--gpus-per-node=4 --gres=nvme:9", ""),
        ("slurm --directive=--gpus=h200:8", "--gpus=h200:8", "--gpus-per-node"),
        ("slurm --directive='-G 8'", "'-G 8'", "--gpus-per-node"),
        # sites that refuse these (TACC, VUB)
        ("slurm --directive=--gpus-per-node= --directive=--mem=", "--exclusive", "--gpus-per-node --gres --mem"),
        ("slurm --directive=--mem-per-cpu=1G", "--mem-per-cpu=1G", "--mem="),
        ("slurm --directive=--no-requeue --directive=--exclusive=user", "--no-requeue --exclusive=user", "--requeue"),
        ("slurm -p gpu --directive='-p big'", "'-p big'", "--partition"),
        ("slurm --cpus-per-node 48 --ranks-per-node 2", "--exclusive --cpus-per-task=24", ""),
        ("pbs --cpus-per-node 64 --directive='-l select=2:ncpus=64:ngpus=4:gpu_type=a100' --directive='-l place='",
         "'-l select=2:ncpus=64:ngpus=4:gpu_type=a100'", "'-l select=2:ncpus=64:mpiprocs' '-l place'"),
        ("pbs --directive=-lselect=2:ncpus=3", "-lselect=2:ncpus=3", "'-l select'"),
        ("lsf --directive='-R \"select[a100]\"'", """'-R "span[ptile=1]"' '-R "select[a100]"'""", ""),
        # nodes that are shared are not requested whole, and their memory is the site's to say
        ("slurm --shared --cpus-per-node 16", "--gpus-per-node=4", "--exclusive --mem"),
        ("pbs --shared --cpus-per-node 16", "'-l place=scatter:shared'", ""),
        ("lsf --shared --cpus-per-node 16", "'-n 32'", "-x"),
        ("flux --shared --cpus-per-node 16", "--nslots=2", "--exclusive"),
        # GPUs only if there are some
        *((f"{system} --gpus-per-node 0", "", "--gpus-per-node -gpu --gpus") for system in ("slurm", "lsf", "flux")),
        ("pbs --gpus-per-node 0", "'-l select=2:ncpus=64:mpiprocs=1'", ""),
        # a number of GPUs without a number of nodes
        ("slurm --gpus 8 --cpus-per-gpu 4", "--gpus=8 --cpus-per-gpu=4", "--nodes --gpus-per-node --ntasks"),
        ("pbs --gpus 8 --cpus-per-gpu 4", "'-l select=8:ncpus=4:mpiprocs=1:ngpus=1' '-l place=free:excl'", ""),
    ],
)  # fmt: skip
def test_directives_that_others_replace(words: str, there: str, gone: str) -> None:
    system, _, options = words.partition(" ")
    shape = "--time 60" if "--gpus " in words else SHAPE
    found = requested(f"{system} {shape} {options}")
    assert set(shlex.split(there)) <= set(found)
    assert not [line for line in found if gone and line.startswith(tuple(shlex.split(gone)))]


def test_first_line_and_settings_of_a_job() -> None:
    assert "\n# 8 GPUs. Made by" in script("slurm --gpus 8 --time 60")
    for system in ("slurm", "pbs", "lsf", "flux"):
        assert ("export DGM_EXPECT_GPUS=4" in script(f"{system} {SHAPE}")) == (system != "slurm")
        assert "export DGM_EXPECT_GPUS=0" in script(f"{system} {SHAPE} --gpus-per-node 0")
    assert "DGM_LAUNCHER=" not in script(f"pbs {SHAPE}")


def is_a_file_name(text: str) -> bool:
    return 0 < len(os.fsencode(text)) < 80 and text not in (".", "..")


#: Everything that an argument can be: text of any kind, and bytes that are none.
WORDS = st.one_of(
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20),
    st.text("'\"\\$`(){}[]<>|&;*?~!#=- \t\r\n", max_size=12),
    st.binary(max_size=8).filter(lambda raw: b"\0" not in raw).map(os.fsdecode),
    st.just(HOSTILE),
)
FILE_NAMES = WORDS.map(lambda text: text.replace("/", "|")).filter(is_a_file_name)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(LAUNCHERS),
    # the first word is the script: options before it are the job's, and `launch` reads them
    st.lists(WORDS, min_size=1, max_size=4).filter(lambda words: not words[0].startswith("-")),
    st.lists(WORDS, max_size=2),
    FILE_NAMES,
    FILE_NAMES,
)
@pytest.mark.slow
def test_hostile_values_arrive_unchanged(
    pair: tuple[str, str], program: list[str], modules: list[str], setup: str, container: str
) -> None:
    """At `launch`; that it passes them on: the test below."""
    system, launcher = pair
    with tempfile.TemporaryDirectory() as folder:
        batch = FakeBatch(Path(folder))
        batch.mock_launch()
        (batch.directory / "setup").mkdir()
        (batch.directory / "setup" / setup).write_text("export SETUP_RAN=yes\n")
        (batch.directory / container).touch()
        job = JobRequest(
            system=system,
            launcher=launcher,
            program=("--container", container, *program),
            nodes=2,
            gpus_per_node=4,
            seconds=60,
            modules=tuple(modules),
            setup=f"setup/{setup}",
        )
        (batch.directory / "job").write_bytes(os.fsencode(render(job)))
        before = set(batch.directory.iterdir())
        ran = batch.run(batch.directory / "job", (), ENVIRON[system])
        assert ran.rc == 0, ran.output
        (words,) = ran.of("dask-gpu-mpi")
        assert words[-2 - len(program) :] == ["--container", container, *program]
        assert ran.of("module") == ([["load", *modules]] if modules else [])
        assert ran.rows[-1]["env"]["SETUP_RAN"] == "yes"
        assert {path.name for path in set(batch.directory.iterdir()) - before} == {"record"}
        # nothing that a batch system takes for a directive of its own
        prefix = format_of(system).prefix
        assert render(job).count(f"\n{prefix}") == len(directives(render(job), prefix))
        assert "\r" not in render(job)  # sbatch refuses scripts with line breaks of DOS


def test_hostile_values_through_the_command_line(batch: FakeBatch, here: Path) -> None:
    setup, out = batch.directory / "a '$(touch gone)' file", batch.directory / "job"
    setup.write_text("true\n")
    words = [*SHAPE.split(), "--setup", str(setup), "--save", str(out)]
    program = ["--container", HOSTILE, "my.py", HOSTILE, ""]
    code = "from dask_gpu_mpi.cli.main import main; main()"
    done = run_python(code, "jobscript", "slurm", *words, "--", *program, cwd=here)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    ran = batch.run(out, (), ENVIRON["slurm"])
    assert ran.program() == ["my.py", HOSTILE, ""]
    assert HOSTILE in ran.of("apptainer")[-1]
    assert not (batch.directory / "gone").exists()


@pytest.mark.usefixtures("dask_config")
def test_a_site_can_ship_its_defaults() -> None:
    shape = {"nodes": 1, "gpus-per-node": 8, "time": "01:30:00"}
    lists = {"modules": ["cuda", "openmpi"], "directives": ["--constraint=gpu"]}
    site = {**shape, **lists, "account": "0123", "launcher": "mpirun"}
    dask.config.config["gpu-mpi"] = {"jobscript": site}
    resolve({}, source="keyword")  # its section is no option of a cluster
    made = script("slurm --nodes 3 --module 'my module' --directive --qos=q")
    expected = "--nodes=3 --gpus-per-node=8 --time=01:30:00 --account=0123 --constraint=gpu --qos=q"
    assert {*expected.split()} <= {*directives(made, "#SBATCH ")}
    assert "\nmodule load 'my module' || exit 2\n" in made
    assert "\nexport DGM_LAUNCHER=mpirun\n" in made


def test_configuration_from_the_environment(here: Path) -> None:
    """As text: an account may be a number that begins with zeros."""
    code = "import dask_gpu_mpi; print(dask_gpu_mpi.job_script('slurm', 'my.py', nodes=1, time='1:00:00'))"
    of_site = {"ACCOUNT": "007", "QOS": "1_2", "GPUS_PER_NODE": "4"}
    env = {f"DASK_GPU_MPI__JOBSCRIPT__{name}": value for name, value in of_site.items()}
    done = run_python(code, cwd=here, env={**os.environ, **env})
    assert {"--account=007", "--qos=1_2", "--gpus-per-node=4"} <= {*directives(done.stdout, "#SBATCH ")}, (
        done.stderr
    )
    done = run_python(code.replace("nodes", "node"), cwd=here)  # an error is one line
    said = "dask_gpu_mpi: error: keyword node: unknown option; did you mean 'nodes'?\n"
    assert (done.returncode, done.stderr) == (2, said)


@pytest.mark.parametrize(
    ("system", "name", "answer", "number"),
    [
        ("slurm", "sbatch", "4711;cluster\n", "4711"),
        ("pbs", "qsub", "4711.server\n", "4711.server"),
        ("lsf", "bsub", "Job <4711> is submitted to queue <gpu>.\n", "4711"),
        ("flux", "flux", "f2Xyz\n", "f2Xyz"),
        ("flux", "flux", "ƒ2Xyz\n", "ƒ2Xyz"),
        ("pbs", "qsub", "your project has 5.5 hours left\n4711[].server\n", "4711[].server"),
    ],
)
def test_submit(
    batch: FakeBatch, monkeypatch: pytest.MonkeyPatch, system: str, name: str, answer: str, number: str
) -> None:
    batch.answers[name] = (answer, 0)
    for key, value in batch.environ().items():
        monkeypatch.setenv(key, value)
    # files of an image are not looked for
    words = f"{system} {SHAPE} --submit"
    assert script(f"{words} -- --container im.sif /opt/my.py 'a b'") == f"{number}\n"
    (row,) = [row for row in batch.rows() if row["name"] == name]
    assert "\nprogram=(--container im.sif /opt/my.py 'a b')\n" in row["stdin"]
    correct = ". Fix: correct what it names, such as the account"
    for text, code, fix in (
        ("error: invalid account", 1, correct),
        ("come back later", 0, " (expected the job's number)"),
    ):
        batch.answers[name] = (f"{text}\n", code)
        monkeypatch.setenv("FAKE_ANSWERS", batch.environ()["FAKE_ANSWERS"])
        assert f"exited with code {code}: {text}{fix}" in script(words, rc=2)
    monkeypatch.setenv("PATH", "/nowhere")
    assert f"error: submit: {name}: not found in PATH. Fix: run this on a login node of " in script(
        words, rc=2
    )
