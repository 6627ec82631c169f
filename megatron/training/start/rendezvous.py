"""Rendezvous of a run's ranks: a TCP store, and a roll call that names missing ranks.

The launcher sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. torchrun's agent hosts the store; otherwise rank 0
does. Every rank registers its host and process ID before any process group is created, so that a missing rank is named
instead of causing a collective time-out."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron.core.config.errors import EXIT_FAILED, UserError, listed

logger = logging.getLogger(__name__)

REMIND_SECONDS = 10.0


class RendezvousError(UserError, OSError):
    """Failed rendezvous; the message names the missing ranks and the fix."""

    exit_code = EXIT_FAILED


@dataclass(frozen=True)
class LaunchInfo:
    """Rank, world size and store address of this process, as set by the launcher."""

    rank: int
    world_size: int
    host: str
    port: int
    agent_holds_store: bool
    attempt: str

    @property
    def holds_store(self) -> bool:
        return self.rank == 0 and not self.agent_holds_store

    @classmethod
    def from_environment(cls) -> LaunchInfo | None:
        """Read rank, world size and store address from the launcher's variables; None without RANK or MASTER_ADDR, or
        with fewer than two ranks. Raises RendezvousError or ValueError for bad values."""
        if "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", "1")) < 2 or "MASTER_ADDR" not in os.environ:
            return None
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if not 0 <= rank < world_size:
            raise RendezvousError(f"RANK {rank}: must lie in [0, {world_size}), as WORLD_SIZE is {world_size}")
        if not os.environ.get("MASTER_PORT", "").isdigit():
            raise RendezvousError("MASTER_PORT: is not set to a port number, though MASTER_ADDR is set")
        return cls(
            rank,
            world_size,
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )


def _is_listening(place: LaunchInfo, timeout: float) -> bool:
    """Whether a program accepts TCP connections at the store's address; retries for up to ``timeout`` seconds (blocks).
    Does not check that it is a store. Called first because torch's connection errors contain pages of C++ frames."""
    limit = time.monotonic() + timeout
    while (left := limit - time.monotonic()) > 0:
        try:
            socket.create_connection((place.host, place.port), timeout=left).close()
            return True
        except OSError:
            time.sleep(min(0.1, left))
    return False


@dataclass(frozen=True)
class Arrival:
    """Entry of a rank in the roll call."""

    host: str
    pid: int
    """For messages only: any program that reaches the store may have written it."""
    world_size: int
    machine: str
    """Equal if process IDs refer to the same processes: host names may be shared, a host may run containers."""

    @classmethod
    def of_this_process(cls, world_size: int) -> Arrival:
        """Return the entry of this process."""
        return cls(socket.gethostname(), os.getpid(), world_size, machine_identity())


def machine_identity() -> str:
    """Return an ID of the running kernel and process namespace; the host name if the system provides neither."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return socket.gethostname()


def open_store(place: LaunchInfo, timeout: float, *, holds: bool = False) -> dist.Store:
    """Open a separate connection to the run's store, whose keys are separate per restart of the launcher. With
    ``holds``, this process hosts the store while the result lives. Raises RendezvousError: no answer within ``timeout``
    seconds, or the port is in use; names the cause and the fix."""
    where = f"MASTER_ADDR {place.host}, MASTER_PORT {place.port}"
    if not holds and not _is_listening(place, timeout):
        missing = "the launcher's agent" if place.agent_holds_store else "rank 0"
        raise RendezvousError(f"{where}: {missing} did not answer within {timeout:g} s: is it running?")

    def connect() -> dist.Store:
        return dist.TCPStore(
            place.host,
            place.port,
            None,
            is_master=holds,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=_listening_socket(place) if holds else None,
        )

    try:
        store = _within(timeout, connect)
    except (RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        advice = "rank 0 cannot listen there, another job may: choose another port" if holds else "no store is there"
        raise RendezvousError(f"{where}: {advice} ({reason})") from None
    if store is None:
        raise RendezvousError(
            f"{where}: something accepts connections there but did not answer within {timeout:g} s: another program may"
            " own the port; choose another MASTER_PORT"
        )
    return dist.PrefixStore(f"attempt-{place.attempt}", store)


def _within(timeout: float, connect: Callable[[], dist.Store]) -> dist.Store | None:
    """Return or raise like ``connect``; None after ``timeout`` seconds. Uses a separate thread, because torch waits
    without limit for the first answer of the program that accepted its connection."""
    future: Future[dist.Store] = Future()

    def attempt() -> None:
        try:
            future.set_result(connect())
        except (RuntimeError, OSError) as error:
            future.set_exception(error)

    threading.Thread(target=attempt, name="rendezvous", daemon=True).start()
    try:
        return future.result(timeout)
    except FutureTimeout:
        return None


def _listening_socket(place: LaunchInfo) -> int | None:
    """Return the descriptor of a socket that is bound to MASTER_ADDR only, so that other networks of this host cannot
    reach the store. None (listen on all addresses) if other hosts may resolve MASTER_ADDR to another address: a host
    name often resolves locally to a loopback address, and a service name to an address of no host. Raises OSError if
    the port is in use."""
    with contextlib.suppress(socket.gaierror):
        found = socket.getaddrinfo(place.host, place.port, type=socket.SOCK_STREAM)
        for family, _, _, _, address in sorted(found, key=lambda each: each[0] != socket.AF_INET):
            if ipaddress.ip_address(address[0]).is_loopback and not _means_loopback(place.host):
                continue
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(address)
            except OSError as error:
                listener.close()
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
            else:
                return listener.detach()
    return None


def _means_loopback(host: str) -> bool:
    """Whether the user wrote a loopback address, not a name that resolves to one here."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def roll_call(store: dist.Store, place: LaunchInfo, timeout: float) -> list[Arrival]:
    """Register this rank, wait for all ranks, and return all entries, indexed by rank. Raises RendezvousError: ranks
    are missing after ``timeout`` seconds (named); another process has registered as this rank; or a rank was started
    with another WORLD_SIZE."""
    _sign_in(store, place)
    keys = [f"arrival/{rank}" for rank in range(place.world_size)]
    begin = reminded = time.monotonic()
    while not store.check(keys):
        now = time.monotonic()
        if now - begin > timeout:
            missing, first = _missing(store, keys)
            raise RendezvousError(
                f"{missing} of {place.world_size} ranks did not arrive within {timeout:g} s: {first}. Look for"
                " their errors, start all ranks, or raise --watchdog-timeout-seconds"
            )
        if now - reminded > REMIND_SECONDS:
            reminded = now
            logger.warning("waiting for %d more ranks: %s", *_missing(store, keys))
        time.sleep(0.05)
    arrivals = [Arrival(**json.loads(store.get(key))) for key in keys]
    odd = [rank for rank, each in enumerate(arrivals) if each.world_size != place.world_size]
    if odd:
        other = arrivals[odd[0]].world_size
        raise RendezvousError(f"WORLD_SIZE is {place.world_size} on rank {place.rank} but {other} on rank {odd[0]}")
    return arrivals


def _sign_in(store: dist.Store, place: LaunchInfo) -> None:
    """Register this process under its rank in the store (atomic compare-and-set). Raises RendezvousError, naming host
    and process, if another process has registered as this rank."""
    own = Arrival.of_this_process(place.world_size)
    written = Arrival(**json.loads(store.compare_set(f"arrival/{place.rank}", "", json.dumps(asdict(own)))))
    if written != own:
        raise RendezvousError(
            f"RANK {place.rank}: process {written.pid} on {written.host} already has this rank at MASTER_ADDR "
            f"{place.host}, MASTER_PORT {place.port}; choose another MASTER_PORT for another job, or start each rank "
            "once"
        )


def _missing(store: dist.Store, keys: list[str]) -> tuple[int, str]:
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    return len(missing), listed(missing, most=16)
