"""Trust at the rendezvous: any program that reaches the store can write it; entries are checked before signals."""

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest

from megatron.training.start.rendezvous import (
    Arrival,
    LaunchInfo,
    RendezvousError,
    machine_identity,
    open_store,
    roll_call,
)
from megatron.training.watchdog.local_ranks import LocalRanks, Presence, Process, find_local_ranks, find_process


def place(rank=0, host="127.0.0.1", port=None):
    """A place in a run of two ranks on a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return LaunchInfo(rank, 2, host, port or free.getsockname()[1], agent_holds_store=False, attempt="0")


@pytest.fixture
def victim():
    """A process of the same user that is no rank of any job."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


def test_a_forged_sign_in_makes_no_rank_signal_a_foreign_process(victim):
    """Any program that reaches the port can claim that rank 1 is any process of this user."""
    run = place()
    store = open_store(run, 10.0, holds=True)
    forged = Arrival("somewhere", victim.pid, 2, machine_identity())
    store.set("arrival/1", json.dumps(asdict(forged)))
    presence = Presence(run)
    local_ranks = find_local_ranks(roll_call(store, run, 10.0), run)
    presence.close()
    assert 1 not in local_ranks and victim.poll() is None


def test_only_processes_verified_by_the_kernel_are_ended(victim):
    run, read_end = place(), os.pipe()
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # its abort is expected: no stacks in the output of the tests
        presence = Presence(place(1, port=run.port))
        os.write(read_end[1], b"r")
        signal.pause()
        presence.close()
    os.read(read_end[0], 1)
    arrivals = [Arrival("here", pid, 2, machine_identity()) for pid in (os.getpid(), victim.pid)]
    local_ranks = find_local_ranks(arrivals, run)
    assert local_ranks.processes[1].pid == child and local_ranks.dead() == []
    local_ranks.end(1, 0.1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGABRT
    assert local_ranks.dead() == [1] and find_process(run, 1) is None and victim.poll() is None
    local_ranks.close()


def test_another_job_on_the_same_host_is_nobodys_neighbour():
    first, second = place(), place(1)
    presence = Presence(second)
    assert find_process(first, 1) is None and find_process(second, 1).pid == os.getpid()
    presence.close()


def test_a_process_number_that_was_given_away_is_not_signalled(victim):
    """Simulates a kernel without process descriptors."""
    registered = Process(victim.pid, "1", None)
    assert not registered.alive
    LocalRanks({1: registered}, 0).end(1, 0.0)
    assert victim.poll() is None
    opened = Process.open(victim.pid)
    Process(victim.pid, opened.started, None).send(signal.SIGKILL)
    assert victim.wait(10) == -signal.SIGKILL and not opened.alive
    opened.close()


SECOND = """
import sys
from megatron.training.start.rendezvous import LaunchInfo, RendezvousError, open_store, roll_call
place = LaunchInfo(1, 2, "127.0.0.1", int(sys.argv[1]), agent_holds_store=False, attempt="0")
try:
    roll_call(open_store(place, 10.0), place, 10.0)
except RendezvousError as error:
    print(error)
"""


def test_second_process_of_a_rank_is_rejected_and_the_job_continues():
    run = place()
    retained = open_store(run, 10.0, holds=True)
    second = LaunchInfo(1, 2, run.host, run.port, agent_holds_store=False, attempt="0")
    with ThreadPoolExecutor(2) as pool:
        signed_in = [pool.submit(roll_call, open_store(item, 10.0), item, 10.0) for item in (run, second)]
    before = [item.result() for item in signed_in]
    program = [sys.executable, "-c", SECOND, str(run.port)]
    result = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert f"RANK 1: process {os.getpid()} on" in result.stdout and "another MASTER_PORT" in result.stdout, result
    assert json.loads(retained.get("arrival/1")) == asdict(before[0][1])
    assert roll_call(open_store(second, 10.0), second, 10.0) == before[0]  # a second run in the same process


def test_store_listens_on_the_master_address_only():
    run = place()
    store = open_store(run, 10.0, holds=True)
    open_store(run, 10.0).set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", run.port), timeout=10.0)


def test_a_port_of_a_program_that_stays_silent_is_rejected_within_the_limit():
    """It accepts the connection and never answers; without the limit torch would wait forever."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(RendezvousError, match="something accepts connections there but did not answer within 1 s"):
            open_store(place(1, port=silent.getsockname()[1]), 1.0)


def test_a_port_that_is_taken_is_rejected_by_its_holder():
    with socket.socket() as selected:
        selected.bind(("127.0.0.1", 0))
        selected.listen()
        with pytest.raises(RendezvousError, match="rank 0 cannot listen there, another job may"):
            open_store(place(port=selected.getsockname()[1]), 5.0, holds=True)
