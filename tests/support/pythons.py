"""Python commands in separate processes that need not import torch and Triton again, which takes 1.6 s each time.

``python`` acts like ``subprocess.run([sys.executable, ...])``, but forks from a server process that has imported other
packages and nothing of this project. Each test process starts a server of its own. Forking hides what only a new interpreter
shows (an import that is missing or comes too late), so for each kind of command a test starts one with ``new=True``.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from pathlib import Path
from typing import Any, NoReturn

import torch

ROOT = Path(__file__).parents[2]
PRELOAD = ("numpy", "torch", "triton.language", "triton.compiler", "jinja2", "optuna", "rich.console", "typer.testing")
# Variables that no package of PRELOAD reads while it is imported. Each set of values of all other variables gets a server.
LATE = (
    "COLUMNS",
    "CUDA_VISIBLE_DEVICES",
    "PYTEST_",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPATH",
    "TORCHINDUCTOR_CACHE_DIR",  # Inductor sets it in the process of a test that compiles
    "TRITON_CACHE_DIR",
    "TUNED_",
    "XDG_",
)
_SERVERS: dict[tuple[tuple[str, str], ...], _Server] = {}


class _Server:
    """The client's end of a process that forks others."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.pythons", str(theirs.fileno())],
                cwd=ROOT,
                # The server finds packages where this process does; each command has a PYTHONPATH of its own.
                env={**environment, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.answers = self.socket.makefile("r", encoding="utf-8")

    def run(self, command: list[str], cwd: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            asked = json.dumps([command, str(cwd), environment]).encode()
            socket.send_fds(self.socket, [len(asked).to_bytes(8, "little")], [out.fileno(), err.fileno()])
            self.socket.sendall(asked)
            told = self.answers.readline()
            assert told, "the process that forks others has ended"
            out.seek(0)
            err.seek(0)
            # Decode as subprocess.run does with text=True.
            texts = (file.read().decode().replace("\r\n", "\n").replace("\r", "\n") for file in (out, err))
            return subprocess.CompletedProcess([sys.executable, *command], int(told), *texts)

    def close(self) -> None:
        self.answers.close()
        self.socket.close()
        self.process.wait()


def python(
    *command: str, cwd: Path = ROOT, environment: dict[str, str] | None = None, new: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run ``python SCRIPT``, ``-c TEXT`` or ``-m MODULE`` with arguments, in a folder and an environment."""
    environment = dict(os.environ if environment is None else environment)
    if new or torch.cuda.device_count():  # a process with a CUDA driver must not be forked
        whole = [sys.executable, *command]
        return subprocess.run(whole, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    key = tuple(sorted(item for item in environment.items() if not item[0].startswith(LATE)))
    if key not in _SERVERS:
        _SERVERS[key] = _Server(environment)
        atexit.register(_SERVERS[key].close)
    return _SERVERS[key].run(list(command), cwd, environment)


# The process that forks -----------------------------------------------------------------------------------------------


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            os._exit(0)  # the client is gone
        data += part
    return data


def _served(connection: socket.socket) -> tuple[list[str], str, dict[str, str]]:
    """Fork for each command. Returns only in the children: the command, its folder and its environment."""
    while True:
        begun, files, _, _ = socket.recv_fds(connection, 8, 2)
        size = begun + _exactly(connection, 8 - len(begun))
        asked = json.loads(_exactly(connection, int.from_bytes(size, "little")))
        pid = os.fork()
        if pid == 0:
            connection.close()
            for file, place in zip(files, (1, 2), strict=True):
                os.dup2(file, place)
                os.close(file)
            return tuple(asked)
        for file in files:
            os.close(file)
        _, status = os.waitpid(pid, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _become(command: list[str], cwd: str, environment: dict[str, str], paths: list[str]) -> None:
    """Do what a new interpreter does with these arguments; the caller handles how the command ends."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    sys.modules["numpy"].random.seed()  # else all children draw the same numbers; Python's random reseeds itself
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    kind = command[0]
    first = {"-c": "", "-m": str(Path.cwd())}.get(kind, str(Path(kind).resolve().parent))
    given = environment.get("PYTHONPATH", "")
    sys.path[:] = [first, *(str(Path(path).absolute()) for path in given.split(os.pathsep) if given), *paths]
    if kind == "-m":
        sys.argv[:] = command[1:]
        runpy._run_module_as_main(command[1])
        return
    sys.argv[:] = ["-c", *command[2:]] if kind == "-c" else command
    text = command[1] if kind == "-c" else Path(kind).read_bytes()
    if kind != "-c":
        main.__file__ = kind
    exec(compile(text, "<string>" if kind == "-c" else kind, "exec", dont_inherit=True), main.__dict__)


def _end(code: Any) -> NoReturn:
    """End as an interpreter does, but without tearing modules down: for torch that takes 0.2 s."""
    if not isinstance(code, int | None):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code or 0)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client ends this process
    given = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = [path for path in sys.path if path and path not in given and Path(path) != ROOT]
    for name in PRELOAD:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    asked = _served(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code: Any = None
    try:
        _become(*asked, paths)
    except SystemExit as end:
        code = end.code
    except BaseException as error:  # noqa: BLE001 - as an interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    _end(code)


if __name__ == "__main__":
    _main()
