"""Throughput of prepare_data by number of cores, compared with bare tokenizer processes.

    python -m scripts.benchmarks.bench_prepare [--cores 1,2,4,8,16] [--tokenizer FOLDER] [--characters 400e6]

The documents repeat those of the embedded corpus, joined to the average length of FineWeb-Edu's, in parquet files on
the disk of --folder. --tokenizer is a folder or hub name; default: one of 4,096 ids is trained on them. For each number
n of cores two rows:

    tokenizers    n processes of one thread each, with documents in memory, discarding the tokens
    prepare_data  sparsellm.data.prepare on n cores: it reads, tokenizes, hashes, writes and syncs

Both rows process the same text, and exclude imports and the training of the tokenizer. Then the time for 10 and 40
billion tokens on the most cores. Every process is pinned to its cores by CPU affinity.
"""

import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from scripts.benchmarks import harness
from sparsellm.config import from_overrides
from sparsellm.data import Request, corpus, prepare, tokenizer

SPAWN: BaseContext = multiprocessing.get_context("spawn")  # a forked process would lack its tokenizer's threads
FILE_CHARACTERS = 50_000_000
DOCUMENT_CHARACTERS = 4_800  # about 1,000 tokens, the mean document of FineWeb-Edu
TARGETS = (10e9, 40e9)  # tokens


def write_documents(texts: list[str], characters: int, folder: Path) -> None:
    """Write parquet files of documents that repeat `texts`, with at least `characters` characters."""
    folder.mkdir()
    joined = "\n\n".join(texts)
    texts = [joined[at : at + DOCUMENT_CHARACTERS] for at in range(0, len(joined), DOCUMENT_CHARACTERS)]
    rows: list[str] = []
    count = total = 0
    while total < characters:
        for text in texts:
            rows.append(f"{total} {text}")  # make documents distinct
            count += len(rows[-1])
            total += len(rows[-1])
            if count >= FILE_CHARACTERS or total >= characters:
                number = len(list(folder.iterdir()))
                pyarrow.parquet.write_table(pyarrow.table({"text": rows}), folder / f"{number:03}.parquet")
                rows, count = [], 0
            if total >= characters:
                return


def tokenize(name: str, files: list[str], cores: list[int], ready: Barrier, answers: Any) -> None:
    """One process: encode the texts of `files` on one core, batch by batch; answers (tokens, begin, end)."""
    os.sched_setaffinity(0, cores)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    vocabulary = tokenizer.load(name)
    texts = [text for file in files for text in pyarrow.parquet.read_table(file)["text"].to_pylist()]
    ready.wait()
    begin, tokens = time.time(), 0
    for first in range(0, len(texts), 1_000):
        encodings = vocabulary.tokenizer.encode_batch_fast(texts[first : first + 1_000], add_special_tokens=False)
        tokens += sum(len(encoding) for encoding in encodings) + len(encodings)
    answers.put((tokens, begin, time.time()))


def prepare_on(cores: list[int], overrides: list[str], answers: Any) -> None:
    """One process: prepare on these cores; answers (tokens, begin, end)."""
    os.sched_setaffinity(0, cores)
    config = from_overrides(overrides)
    begin = time.time()
    manifest = prepare(Request.of(config))
    answers.put((manifest.train.tokens + manifest.validation.tokens, begin, time.time()))


def rate(processes: list[Any], answers: Any) -> float:
    """Tokens/s of the processes together, from the first begin to the last end."""
    for process in processes:
        process.start()
    found = [answers.get() for _ in processes]
    for process in processes:
        process.join()
    tokens, begins, ends = zip(*found, strict=True)
    return sum(tokens) / (max(ends) - min(begins))


def of_tokenizers(name: str, files: list[str], cores: list[int]) -> float:
    ready, answers = SPAWN.Barrier(len(cores)), SPAWN.Queue()
    shares = [files[i :: len(cores)] or files[:1] for i in range(len(cores))]
    made: Callable[..., Any] = SPAWN.Process
    return rate(
        [
            made(target=tokenize, args=(name, share, [core], ready, answers))
            for share, core in zip(shares, cores, strict=True)
        ],
        answers,
    )


def of_prepare_data(name: str, files: Path, folder: Path, cores: list[int]) -> float:
    answers = SPAWN.Queue()
    overrides = [
        "data=files", f"data.files=[{files}/*.parquet]", f"data.tokenizer={name}", f"data.path={folder}",
        "data.max_tokens=1000000000000", "model.vocab_size=1000000",
    ]  # fmt: skip
    made: Callable[..., Any] = SPAWN.Process
    found = rate([made(target=prepare_on, args=(cores, overrides, answers))], answers)
    shutil.rmtree(folder)
    return found


def main() -> None:
    parser = harness.parser(__doc__)
    here = sorted(os.sched_getaffinity(0))
    halves = [n for n in (1, 2, 4, 8, 16, 32, 64) if n < len(here)]
    parser.add_argument("--cores", default=",".join(map(str, [*halves, len(here)])), help="numbers of cores")
    parser.add_argument("--tokenizer", help="a folder or hub name; without it one of 4,096 ids is trained")
    parser.add_argument("--characters", type=float, default=400e6, help="total characters of the documents")
    parser.add_argument(
        "--folder", help="output folder, about 5 bytes per character; default: the system's temporary folder"
    )
    given = parser.parse_args()
    numbers = [int(n) for n in given.cores.split(",")]
    if max(numbers) > len(here):
        raise SystemExit(f"--cores {max(numbers)}: this process may use {len(here)} cores")
    with tempfile.TemporaryDirectory(dir=given.folder) as made:
        folder, name = Path(made), given.tokenizer
        texts = corpus.stdlib_docs()[0]
        if name is None:
            name = str(folder / "tokenizer")
            tokenizer.save(tokenizer.train(texts, 4_096), Path(name))
        write_documents(texts, int(given.characters), folder / "documents")
        files = sorted(map(str, (folder / "documents").iterdir()))
        characters = sum(Path(file).stat().st_size for file in files)
        print(f"{given.characters:,.0f} characters in {len(files)} files, {characters:,} bytes", flush=True)
        found = {}
        for n in numbers:
            alone = of_tokenizers(name, files, here[:n])
            ours = of_prepare_data(name, folder / "documents", folder / "prepared", here[:n])
            found[n] = {"tokenizers": alone, "prepare_data": ours, "share": ours / alone, "per_core": ours / n}
            print(
                f"{n:>3} cores  tokenizers {alone:>12,.0f} tokens/s   prepare_data {ours:>12,.0f} tokens/s,"
                f" {ours / n:>9,.0f} per core, {ours / alone:.2f} of the tokenizers",
                flush=True,
            )
        best = found[max(numbers)]["prepare_data"]
        size = 2 if tokenizer.vocabulary_size(tokenizer.load(name)) <= 65_536 else 4
        for tokens in TARGETS:
            print(f"{tokens / 1e9:,.0f}B tokens: {tokens / best / 3600:.1f} h, {tokens * size / 1e9:,.0f} GB")
        harness.write(given.json, found)


if __name__ == "__main__":
    main()
