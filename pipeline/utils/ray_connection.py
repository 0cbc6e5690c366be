"""Connects to a Ray cluster. Ray is imported only by what imports this module."""

from __future__ import annotations

import logging
import os
import signal
import socket

import grpc
import ray

from pipeline.utils.errors import RetryableError, last_line
from pipeline.utils.shutdown import kept_handlers

_CONNECT_SECONDS = 10.0


def connect(address: str) -> None:
    """Connects this process to a cluster, and keeps its signal handlers.

    Args:
      address: Address of the cluster, as `ray.init` takes it.

    Raises:
      RetryableError: If no cluster answers there.
    """
    try:
        # Ray's handler exits, and if it cannot, its C++ code aborts the process.
        with kept_handlers():
            _check_address(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except SystemExit as error:
        raise SystemExit(128 + signal.SIGTERM) from error  # Ray's own handler exits with 15.
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise RetryableError(
            f"--ray_address={address}: cannot connect to a Ray cluster ({reason}). If none is "
            "running, start one with: ray start --head. Otherwise, check the address, the version "
            "of Ray and, if the cluster uses a token, RAY_AUTH_MODE=token here."
        ) from error


def reason_of(error: ray.exceptions.RayError) -> str:
    """Returns why a process of Ray was lost, without the causes that Ray guesses at."""
    return last_line(error).partition(". ")[0].rstrip(".")


def _check_address(address: str) -> None:
    """Checks that a program at HOST:PORT speaks Ray's protocol, gRPC.

    Ray itself would try for several minutes, and no signal would stop it.

    Raises:
      OSError: If none does.
    """
    place = address.removeprefix("ray://")
    host, _, port = place.rpartition(":")
    if not (host and port.isdigit()):
        return
    socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    if os.environ.get("RAY_USE_TLS", "0") != "0":  # Ray takes its certificates to connect
        return
    options = [("grpc.enable_http_proxy", 0)]  # as Ray does
    with grpc.insecure_channel(place, options) as channel:
        try:
            grpc.channel_ready_future(channel).result(_CONNECT_SECONDS)
        except grpc.FutureTimeoutError as error:
            raise OSError(
                f"what listens there has not answered as Ray does for {_CONNECT_SECONDS:g} s"
            ) from error
