"""Lifelines: how a rank learns that another one died or hangs, whatever it is waiting for.

A rank that is killed, or whose machine fails, leaves the others waiting in a collective. With gloo, the connections of
the waiting ranks break, unless a process forked from the dead rank holds them open; with NCCL, the ranks wait for an
hour. So every rank keeps a TCP connection to rank 0. The system closes the connection however the process ends, and
keepalive probes detect a machine that no longer answers. Rank 0 tells the others which rank died, and all ranks exit at
once with a message that names the dead rank, before NCCL's watchdog would abort them without a message. A rank that
fails reports its error; the others then have a few seconds to report their own, because ranks often fail together.

A rank may also hang. So a thread of each rank sends a heartbeat every BEAT seconds with the rank's progress, which is
the number of sync points that the rank has passed. A sync point is a step or an exchange of objects; all ranks pass the
same sync points in the same order. Rank 0 reports

- a rank whose process is silent, because it is stopped or its machine hangs: after SILENT seconds;
- a rank that is behind the others, for example because its data does not arrive: after BEHIND seconds.

Rank 0 ends all ranks after minutes of waiting, or after an hour if the rank is known to do work that the others wait
for. The wait is shorter if a rank was asked to stop, because ranks can only stop together. Rank 1 watches rank 0. Time
is counted in heartbeats, so a job that was suspended as a whole (SIGSTOP to all ranks) resumes without a rank being
late. If the GPUs of all ranks hang in the same step, only the timeout of collectives ends the run: from outside it
looks as if rank 0 worked alone.

The connections also give each launch of the ranks an ID. torchrun (torch 2.13) keeps its store across restarts, with
the addresses of ranks that have ended. On several nodes torchrun counts restarts per node, so no number identifies a
launch on all ranks. A rank 0 that answers belongs to this launch, because torchrun ends all before it restarts any.
"""

import json
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

from sparsellm.system.errors import SparsellmError
from sparsellm.system.streams import write_now

ARRIVAL = 600  # seconds for all ranks to join: importing from a shared file system may take minutes
GRACE = 5  # seconds in which a rank can still report its own error after it hears of another rank's error
NOTICE = 3  # seconds to wait, after a collective fails, for news of which rank died
HANDSHAKE = 10  # seconds to wait for the first line on a connection
PROBES = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # give up on a machine after 30 s
BEAT = 5  # seconds
SILENT = 30  # seconds; C code that holds the GIL may keep a healthy rank silent for some seconds
SILENT_LIMIT = 300  # seconds; no healthy process blocks its threads for minutes
BEHIND = 60  # seconds
# Seconds that the other ranks wait for a rank that is behind:
PATIENCE = 3600  # before the second step: preparing data, loading 25 GB from a slow disk, and compilation take long
STEP_PATIENCE = 900  # in later steps: only a slow disk, a data stream or another compilation delays a rank
STOPPING_PATIENCE = 120  # after a stop request: schedulers kill the job about three minutes later
KEY = "lifeline"  # key in the store; the value is "PORT ID": rank 0's port and the ID of the launch
LEFT, FAILED, GONE = "left", "failed", "gone"  # how a rank ended: first word of a line
AT = "at"  # first word of a heartbeat


class RanksMissing(SparsellmError, RuntimeError):
    """Not all ranks have joined."""


@dataclass
class _Standing:
    """A rank's progress, as of its last heartbeat."""

    who: str
    passed: int = 0  # sync points
    step: int | None = None  # last step begun
    patience: float = PATIENCE  # seconds that others wait for the rank at this sync point
    stopping: bool = False  # whether the rank was asked to stop
    silent: float = 0  # seconds since the last heartbeat
    behind: float = 0  # seconds for which others have been at a later sync point
    reported: bool = False  # whether a message said that others wait for the rank

    def beat(self) -> str:
        return f"{AT} {json.dumps([self.passed, self.patience, self.stopping, self.step])}"

    def hear(self, said: str) -> None:
        passed, self.patience, self.stopping, self.step = json.loads(said)
        if passed > self.passed:
            self.behind = 0
        self.passed, self.silent = passed, 0


class Lifeline:
    """This rank's connection to rank 0; on rank 0, its connections to all others. Constructed on all ranks together."""

    def __init__(self, store: dist.Store, address: str, rank: int, world_size: int) -> None:
        """`store` is shared by all ranks; `address` is rank 0's host. Raises RanksMissing if not all ranks join."""
        self.rank, self.world_size = rank, world_size
        self.me = f"rank {rank} (host {socket.gethostname()}, process {os.getpid()})"
        self._others: dict[int, socket.socket] = {}
        self._own = _Standing(self.me)
        self._standings = {rank: self._own}  # this rank, and the ranks that it watches
        self._lost: str | None = None
        self._lock, self._heard, self._left = threading.Lock(), threading.Event(), threading.Event()
        # A forked process would keep the connections open after this process ends.
        os.register_at_fork(after_in_child=self._close)
        self.launch = self._listen(store) if rank == 0 else self._connect(store, address)  # ID of this launch
        threading.Thread(target=self._beat, name="lifeline", daemon=True).start()

    def reached(self, step: int | None = None) -> None:
        """Record that this rank reached the next sync point: the start of `step`, or an exchange of objects."""
        if step is not None:
            self._own.patience = PATIENCE if self._own.step is None else STEP_PATIENCE
            self._own.step = step
        self._own.behind = 0
        self._own.passed += 1

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context manager for work on this rank that the others wait for."""
        before, self._own.patience = self._own.patience, PATIENCE
        try:
            yield
        finally:
            self._own.patience = before

    def hurry(self) -> None:
        """Record that this rank was asked to stop."""
        self._own.stopping = True

    def explain(self) -> None:
        """Wait up to NOTICE seconds for news that another rank has ended; then report it and end this process."""
        if self._heard.wait(NOTICE):
            self._end()

    def leave(self, error: BaseException | None = None) -> None:
        """Tell the others that this rank leaves: normally, or with `error`, after which the others end too."""
        if self._left.is_set():
            return
        self._left.set()
        self._tell(LEFT if error is None else f"{FAILED} {self.me} failed: {type(error).__name__}: {error}")

    def _listen(self, store: dist.Store) -> str:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        launch, deadline = secrets.token_hex(8), time.monotonic() + ARRIVAL
        with socket.create_server(("", 0), family=family, backlog=self.world_size, dualstack_ipv6=both) as listener:
            store.set(KEY, f"{listener.getsockname()[1]} {launch}")
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
                self._admit(connection, launch)
        return launch

    def _admit(self, connection: socket.socket, launch: str) -> None:
        """Keep the connection if it comes from a rank of this launch; otherwise close it."""
        rank = -1
        with suppress(OSError):  # the rank will retry
            connection.settimeout(HANDSHAKE)
            lines = connection.makefile("r", encoding="utf-8", errors="replace")
            said, _, who = lines.readline().strip().partition(" ")
            claimed = int(who.split()[1]) if said == launch else -1
            if claimed not in self._others and 0 < claimed < self.world_size:
                connection.sendall(f"{launch} {self.me}\n".encode())
                rank = claimed
        if rank < 0:
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
                port, launch = store.get(KEY).decode().split()
            except RuntimeError as error:
                raise RanksMissing(
                    f"{self.me} cannot reach rank 0 ({error}): check the log of rank 0's node"
                ) from error
            try:
                connection = socket.create_connection((address, int(port)), timeout=HANDSHAKE)
                connection.sendall(f"{launch} {self.me}\n".encode())
                lines = connection.makefile("r", encoding="utf-8", errors="replace")
                said, _, who = lines.readline().strip().partition(" ")
            except OSError:
                said = ""
            if said == launch:
                self._keep(0, connection, lines, who)
                return launch
            time.sleep(0.1)  # the address was that of rank 0 of an earlier launch; retry
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
        """Listen to `who` until its connection ends. Then end this process too, unless `who` left normally."""
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
        """End this process (rank 0: all ranks) with the message `said`, unless this process is ending already."""
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
            furthest = max(standing.passed for standing in standings.values())
            stopping = any(standing.stopping for standing in standings.values())
            for rank, standing in standings.items():
                standing.silent += BEAT if rank != self.rank else 0
                standing.behind = standing.behind + BEAT if standing.passed < furthest else 0
                if rank == 0 or self.rank == 0:
                    self._judge(standing, stopping)

    def _judge(self, standing: _Standing, stopping: bool) -> None:
        """Report the rank of `standing` if others wait for it, and end all ranks once its time limit has passed."""
        silent, behind = standing.silent, standing.behind
        limit: float
        if silent >= SILENT:
            waited, limit = silent, SILENT if stopping else SILENT_LIMIT
            what = f"has not answered for {silent:.0f} s: it is stopped (`kill -CONT` resumes it), or its machine hangs"
        elif behind >= BEHIND and self.rank == 0:
            waited, limit = behind, standing.patience
            if stopping and limit < PATIENCE:
                limit = min(limit, STOPPING_PATIENCE)
            where = "before its first step" if standing.step is None else f"in or after step {standing.step:,}"
            how = "py-spy on its host shows what it is doing"
            what = f"has kept the other ranks waiting for {behind:.0f} s, {where} ({how})"
        else:
            if standing.reported:
                standing.reported = False
                self._say(f"{standing.who} continues")
            return
        if waited >= limit:
            self._lose(GONE, f"{standing.who} {what}")
        elif not standing.reported:
            standing.reported = True
            ending = f"All ranks will end if it does not continue within {limit - waited:.0f} s"
            self._say(f"{standing.who} {what}. {ending}")

    def _say(self, text: str) -> None:
        if self.rank <= 1:
            write_now(f"sparsellm: {text}\n")

    def _tell(self, text: str) -> None:
        line = " ".join(text.split())
        for connection in list(self._others.values()):
            with suppress(OSError):
                connection.sendall(f"{line}\n".encode())

    def _end(self) -> None:
        self._lock.acquire()  # never released, so that only one thread reports
        write_now(f"sparsellm: rank {self.rank} exits: {self._lost}. Run the same command to resume\n")
        os._exit(1)

    def _close(self) -> None:
        for connection in self._others.values():
            os.close(connection.detach())
        self._others.clear()
