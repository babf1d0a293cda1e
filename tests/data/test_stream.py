import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from sparsellm.config import Config
from sparsellm.data import DataError, corpus, prepare, tokenizer
from sparsellm.data.stream import TokenStream

LENGTH, SHARE, GROUP = 32, 8, 50
BEGIN = {"epoch": 0, **corpus.START, "skip_tokens": 0, "group": 0, "given": 0}


@pytest.fixture
def stream(
    make_config: Callable[..., Config], parquet: list[str], tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> TokenStream:
    """Six files of about 140 blocks each, in groups of 50; a chunk is less than a group."""
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 2_000)
    return TokenStream(
        files=corpus.find_files(make_config(parquet).data),
        text_column="text",
        tokenizer_folder=tokenizer_folder,
        validation_fraction=0.1,
        sequence_length=LENGTH,
        share=SHARE,
        rank=0,
        world_size=1,
        seed=7,
        workers=0,
        pin_memory=False,
        group_blocks=GROUP,
    )


def take(stream: TokenStream, count: int, state: dict | None = None) -> list[tuple[torch.Tensor, dict]]:
    return list(islice(stream.batches(state), count))


def tokens_of(stream: TokenStream, texts: list[str]) -> list[int]:
    ids = tokenizer.encode(tokenizer.load(str(stream.tokenizer_folder)), texts)
    return [i for document in ids for i in document]


def test_an_epoch_holds_the_training_documents_in_the_order_of_its_files(stream: TokenStream, texts: list[str]) -> None:
    """Undo the shuffling inside groups: blocks chain by their shared token."""
    kept = {text for i, text in enumerate(texts) if i % 50 != 49 and not corpus.is_held_out(text, 0.1)}
    groups = stream._groups(BEGIN)
    blocks = torch.cat([torch.from_numpy(group.copy()) for _, group in islice(groups, 40)])
    assert torch.equal(blocks[1:, 0], blocks[:-1, -1])
    vocabulary = tokenizer.load(str(stream.tokenizer_folder))
    ids = blocks[:, :-1].flatten().tolist()
    read = vocabulary.tokenizer.decode(ids, skip_special_tokens=False).split("<|endoftext|>")
    first, second = read[: len(kept)], read[len(kept) : 2 * len(kept)]
    assert set(first) == set(second) == kept
    assert first != second  # each epoch has its own order of files


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resume_gives_what_followed_within_groups_and_across_epochs(
    stream: TokenStream, world_size: int, workers: int
) -> None:
    for rank in range(world_size):
        mine = replace(stream, rank=rank, world_size=world_size)
        everything = take(mine, 250)
        epochs = {state["epoch"] for _, state in everything}
        assert len(epochs) >= 2
        # The start, inside a group, at a group's last block, in a batch of two groups, in a later epoch.
        ends_group = next(i for i, (_, state) in enumerate(everything) if state["given"] == GROUP)
        for stop in (1, 3, ends_group + 1, 7, 120, 249) if workers == 0 else (7, 120):
            state = json.loads(json.dumps(everything[stop - 1][1]))
            rest = take(replace(mine, workers=workers), 250 - stop, state)
            for (batch, after), (expected, expected_after) in zip(rest, everything[stop:], strict=True):
                assert torch.equal(batch, expected)
                assert after == expected_after


def test_workers_do_not_change_the_stream_or_run_ahead(stream: TokenStream) -> None:
    here, there = take(stream, 20), take(replace(stream, workers=3), 20)
    assert all(torch.equal(a, b) and s == t for (a, s), (b, t) in zip(here, there, strict=True))


def test_batches_are_shuffled_within_a_group(stream: TokenStream) -> None:
    _, group = next(stream._groups(BEGIN))
    batches = torch.cat([batch for batch, _ in take(replace(stream, share=10), 5)])
    assert not torch.equal(batches, torch.from_numpy(group.copy()))
    assert sorted(batches.tolist()) == sorted(group.tolist())
    assert batches.dtype == torch.int64


def test_ranks_read_different_files(stream: TokenStream) -> None:
    seen = []
    for rank in range(2):
        blocks = torch.cat([batch for batch, _ in take(replace(stream, rank=rank, world_size=2, share=10), 20)])
        seen.append({tuple(block) for block in blocks.tolist()})
    assert seen[0].isdisjoint(seen[1])


def test_validation_is_held_out_and_the_same_as_when_prepared(
    stream: TokenStream, make_config: Callable[..., Config], parquet: list[str], texts: list[str]
) -> None:
    held_out = [text for i, text in enumerate(texts) if i % 50 != 49 and corpus.is_held_out(text, 0.1)]
    expected = torch.tensor(tokens_of(stream, held_out)).unfold(0, LENGTH + 1, LENGTH)
    assert torch.equal(stream.validation(10), expected[:10])
    assert torch.equal(stream.validation(10**6), expected)
    assert torch.equal(replace(stream, rank=1, world_size=2).validation(10), expected[:10])
    assert prepare(make_config(parquet)).validation.blocks == len(expected)


def test_another_number_of_ranks_another_rank_and_other_files_are_refused_by_name(stream: TokenStream) -> None:
    ((_, state),) = take(stream, 1)
    with pytest.raises(DataError, match="saved with world_size 1 and world_size is 2 now"):
        take(replace(stream, world_size=2), 1, state)
    ((_, state),) = take(replace(stream, world_size=2), 1)
    with pytest.raises(DataError, match="saved with rank 0 and rank is 1 now"):
        take(replace(stream, rank=1, world_size=2), 1, state)
    fewer = dict(list(stream.files.items())[1:])
    with pytest.raises(DataError, match="saved with files"):
        take(replace(stream, files=fewer, world_size=2), 1, state)


def test_another_tokenizer_is_refused_by_name(stream: TokenStream, texts: list[str], tmp_path: Path) -> None:
    ((_, state),) = take(stream, 1)
    tokenizer.save(tokenizer.train(texts, 350), tmp_path / "other")
    other = replace(stream, tokenizer_folder=tmp_path / "other")
    with pytest.raises(DataError, match=r"the data position was saved with tokenizer [0-9a-f]{16} and tokenizer is"):
        take(other, 1, state)
    del state["tokenizer"]  # as an earlier version saved it
    assert len(take(stream, 1, state)) == 1


@pytest.mark.parametrize("at", [8, -8])
def test_a_file_of_other_content_and_the_same_size_is_refused_by_name(stream: TokenStream, at: int) -> None:
    ((_, state),) = take(stream, 1)
    state = json.loads(json.dumps(state))
    path = Path(list(stream.files)[2])
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path.name}: of another content than when the data position was saved"):
        take(stream, 1, state)
    content[at] ^= 1
    path.write_bytes(content)
    assert take(stream, 1, state)
    del state["ends"]  # as an earlier version saved it
    assert take(stream, 1, state)


@pytest.mark.parametrize(("size", "at"), [(100, 50), (3 << 19, (3 << 19) - 1), (3 << 19, 1 << 20), (3 << 20, 0)])
def test_the_ends_of_a_file_are_its_first_and_last_mebibyte(tmp_path: Path, size: int, at: int) -> None:
    path, content = tmp_path / "x.txt", bytearray(size)
    path.write_bytes(content)
    before = corpus.ends({str(path): size, "hf://x": None})
    assert list(before) == [str(path)]
    content[at] = 1
    path.write_bytes(content)
    assert corpus.ends({str(path): size}) != before


def test_a_rank_without_files_is_refused(stream: TokenStream) -> None:
    with pytest.raises(DataError, match="there are 6 for 7 ranks"):
        replace(stream, world_size=7)


def test_a_stream_with_nothing_to_train_on_stops(stream: TokenStream) -> None:
    with pytest.raises(DataError, match="hold no document to train on"):
        take(replace(stream, validation_fraction=1.0), 1)
    with pytest.raises(DataError, match=r"less than one block of 33: prepare the tokens first"):
        replace(stream, validation_fraction=0.0).validation(1)
