"""No secret of the job or of the user's options is shown."""

from __future__ import annotations

import time

import pytest

from dask_gpu_mpi.view.report_data import LEFT_OUT, scrub, scrub_options

PEM = "-----BEGIN PRIVATE KEY-----\nMIIabc\n-----END PRIVATE KEY-----"


@pytest.mark.parametrize(
    "text",
    [
        f"tls: {PEM} rest",
        "http://h:1/status?token=S3CRET",
        "the password=S3CRET, and more",
        '{"api_key": "S3CRET"}',
        "Authorization: Bearer S3CRET",
        "AWS_SECRET_ACCESS_KEY=S3CRET",
        "s3://user:S3CRET@host/x",
        "-----BEGIN RSA PRIVATE KEY-----\nS3CRET",
        "run --password S3CRET x",
        "PGPASS S3CRET",
        "password S3CRET of the database",
        "DB_PWD=S3CRET",
        "HF_TOKEN is S3CRET",
        "https://S3CRET@github.com/x",
        "ftp://me:p@S3CRET@host",
        'password = "correct S3CRET battery"',
        "Authorization: Token S3CRET",
        '"password": ["S3CRET"]',
    ],
)
def test_what_looks_like_a_secret(text: str) -> None:
    found = scrub([text, {"x": (text,)}])
    assert "S3CRET" not in str(found)
    assert "MIIabc" not in str(found)
    assert LEFT_OUT in found[0]
    assert found[1]["x"] == [found[0]]


@pytest.mark.parametrize("text", ["", "a token ring", "tcp://host:8786", "key=1", "x = y", "monkey: 3"])
def test_what_does_not(text: str) -> None:
    assert scrub(text) == text


@pytest.mark.parametrize(
    "text", ["a" * 200_000, "token" * 40_000, "token " * 30_000, "a://" * 50_000, "pwd" + " " * 200_000]
)
def test_long_texts_take_no_time(text: str) -> None:
    began = time.process_time()
    scrub(text)
    assert time.process_time() - began < 5  # with repetitions without a bound it is minutes


def test_numbers_and_none_stay() -> None:
    assert scrub({"a": 1, "b": None, "c": True}) == {"a": 1, "b": None, "c": True}


def test_options() -> None:
    class Mine:
        pass

    found = scrub_options(
        {
            "worker_class": Mine,
            "worker_options": {
                "rmm_pool_size": "10 GiB",
                "n": 3,
                "env": {"HOME": "/secret/home"},
                "list": ["a", {"b": "c"}],
                "api_key": 17,
            },
            "plain": ["a", 2],
        }
    )
    assert found["worker_class"].endswith("Mine")
    # of an option that is made of several nothing but numbers: nobody knows what is in it
    assert found["worker_options"] == {
        "rmm_pool_size": LEFT_OUT,
        "n": 3,
        "env": {"HOME": LEFT_OUT},
        "list": LEFT_OUT,
        "api_key": LEFT_OUT,
    }
    assert found["plain"] == ["a", 2]
