"""Abstract Unix sockets, by which processes on one machine connect without leaving a file.

Connections are only possible within one machine and one user; both are checked. Any process may list and
connect to such sockets, or bind the name of one that is gone. So before a byte of a peer is unpickled, it
must prove that it knows the address's key: the connecting side by its first bytes, the listening side by its
own (`ShmEndpoint._add_peer` waits for them). The address is only sent through Ray.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct

from .endpoint import PROOF_BYTES, PeerLostError

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
CONNECT_TIMEOUT_S = 1.0  # a connecting process must prove itself within this time
BACKLOG_MARGIN = 16  # unknown connections that may be queued before expected ones


class AbstractListener:
    def __init__(self, backlog: int) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)  # the socket
        name, key = f"manta-{os.getpid()}-{secrets.token_hex(8)}", secrets.token_bytes(2 * PROOF_BYTES)
        self.address = f"{name}/{key.hex()}"  # the argument of `connect`; a secret
        self._peer_proof, self._own_proof = key[:PROOF_BYTES], key[PROOF_BYTES:]
        self.listener.bind("\0" + name)
        self.listener.listen(backlog + BACKLOG_MARGIN)

    def accept(self) -> socket.socket | None:
        """Accept a connection and send our proof on it.

        None if it is another user's, or does not know the key.
        """
        sock, _ = self.listener.accept()
        try:
            sock.settimeout(CONNECT_TIMEOUT_S)
            if _peer_uid(sock) == os.getuid() and hmac.compare_digest(
                sock.recv(PROOF_BYTES, socket.MSG_WAITALL), self._peer_proof
            ):
                sock.sendall(self._own_proof)
                return sock
        except OSError:
            pass
        sock.close()
        return None


def connect(address: str) -> tuple[socket.socket, bytes]:
    """Return the socket to a listener, and the proof that the other side sends first.

    Raises PeerLostError if there is no such listener on this machine, or it is another user's.
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
