import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from whole_config import prepare

from sparsellm.config import Config
from sparsellm.data import DataError, corpus, tokenizer
from sparsellm.data.stream import TokenStream

LENGTH, SHARE, GROUP = 32, 8, 50
BEGIN = {"epoch": 0, **corpus.START, "skip_tokens": 0, "group": 0, "given": 0}


@pytest.fixture
def stream(
    make_config: Callable[..., Config], parquet: list[str], tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> TokenStream:
    """Six files of about 140 blocks each, in groups of 50; a chunk is less than a group."""
    monkeypatch.setattr(corpus, "CHUNK_CHARACTERS", 2_000)
    files = corpus.find_files(make_config(parquet).data)
    return TokenStream(
        files=files,
        ends=corpus.ends(files),
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
    """Undo the shuffling inside groups: consecutive blocks share a token."""
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
@pytest.mark.slow
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


def held_out_blocks(stream: TokenStream, texts: list[str]) -> torch.Tensor:
    held_out = [text for i, text in enumerate(texts) if i % 50 != 49 and corpus.is_held_out(text, 0.1)]
    return torch.tensor(tokens_of(stream, held_out)).unfold(0, LENGTH + 1, LENGTH)


def test_validation_is_held_out_and_the_same_on_every_rank(
    stream: TokenStream, make_config: Callable[..., Config], parquet: list[str], texts: list[str]
) -> None:
    everything = held_out_blocks(stream, texts)
    assert torch.equal(stream.validation(10**6), everything)
    found = stream.validation(10)
    assert found.shape == (10, LENGTH + 1)
    assert torch.equal(replace(stream, rank=1, world_size=2).validation(10), found)
    assert prepare(make_config(parquet)).validation.blocks == len(everything)


def test_validation_sequences_come_from_all_files_in_proportion_to_their_sizes(
    stream: TokenStream, texts: list[str]
) -> None:
    of = [held_out_blocks(stream, texts[100 * i : 100 * i + 100]).flatten() for i in range(6)]
    own = [set(zip(ids.tolist(), ids[1:].tolist(), ids[2:].tolist(), ids[3:].tolist(), strict=False)) for ids in of]
    first = next(iter(stream.files))
    larger = replace(stream, files=dict.fromkeys(stream.files, 1) | {first: 3})  # 3 of 8
    for found, shares in (
        (stream.validation(12), [2] * 6),
        (stream.validation(40), [40 / 6] * 6),
        (larger.validation(24), [9, *[3] * 5]),
    ):
        assert len({tuple(block) for block in found.tolist()}) == len(found) == round(sum(shares))
        counts = [0] * 6
        for block in found.tolist():
            four = list(zip(block, block[1:], block[2:], block[3:], strict=False))
            counts[max(range(6), key=lambda i, four=four: sum(each in own[i] for each in four))] += 1
        assert all(abs(count - share) <= 2 for count, share in zip(counts, shares, strict=True))
        assert min(counts) > 0


def test_a_stream_of_many_files_opens_only_some_for_validation(
    stream: TokenStream, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    opened, reading = [], corpus.read
    monkeypatch.setattr("sparsellm.data.stream.MOST_FILES", 2)
    monkeypatch.setattr(
        corpus, "read", lambda names, *given, **named: opened.extend(names) or reading(names, *given, **named)
    )
    assert len(stream.validation(4)) == 4
    assert sorted(opened) == sorted(list(stream.files)[::3])
    of_all = len(held_out_blocks(stream, texts))
    assert len(stream.validation(10**6)) == of_all


def test_a_file_with_little_held_out_text_hands_its_validation_sequences_on(
    stream: TokenStream, texts: list[str], tmp_path: Path
) -> None:
    Dataset.from_dict({"text": ["short"] * 10}).to_parquet(tmp_path / "short.parquet")
    files = {**stream.files, str(tmp_path / "short.parquet"): 10 * max(stream.files.values())}
    of_all = len(held_out_blocks(stream, texts))
    for samples in (10, of_all):  # `of_all` needs every held-out document of the other files
        assert len(replace(stream, files=files).validation(samples)) == samples


def test_another_number_of_ranks_another_rank_and_other_files_are_refused_by_name(stream: TokenStream) -> None:
    ((_, state),) = take(stream, 1)
    with pytest.raises(DataError, match="saved with world_size 1, but world_size is now 2"):
        take(replace(stream, world_size=2), 1, state)
    ((_, state),) = take(replace(stream, world_size=2), 1)
    with pytest.raises(DataError, match="saved with rank 0, but rank is now 1"):
        take(replace(stream, rank=1, world_size=2), 1, state)
    more = {"files": {**stream.files, "later.parquet": 1}, "ends": {**stream.ends, "later.parquet": "0"}}
    with pytest.raises(DataError, match=r"saved with files .* \(later\.parquet added later\)"):
        take(replace(stream, **more, world_size=2), 1, state)
    state["ends"], state["sizes"] = {}, {}  # like those of hub files, which only the digest can tell
    with pytest.raises(DataError, match="saved with files"):
        take(replace(stream, files=dict(list(stream.files.items())[1:]), world_size=2), 1, state)


def test_another_tokenizer_is_refused_by_name(stream: TokenStream, texts: list[str], tmp_path: Path) -> None:
    ((_, state),) = take(stream, 1)
    tokenizer.save(tokenizer.train(texts, 350), tmp_path / "other")
    other = replace(stream, tokenizer_folder=tmp_path / "other")
    with pytest.raises(
        DataError, match=r"the data position was saved with tokenizer [0-9a-f]{16}, but tokenizer is now"
    ):
        take(other, 1, state)


def changed(stream: TokenStream, name: str) -> TokenStream:
    """The stream where file `name` has its documents in another order."""
    path = Path(name)
    Dataset.from_dict({"text": Dataset.from_parquet(name)["text"][::-1]}).to_parquet(path)
    return replace(stream, files={**stream.files, name: path.stat().st_size}, ends=corpus.ends(stream.files))


def without(stream: TokenStream, name: str) -> TokenStream:
    files = {file: size for file, size in stream.files.items() if file != name}
    return replace(stream, files=files, ends={file: stream.ends[file] for file in files})


def order_of(stream: TokenStream, epoch: int = 0) -> list[str]:
    return stream._order(epoch)


def position(stream: TokenStream, file: int) -> dict:
    """A state in the middle of file number `file` of the first epoch, of whose group every token is from that file."""
    for _, state in stream.batches(None):
        name = order_of(stream)[file]
        if state["file"] == file and state["reached"] == [0, name] and state["given"] not in (0, GROUP):
            return json.loads(json.dumps(state))
    raise AssertionError


def test_a_file_that_was_read_to_its_end_may_not_change_or_go(stream: TokenStream) -> None:
    state, (first, *_) = position(stream, 2), order_of(stream)
    for other in (without(stream, first), changed(stream, first)):
        with pytest.raises(DataError, match=f"{Path(first).name} changed or disappeared after the run had read"):
            take(other, 1, state)
    del state["sizes"]  # like a state saved before 0.1.0
    assert take(stream, 1, state)


def test_a_later_file_may_change_or_go_and_nothing_is_read_twice(
    stream: TokenStream, capsys: pytest.CaptureFixture[str]
) -> None:
    state, order = position(stream, 1), order_of(stream)
    follows = take(stream, 12, state)
    for other in (without(stream, order[4]), changed(stream, order[4])):
        rest = take(other, 140, state)
        assert all(torch.equal(a, b) for (a, _), (b, _) in zip(rest[:12], follows, strict=True))
        assert f"{order[4]} changed or disappeared before" in capsys.readouterr().err
        # Its own states resume with the current files, in later epochs too.
        again = take(other, 10, json.loads(json.dumps(rest[129][1])))
        for (batch, after), (expected, expected_after) in zip(again, rest[130:], strict=True):
            assert torch.equal(batch, expected)
            assert after == expected_after
        assert capsys.readouterr().err == ""
    assert rest[-1][1]["epoch"] > 0


def training_tokens(stream: TokenStream, name: str) -> list[int]:
    return np.concatenate([tokens for *_, tokens in stream._tokens([name], corpus.START)]).tolist()


def in_order(stream: TokenStream, state: dict) -> list[int]:
    """The tokens of the next group, unshuffled."""
    _, resumed = stream._since(state)
    _, group = next(stream._since(state)[0]._groups(resumed))
    assert resumed["given"] == 0
    return group[:, :-1].flatten().tolist()


def test_the_file_that_is_being_read_begins_again_where_it_changed_and_the_next_one_where_it_is_gone(
    stream: TokenStream, capsys: pytest.CaptureFixture[str]
) -> None:
    state, order = position(stream, 1), order_of(stream)
    gone = without(stream, order[1])
    expected = training_tokens(stream, order[2]) + training_tokens(stream, order[3])
    assert in_order(gone, state) == expected[: GROUP * LENGTH]
    assert take(gone, 3, state)[-1][1]["file"] == 1
    other = changed(stream, order[1])
    expected = training_tokens(other, order[1])
    assert in_order(other, state) == expected[: GROUP * LENGTH]
    assert "are repeated, about" in capsys.readouterr().err


def test_where_a_group_goes_into_a_changed_file_it_is_collected_again(stream: TokenStream) -> None:
    for _, state in stream.batches(None):
        if state["file"] == 0 and state["reached"][1] == order_of(stream)[1]:
            break
    before = {key: state[key] for key in ("epoch", "file", "document")}
    other = changed(stream, order_of(stream)[1])
    _, resumed = other._since(json.loads(json.dumps(state)))
    assert {key: resumed[key] for key in before} == before
    assert (resumed["given"], resumed["skip_tokens"]) == (0, 0)


def test_a_file_that_comes_back_is_read(stream: TokenStream) -> None:
    state, order = position(stream, 1), order_of(stream)
    later = take(without(stream, order[3]), 1, state)[-1][1]
    assert later["ends"][order[3]] is None
    again, follows = take(stream, 30, json.loads(json.dumps(later))), take(stream, 31, state)[1:]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(again, follows, strict=True))


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
    with pytest.raises(DataError, match="7 ranks share 6 files"):
        replace(stream, world_size=7)


def test_a_stream_with_nothing_to_train_on_stops(stream: TokenStream) -> None:
    with pytest.raises(DataError, match="contain no document to train on"):
        take(replace(stream, validation_fraction=1.0), 1)
    with pytest.raises(DataError, match=r"fewer than one block of 33: prepare the tokens first"):
        replace(stream, validation_fraction=1e-9).validation(1)
