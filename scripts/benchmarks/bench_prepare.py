"""Throughput of prepare_data by number of cores, compared with bare tokenizer processes.

    python -m scripts.benchmarks.bench_prepare [--cores 1,2,4,8,16] [--tokenizer FOLDER] [--characters 400e6]

The documents repeat the text of the embedded corpus, cut to the average length of FineWeb-Edu's documents, in parquet
files in --folder. For each number n of cores it prints the rates of

    tokenizers    n processes of one thread each, with documents in memory, which discard the tokens
    prepare_data  sparsellm.data.prepare on n cores: it reads, tokenizes, hashes, writes and syncs

Both process the same text; imports and the training of the tokenizer are not timed. Then it prints the time for 10 and
40 billion tokens on the most cores. Every process is pinned to its cores by CPU affinity.
"""

import itertools
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pyarrow
import pyarrow.parquet

from scripts.benchmarks import harness
from sparsellm.config import from_overrides
from sparsellm.data import Request, corpus, prepare, tokenizer

SPAWN = multiprocessing.get_context("spawn")  # a forked process would lack its tokenizer's threads
FILE_CHARACTERS = 50_000_000
DOCUMENT_CHARACTERS = 4_800  # about 1,000 tokens, the mean length of FineWeb-Edu's documents
TARGETS = (10e9, 40e9)  # tokens


def write_documents(texts: list[str], characters: int, folder: Path) -> None:
    """Write parquet files with documents that repeat `texts`, with at least `characters` characters in total."""
    folder.mkdir()
    joined = "\n\n".join(texts)
    texts = [joined[at : at + DOCUMENT_CHARACTERS] for at in range(0, len(joined), DOCUMENT_CHARACTERS)]
    rows, total, written = [], 0, 0
    for text in itertools.cycle(texts):
        rows.append(f"{total} {text}")  # make documents distinct
        total += len(rows[-1])
        if total >= min(characters, written + FILE_CHARACTERS):
            number = len(list(folder.iterdir()))
            pyarrow.parquet.write_table(pyarrow.table({"text": rows}), folder / f"{number:03}.parquet")
            rows, written = [], total
        if total >= characters:
            return


def tokenize(name: str, files: list[str], core: int, ready: Barrier, answers: Queue) -> None:
    """The body of a worker process: encode the documents in `files` on one core, batch by batch, and put (tokens,
    begin, end) into `answers`."""
    os.sched_setaffinity(0, [core])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    vocabulary = tokenizer.load(name)
    texts = [text for file in files for text in pyarrow.parquet.read_table(file)["text"].to_pylist()]
    ready.wait()
    begin, tokens = time.time(), 0
    for first in range(0, len(texts), 1_000):
        encodings = vocabulary.tokenizer.encode_batch_fast(texts[first : first + 1_000], add_special_tokens=False)
        tokens += sum(len(encoding) for encoding in encodings) + len(encodings)
    answers.put((tokens, begin, time.time()))


def prepare_on(cores: list[int], overrides: list[str], ready: Barrier, answers: Queue) -> None:
    """The body of a worker process: prepare on `cores`, and put (tokens, begin, end) into `answers`."""
    os.sched_setaffinity(0, cores)
    config = from_overrides(overrides)
    ready.wait()
    begin = time.time()
    manifest = prepare(Request.of(config))
    answers.put((manifest.train.tokens + manifest.validation.tokens, begin, time.time()))


def rate(target: Callable[..., None], arguments: list[tuple]) -> float:
    """Total tokens/s of concurrent processes, each of which runs `target` with one tuple from `arguments`."""
    ready, answers = SPAWN.Barrier(len(arguments)), SPAWN.Queue()
    processes = [SPAWN.Process(target=target, args=(*each, ready, answers)) for each in arguments]
    for process in processes:
        process.start()
    tokens, begins, ends = zip(*(answers.get() for _ in processes), strict=True)
    for process in processes:
        process.join()
    return sum(tokens) / (max(ends) - min(begins))


def main() -> None:
    parser = harness.parser(__doc__)
    here = sorted(os.sched_getaffinity(0))
    halves = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < len(here)]
    parser.add_argument("--cores", default=",".join(map(str, [*halves, len(here)])), help="numbers of cores")
    parser.add_argument("--tokenizer", help="a folder or hub name; without it, one of 4,096 ids is trained")
    parser.add_argument("--characters", type=float, default=400e6, help="total characters of the documents")
    parser.add_argument(
        "--folder", help="output folder, about 5 bytes per character; default: the system's temporary folder"
    )
    args = parser.parse_args()
    numbers = [int(n) for n in args.cores.split(",")]
    if max(numbers) > len(here):
        raise SystemExit(f"--cores {max(numbers)}: this process may use {len(here)} cores")
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        folder, name = Path(temporary), args.tokenizer
        texts = corpus.stdlib_docs()[0]
        if name is None:
            name = str(folder / "tokenizer")
            tokenizer.save(tokenizer.train(texts, 4_096), Path(name))
        documents, prepared = folder / "documents", folder / "prepared"
        write_documents(texts, int(args.characters), documents)
        files = sorted(map(str, documents.iterdir()))
        size = sum(Path(file).stat().st_size for file in files)
        print(f"{args.characters:,.0f} characters in {len(files)} files, {size:,} bytes", flush=True)
        overrides = [
            "data=files", f"data.files=[{documents}/*.parquet]", f"data.tokenizer={name}", f"data.path={prepared}",
            "data.max_tokens=1000000000000", "model.vocab_size=1000000",
        ]  # fmt: skip
        found = {}
        for n in numbers:
            alone = rate(tokenize, [(name, files[i::n] or files[:1], core) for i, core in enumerate(here[:n])])
            ours = rate(prepare_on, [(here[:n], overrides)])
            shutil.rmtree(prepared)
            found[n] = {"tokenizers": alone, "prepare_data": ours, "share": ours / alone, "per_core": ours / n}
            print(
                f"{n:>3} cores  tokenizers {alone:>12,.0f} tokens/s   prepare_data {ours:>12,.0f} tokens/s,"
                f" {ours / n:>9,.0f} per core, {ours / alone:.2f} of the tokenizers",
                flush=True,
            )
        best = found[max(numbers)]["prepare_data"]
        bytes_per_token = 2 if tokenizer.vocabulary_size(tokenizer.load(name)) <= 65_536 else 4
        for tokens in TARGETS:
            print(
                f"{tokens / 1e9:,.0f}B tokens: {tokens / best / 3600:.1f} h, {tokens * bytes_per_token / 1e9:,.0f} GB"
            )
        harness.write(args.json, found)


if __name__ == "__main__":
    main()
