"""Lifelines: how a rank learns that another one died or hangs, whatever it is waiting for.

A rank that is killed, or whose machine fails, leaves the others in a collective. With gloo their connections break,
unless a process forked from the dead rank holds them open; with NCCL they wait for an hour. So every rank keeps a TCP
connection to rank 0. The system closes it however the process ends, and keepalive probes detect a machine that no
longer answers. Rank 0 tells the others which rank died, and all of them end at once with a message that names it,
before NCCL's watchdog would abort them without one. A rank that fails with an error reports it; the others get a few
seconds to report their own, because ranks often fail together.

A rank may also hang. So a thread of each rank sends a heartbeat every BEAT seconds with the rank's progress: all ranks
pass the same places (a step, an exchange of objects) in the same order, and count them. Rank 0 reports

- a rank whose process is silent, because it is stopped or its machine hangs: after SILENT seconds;
- a rank that is behind the others, for example because its data does not arrive: after BEHIND seconds;

and ends all ranks after minutes of waiting, or after an hour if the rank is known to work alone; sooner if a rank was
asked to stop, which ranks can only do together. Rank 1 watches rank 0. Time is counted in heartbeats, so a job that was
suspended as a whole (SIGSTOP to all ranks) resumes without a rank being late. A GPU that hangs on all ranks in the same
step is left to the timeout of collectives: from outside it looks as if rank 0 worked alone.

The connections also give each start of the ranks a name. torchrun (torch 2.13) keeps its store across restarts, with
the addresses of ranks that have ended. On several nodes it counts restarts per node, so no number identifies a start on
all ranks; but a rank 0 that answers belongs to this start, because torchrun ends all ranks before it restarts any.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TextIO

import torch.distributed as dist

from sparsellm.system.streams import write_now

ARRIVAL = 600  # seconds for all ranks to join: importing from a shared file system may take minutes
GRACE = 5  # seconds for a rank that learns of another's error to report its own
NOTICE = 3  # seconds to wait, after a collective fails, for news of which rank died
HANDSHAKE = 10  # seconds for the first line of a connection
PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # give up on a machine after 30 s
BEAT = 5  # seconds
SILENT = 30  # seconds; C code that holds the GIL may take some
SILENT_LIMIT = 300  # seconds; no healthy process blocks its threads for minutes
BEHIND = 60  # seconds
# Seconds that others wait for a rank that is behind. Preparing the embedded corpus, loading 25 GB from a slow disk
PATIENCE = 3600  # and compiling the first step may take this long. In later steps, ranks wait only for
STEP_PATIENCE = 900  # a slow disk, a data stream or another compilation.
STOPPING_PATIENCE = 120  # after a stop request: schedulers give about three minutes
KEY = "lifeline"  # key in the store; value "PORT NAME" of rank 0
LEFT, FAILED, GONE = "left", "failed", "gone"  # how a rank ended: first word of a line
AT = "at"  # first word of a heartbeat


class RanksMissing(RuntimeError):
    """Not all ranks have joined."""


@dataclass
class _Standing:
    """A rank's progress, from its last heartbeat."""

    who: str
    places: int = 0  # passed
    step: int | None = None  # last step begun
    patience: float = PATIENCE  # seconds that others wait for it here
    stopping: bool = False  # whether it was asked to stop
    silent: float = 0  # seconds since its last heartbeat
    behind: float = 0  # seconds for which others have been at a later place
    named: bool = False

    def beat(self) -> str:
        return f"{AT} {self.places} {self.patience} {self.stopping:d} {'' if self.step is None else self.step}"

    def hear(self, said: str) -> None:
        places, patience, stopping, *step = said.split()
        if int(places) > self.places:
            self.behind = 0
        self.places, self.patience, self.stopping = int(places), float(patience), stopping == "1"
        self.step, self.silent = int(step[0]) if step else None, 0


class Lifeline:
    """This rank's connection to rank 0; on rank 0, the connections to all others. Constructed on all ranks together."""

    def __init__(self, store: dist.Store, address: str, rank: int, world_size: int) -> None:
        """`store` is shared by all ranks, `address` the host of rank 0. Raises RanksMissing."""
        self.rank, self.world_size = rank, world_size
        self.me = f"rank {rank} (host {socket.gethostname()}, process {os.getpid()})"
        self._others: dict[int, socket.socket] = {}
        self._own = _Standing(self.me)
        self._standings = {rank: self._own}  # of the ranks that this one watches
        self._lost: str | None = None
        self._lock, self._heard, self._left = threading.Lock(), threading.Event(), threading.Event()
        # A forked process would keep the connections open after this process ends.
        os.register_at_fork(after_in_child=self._close)
        self.start = self._listen(store) if rank == 0 else self._connect(store, address)  # ID of this launch
        threading.Thread(target=self._beat, name="lifeline", daemon=True).start()

    def reached(self, step: int | None = None) -> None:
        """Record that this rank reached the next common place: the start of `step`, or an exchange of objects."""
        if step is not None:
            self._own.patience = PATIENCE if self._own.step is None else STEP_PATIENCE
            self._own.step = step
        self._own.behind = 0
        self._own.places += 1

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context in which this rank does work that the others wait for."""
        before, self._own.patience = self._own.patience, PATIENCE
        try:
            yield
        finally:
            self._own.patience = before

    def hurry(self) -> None:
        """Record that this rank was asked to stop."""
        self._own.stopping = True

    def explain(self) -> None:
        """If another rank's end is known, or becomes known within NOTICE seconds, report it and end this process."""
        if self._heard.wait(NOTICE):
            self._end()

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this rank leaves normally, or with which error, so that they end too."""
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
                        f"{len(missing)} of {self.world_size} ranks have not joined within {ARRIVAL} s: {missing[:8]}."
                        " Check their nodes' logs; ranks must reach rank 0 by TCP, on any port"
                    ) from None
                self._admit(connection, name)
        return name

    def _admit(self, connection: socket.socket, name: str) -> None:
        """Keep the connection of a rank of this start; reject any other."""
        try:
            connection.settimeout(HANDSHAKE)
            lines = connection.makefile("r", encoding="utf-8", errors="replace")
            said, _, who = lines.readline().strip().partition(" ")
            rank = int(who.split()[1]) if said == name else -1
            if rank in self._others or not 0 < rank < self.world_size:
                connection.close()
                return
            connection.sendall(f"{name} {self.me}\n".encode())
        except OSError:  # it will retry
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
                    f"{self.me} cannot reach rank 0 ({error}): check the log of rank 0's node"
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
            time.sleep(0.1)  # that was rank 0 of an earlier start; retry
        raise RanksMissing(f"{self.me} has not reached rank 0 on {address} by TCP in {ARRIVAL} s")

    def _keep(self, rank: int, connection: socket.socket, lines: TextIO, who: str) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in PROBES.items():
            if hasattr(socket, option):  # Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._others[rank] = connection
        self._standings[rank] = _Standing(who)
        threading.Thread(target=self._attend, args=(rank, lines, who), name=f"lifeline_{rank}", daemon=True).start()

    def _attend(self, rank: int, lines: TextIO, who: str) -> None:
        """Listen to `who` until its end, and then end this process too, unless it left normally."""
        try:
            while (line := lines.readline().strip()).startswith(f"{AT} "):
                self._standings[rank].hear(line.removeprefix(f"{AT} "))
        except OSError:
            line = ""
        self._standings.pop(rank)
        how, _, said = (line or f"{GONE} {who} died: it was killed, or its machine does not answer").partition(" ")
        if how != LEFT:
            self._lose(how, said)

    def _lose(self, how: str, said: str) -> None:
        """End this process, and from rank 0 all others, with the message `said`, unless it is ending already."""
        with self._lock:
            if self._lost is not None or self._left.is_set():
                return
            self._lost = said
        if self.rank == 0:
            self._tell(f"{how} {said}")
        self._heard.set()
        if how == GONE or not self._left.wait(GRACE):
            self._end()

    def _beat(self) -> None:
        while not self._left.wait(BEAT):
            self._tell(self._own.beat())
            standings = dict(self._standings)
            furthest = max(standing.places for standing in standings.values())
            stopping = any(standing.stopping for standing in standings.values())
            for rank, standing in standings.items():
                standing.silent += BEAT if rank != self.rank else 0
                standing.behind = standing.behind + BEAT if standing.places < furthest else 0
                if rank == 0 or self.rank == 0:
                    self._judge(standing, stopping)

    def _judge(self, standing: _Standing, stopping: bool) -> None:
        """Report a rank that others wait for, and end all ranks after its time limit."""
        who, silent, behind = standing.who, standing.silent, standing.behind
        limit: float
        if silent >= SILENT:
            waited, limit = silent, SILENT if stopping else SILENT_LIMIT
            why = "it is stopped (`kill -CONT` resumes it), or its machine hangs"
            what = f"has not answered for {silent:.0f} s: {why}"
        elif behind >= BEHIND and self.rank == 0:
            waited, limit = behind, standing.patience
            if stopping and limit < PATIENCE:
                limit = min(limit, STOPPING_PATIENCE)
            where = "before its first step" if standing.step is None else f"in or after step {standing.step:,}"
            how = "py-spy on its host shows what it is doing"
            what = f"has kept the other ranks waiting for {behind:.0f} s, {where} ({how})"
        else:
            if standing.named:
                standing.named = False
                self._say(f"{who} continues")
            return
        if waited >= limit:
            self._lose(GONE, f"{who} {what}")
        elif not standing.named:
            standing.named = True
            self._say(f"{who} {what}. All ranks will end if it does not continue within {limit - waited:.0f} s")

    def _say(self, text: str) -> None:
        if self.rank <= 1:
            write_now(f"sparsellm: {text}\n")

    def _tell(self, text: str) -> None:
        line = " ".join(text.split())
        for connection in list(self._others.values()):
            with suppress(OSError):
                connection.sendall(f"{line}\n".encode())

    def _end(self) -> None:
        self._lock.acquire()  # only one thread reports
        text = f"sparsellm: rank {self.rank} exits: {self._lost}. Run the same command to resume\n"
        write_now(text)
        os._exit(1)

    def _close(self) -> None:
        for connection in self._others.values():
            os.close(connection.detach())
        self._others.clear()
