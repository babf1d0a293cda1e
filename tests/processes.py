"""Processes that tests start and kill.

A fork server has imported all that commands need, so a rank or a victim costs a fork instead of seconds of imports.
`started` makes of a fork what `python -m MODULE ARGUMENT...` would be, and of what it starts in turn (torchrun its
workers, a sweep its runs) as well. `dying` has such a process die at a chosen call to the system.
"""

import gc
import importlib
import inspect
import itertools
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from pictures import do_not_draw

from sparsellm import cli
from sparsellm.distributed.groups import Ranks

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    [
        *(f"sparsellm.commands.{name}" for name in ("train", "prepare_data", "evaluate", "sweep", "analyze")),
        # Modules that commands import late.
        "sparsellm.evaluation.downstream", "sparsellm.runs.curves", "transformers.models.llama.modeling_llama",
        "transformers.convert_slow_tokenizer", "matplotlib.backends.backend_agg", "lm_eval.tasks",
        "torch.distributed.run", "safetensors.torch", "pytest", "tests.warm",
    ]
)  # fmt: skip
PATIENCE = 60  # seconds until a process that does not come back counts as hanging

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "fsync")
_execute = subprocess.Popen._execute_child


@contextmanager
def joined(store: Path, rank: int = 0, world_size: int = 1, device: str = "cpu") -> Iterator[Ranks]:
    """The Ranks of this process in a group that meets at the file `store`."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), world_size), rank=rank, world_size=world_size)
    try:
        yield Ranks(rank, world_size, torch.device(device), dist.new_group(backend="gloo"))
    finally:
        dist.destroy_process_group()


class Forked:
    """A running process that `started` makes of a fork, with the methods of subprocess.Popen that tests use."""

    def __init__(self, command: list[str], folder: Path, output: Path, prepare: Callable[[str], object], *errors: Path):
        self._process = SERVER.Process(target=started, args=(command, folder, output, prepare, *errors))
        self._process.start()
        self.pid, self.kill = self._process.pid, self._process.kill

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float | None = None) -> int:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", seconds)
        return self._process.exitcode


def on_one_thread(_name: str) -> None:
    """A `prepare`: what OMP_NUM_THREADS=1 does to a process that has not imported torch yet."""
    torch.set_num_threads(1)


def torchrun(ranks: int, *command: object, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run `command` (a script, or "-m" and a module, with arguments) in `folder` on `ranks` ranks of one thread each,
    all forked; it must succeed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *map(str, command)]
    with tempfile.TemporaryDirectory() as made:
        output, errors = Path(made, "output"), Path(made, "errors")
        process = Forked(launcher, folder or Path.cwd(), output, on_one_thread, errors)
        try:
            code = process.wait(300)
        finally:
            kill(family(process.pid))
        done = subprocess.CompletedProcess(launcher, code, output.read_text(), errors.read_text())
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def family(pid: int) -> list[psutil.Process]:
    """The process and all that it and they have started, each after its parent, as far as they are alive."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kill(processes: list[psutil.Process]) -> None:
    """kill -9, and wait until they are gone, including torchrun's workers, which have separate sessions."""
    for process in processes:
        if process.is_running():
            process.kill()
    psutil.wait_procs(processes, PATIENCE)


def started(
    command: list[str],
    folder: Path,
    output: Path,
    prepare: Callable[[str], object] = lambda _: None,
    errors: Path | None = None,
) -> None:
    """Be the process that `command`, ["-m", MODULE, ARGUMENT...], starts in `folder`, with what it says in `output`, or
    in `output` and `errors`, except that it does not draw.

    `prepare(name)` is called in it, and in each process under it, before its command: name is "0" of the first one, and
    "0.1", "0.2", ... of those that it starts.
    """
    os.chdir(folder)
    for number, path in ((1, output), (2, errors or output)):
        with path.open("ab", buffering=0) as said:
            os.dup2(said.fileno(), number)
    do_not_draw()
    _run(command, "0", prepare)


def _run(command: list[str], name: str, prepare: Callable[[str], object]) -> None:
    """Run the command and end this process with its exit code."""
    forks = itertools.count(1)

    def fork(popen: subprocess.Popen, *arguments: object) -> None:
        given = inspect.signature(_execute).bind(popen, *arguments).arguments
        if (of_python := _of_python(given["args"])) is None:
            return _execute(popen, *arguments)
        under = f"{name}.{next(forks)}"
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        popen.pid = os.fork()
        if popen.pid == 0:
            _as_after_exec(given)
            _run(of_python, under, prepare)
        popen._child_created = True
        streams = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        popen._close_pipe_fds(*(given[stream] for stream in streams))

    subprocess.Popen._execute_child = fork
    code = 1
    try:
        prepare(name)
        if command[0] != "-m":
            sys.argv, sys.path[:0] = command, [str(Path(command[0]).parent)]
            runpy.run_path(command[0], run_name="__main__")
            code = 0
        elif command[1] == "torch.distributed.run":
            importlib.import_module(command[1]).main(command[2:])
            code = 0
        else:
            cli.run(command[1].removeprefix("sparsellm."), command[2:])
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _of_python(command: Sequence[str]) -> list[str] | None:
    """["-m", MODULE, ARGUMENT...] or [SCRIPT, ARGUMENT...] of a command line of Python's; None: it is another's."""
    if "-m" in command:
        return list(command[command.index("-m") :])
    match list(command):
        case [_, "-u", script, *arguments] if script.endswith(".py"):  # as torchrun starts it
            return [script, *arguments]
    return None


def _as_after_exec(given: dict[str, object]) -> None:
    """Drop what a fork has of its parent and a new program has not. `given`: the arguments of Popen._execute_child."""
    gc.freeze()  # nothing of the parent's is collected, and closes a file by a number that is another file's by then
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    multiprocessing.process._parent_process = None
    if given["start_new_session"]:
        os.setsid()
    if given["preexec_fn"] is not None:
        given["preexec_fn"]()
    for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
        if given[name] != -1:
            os.dup2(given[name], number)
    # Files are replaced instead of closed: what an object of the parent's closes late is then no other file.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (int(path.name) for path in Path("/proc/self/fd").iterdir()):
        if number > 2:
            with suppress(OSError):  # of the folder that was listed
                os.dup2(nothing, number)
    if given["env"] is not None:
        os.environ.clear()
        os.environ.update(given["env"])


def dying(call: int | None, size: int | None = None, count: Path | None = None) -> None:
    """Have this process kill itself before the call number `call` that changes files: opens one to write, renames, ...

    With `size`, not before that call, but within the first write after it that is to make a file larger than so many
    bytes; as much as fits is written. `count`: a file that gets a byte for every call.
    """
    calls = itertools.count(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    counted = None if count is None else os.open(count, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def hook(event: str, arguments: tuple) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if not (writes or event in CHANGES):
            return
        if counted is not None:
            os.write(counted, b".")
        if next(calls) == call:
            if size is None:
                os.kill(os.getpid(), signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

    fsync = os.fsync

    def heard(descriptor: int) -> None:
        sys.audit("fsync", descriptor)
        fsync(descriptor)

    os.fsync = heard
    sys.addaudithook(hook)
