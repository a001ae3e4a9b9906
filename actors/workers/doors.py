"""Unix sockets in the abstract namespace: how processes on one machine find each other without a file.

Nothing is left behind in /tmp, whoever is killed and when. Same machine and same user only; both are checked.
Any process may list and connect to such sockets, and bind the name of one that is gone. So both sides prove
that they know the address's key before a byte of theirs is unpickled: the one that knocks by its first bytes,
the one that lets in by its own (`End._meet` awaits them). The address goes by Ray alone. Used by `channel.py`
and `drafter_link.py`.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct

from .ends import PROOF_BYTES, PeerLostError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
KNOCK_WITHIN_S = 1.0  # whoever connects proves itself at once
STRANGERS = 16  # that may stand before those who are awaited


class Door:
    """A listening socket.

    Attributes:
        listener: the socket.
        address: what `knock` takes; a secret.
    """

    def __init__(self, backlog: int) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        name, key = f"manta-{os.getpid()}-{secrets.token_hex(8)}", secrets.token_bytes(2 * PROOF_BYTES)
        self.address = f"{name}/{key.hex()}"
        self._theirs, self._ours = key[:PROOF_BYTES], key[PROOF_BYTES:]
        self.listener.bind("\0" + name)
        self.listener.listen(backlog + STRANGERS)

    def let_in(self) -> socket.socket | None:
        """Return the next socket that knocks, after our proof was sent on it. One that is another user's, or
        does not know the key, is sent away: None."""
        sock, _ = self.listener.accept()
        try:
            sock.settimeout(KNOCK_WITHIN_S)
            if _peer_uid(sock) == os.getuid() and hmac.compare_digest(
                sock.recv(PROOF_BYTES, socket.MSG_WAITALL), self._theirs
            ):
                sock.sendall(self._ours)
                return sock
        except OSError:
            pass
        sock.close()
        return None


def knock(address: str) -> tuple[socket.socket, bytes]:
    """Connect to a door: the socket, and the proof that must come first on it.

    Raises:
        PeerLostError: there is none on this machine, or another user's.
    """
    name, _, key_hex = address.partition("/")
    key = bytes.fromhex(key_hex)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect("\0" + name)
        if _peer_uid(sock) != os.getuid():
            raise PeerLostError("the address is held by another user")
        sock.sendall(key[:PROOF_BYTES])
    except OSError:
        sock.close()
        raise PeerLostError("it is not on this machine") from None
    except PeerLostError:
        sock.close()
        raise
    return sock, key[PROOF_BYTES:]


def _peer_uid(sock: socket.socket) -> int:
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return uid
