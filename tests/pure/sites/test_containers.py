"""Which container runtime runs an image, and what is wrong with one that can't be run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.sites.containers import Container, choose_container

ALL = ("podman-hpc", "shifter", "apptainer", "singularity")
REGISTRY = "nvcr.io/nvidia/rapidsai/base:26.10"


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Container]:
    """The choice on a node that has these commands."""
    monkeypatch.chdir(tmp_path)
    for name in ("image.sif", "image.sqsh", "image.toml"):
        (tmp_path / name).touch()
    (tmp_path / "sandbox").mkdir()

    def chosen(
        image: str,
        here: Sequence[str] = ALL,
        *,
        launcher: str = "",
        runtime: str = "",
        mounts: Sequence[str] = (),
    ) -> Container:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for name in here:
            (folder / name).touch(mode=0o755)
        help_of_srun = "--container-image=IMAGE  [pyxis] the image" if "pyxis" in here else "Usage: srun"
        return choose_container(
            image,
            runtime=runtime,
            mounts=mounts,
            launcher=launcher,
            environ={"PATH": str(folder)},
            ask=lambda command: help_of_srun if [*command] == ["srun", "--help"] else "",
        )

    return chosen


@pytest.mark.parametrize(
    ("image", "here", "launcher", "expected"),
    [
        (REGISTRY, ("pyxis", *ALL), "srun", "pyxis"),
        (REGISTRY, ("pyxis", *ALL), "mpirun", "podman-hpc"),
        (REGISTRY, ALL, "srun", "podman-hpc"),
        (REGISTRY, ALL[1:], "srun", "shifter"),
        (REGISTRY, ALL[2:], "srun", "apptainer"),
        ("image.sif", ("pyxis", *ALL), "srun", "apptainer"),
        ("image.sif", ("singularity",), "", "singularity"),
        ("image.sqsh", ("pyxis", *ALL), "srun", "pyxis"),
        ("image.sqsh", ALL, "srun", "apptainer"),
        ("image.toml", ("pyxis", *ALL), "srun", "srun"),
        ("--environment=x --network=y", ("pyxis", *ALL), "srun", "srun"),
        ("sandbox", ALL, "", "apptainer"),
        ("oras://registry/image", ("pyxis", *ALL), "srun", "apptainer"),
    ],
)
def test_the_first_that_is_there_and_runs_the_image(
    choose: Callable[..., Container], image: str, here: Sequence[str], launcher: str, expected: str
) -> None:
    assert choose(image, here, launcher=launcher).runtime.name == expected


@pytest.mark.parametrize(
    ("runtime", "image", "expected"),
    [
        ("pyxis", "image.sqsh", "{here}/image.sqsh"),
        ("pyxis", REGISTRY, REGISTRY),
        ("srun", "image.toml", "--environment={here}/image.toml"),
        ("srun", "--environment=gone.toml", "--environment=gone.toml"),
        ("srun", "--container-image=/gone.sqsh", "--container-image=/gone.sqsh"),
        ("srun", "--environment=x --network=y", "--environment=x --network=y"),
        ("podman-hpc", f"docker://{REGISTRY}", REGISTRY),
        ("shifter", f"docker://{REGISTRY}", f"docker:{REGISTRY}"),
        ("singularity", "image.sif", "image.sif"),
        ("apptainer", REGISTRY, f"docker://{REGISTRY}"),
        ("apptainer", "library://a/b", "library://a/b"),
        ("apptainer", "image.sif", "image.sif"),
    ],
)
def test_image_as_the_runtime_spells_it(
    choose: Callable[..., Container], tmp_path: Path, runtime: str, image: str, expected: str
) -> None:
    found = choose(image, ("pyxis", *ALL), launcher="srun", runtime=runtime)
    assert found.runtime.name == runtime
    assert found.image == expected.format(here=tmp_path)


def test_mounts_of_the_user(choose: Callable[..., Container], tmp_path: Path) -> None:
    found = choose("image.sif", mounts=["sandbox", "/usr:/mnt", "/usr:/data:ro"]).mounts
    assert found == (f"{tmp_path}/sandbox:{tmp_path}/sandbox", "/usr:/mnt", "/usr:/data:ro")


NODE = ("podman-hpc",)
NO_MOUNT = "can't be mounted .expected SOURCE"


@pytest.mark.parametrize(
    ("image", "here", "given", "message"),
    [
        (REGISTRY, (), {"runtime": "docker"}, "--container-runtime docker: unknown .expected one of srun, pyxis, podman-hpc"),
        (REGISTRY, (), {"runtime": "shifter"}, "shifter: command shifter not found in PATH. Fix: load its module"),
        (REGISTRY, (), {"runtime": "pyxis"}, "pyxis: srun has no option --container-image"),
        (REGISTRY, ("pyxis",), {"runtime": "pyxis", "launcher": "mpirun"}, "pyxis: the ranks are not started by srun"),
        (REGISTRY, (), {}, "no container runtime found .expected one of pyxis, podman-hpc, shifter, appt"),
        ("image.sif", (), {}, "no container runtime found .expected one of apptainer, singularity"),
        ("image.toml", ALL, {"launcher": "mpirun"}, "no container runtime found .expected one of srun.. Fix"),
        ("gone.sif", (), {}, "--container gone.sif: no such file .expected an image file, or the name"),
        ("./gone", (), {}, "--container ./gone: no such file"),
        ("gone.toml", ALL, {}, "--container gone.toml: no such file"),
        ("image.sif", NODE, {"runtime": "podman-hpc"}, "podman-hpc does not run such images .expected the name of an image"),
        ("oras://r/i", ("pyxis",), {"runtime": "pyxis"}, "pyxis does not run such images .expected a file .sqsh, a file .sq"),
        (REGISTRY, NODE, {"mounts": ["/gone:/mnt"]}, "--container-mount /gone:/mnt: /gone does not exist .expected"),
        (REGISTRY, NODE, {"mounts": ["/usr:mnt"]}, f"--container-mount /usr:mnt: {NO_MOUNT}"),
        *((REGISTRY, NODE, {"mounts": [mount]}, NO_MOUNT) for mount in ("/usr:/a,b", "/usr:/a:ro:x", "")),
    ],
)  # fmt: skip
def test_refused(
    choose: Callable[..., Container], image: str, here: Sequence[str], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        choose(image, here, **{"launcher": "srun", **given})
    assert "\n" not in str(caught.value)
