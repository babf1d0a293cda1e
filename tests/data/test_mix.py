"""Several prepared corpora as one: shares, an order that depends only on sample numbers, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from whole_config import mistakes as data_mistakes
from whole_config import open_data, open_validation, prepare

from sparsellm.config import MIX_PERIOD, Config, ConfigError, LoggingConfig, from_overrides, mistakes
from sparsellm.config.values import definition
from sparsellm.data import DataError, Request, mix, tokenizer
from sparsellm.data.mix import MixedTokens
from sparsellm.data.packed import PackedTokens
from sparsellm.distributed.groups import process_group


@pytest.fixture
def mixed(make_config: Callable[..., Config], parquet: list[str], tmp_path: Path) -> Config:
    """a, two files of six, has 0.7 of the samples, and b, the others, 0.3."""
    config = make_config(parquet)
    for name, files in (("a", parquet[:2]), ("b", parquet[2:])):
        prepare(make_config(files, name=name, path=str(tmp_path / name)))
    sources = [{"data": str(tmp_path / name), "weight": weight} for name, weight in (("a", 7), ("b", 3))]
    data = replace(config.data, mix=sources, path="nowhere", max_tokens=None)
    return replace(config, data=data, logging=LoggingConfig(validation_samples=10))


def opened(config: Config, rank: int = 0, world_size: int = 1) -> MixedTokens:
    return mix.mixed(
        config.data, mix.read(Request.of(config)), batch_size=8, rank=rank, world_size=world_size,
        sequence_length=32, seed=3, workers=0, pin_memory=False,
    )  # fmt: skip


def batches(tokens: MixedTokens, count: int, state: dict | None = None) -> list[torch.Tensor]:
    return [batch for batch, _ in islice(tokens.batches(state), count)]


def test_every_period_has_the_shares_and_every_source_all_its_samples_in_turn(mixed: Config) -> None:
    tokens = opened(mixed)
    of, numbers = tokens.places(np.arange(3 * MIX_PERIOD))
    for period in of.reshape(3, MIX_PERIOD):
        assert np.bincount(period).tolist() == [7_000, 3_000]
    for source in (0, 1):
        assert numbers[of == source].tolist() == list(range((of == source).sum()))
    assert not np.array_equal(of[:MIX_PERIOD], of[MIX_PERIOD : 2 * MIX_PERIOD])
    assert 0.6 < 1 - of[:200].mean() < 0.8  # mixed, not one after the other
    some = np.random.default_rng(0).integers(0, 3 * MIX_PERIOD, 50)  # the number alone determines the sample
    assert [int(tokens.places(np.array([n]))[1][0]) for n in some] == numbers[some].tolist()


def test_counts_are_the_largest_remainders() -> None:
    config = from_overrides(["data.mix=[{data: a, weight: 2}, {data: b, weight: 1}, {data: c, weight: 1}]"])
    assert mix.counts(config.data) == (5_000, 2_500, 2_500)
    assert mix.counts(config.data, 3) == (1, 1, 1)


def test_a_batch_has_the_blocks_of_its_sources_and_ranks_share_it(mixed: Config) -> None:
    tokens = opened(mixed)
    of, numbers = tokens.places(np.arange(840))  # a is in its third epoch
    sources = list(tokens.sources.values())
    assert numbers[of == 0].max() >= 2 * sources[0].manifest.train.blocks
    expected = torch.stack([sources[i].sequences(np.array([n]))[0] for i, n in zip(of, numbers, strict=True)])
    steps = batches(tokens, 105)
    assert torch.equal(torch.cat(steps), expected)
    shares = [batches(opened(mixed, rank, 2), 105) for rank in (0, 1)]
    assert torch.equal(torch.cat([torch.cat(each) for each in zip(*shares, strict=True)]), expected)
    state = list(islice(tokens.batches(None), 20))[-1][1]
    assert torch.equal(torch.stack(batches(opened(mixed), 85, state)), torch.stack(steps[20:]))


def test_a_position_holds_for_the_same_sources_alone(mixed: Config, tmp_path: Path) -> None:
    state = next(opened(mixed).batches(None))[1]
    assert state["samples"] == 8
    assert state["tokens"].keys() == {"a", "b"}
    with pytest.raises(DataError, match=r"trained on tokens other than those in .*a, .*b"):
        next(opened(mixed).batches({**state, "tokens": {**state["tokens"], "b": "0"}}))


def test_each_source_is_validated_and_the_mix_by_shares(mixed: Config, tmp_path: Path) -> None:
    with process_group("cpu") as ranks:
        data = open_data(mixed, ranks)
    each = data.named_validation
    assert {name: len(blocks) for name, blocks in each.items()} == {"a": 10, "b": 10}
    sources = data.tokens.sources
    assert torch.equal(data.validation, torch.cat([sources["a"].validation(7), sources["b"].validation(3)]))
    assert data.training_tokens == min(
        sources["a"].manifest.train.tokens * 10 // 7, sources["b"].manifest.train.tokens * 10 // 3
    )
    assert torch.equal(open_validation(mixed, data.tokenizer_folder, tmp_path / "run"), data.validation)
    (tmp_path / "b" / "validation.tokens").write_bytes(b"")
    with pytest.raises(DataError, match=r"the prepared tokens of .*run are not in .*/b"):
        open_validation(mixed, data.tokenizer_folder, tmp_path / "run")


def test_a_source_with_few_held_out_blocks_keeps_its_share_of_the_validation(mixed: Config) -> None:
    """With 1,000 samples, b would need 300 and a 700, more than they have."""
    many = replace(mixed, logging=LoggingConfig(validation_samples=1_000))
    with process_group("cpu") as ranks:
        data = open_data(many, ranks)
    a, b = (len(each) for each in data.named_validation.values())
    total = len(data.validation)
    assert min(a / 7, b / 3) == pytest.approx(total / 10, abs=1)
    assert torch.equal(data.validation[: round(0.7 * total)], data.named_validation["a"][: round(0.7 * total)])


def test_what_is_not_prepared_or_does_not_fit_is_refused(
    mixed: Config, make_config: Callable[..., Config], parquet: list[str], texts: list[str], tmp_path: Path
) -> None:
    assert data_mistakes(mixed) == []

    def refused(path: Path) -> str:
        data = replace(mixed.data, mix=[*mixed.data.mix, {"data": str(path), "weight": 1}])
        (found,) = data_mistakes(replace(mixed, data=data))
        return found

    missing = refused(tmp_path / "fineweb_edu")
    assert "fineweb_edu: there are no prepared tokens; run python -m sparsellm.prepare_data data=fineweb_edu" in missing
    assert "data.max_tokens=265 training.sequence_length=32" in missing  # a tenth of 10 x 8 x 32 - 1/110, and a block
    tokenizer.save(tokenizer.train(texts, 300), tmp_path / "other tokenizer")
    prepare(make_config(parquet, tokenizer=str(tmp_path / "other tokenizer"), path=str(tmp_path / "c")))
    assert "prepared with different tokenizers (a with" in refused(tmp_path / "c")
    short = make_config(parquet[:1], path=str(tmp_path / "d"), validation_fraction=0.001, max_tokens=None)
    prepare(replace(short, training=replace(short.training, sequence_length=4)))
    assert "held-out tokens, but a block of training.sequence_length 32 takes 33 of each" in refused(tmp_path / "d")
    with (tmp_path / "a" / "train.tokens").open("r+b") as file:
        file.write(b"\xff\x00")
    with process_group("cpu") as ranks, pytest.raises(DataError, match=r"a/train\.tokens is corrupt"):
        open_data(mixed, ranks)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["data.mix=[{data: a}]"], "data.mix has {'data': 'a'}: each of its sources should be {data: NAME, weight: W}"),
        (["data.mix=[{data: a, weight: 0}]"], "each of its sources should be {data: NAME, weight: W}"),
        (["data.mix=[{data: a, weight: true}]"], "each of its sources should be {data: NAME, weight: W}"),
        (["data.mix=[{data: a, weight: 1, x: 2}]"], "each of its sources should be {data: NAME, weight: W}"),
        (["data.mix=[{data: a, weight: 1}, {data: x/a, weight: 1}]"], "data.mix has 2 sources called a"),
        (["data.mix=[{data: a, weight: 1}, {data: b, weight: 1e-5}]"], "gives b less than 0.0001 of all samples"),
        (["data.mix=[{data: a, weight: 1}]", "data.max_tokens=999"], "data.max_tokens is 999 with data.mix"),
        (["data.mix=[{data: a, weight: 1}]", "data=fineweb_edu_stream"], "data.streaming is True with data.mix"),
    ],
)
def test_mixes_that_cannot_be_are_refused_by_name(typed: list[str], message: str) -> None:
    config = from_overrides(typed)
    assert any(message in each for each in mistakes(config, 1))
    assert data_mistakes(config) == [] or "a/" in typed[0]


def test_a_mix_is_a_list_of_sources_whose_folders_may_move() -> None:
    with pytest.raises(ConfigError, match=r"data.mix is a: it should be a list of mappings, like \[\{a: b\}\]"):
        from_overrides(["data.mix=a"])
    here, there = (from_overrides([f"data.mix=[{{data: {path}, weight: 0.5}}]"]) for path in ("a", "/mnt/a"))
    assert mix.folders(here.data) == {"a": Path("data/a")}
    assert mix.folders(there.data) == {"a": Path("/mnt/a")}
    assert definition(here) == definition(there) != definition(from_overrides([]))
    assert here.run.name == there.run.name != from_overrides([]).run.name


def test_a_mix_of_one_source_alone_has_its_order(mixed: Config) -> None:
    only = replace(mixed, data=replace(mixed.data, mix=mixed.data.mix[:1]))
    tokens = opened(only)
    (source,) = tokens.sources.values()
    assert isinstance(source, PackedTokens)
    assert torch.equal(torch.stack(batches(tokens, 5)), torch.stack([b for b, _ in islice(source.batches(None), 5)]))
