"""What the calls make of errors that are not theirs."""

from __future__ import annotations

import json
import ssl
from pathlib import Path
from typing import Any

import distributed
import pytest

from dask_gpu_mpi import connect
from dask_gpu_mpi.errors import InputError


@pytest.mark.parametrize(
    ("reason", "raised"),
    [
        ("certificate has expired", "connect: the job's certificate has expired by the clock of "),
        ("unable to get local issuer certificate", "TLS certificate does not match"),
    ],
)
def test_connect_names_a_clock_that_is_wrong(
    reason: str, raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError("TLS certificate does not match. Check your security settings.") from ssl.SSLError(
            reason
        )

    monkeypatch.setattr(distributed, "Client", refused)
    file = tmp_path / "scheduler.json"
    file.write_text(json.dumps({"address": "tls://10.0.0.1:8786"}))
    with pytest.raises((InputError, OSError), match=raised):
        connect(file)
