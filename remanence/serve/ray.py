"""Replicas of a server on a Ray cluster, behind the proxies of Ray Serve (extra `ray`).

Replicas share the table and the files of memories, and nothing else, so each can continue any memory. Requests with the
same header ``X-Session-Id`` go to the same replica as long as it runs, where their memory is in RAM.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp

from remanence.inference.session import Session
from remanence.runtime.errors import first_line
from remanence.runtime.terminal import echo
from remanence.serve.server import Server, Settings, address, check_keys, listen, open_database, start_log

try:
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions, RequestRouterConfig
    from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
except ImportError as error:
    raise ImportError(f"--replicas needs the extra 'ray': pip install 'remanence[ray]' ({error})") from None

NAME = "remanence"
"""The name of the application and of its deployment in Ray Serve."""
HEALTH_SECONDS = 5.0
"""The time between two checks whether a replica works."""


class Replica:
    """One server of several.

    Args:
        open_session: returns a session with the model to serve.
        settings: the settings, the same for all replicas.
    """

    def __init__(self, open_session: Callable[[], Session], settings: Settings) -> None:
        start_log()
        settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._server = Server(open_session(), settings)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._server.app

    def check_health(self) -> None:
        """Raise an error if the replica must be replaced. Ray Serve calls it."""
        if not self._server.engine.is_alive:
            raise RuntimeError("engine: expected one that runs, got one that has stopped")

    def __del__(self) -> None:
        if (server := getattr(self, "_server", None)) is not None:
            server.close()


def application(
    open_session: Callable[[], Session], settings: Settings, *, replicas: int, gpus: float = 0.0
) -> serve.Application:
    """Return the application for ``serve.run``: so many replicas, each with so many GPUs or one CPU."""
    deployment = serve.deployment(
        name=NAME,
        num_replicas=replicas,
        max_ongoing_requests=settings.max_rows + settings.limits.max_waiting + 16,  # beyond, they answer 503
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=settings.grace,
        request_router_config=RequestRouterConfig(request_router_class=ConsistentHashRouter),
    )(serve.ingress()(Replica))
    return deployment.bind(open_session, settings)


def start(app: serve.Application, host: str, port: int, **options: Any) -> None:
    """Start an application on the cluster that ``RAY_ADDRESS`` names, or on this machine. Returns when it takes
    requests at an address of each machine. `options` are those of ``ray.init``.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # otherwise Ray reports to its makers
    if not ray.is_initialized():
        ray.init(log_to_driver=True, **options)
    serve.start(proxy_location="EveryNode", http_options=HTTPOptions(host=host, port=port))
    try:
        serve.run(app, name=NAME, route_prefix="/")
    except RuntimeError as error:
        stop()
        raise ValueError(f"--replicas: expected all to start, got another ({first_line(error)})") from None


def stop() -> None:
    """Let the replicas complete the answers under way, and end them."""
    serve.shutdown()
    ray.shutdown()


def run(
    open_session: Callable[[], Session], settings: Settings, *, port: int, replicas: int, gpus: float
) -> None:
    """Serve until SIGINT or SIGTERM. Port 0: any free one."""
    with listen(settings.host, port) as free:
        port, url = free.getsockname()[1], address(free)
    database = open_database(settings.folder, settings.database)
    try:
        check_keys(database, settings)
    finally:
        database.close()
    ended = threading.Event()
    start(application(open_session, settings, replicas=replicas, gpus=gpus), settings.host, port)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    echo(f"{settings.name}: {url}, {replicas} replicas")
    ended.wait()
    stop()
