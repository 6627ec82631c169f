"""A ``python`` that has imported torch and the suite: programs of a shell start in a tenth of a second instead of four.

``WarmPython`` starts a server, which imports once, and writes a stand-in for the interpreter. The stand-in passes its
arguments, environment, folder and standard files to the server and is the program's shadow: signals go through it, it
ends with the program's exit code, and when it is killed so is the program. The server forks every program, which runs
as ``__main__`` on the search path that an interpreter would give it. Command lines that are neither of a script, nor
``-m``, nor ``-c`` go to the interpreter itself.

Some bugs appear only in a fresh interpreter (imports that need each other in another order, hashes that differ between
ranks). Programs that start cold detect these bugs: the programs of README.md, the quickstart,
``test_library_programs.py`` and the watchdog.
"""

import _signal  # a program's stand-in loads no modules in Python: 25 ms of CPU time in place of 65
import _socket
import array
import marshal
import os
import sys

FORWARDED = (_signal.SIGTERM, _signal.SIGINT, _signal.SIGUSR1, _signal.SIGUSR2, _signal.SIGHUP)


def run_shadow(address, arguments):
    """The stand-in: has ``arguments`` run by the server; ends as the program ended."""
    words = [word for word in arguments if word != "-u"] if arguments[:1] == ["-u"] else arguments
    if not words or words[0].startswith("-") and words[0] not in ("-m", "-c"):
        os.execv(sys.executable, [sys.executable, *arguments])
    server = _socket.socket(_socket.AF_UNIX)
    server.connect(address)
    task = {"words": words, "env": dict(os.environ), "folder": os.getcwd(), "unbuffered": words != arguments}
    text, files = marshal.dumps(task), array.array("i", [0, 1, 2])
    server.sendmsg([len(text).to_bytes(8, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, files)])
    server.sendall(text)
    for number in FORWARDED:
        _signal.signal(number, lambda number, frame: server.sendall(bytes([number])))
    status = int.from_bytes(server.recv(4), "little")
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code in FORWARDED:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def receive_task(client):
    """A stand-in's request, its standard files put in place of this process's."""
    import socket

    size, files, _, _ = socket.recv_fds(client, 8, 3)
    size, text = int.from_bytes(size, "little"), b""
    while len(text) < size:
        text += client.recv(size - len(text))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    return marshal.loads(text)


def keep(client, program):
    """Wait for the ``program``, forward signals, kill it when its stand-in has exited; never return."""
    import select

    nowhere, ended = os.open(os.devnull, os.O_RDWR), os.pidfd_open(program)
    for number in range(3):
        os.dup2(nowhere, number)
    while True:
        ready, _, _ = select.select([client, ended], [], [])
        if ended in ready:
            client.sendall(os.waitpid(program, 0)[1].to_bytes(4, "little"))
            os._exit(0)
        number = client.recv(1)
        if number:
            os.kill(program, number[0])
        else:
            os.killpg(program, _signal.SIGKILL)
            os._exit(0)


def serve(address):
    """Fork a program per request until the parent has exited; return the task in each program."""
    import socket

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        while True:
            client, _ = server.accept()
            if os.fork() == 0:
                break
            client.close()
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                pass
    task = receive_task(client)
    program = os.fork()
    os.setpgid(program, program)  # by both: neither is to run on before
    if program:
        keep(client, program)
    client.close()
    return task


def become(task, stand_in, path):
    """This forked process gets the task's environment; returns what to run."""
    os.environ.clear()
    os.environ.update(task["env"])
    os.chdir(task["folder"])
    sys.modules["multiprocessing.process"].ORIGINAL_DIR = task["folder"]  # of relative paths of scripts
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        buffering = 1 if name == "stderr" or task["unbuffered"] else -1
        file = open(number, "rw"[number > 0], buffering, closefd=False)  # noqa: SIM115
        setattr(sys, name, file)
        setattr(sys, f"__{name}__", file)
    words = task["words"]
    sys.executable = stand_in  # programs that it starts are warm too
    first = os.path.dirname(os.path.realpath(words[0])) if words[0] not in ("-m", "-c") else os.getcwd()
    requested = [word for word in os.environ.get("PYTHONPATH", "").split(os.pathsep) if word]
    sys.path[:] = [first, *requested, *path]
    sys.argv = words if words[0] not in ("-m", "-c") else ["-c" if words[0] == "-c" else words[1], *words[2:]]
    return words


def run_server(address, stand_in, *preloaded):
    """Import the ``preloaded`` modules, serve, and in each program run it."""
    import gc
    import importlib

    for name in preloaded:
        importlib.import_module(name)
    path = [item for item in sys.path[1:] if item not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    gc.collect()
    gc.freeze()
    words = become(serve(address), stand_in, path)
    end(lambda: run(words))


def run(words):
    """Run the program of ``words`` as ``__main__``."""
    import runpy
    import types

    if words[0] == "-m":
        sys.modules.pop(words[1], None)  # else runpy warns
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-c":
        text = words[1]
    else:
        main.__file__ = words[0]
        with open(words[0], encoding="utf-8") as file:
            text = file.read()
    exec(compile(text, words[0], "exec"), main.__dict__)


def end(program):
    """Run ``program`` and end like an interpreter, which would also free all objects: 0.4 CPU seconds in a fork, whose
    memory is copied when it is written."""
    import atexit
    import threading
    from contextlib import suppress

    code = 0
    try:
        program()
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    if sys.modules["__main__"].__dict__ is not globals():  # runpy of -m restores this module
        sys.modules["__main__"].__dict__.clear()  # closes its files
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # a closed pipe, a closed stream
            stream.flush()
    os._exit((code or 0) & 0xFF)


class WarmPython:
    """The server and its stand-in, the executable ``python``, in ``folder``. The ``interpreter`` loads this checkout's
    suite, or the one of the given ``environment``; it imports ``modules`` first, by default torch and the suite."""

    def __init__(self, folder, interpreter=sys.executable, environment=None, modules=None):
        import shlex
        import subprocess
        import time

        from tests.test_utils.gloo_pool import PRELOADED

        address, self.python = f"{folder}/server", f"{folder}/python"
        real, local = shlex.quote(str(interpreter)), shlex.quote(os.path.abspath(__file__))
        with open(self.python, "w") as file:
            file.write(f'#!/bin/sh\nexec {real} -ISE {local} shadow {shlex.quote(address)} "$@"\n')
        os.chmod(self.python, 0o755)
        root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        names = PRELOADED if modules is None else modules
        preloaded = [name for name in names if environment is None or not name.startswith("tests.")]
        environment = environment or {**os.environ, "PYTHONPATH": root}
        self.server = subprocess.Popen(
            [interpreter, os.path.abspath(__file__), "server", address, self.python, *preloaded],
            env={**environment, "OMP_NUM_THREADS": "1"}, cwd=folder, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        while not os.path.exists(address):
            assert self.server.poll() is None, "the server of warm programs did not start"
            time.sleep(0.05)

    def close(self):
        """End the server; running programs continue."""
        self.server.kill()
        self.server.wait()


if __name__ == "__main__":
    if sys.argv[1] == "shadow":
        run_shadow(sys.argv[2], sys.argv[3:])
    else:
        run_server(*sys.argv[2:])
