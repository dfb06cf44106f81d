"""CUDA_VISIBLE_DEVICES against what NVML lists."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dask_gpu_mpi.errors import InputError
from dask_gpu_mpi.machine.gpus import Gpu
from dask_gpu_mpi.machine.nvidia import hide_gpus, parse_visible, sees_none

GIB = 1024**3


def gpu(index: int, uuid: str) -> Gpu:
    return Gpu(uuid=uuid, index=index, name="A100", memory=40 * GIB)


FOUR = tuple(gpu(i, uuid) for i, uuid in enumerate(["GPU-aa00", "GPU-aa11", "GPU-bb22", "GPU-cc33"]))
PARENT = "GPU-dd00"
MIG = (
    gpu(0, "GPU-aa00"),
    *(Gpu(f"MIG-ee0{i}", 1, "A100 MIG 1g.5gb", 5 * GIB, parent=PARENT, slice=i) for i in range(3)),
    gpu(2, "GPU-bb22"),
)
LOST = (*FOUR[:2], Gpu(uuid="", index=2, name="GPU is lost", memory=0), FOUR[3])


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("0,1", [0, 1]),
        ("3,1", [3, 1]),
        (" 2 , 0 ", [2, 0]),
        ("00", [0]),
        ("GPU-cc33,GPU-aa00", [3, 0]),
        ("GPU-b,GPU-c", [2, 3]),
        ("GPU-BB22", [2]),
        ("1,-1,3", [1]),
        ("1,-1,what ever", [1]),
        ("", []),
        (" ", []),
        ("-1", []),
        ("-1,0", []),
        ("NoDevFiles", []),
    ],
)
def test_values(value: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in parse_visible(value, FOUR)] == indices
    assert sees_none(value) == (not indices)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("4", ["'4'", "there is no GPU"]),
        ("0,9", ["'9'", "there is no GPU"]),
        ("GPU-ff", ["'GPU-ff'", "there is no GPU"]),
        ("MIG-ff", ["'MIG-ff'", "there is no GPU"]),
        ("0,0", ["twice"]),
        ("0,GPU-aa00", ["twice", "'0'", "'GPU-aa00'"]),
        ("GPU-aa1,GPU-aa11", ["twice"]),
        ("GPU-aa", ["fits 2"]),
        ("0,", ["''", "expected an index"]),
        (",0", ["''", "expected an index"]),
        (",", ["''", "expected an index"]),
        ("0;1", ["'0;1'"]),
        ("GPU-", ["'GPU-'"]),
        ("all", ["'all'"]),
        ("-2", ["'-2'"]),
        ("²", ["'²'"]),
    ],
)
def test_errors_name_the_value_and_what_is_there(value: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse_visible(value, FOUR)
    message = str(caught.value)
    for word in [f"CUDA_VISIBLE_DEVICES={value!r}", "0 (GPU-aa00)", "3 (GPU-cc33)", *words]:
        assert word in message
    assert "\n" not in message


@pytest.mark.parametrize("entry", ["0x1", "gpu-1111", "UUID-123456", "GPU-", "MIG-", "-1x"])
def test_an_entry_that_is_neither_index_nor_uuid(entry: str) -> None:
    with pytest.raises(InputError, match=f"invalid entry '{entry}' "):
        parse_visible(entry, FOUR)


def test_without_any_gpu() -> None:
    assert parse_visible(None, ()) == ()
    assert parse_visible("", ()) == ()
    with pytest.raises(InputError, match="NVML lists no GPU"):
        parse_visible("0", ())


def test_an_exact_uuid_wins_over_longer_ones() -> None:
    devices = (gpu(0, "GPU-a"), gpu(1, "GPU-ab"))
    assert parse_visible("GPU-a", devices) == devices[:1]


@pytest.mark.parametrize(
    ("value", "uuids"),
    [
        (None, ["GPU-aa00", "MIG-ee00", "MIG-ee01", "MIG-ee02", "GPU-bb22"]),
        ("MIG-ee02,MIG-ee00", ["MIG-ee02", "MIG-ee00"]),
        ("1", ["MIG-ee00"]),
        ("GPU-dd", ["MIG-ee00"]),
        ("2,MIG-ee01", ["GPU-bb22", "MIG-ee01"]),
    ],
)
def test_mig(value: str | None, uuids: list[str]) -> None:
    assert [gpu.uuid for gpu in parse_visible(value, MIG)] == uuids


def test_mig_errors() -> None:
    with pytest.raises(InputError, match="fits 3"):
        parse_visible("MIG-ee", MIG)
    with pytest.raises(InputError, match="twice"):
        parse_visible("1,MIG-ee00", MIG)


def test_the_oldest_mig_syntax_where_the_driver_uses_it() -> None:
    devices = (Gpu("MIG-GPU-dd00/1/0", 0, "A100", GIB, parent=PARENT, slice=0),)
    assert parse_visible("MIG-GPU-dd00/1/0", devices) == devices


def test_lost_gpus_come_back_where_they_are_asked_for() -> None:
    assert parse_visible("0,1", LOST) == LOST[:2]
    assert parse_visible("0,2", LOST) == (LOST[0], LOST[2])
    assert parse_visible(None, LOST) == LOST
    # its UUID can't be read any more
    assert parse_visible("GPU-bb22,GPU-cc33", LOST) == (LOST[2], LOST[3])
    with pytest.raises(InputError, match="lost: GPU is lost"):
        parse_visible("GPU-bb22,GPU-ff", LOST)


@given(st.permutations(range(4)), st.lists(st.booleans(), min_size=4, max_size=4), st.integers(0, 4))
def test_any_mix_of_names_gives_that_order(order: list[int], by_uuid: list[bool], count: int) -> None:
    names = [FOUR[i].uuid if by_uuid[i] else str(i) for i in order[:count]]
    assert parse_visible(",".join(names), FOUR) == tuple(FOUR[i] for i in order[:count])


@given(st.text(alphabet="01-,GPUMIabc \x00é", max_size=12))
def test_any_text_is_read_or_refused(value: str) -> None:
    try:
        found = parse_visible(value, FOUR)
    except InputError as error:
        message = str(error)
        assert "\n" not in message
    else:
        assert len({gpu.uuid for gpu in found}) == len(found)


def test_gpus_are_hidden_from_a_process() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "0,1", "HOME": "/"}
    hide_gpus(environ)
    assert environ == {"CUDA_VISIBLE_DEVICES": "", "HOME": "/"}
    assert sees_none(environ["CUDA_VISIBLE_DEVICES"])
    hide_gpus(environ, but="GPU-x")
    assert environ["CUDA_VISIBLE_DEVICES"] == "GPU-x"
