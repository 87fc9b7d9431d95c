"""Ranks as processes: messages over a TCP connection from each to each, with names for what fails.

Ranks find one another through the store that `torch.distributed` launchers provide, and are its ordinary processes. Its
gloo backend is not used: a wait there cannot be interrupted or polled, and a connection that closes just as a wait
begins goes unnoticed until the timeout. Here every wait watches the connection itself: closed means that the rank is
gone, at once, and a deadline that passes means that it is late. What a rank finds first it writes into the store, so
that those who only see the finder leave can name the rank that made it leave.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from deepinfer.ops.collectives import Rendezvous
from deepinfer.ops.errors import CollectiveTimeoutError
from deepinfer.ops.exchange import HostCommunicator, PeerError, Verdict

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch exports it without saying so

_VERDICT: Final = "verdict"
_LOOPBACK: Final = "127.0.0.1"
_POLL_SECONDS: Final = 0.005
_TOKEN_BYTES: Final = 16
_HELLO_BYTES: Final = _TOKEN_BYTES + 4
_HELLO_SECONDS: Final = 5.0
"""How long a caller may take to say who it is: a rank says it at once, and a stranger must not hold up the group."""


def has_store() -> bool:
    """Whether this build of torch has the stores that ranks meet in."""
    return torch.distributed.is_available()


def join(rendezvous: Rendezvous) -> HostCommunicator:
    """A communicator over host memory; returns when all ranks have come.

    Raises:
        CollectiveTimeoutError: a rank did not come within the timeout; it is named.
    """
    group = range(rendezvous.world_size)
    if rendezvous.store is None or rendezvous.world_size == 1:
        return HostCommunicator(group, rendezvous.rank, timeout=rendezvous.timeout)
    peers = SocketPeers(rendezvous.store, rendezvous.name, group, rendezvous.rank, rendezvous.timeout)
    return HostCommunicator(group, rendezvous.rank, peers, rendezvous.timeout)


class SocketPeers:
    """Implements `exchange.Peers`; used by one thread at a time.

    Args:
        store: reached by all.
        name: of this group in the store.
        group: the members as the whole job counts them.
        rank: this one's place.
        timeout: seconds until all have come.

    Raises:
        CollectiveTimeoutError: one did not.
    """

    def __init__(self, store: Store, name: str, group: Sequence[int], rank: int, timeout: float) -> None:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        self._name = name
        self._group = tuple(group)
        self._rank = rank
        self._root = store
        self._store = PrefixStore(name, store)
        self._subgroups: dict[tuple[int, ...], int] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._unsent: dict[int, deque[memoryview]] = {}
        began = time.monotonic()
        try:
            self._connect(began, began + timeout)
        except BaseException:
            self.close()
            raise
        for connection in self._sockets.values():
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)

    def send(self, peer: int, data: Tensor) -> None:
        """As `Peers.send`."""
        self._unsent.setdefault(peer, deque()).append(data.numpy().data)
        self._push(peer)

    def receive(self, peer: int, data: Tensor, deadline: float) -> None:
        """As `Peers.receive`."""
        room = data.numpy().data
        while room:
            try:
                count = self._socket(peer).recv_into(room)
            except BlockingIOError:
                self._wait(peer, deadline)
                continue
            except OSError as error:
                raise PeerError(peer, late=False) from error
            if not count:
                raise PeerError(peer, late=False)
            room = room[count:]

    def flush(self, deadline: float) -> None:
        """As `Peers.flush`."""
        while self._unsent:
            self._wait(None, deadline)

    def agree(self, verdict: Verdict) -> Verdict:
        """As `Peers.agree`; a store that is gone with its rank leaves this rank to its own findings."""
        try:
            first = self._store.compare_set(_VERDICT, "", verdict.to_json())
        except RuntimeError:
            return verdict
        return Verdict.from_json(first.decode())

    def subgroup(self, ranks: Sequence[int], timeout: float) -> SocketPeers:
        """As `Peers.subgroup`; the same ranks may be grouped more than once."""
        key = tuple(ranks)
        self._subgroups[key] = self._subgroups.get(key, 0) + 1
        name = f"{self._name}/{'-'.join(map(str, key))}/{self._subgroups[key]}"
        group = [self._group[place] for place in ranks]
        return SocketPeers(self._root, name, group, key.index(self._rank), timeout)

    def close(self) -> None:
        """As `Peers.close`."""
        self._unsent.clear()
        for connection in self._sockets.values():
            connection.close()
        self._sockets.clear()

    def _connect(self, began: float, deadline: float) -> None:
        """Call those before this rank, be called by those behind it."""
        address = _own_address(self._root)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=len(self._group)) as server:
            token = secrets.token_bytes(_TOKEN_BYTES)  # keeps out whoever does not read the store
            card = {"address": server.getsockname()[:2], "token": token.hex()}
            self._store.set(f"here/{self._rank}", json.dumps(card))
            for place in range(len(self._group)):
                if place != self._rank:
                    self._await_card(place, began, deadline)
            for place in range(self._rank):
                self._call(place, began, deadline)
            while len(self._sockets) < len(self._group) - 1:
                self._answer(server, token, began, deadline)

    def _await_card(self, place: int, began: float, deadline: float) -> None:
        while not self._store.check([f"here/{place}"]):  # not `wait`, which cannot be interrupted
            if time.monotonic() >= deadline:
                raise self._absent(place, began)
            time.sleep(_POLL_SECONDS)

    def _call(self, place: int, began: float, deadline: float) -> None:
        card = json.loads(self._store.get(f"here/{place}"))
        try:
            connection = socket.create_connection(card["address"], timeout=_left(deadline))
            self._sockets[place] = connection
            connection.sendall(bytes.fromhex(card["token"]) + self._rank.to_bytes(4, "big"))
        except OSError as error:
            raise self._absent(place, began) from error

    def _answer(self, server: socket.socket, token: bytes, began: float, deadline: float) -> None:
        missing = next(place for place in range(self._rank + 1, len(self._group)) if place not in self._sockets)
        server.settimeout(_left(deadline))
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            raise self._absent(missing, began) from error
        hello = _read_hello(connection, min(_HELLO_SECONDS, _left(deadline)))
        place = int.from_bytes(hello[_TOKEN_BYTES:], "big")
        if hello[:_TOKEN_BYTES] != token or not self._rank < place < len(self._group):
            connection.close()  # no rank of this group
            return
        self._sockets[place] = connection

    def _absent(self, place: int, began: float) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(self._group[place], "join", time.monotonic() - began, "did not come")

    def _socket(self, peer: int) -> socket.socket:
        if peer not in self._sockets:
            raise PeerError(peer, late=False)
        return self._sockets[peer]

    def _push(self, peer: int) -> None:
        """Send as much as the connection takes now."""
        queue = self._unsent[peer]
        connection = self._socket(peer)
        try:
            while queue:
                count = connection.send(queue[0])
                queue[0] = queue[0][count:]
                if not queue[0]:
                    queue.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerError(peer, late=False) from error
        del self._unsent[peer]

    def _wait(self, reading: int | None, deadline: float) -> None:
        """Wait until a peer can be read from, or until some of what is unsent can go, and let it go."""
        with selectors.DefaultSelector() as selector:
            for peer in self._unsent.keys() | ({reading} if reading is not None else set()):
                mask = selectors.EVENT_WRITE if peer in self._unsent else 0
                mask |= selectors.EVENT_READ if peer == reading else 0
                selector.register(self._socket(peer), mask, peer)
            ready = selector.select(max(deadline - time.monotonic(), 0.0))
        if not ready:
            raise PeerError(reading if reading is not None else min(self._unsent), late=True)
        for key, events in ready:
            if events & selectors.EVENT_WRITE:
                self._push(key.data)


def _read_hello(connection: socket.socket, seconds: float) -> bytes:
    """What a caller says first, as far as it comes; the connection keeps the timeout."""
    connection.settimeout(seconds)
    hello = b""
    try:
        while len(hello) < _HELLO_BYTES and (part := connection.recv(_HELLO_BYTES - len(hello))):
            hello += part
    except OSError:
        return hello  # too short, so it is nobody's
    return hello


def _own_address(store: Store) -> str:
    """The address of this host on the way to the store's; the loopback for stores that stay on one host."""
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return _LOOPBACK
    kind, _, _, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing; the system chooses the interface
        return str(probe.getsockname()[0])


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)
