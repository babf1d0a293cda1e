"""Lifelines: how ranks hear of each other's end, whatever they are waiting for.

A rank that is killed, or whose machine fails, leaves the others in the middle of a collective. Over gloo their
connections break, unless a process forked from the dead rank holds them open; over NCCL they wait for an hour. So every
rank keeps a TCP connection to rank 0, over which nothing is sent while all is well. The system closes it with the
process, however that ends, and probes find a machine that no longer answers. Rank 0 tells the others who is gone, and
all of them end with a sentence that names it; at once, for NCCL's own watchdog would abort them without one. A rank
that fails of an error says so itself; the others have some seconds for their own words, as where all fail alike.

The connections also give each start of the ranks a name. torchrun (of torch 2.13) keeps its store when it starts ranks
again, and in it the addresses of ranks that ended. On several nodes it counts the starts of each node alone, so there
is no number that all ranks know; but a rank 0 that answers is of this start, for torchrun ends all ranks before it
starts any again.
"""

import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TextIO

import torch.distributed as dist

ARRIVAL = 600  # seconds within which all ranks come: importing from a shared file system may take minutes
GRACE = 5  # seconds in which a rank that hears of another's error may still end by itself, in its own words
NOTICE = 3  # seconds by which the word of a rank's end may come later than what breaks because of it
HANDSHAKE = 10  # seconds for the first line of a connection
PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a machine is silent for 30 s: given up
KEY = "lifeline"  # in the store: "PORT NAME" of rank 0
LEFT, FAILED, GONE = "left", "failed", "gone"  # how a rank ended: the first word of a line


class RanksMissing(RuntimeError):
    """Not all ranks have come."""


class Lifeline:
    """This rank's connection to rank 0; on rank 0, those to all others. Built on all ranks together."""

    def __init__(self, store: dist.Store, address: str, rank: int, world_size: int) -> None:
        """`store` is shared by all ranks, `address` the host of rank 0. Raises RanksMissing."""
        self.rank, self.world_size = rank, world_size
        self.me = f"rank {rank} (host {socket.gethostname()}, process {os.getpid()})"
        self._others: dict[int, socket.socket] = {}
        self._lost: str | None = None
        self._lock, self._heard, self._left = threading.Lock(), threading.Event(), threading.Event()
        # A forked process would hold the connections open after the end of this one.
        os.register_at_fork(after_in_child=self._close)
        self.start = self._listen(store) if rank == 0 else self._connect(store, address)  # the name of this start

    def explain(self) -> None:
        """End this process with the sentence, if another rank's end is known, or is within NOTICE seconds."""
        if self._heard.wait(NOTICE):
            self._end()

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this rank ends in order; or of what, so that they end too."""
        if self._left.is_set():
            return
        self._left.set()
        self._tell(LEFT if error is None else f"{FAILED} {self.me} failed: {type(error).__name__}: {error}")

    def _listen(self, store: dist.Store) -> str:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        name, deadline = secrets.token_hex(8), time.monotonic() + ARRIVAL
        with socket.create_server(("", 0), family=family, backlog=self.world_size, dualstack_ipv6=both) as listener:
            store.set(KEY, f"{listener.getsockname()[1]} {name}")
            while len(self._others) < self.world_size - 1:
                listener.settimeout(max(0.01, deadline - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self.world_size)) - self._others.keys())
                    raise RanksMissing(
                        f"{len(missing)} of {self.world_size} ranks have not come in {ARRIVAL} s: {missing[:8]}. Their"
                        " nodes' logs may say why; ranks reach rank 0 by TCP, on any port"
                    ) from None
                self._admit(connection, name)
        return name

    def _admit(self, connection: socket.socket, name: str) -> None:
        """Keep the connection of a rank of this start; whoever else comes is turned away."""
        try:
            connection.settimeout(HANDSHAKE)
            lines = connection.makefile("r", encoding="utf-8", errors="replace")
            said, _, who = lines.readline().strip().partition(" ")
            rank = int(who.split()[1]) if said == name else -1
            if rank in self._others or not 0 < rank < self.world_size:
                connection.close()
                return
            connection.sendall(f"{name} {self.me}\n".encode())
        except OSError:  # it comes again
            connection.close()
            return
        self._keep(rank, connection, lines, who)
        if self._lost is not None:
            self._tell(f"{GONE} {self._lost}")

    def _connect(self, store: dist.Store, address: str) -> str:
        deadline = time.monotonic() + ARRIVAL
        while time.monotonic() < deadline:
            try:
                store.wait([KEY], timedelta(seconds=ARRIVAL))
                port, name = store.get(KEY).decode().split()
            except RuntimeError as error:
                raise RanksMissing(
                    f"{self.me} cannot reach rank 0 ({error}): the log of its node may say why"
                ) from error
            try:
                connection = socket.create_connection((address, int(port)), timeout=HANDSHAKE)
                connection.sendall(f"{name} {self.me}\n".encode())
                lines = connection.makefile("r", encoding="utf-8", errors="replace")
                said, _, who = lines.readline().strip().partition(" ")
            except OSError:
                said = ""
            if said == name:
                self._keep(0, connection, lines, who)
                return name
            time.sleep(0.1)  # that was rank 0 of an earlier start: this one's is about to come
        raise RanksMissing(f"{self.me} has not reached rank 0 on {address} by TCP in {ARRIVAL} s")

    def _keep(self, rank: int, connection: socket.socket, lines: TextIO, who: str) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in PROBES.items():
            if hasattr(socket, option):  # as on Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._others[rank] = connection
        threading.Thread(target=self._attend, args=(lines, who), name=f"lifeline_{rank}", daemon=True).start()

    def _attend(self, lines: TextIO, who: str) -> None:
        """Wait for the end of `who`, and of this process with it, unless that was in order."""
        try:
            line = lines.readline().strip()
        except OSError:
            line = ""
        how, _, said = (line or f"{GONE} {who} is gone: it was killed, or its machine does not answer").partition(" ")
        with self._lock:
            if how == LEFT or self._lost is not None or self._left.is_set():
                return
            self._lost = said
        if self.rank == 0:
            self._tell(f"{how} {said}")
        self._heard.set()
        if how == GONE or not self._left.wait(GRACE):
            self._end()

    def _tell(self, text: str) -> None:
        line = " ".join(text.split())
        for connection in list(self._others.values()):
            with suppress(OSError):
                connection.sendall(f"{line}\n".encode())

    def _end(self) -> None:
        self._lock.acquire()  # one thread says it
        text = f"sparsellm: rank {self.rank} ends, for {self._lost}. The same command goes on from what is saved\n"
        os.write(2, text.encode())  # other threads may hold the streams' locks
        os._exit(1)

    def _close(self) -> None:
        for connection in self._others.values():
            os.close(connection.detach())
        self._others.clear()
