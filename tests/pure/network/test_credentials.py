"""The job's credentials let each other in, and nobody else."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest

from dask_gpu_mpi.network.credentials import Credentials, make_credentials


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> str:
    """Let two contexts greet each other; returns what the server read, raises what either side raised."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    theirs.settimeout(10)
    errors: list[BaseException] = []
    heard: list[bytes] = []

    def serve() -> None:
        try:
            with server.wrap_socket(ours, server_side=True) as secure:
                heard.append(secure.recv(10))
        except OSError as error:
            errors.append(error)
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(theirs) as secure:
            secure.send(b"hello")
    except OSError as error:
        errors.append(error)
    finally:
        theirs.close()
        thread.join(timeout=10)
        ours.close()
    if errors:
        raise errors[0]
    return heard[0].decode()


def contexts(credentials: Credentials) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    security = credentials.security()
    return (
        security.get_listen_args("scheduler")["ssl_context"],
        security.get_connection_args("client")["ssl_context"],
    )


def test_members_of_one_job_let_each_other_in() -> None:
    server, client = contexts(make_credentials())
    assert shake_hands(server, client) == "hello"


def test_a_member_of_another_job_is_refused() -> None:
    server, _ = contexts(make_credentials())
    _, client = contexts(make_credentials())
    with pytest.raises(OSError, match=r"(?i)certificate|alert|reset|broken"):
        shake_hands(server, client)


def test_a_member_is_no_authority() -> None:
    from cryptography import x509

    credentials = make_credentials()
    member = x509.load_pem_x509_certificate(credentials.certificate.encode())
    assert not member.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_the_key_is_not_shown() -> None:
    credentials = make_credentials()
    assert "PRIVATE KEY" in credentials.key
    assert "PRIVATE KEY" not in repr(credentials)


def test_the_configuration_makes_plain_objects_secure() -> None:
    import dask
    from distributed import Security

    credentials = make_credentials()
    with dask.config.set(credentials.dask_config()):
        security = Security()
    assert security.require_encryption
    assert security.tls_worker_key == credentials.key


def test_strict_verification_is_satisfied() -> None:
    import ssl as tls

    server, client = contexts(make_credentials())
    for context in (server, client):
        context.verify_flags |= tls.VERIFY_X509_STRICT
    assert shake_hands(server, client) == "hello"
