"""Unix sockets in the abstract namespace: how processes on one machine find each other without a file.

Nothing is left behind in /tmp, whoever is killed and when. Same machine and same user only; both are checked.
Used by `channel.py` and `drafter_link.py`.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct

from .ends import PeerLostError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def open_door(backlog: int) -> tuple[socket.socket, str]:
    """A listening socket, and the address that `knock` takes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    address = f"manta-{os.getpid()}-{secrets.token_hex(8)}"
    listener.bind("\0" + address)
    listener.listen(backlog)
    return listener, address


def let_in(listener: socket.socket) -> socket.socket | None:
    """Whoever knocks next; None if it is another user's process, which is sent away."""
    sock, _ = listener.accept()
    if _peer_uid(sock) == os.getuid():
        return sock
    sock.close()
    return None


def knock(address: str) -> socket.socket:
    """Connect to a door. Raises PeerLostError if there is none on this machine."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect("\0" + address)
    except OSError:
        sock.close()
        raise PeerLostError("it is not on this machine") from None
    if _peer_uid(sock) != os.getuid():
        sock.close()
        raise PeerLostError("the address is held by another user")
    return sock


def _peer_uid(sock: socket.socket) -> int:
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid
