"""Started by Ray in place of a worker: asks a fork server (`fork_server.py`) to become that worker.

    python -IS fork_client.py SOCKET SETUP_WORKER [flags of setup_worker and default_worker]

Passes its arguments, environment, working directory, signal mask and standard streams on, and exits once the
worker runs. Where that is impossible (no server, or a runtime environment with a program of its own) it
starts the worker as Ray would have done. Standard library only: each worker pays for these imports.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

TIMEOUT_S = 60.0  # the server may still be importing
CONTEXT = "--serialized-runtime-env-context"
LANGUAGE = "--language"
HEADER_BYTES = 8


def main() -> None:
    where, setup_worker, *arguments = sys.argv[1:]
    variables = own_variables(arguments)
    if variables is None or not request_worker(where, worker_arguments(arguments), variables):
        os.execv(sys.executable, [sys.executable, setup_worker, *arguments])


def worker_arguments(arguments: list[str]) -> list[str]:
    """Drop the arguments that `setup_worker.py` takes for itself."""
    return [each for each in arguments if not each.startswith((f"{CONTEXT}=", f"{LANGUAGE}="))]


def own_variables(arguments: list[str]) -> dict[str, str] | None:
    """Return a runtime environment's variables; None if it asks for more than these."""
    given = [each.partition("=")[2] for each in arguments if each.startswith(f"{CONTEXT}=")]
    if CONTEXT in arguments or f"{LANGUAGE}=PYTHON" not in arguments:
        return None
    context = json.loads(given[-1]) if given else {}
    others = (
        context.get("command_prefix"),
        context.get("override_worker_entrypoint"),
        context.get("java_jars"),
    )
    if any(others) or context.get("py_executable", sys.executable) != sys.executable:
        return None
    return context.get("env_vars") or {}


def request_worker(where: str, arguments: list[str], variables: dict[str, str]) -> bool:
    """Return whether a server at the socket `where` has started the worker."""
    order = {
        "arguments": arguments,
        "environment": {**os.environ, **{name: os.path.expandvars(text) for name, text in variables.items()}},
        "directory": os.getcwd(),  # noqa: PTH109  # pathlib takes longer to import
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    content = json.dumps(order).encode()
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(where)
            socket.send_fds(connection, [len(content).to_bytes(HEADER_BYTES, "big")], [0, 1, 2])
            connection.sendall(content)
            return bool(connection.recv(1))
    except OSError:
        return False


if __name__ == "__main__":
    main()
