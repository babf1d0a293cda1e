"""Every broken rule is reported at once, with its remedy; values just within the rule are accepted."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from sparsellm.config import (
    SHORTEST_SEQUENCE,
    BenchmarkConfig,
    ConfigError,
    Dtype,
    EvaluateConfig,
    GenerateConfig,
    Kernels,
    benchmark_mistakes,
    evaluate_mistakes,
    from_overrides,
    generate_mistakes,
    memory_mistakes,
    mistakes,
    parameters,
    prepare_mistakes,
    ranks_that_share,
    state_bytes,
)
from sparsellm.ops import build, float8


def of_memory(config, ranks_here, world_size):
    return memory_mistakes(config.model, config.training, config.runtime, ranks_here, world_size)


ON_CPU = ["experiment=smoke", "runtime.device=cpu"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sparsity.l1_coefficient=-1"], "sparsity.l1_coefficient is -1.0: it should be at least 0"),
        (["sparsity.l1_coefficient=nan"], "sparsity.l1_coefficient is nan"),
        (["data.name=../corpus"], "data.name is '../corpus': it should be a folder name in data/; for a folder"),
        (["data.name=/corpus"], "data.name is '/corpus': it should be a folder"),
        (["data.name="], "data.name is '': it should be a folder"),
        (["training.batch_size=7"], "training.batch_size 7 is not divisible by the number of ranks, 2"),
        (["training.sequence_length=512"], "training.sequence_length 512 is longer than model.context_length 256"),
        (["model.intermediate_size=500"], "model.intermediate_size is 500: it should be a multiple of 8"),
        (
            ["model.intermediate_size=65544"],
            "intermediate_size is 65544: it should be at least 8 and at most 65536",
        ),
        (["model.num_heads=3"], "model.hidden_size 128 cannot be divided into 3 heads"),
        (["model.num_heads=0"], "model.num_heads is 0: it should be at least 1"),
        (["sparsity.activation=silu"], "sparsity.l1_coefficient is 0.001 with sparsity.activation=silu"),
        (["sparsity.l1_warmup_tokens=5"], "l1_warmup_tokens is 5 with sparsity.l1_schedule=constant"),
        (["sparsity.l1_schedule=linear"], "l1_warmup_tokens is 0 with sparsity.l1_schedule=linear"),
        (["distill.temperature=2"], "distill.temperature is 2.0 without a teacher: add distill.teacher=NAME"),
        (["distill.teacher=a", "distill.weight=0"], "distill.weight is 0.0: it should be a positive number"),
        (["sparsity.l1_schedule=cosine"], "l1_warmup_tokens is 0 with sparsity.l1_schedule=cosine"),
        (["sparsity.relu_tokens=-1"], "sparsity.relu_tokens is -1: it should be at least 0"),
        (["sparsity.relu_tokens=819201"], "sparsity.relu_tokens 819201 exceeds the run's 819200 tokens"),
        (["sparsity.relu_tokens=9", "model.gated=false"], "activation=relu and model.gated=false: set it to 0"),
        (["sparsity.relu_tokens=9", "sparsity=dense_silu"], "activation=silu and model.gated=true: set it to 0"),
        (["sparsity.l1_start_tokens=-1"], "sparsity.l1_start_tokens is -1: it should be at least 0"),
        (["sparsity.l1_start_tokens=819200"], "together exceed the run's 819200 tokens"),
        (["sparsity.reinit_dead_after_tokens=0"], "sparsity.reinit_dead_after_tokens is 0: .* at least 1, or null"),
        (["sparsity.reinit_every=0"], "sparsity.reinit_every is 0: it should be at least 1"),
        (
            ["sparsity.reinit_blend=0", "sparsity.reinit_dead_after_tokens=9"],
            "reinit_blend is 0.0: .* above 0",
        ),
        (["sparsity.reinit_blend=0.1"], "reinit_blend is 0.1 with .*, which disables it: set reinit_dead_after_tokens"),
        (["sparsity=dense_silu", "sparsity.reinit_dead_after_tokens=9"], "=silu, whose neurons are never dead"),
        (
            ["sparsity.reinit_dead_after_tokens=204801", "sparsity.reinit_every=300"],
            "never takes effect in 400 steps: the first reinitialization could be at step 300, .* in the last 101",
        ),
        (
            ["sparsity.reinit_dead_after_tokens=1", "sparsity.relu_tokens=819200"],
            "reinit_every 100 after relu_tokens 819200 never takes effect in .* could be at step 400",
        ),
        (["optimizer.decay_fraction=0.3"], "optimizer.decay_fraction is 0.3 with optimizer.schedule=cosine"),
        (["optimizer.schedule=wsd", "optimizer.decay_fraction=0"], "decay_fraction is 0.0: it should be above 0"),
        (["optimizer.schedule=wsd", "optimizer.decay_fraction=nan"], "decay_fraction is nan: it should be above 0"),
        (["optimizer.schedule=wsd", "optimizer.warmup_steps=321"], "warmup_steps 321 overlaps the decay"),
        (["runtime.profile_steps=[20]"], r"runtime.profile_steps is \[20\]: it should be the first and the last step"),
        (["runtime.profile_steps=[9,8]"], r"runtime.profile_steps is \[9, 8\]: it should be"),
        (["runtime.profile_steps=[0,8]"], r"runtime.profile_steps is \[0, 8\]: it should be"),
        (["runtime.profile_steps=[9,401]"], "of training.steps=400"),
        (["run.keep_every=-1"], "run.keep_every is -1: it should be at least 0"),
        (["optimizer.warmup_steps=401"], "optimizer.warmup_steps 401 exceeds training.steps 400"),
        (["optimizer.learning_rate=0"], "optimizer.learning_rate is 0.0: it should be a positive number"),
        (["optimizer.beta2=1"], "optimizer.beta2 is 1.0"),
        (["logging.every=11"], "logging.every is 11: it should be at least 1 and at most 10"),
        (["run.name=A/B"], "run.name is 'A/B': use only"),
        (["run.name=.."], r"run.name is '\.\.'"),
        ([f"run.name={'a' * 201}"], "run.name is 'a+': use only .*, at most 200"),
        (["data.source=hub"], "data.source=hub needs the data set's name"),
        (["data.source=files"], "data.source=files needs data.files"),
        (["data.streaming=true"], "this corpus cannot be streamed; leave it out, or use data=fineweb_edu_stream"),
        (
            ["data.files=x.txt"],
            "data.files is given with data.source=stdlib_docs, which reads no files: add data=files",
        ),
        (["data.max_tokens=0"], "data.max_tokens is 0"),
        (["runtime.ddp_compress=bf16"], "ddp_compress=bf16, but runtime.precision=float32 does not round to bfloat16"),
        (
            ["runtime.ddp_compress=bf16", "runtime.shard=full"],
            "ddp_compress=bf16, but runtime.shard=full always reduces",
        ),
        (
            ["runtime.ddp_compress=bf16", "runtime.precision=bfloat16", "runtime.device=cpu"],
            "ddp_compress=bf16, but torch compresses only communication between GPUs",
        ),
        (["runtime.micro_batch_size=0"], "runtime.micro_batch_size is 0: it should be auto, or a number of at least 1"),
        (["runtime.micro_batch_size=all"], "runtime.micro_batch_size is all: it should be auto, or a number"),
        (["runtime.recompute=some"], "runtime.recompute is some: it should be auto, true or false"),
        (["runtime.memory_limit_gib=0"], "runtime.memory_limit_gib is 0.0: it should be a positive number"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(overrides, message):
    found = mistakes(from_overrides(overrides), 2)
    assert any(re.search(message, problem) for problem in found), found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.steps", 0),
        ("training.batch_size", 0),
        ("training.sequence_length", SHORTEST_SEQUENCE - 1),
        ("data.max_tokens", 0),
        ("data.name", ".."),
        ("data.source", "hub"),
    ],
)
def test_prepare_data_refuses_the_keys_that_decide_its_tokens_and_no_others(key, value):
    config = from_overrides([f"{key}={value}", "model.num_heads=0", "training.seed=-1", "runtime.data_workers=-1"])
    found = prepare_mistakes(config)
    assert found, "nothing is refused"
    assert [message for message in found if not message.startswith(key)] == []


@pytest.mark.parametrize(
    ("overrides", "obstacle"),
    [
        (["runtime.device=cpu"], "runtime.device=cpu has no GPU"),
        (["runtime.precision=float32"], "runtime.precision=float32 is not bfloat16"),
        (["runtime=deterministic"], "runtime.deterministic=true excludes engines that are chosen by timing"),
        (
            ["sparsity=dense_silu", "sparsity.l1_coefficient=0"],
            "sparsity.activation=silu never gives exact zeros",
        ),
    ],
)
def test_kernels_that_could_never_run_are_refused_and_auto_goes_without(overrides, obstacle):
    def found(kernels):
        return mistakes(from_overrides(["experiment=0p5b", *overrides, f"runtime.kernels={kernels}"]), 1)

    assert found("cuda") == [f"runtime.kernels=cuda, but {obstacle}: change it, or use runtime.kernels=auto"]
    assert found("auto") == found("torch") == []


FLOAT8 = [
    "experiment=smoke", "runtime.precision=bfloat16", "runtime.device=auto", "runtime.float8=attention",
    "runtime.deterministic=false",
]  # fmt: skip
ALL = "runtime.float8=all"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["runtime.precision=float32"], "runtime.float8=attention with runtime.precision=float32: use .*=bfloat16"),
        (["model.num_heads=16"], None),
        (["model.head_dim=8", "model.num_key_value_heads=1"], "all key/value heads is 8 with .*: .* a multiple of 16"),
        ([ALL], None),
        ([ALL, "runtime.kernels=cuda", "sparsity.relu_tokens=9"], None),
        ([ALL, "model.intermediate_size=504"], None),
        ([ALL, "runtime.kernels=torch", "model.intermediate_size=504"], "size is 504 with .* multiple of 16"),
        ([ALL, "runtime.kernels=triton"], "layers, but runtime.kernels=triton has no FP8: change it, or use .*=torch"),
        ([ALL, "runtime.deterministic=true"], "deterministic=true excludes .*: change it, or use runtime.kernels=tor"),
        ([ALL, "runtime.precision=float32"], "runtime.float8=all with runtime.precision=float32: use .*=bfloat16"),
        ([ALL, "runtime.device=cpu"], "runtime.float8=all does not run here: runtime.device=cpu has no FP8"),
        ([ALL, "runtime.kernels=torch"], None),
        ([ALL, "sparsity=dense_silu"], None),
        (
            [ALL, "sparsity=dense_silu", "model.intermediate_size=504"],
            "intermediate_size is 504 with .* multiple of 16",
        ),
        ([ALL, "runtime.kernels=torch", "sparsity.relu_tokens=9"], "relu_tokens: use runtime.float8=attention, or"),
        (["runtime.float8=null", "runtime.float8_recipe=rowwise"], "float8_recipe is rowwise without FP8: add"),
        (["runtime.device=cpu"], "runtime.float8=attention does not run here: runtime.device=cpu has no FP8"),
    ],
)
def test_float8_is_refused_where_a_layer_cannot_have_it(overrides, message, monkeypatch):
    monkeypatch.setattr(float8, "obstacle", lambda: None)
    monkeypatch.setattr(build, "check", lambda: None)
    found = [each for each in mistakes(from_overrides([*FLOAT8, *overrides]), 1) if "float8" in each]
    assert len(found) == (message is not None)
    assert message is None or re.search(message, found[0]), found


def test_float8_is_refused_with_the_machines_own_reason(monkeypatch):
    def refusal():
        (found,) = (each for each in mistakes(from_overrides(FLOAT8), 1) if "float8" in each)
        return found

    monkeypatch.setattr(float8, "find_spec", lambda _name: None)
    assert "the package torchao is not installed: install it with `pip install torchao`" in refusal()
    monkeypatch.setattr(float8, "find_spec", lambda _name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no GPU" in refusal()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    assert "NVIDIA A100 has no FP8, which needs compute capability 8.9 or higher" in refusal()


@pytest.mark.parametrize("kernels", ["auto", "cuda"])
def test_float8_gates_are_refused_with_the_reason_of_the_kernels(kernels, monkeypatch):
    def unavailable():
        raise build.KernelsUnavailable("the kernels need a Hopper GPU")

    monkeypatch.setattr(float8, "obstacle", lambda: None)
    monkeypatch.setattr(build, "check", unavailable)
    found = mistakes(from_overrides([*FLOAT8, ALL, f"runtime.kernels={kernels}"]), 1)
    assert [each for each in found if "float8" in each] == [
        "runtime.float8=all of sparse layers does not run here (runtime.kernels=torch does not need it): the kernels"
        " need a Hopper GPU"
    ]


@pytest.mark.parametrize("kind", [EvaluateConfig, GenerateConfig, BenchmarkConfig])
def test_commands_refuse_float8_by_what_is_missing(kind, monkeypatch):
    refuse = {
        EvaluateConfig: evaluate_mistakes, GenerateConfig: generate_mistakes, BenchmarkConfig: benchmark_mistakes
    }[kind]  # fmt: skip

    def refusals(**settings):
        return [each for each in refuse(kind(**settings, float8=True)) if "float8" in each]

    monkeypatch.setattr(build, "check", lambda: None)
    monkeypatch.setattr(float8, "find_spec", lambda _name: None)
    package = (
        "float8=true does not run here: the package torchao is not installed: install it with `pip install torchao`"
    )
    assert refusals() == ([] if kind == GenerateConfig else [package])
    monkeypatch.setattr(float8, "find_spec", lambda _name: object())
    assert refusals() == []
    change = "change it, or use float8=false"
    assert refusals(kernels=Kernels.triton) == [f"float8=true, but kernels=triton has no FP8: {change}"]
    if kind != BenchmarkConfig:
        assert refusals(dtype=Dtype.float32) == [f"float8=true, but dtype=float32 is not bfloat16: {change}"]
    if kind == EvaluateConfig:
        assert refusals(compare_kernels=True) == [f"float8=true, but compare_kernels=true measures bfloat16: {change}"]

    def unavailable():
        raise build.KernelsUnavailable("the kernels need a Hopper GPU")

    monkeypatch.setattr(build, "check", unavailable)
    assert refusals() == [
        "float8=true does not run here (float8=false does not need it): the kernels need a Hopper GPU"
    ]


def test_kernels_are_refused_with_the_machines_own_reason(monkeypatch):
    def unavailable():
        raise build.KernelsUnavailable("no nvcc in PATH: install the CUDA toolkit")

    config = from_overrides(["experiment=0p5b", "runtime.kernels=cuda"])
    assert config.runtime.kernels == Kernels.cuda
    monkeypatch.setattr(build, "check", unavailable)
    assert mistakes(config, 1) == [
        "runtime.kernels=cuda does not run here (runtime.kernels=auto does not need it): no nvcc in PATH: install the"
        " CUDA toolkit"
    ]
    monkeypatch.setattr(build, "check", lambda: None)
    assert mistakes(config, 1) == []


def test_schedules_and_reinitialization_that_just_fit_are_accepted():
    for overrides in (
        ["sparsity.l1_start_tokens=819199"],
        ["sparsity.l1_schedule=linear", "sparsity.l1_start_tokens=800000", "sparsity.l1_warmup_tokens=19200"],
        ["optimizer.schedule=wsd", "optimizer.warmup_steps=320"],
        ["sparsity.reinit_dead_after_tokens=204800", "sparsity.reinit_every=300"],
        ["sparsity.reinit_dead_after_tokens=1", "sparsity.reinit_every=399"],
    ):
        assert mistakes(from_overrides(overrides), 1) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"training.steps={10**30}"], "training.steps is 1000000000000000000000000000000: it should be below 2.63"),
        (["training.steps=1e18"], "are 2048000000000000000000 tokens: they should be below 2.63"),
        (["runtime.data_workers=100000"], "runtime.data_workers is 100000: it should be at least 0 and at most 256"),
        ([f"sparsity.l1_start_tokens={2**63}"], "sparsity.l1_start_tokens is 9223372036854775808: .* below 2"),
    ],
)
def test_impossible_sizes_are_refused_by_arithmetic(overrides, message):
    found = mistakes(from_overrides(overrides), 1)
    assert any(re.search(message, problem) for problem in found), found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.num_layers=1000000"],
            "model has 262,400,524,416 parameters: .* take 3,910.1 GiB, but this machine has",
        ),
        (["model.vocab_size=1000000000"], "model has 128,001,049,728 parameters"),
        (
            ["training.batch_size=1e10"],
            "training.batch_size 10000000000 x sequence_length 256: the tokens of a step take",
        ),
    ],
)
def test_what_exceeds_the_memory_is_refused_before_it_is_built(overrides, message):
    (found,) = of_memory(from_overrides([*overrides, "runtime.device=cpu"]), 1, 1)
    assert re.search(message, found), found


def test_ranks_on_a_cpu_share_its_memory():
    config = from_overrides(["runtime.device=cpu", "model.vocab_size=100000"])
    assert of_memory(config, 1, 1) == []
    (found,) = of_memory(config, 10**6, 10**6)
    assert "on each of 1000000 ranks" in found


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (150, "runtime.memory_limit_gib is 150, but this GPU has 140.0 GiB: lower it, or set it to null"),
        (7, r"take 7\.6 GiB, but this run, by runtime\.memory_limit_gib, has 7\.0 GiB"),
        (8, None),
    ],
)
def test_a_part_of_a_gpu_is_all_that_a_run_has(limit, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=140 * 2**30))
    found = of_memory(from_overrides(["model=0p5b", f"runtime.memory_limit_gib={limit}"]), 1, 1)
    assert (found == []) if message is None else re.search(message, found[0]), found


def test_a_part_of_a_gpu_is_refused_where_there_is_none():
    (found,) = of_memory(from_overrides(["runtime.device=cpu", "runtime.memory_limit_gib=77"]), 1, 1)
    assert found == "runtime.memory_limit_gib is 77, but this run uses no GPU: set it to null"


@pytest.mark.parametrize(
    ("shard", "world_size", "ranks_here", "bytes_"),
    [
        ("none", 8, 8, 16), ("optimizer", 1, 1, 16), ("full", 1, 1, 16), ("optimizer", 8, 8, 4 + 2),
        ("full", 8, 8, 2), ("full", 16, 8, 2), ("full", 16, 1, 1), ("optimizer", 4, 2, 4 + 8),
    ],
)  # fmt: skip
def test_ranks_of_a_node_divide_the_state(shard, world_size, ranks_here, bytes_):
    config = from_overrides(["experiment=1p5b", f"runtime.shard={shard}"])
    sharing = ranks_that_share(world_size, ranks_here)
    assert state_bytes(config.model, config.runtime.shard, sharing) == bytes_ * parameters(config.model)


def test_what_is_divided_between_too_few_is_refused():
    overrides = ["runtime.device=cpu", "model.num_layers=1000000", "runtime.shard=full"]
    (found,) = of_memory(from_overrides(overrides), 4, 4)
    assert "on each of 4 ranks with runtime.shard=full between 4" in found
    assert "shard it over more GPUs (runtime.shard=full)" in found


def test_all_mistakes_are_listed_at_once():
    bad = ["training.batch_size=7", "model.intermediate_size=500", "run.name=X/Y", "logging.every=0"]
    assert len(mistakes(from_overrides(bad), 2)) == 4
    assert str(ConfigError(["a", "b"])).startswith("2 mistakes in the configuration:\n  - a\n  - b")


def test_layers_are_compiled_on_a_cpu_only_with_a_compiler(monkeypatch):
    asked = [*ON_CPU, "runtime.compile=true"]
    monkeypatch.setenv("CXX", "no-such-compiler")
    (found,) = mistakes(from_overrides(asked), 1)
    assert "no-such-compiler is missing: install it (g++), set CXX=PATH" in found
    assert mistakes(from_overrides([*ON_CPU, "runtime.compile=false"]), 1) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not [each for each in mistakes(from_overrides([*asked, "runtime.device=auto"]), 1) if "compiler" in each]
    monkeypatch.undo()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    assert "g++ is missing" in mistakes(from_overrides(asked), 1)[0]
    monkeypatch.setenv("CXX", sys.executable)
    assert mistakes(from_overrides(asked), 1) == []
