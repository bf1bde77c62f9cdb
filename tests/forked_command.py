"""`python` or `torchrun` as a request to the server of forked_programs.py, in whose name it is called:

    python -SE forked_command.py SOCKET PYTHON NAME ARGUMENTS

It imports next to nothing. What the server does not know goes to the real PYTHON."""

import json
import os
import socket
import sys
import time


def main(address: str, python: str, name: str, *arguments: str) -> int:
    first = (*arguments, "")[0]
    if name != "torchrun" and (not first or first[0] == "-") and (first not in ("-c", "-m") or len(arguments) < 2):
        os.execv(python, [python, *arguments])
    about = {"name": name, "arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        while server.connect_ex(address):  # it has not started yet
            time.sleep(0.05)
        socket.send_fds(server, [json.dumps(about).encode()], [0, 1, 2])
        code = int(server.recv(16) or b"1")
    if code < 0:
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
