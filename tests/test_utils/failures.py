"""Runs of two ranks with a fault in one rank, and their outcome.

Ranks run ``scripts/pretrain_gpt_with_fault.py``. They are forked from a server that has imported everything once, by
torchrun itself (``--start-method fork --run-path``), as ranks without a launcher, or as separate hosts: in network,
name and process namespaces with a cable between them.
"""

import ctypes
import multiprocessing as mp
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.test_utils.gpt_runs import MODEL_FLAGS

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "functional_tests" / "scripts" / "pretrain_gpt_with_fault.py"
PATIENCE = 120.0
RANKS = 2
NEW_USER, NEW_NET, NEW_NAME, NEW_PIDS = 0x10000000, 0x40000000, 0x04000000, 0x20000000


@dataclass(frozen=True)
class Fault:
    """A fault, its rank, and the launcher and flags of the run."""

    what: str
    rank: int | str = 1
    launcher: str = "torchrun"
    """"torchrun"; "ranks": no launcher, rank 0 holds the store; "hosts": likewise, each rank on a separate host;
    "alone": one rank."""
    ranks: tuple[int, ...] = (0, 1)
    """Ranks to start with launcher "ranks"."""
    interpreter: bool = False
    """Whether torchrun and the ranks are fresh processes of a shell, with nothing loaded."""
    device: str = "cpu"
    timeout: float = 10.0
    """--watchdog-timeout-seconds. With 6, a busy machine made a rank seem dead before its fault."""
    collective_minutes: float = 10.0
    """--distributed-timeout-minutes."""
    layout: str = ""
    """Flags of a pipeline, in place of data parallelism."""

    def __str__(self):
        where = "" if self.launcher == "torchrun" else f" ({self.launcher})"
        where += " pipeline" if self.layout else ""
        only = "" if len(self.ranks) == RANKS else f" only {self.ranks[0]}"
        return f"rank {self.rank} {self.what}{only}{where}".replace(" ", "-")

    @property
    def flags(self):
        return ["--mock-data", "--watchdog-timeout-seconds", str(self.timeout), "--save-interval", "5",
                "--eval-interval", "4", *self.layout.split(),
                *(["--async-save"] if "background" in self.what else [])]  # fmt: skip


@dataclass
class Outcome:
    """Exit code, duration, output and remaining processes of a run."""

    code: int | None
    """The launcher's exit code, or the first of the ranks that is not 0."""
    seconds: float
    """From the fault, or the start if there was none, to the end of the last process."""
    output: str
    """Output of the launcher."""
    folder: Path
    errors: dict[int, str] = field(default_factory=dict)
    """Rank -> its stdout and stderr."""
    stacks: dict[str, str] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)
    """Rank processes that still run after the launcher has exited."""

    def first_word(self, rank):
        """The first line that a rank's watchdog wrote."""
        return next((line for line in self.errors[rank].splitlines() if line.startswith("watchdog:")), "")


def run(fault, folder):
    """Runs ``fault`` in ``folder`` to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.time()
    if fault.interpreter:
        process = subprocess.Popen(
            torchrun(fault, folder, shell=True), env=os.environ | environment(fault, folder), cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        output, _ = process.communicate(timeout=PATIENCE)
        code = process.returncode
    else:
        context = mp.get_context("forkserver")
        start = start_torchrun if fault.launcher == "torchrun" else start_ranks
        process = context.Process(target=start, args=(fault, folder))
        process.start()
        process.join(PATIENCE)
        code, output = process.exitcode, (folder / "launcher").read_text()
        process.kill()
    return look(fault, folder, code, output, began)


def look(fault, folder, code, output, began):
    """Collect the output of the ranks and kill their remaining processes."""
    ended = time.time()
    notes = {path.name: path.read_text().split() for path in folder.glob("*-[01]")}
    times = [float(when) for name, (_, when) in notes.items() if name.startswith("fault")]
    pids = [int(pid) for name, (pid, _) in notes.items() if name.startswith("start") and fault.launcher != "hosts"]
    errors = {}
    for rank in fault.ranks:
        files = [*sorted(folder.glob(f"logs/**/{rank}/*.log")), *folder.glob(f"stderr-rank{rank}")]
        errors[rank] = "".join(path.read_text() for path in files)
    stacks = {path.stem: path.read_text() for path in (folder / "save" / "stacks").glob("*.txt")}
    left = [pid for pid in pids if Path(f"/proc/{pid}").exists() and not is_zombie(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return Outcome(code, ended - min(times, default=began), output, folder, errors, stacks, left)


def is_zombie(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def environment(fault, folder):
    return {
        "FAULT": fault.what, "FAULT_RANK": str(fault.rank), "FAULT_FOLDER": str(folder), "PYTHONPATH": str(ROOT),
        "STANDSTILL": str(1.2 * fault.timeout), "COLLECTIVE_MINUTES": str(fault.collective_minutes),
        "OMP_NUM_THREADS": "1",
    } | ({"CUDA_VISIBLE_DEVICES": ""} if fault.device == "cpu" else {})  # fmt: skip


def script_flags(fault, folder):
    return [*MODEL_FLAGS, *fault.flags, "--save", str(folder / "save"), "--load", str(folder / "save")]


def torchrun(fault, folder, shell=False):
    """The command line, or the part of it that follows ``torchrun`` in a process that has it loaded."""
    local = ["--standalone", "--nproc-per-node", str(RANKS), "--redirects", "3", "--log-dir", str(folder / "logs")]
    if shell:
        start = [sys.executable, "-m", "torch.distributed.run", *local]
    else:
        start = [*local, "--start-method", "fork", "--run-path"]
    return [*start, str(SCRIPT), *script_flags(fault, folder)]


def become(fault, folder, output):
    """This forked process gets the fault's environment and writes to a file."""
    os.environ.update(environment(fault, folder))
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    error = os.open(folder / output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(error, 1)
    os.dup2(error, 2)
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115


def start_torchrun(fault, folder):
    """The process of torchrun."""
    become(fault, folder, "launcher")
    from torch.distributed.run import main

    main(torchrun(fault, folder))


def start_ranks(fault, folder):
    """Starts ranks as a cluster's scheduler does: with an environment and nothing else."""
    become(fault, folder, "launcher")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = 1 if fault.launcher == "alone" else RANKS
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if fault.launcher == "hosts":
        place |= {"MASTER_ADDR": address(0), "GLOO_SOCKET_IFNAME": "cable"}
        pids = hosts_with_cable(lambda rank: start_rank(fault, folder, rank, place))
    else:
        pids = [os.fork() or start_rank(fault, folder, rank, place) for rank in fault.ranks]
    os._exit(max(map(exit_code, pids)))


def exit_code(pid):
    """Waits for a child."""
    return abs(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def start_rank(fault, folder, rank, place):
    """One rank; never returns."""
    code = 1
    try:
        become(fault, folder, f"stderr-rank{rank}")
        os.environ.update(place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        sys.argv = [str(SCRIPT), *script_flags(fault, folder)]
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


# ---- separate hosts


def address(rank):
    return f"10.9.0.{1 + rank}"


def unshare(flags):
    """New namespaces for this process, or its children for NEW_PIDS. Raises OSError where that is forbidden."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def become_root():
    """In a user namespace, which takes no rights."""
    user, group = os.getuid(), os.getgid()
    unshare(NEW_USER | NEW_NET)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def can_have_hosts():
    """Whether this machine allows namespaces."""
    if shutil.which("ip") is None or not hasattr(os, "fork"):
        return False
    program = "from tests.test_utils import failures as f; f.become_root(); f.unshare(f.NEW_NAME | f.NEW_PIDS)"
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=False).returncode == 0


def hosts_with_cable(start):
    """``start(rank)`` on two hosts; the processes to wait for."""
    become_root()
    pids, ready, go = [], os.pipe(), os.pipe()
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            be_a_host(rank, start, ready[1], go[0])
        pids.append(pid)
    for _ in pids:
        os.read(ready[0], 1)
    for pid in pids:
        os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)  # keeps the cable when its host dies
    command = "ip link add name cable netns {} type veth peer name cable netns {}"
    subprocess.run(command.format(*pids).split(), check=True)
    os.write(go[1], b"gg")
    return pids


def be_a_host(rank, start, ready, go):
    """Never returns."""
    unshare(NEW_NET | NEW_NAME)
    socket.sethostname(f"host{rank}")
    os.write(ready, b"r")
    os.read(go, 1)
    for command in (f"addr add {address(rank)}/24 dev cable", "link set cable up", "link set lo up"):
        subprocess.run(["ip", *command.split()], check=True)
    unshare(NEW_PIDS)  # last: the next child is the first process of the namespace
    os._exit(exit_code(os.fork() or start(rank)))
