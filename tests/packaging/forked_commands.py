"""``hybridindex`` for shells: each command runs in a fork of a process that has imported the product once.

A command of its own would import for two seconds; a README has dozens. What runs is the entry point itself, with the
caller's arguments, folder, environment, input and output.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

__all__ = ["forked_commands"]

#: Sends what it was called with and its three files; its status is the command's.
_CALLER = """#!{python} -ISs
import array, json, os, socket, sys
with socket.socket(socket.AF_UNIX) as to:
    to.connect({address!r})
    call = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    files = array.array("i", [0, 1, 2])
    to.sendmsg([len(call).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    to.sendall(call)
    status = to.recv(4)
sys.exit(int.from_bytes(status, "big") if status else 70)
"""


@contextmanager
def forked_commands(folder: Path) -> Iterator[Path]:
    """A folder for PATH with the program ``hybridindex``; ``folder`` is for it and its socket."""
    address, program = folder / "s", folder / "hybridindex"
    program.write_text(_CALLER.format(python=sys.executable, address=str(address)))
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen()
        command = [sys.executable, "-m", "tests.packaging.forked_commands", str(listener.fileno())]
        root = Path(__file__).resolve().parents[2]
        server = subprocess.Popen(command, cwd=root, pass_fds=[listener.fileno()])
        try:
            yield folder
        finally:
            server.terminate()
            server.wait()


def _serve(listener: socket.socket) -> None:
    import hybridindex.cli.main  # noqa: F401 - the forks have it

    while True:
        call, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _follow(call)
        call.close()


def _follow(call: socket.socket) -> NoReturn:
    """Waits for the command, in a process of its own, and tells its status."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    files = array.array("i")
    head, ancillary, _, _ = call.recvmsg(4, socket.CMSG_SPACE(3 * files.itemsize))
    files.frombytes(ancillary[0][2])
    length, text = int.from_bytes(head, "big"), b""
    while len(text) < length:
        text += call.recv(length - len(text))
    words, folder, environment = json.loads(text)
    child = os.fork()
    if child == 0:
        call.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.closerange(3, 64)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["hybridindex", *words]
        from hybridindex.cli.main import run

        run()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    call.sendall((status if status >= 0 else 128 - status).to_bytes(4, "big"))
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _serve(socket.socket(fileno=int(sys.argv[1])))
