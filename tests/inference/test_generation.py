"""Text from the decoder: the tokens that transformers would choose, regardless of the rest of the batch."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from inference.near_ties import assert_texts_part_at_near_ties
from inference.small_models import make

from sparsellm.config import Activation
from sparsellm.hf import conversion
from sparsellm.inference import generation, layer_forward
from sparsellm.inference.generation import Generator, Sampling
from sparsellm.ops import backend
from sparsellm.ops.compiler import KernelsUnavailable
from sparsellm.ops.float8_weights import round_weight

PROMPTS = [[5, 17, 3, 80, 11], [3], [44, 2, 9]]


def all_of(generator, prompts, new, *settings):
    """The new tokens of each sequence, without None."""
    steps = list(generator.stream(prompts, new, *settings))
    return [[token for token in sequence if token is not None] for sequence in zip(*steps, strict=True)]


@pytest.mark.parametrize("kernels", [None, "torch"])
@pytest.mark.parametrize(
    ("name", "activation"),
    [("decoder", Activation.relu), ("nongated_decoder", Activation.relu), ("decoder", Activation.silu)],
)
@pytest.mark.slow
def test_greedy_tokens_are_those_of_transformers(name, activation, kernels):
    decoder = make(name, activation=activation)
    theirs = conversion.view({n: p.detach() for n, p in decoder.named_parameters()}, decoder.config, activation, 0)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        tokens = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, min_new_tokens=40, do_sample=False
        )
        expected.append(tokens[0, len(prompt) :].tolist())
    generator = Generator(decoder, kernels=kernels)
    # min_new_tokens keeps transformers from choosing token 0, which ends a sequence there
    assert all(0 not in tokens for tokens in expected)
    assert all_of(generator, PROMPTS, 40) == expected
    assert all_of(generator, PROMPTS[1:2], 40) == expected[1:2]
    assert all_of(generator, PROMPTS, 40) == expected  # in memory used by earlier calls


@pytest.mark.parametrize(
    ("name", "activation"),
    [("decoder", Activation.relu), ("nongated_decoder", Activation.relu), ("decoder", Activation.silu)],
)
def test_float8_computes_with_the_rounded_weights_and_keeps_no_others(name, activation):
    """On a CPU, in PyTorch: the texts are those of a decoder with the rounded weights."""
    decoder, rounded = (make(name, activation=activation) for _ in range(2))
    for parameter in rounded.layers.parameters():
        if parameter.dim() == 2:
            parameter.data = round_weight(parameter).to(torch.float32)
    ours, theirs = (Generator(each, kernels=None, float8=each is decoder) for each in (decoder, rounded))
    theirs.head = round_weight(theirs.head).to(torch.float32)  # the embedding, which stays as it is, is tied to it
    assert all_of(ours, PROMPTS, 20) == all_of(theirs, PROMPTS, 20)
    assert sum(p.numel() for p in decoder.parameters() if p.dim() == 2) == decoder.embed_tokens.weight.numel()
    matrices = [matrix for weights in ours.weights for matrix in weights if matrix is not None]
    assert all(matrix.values.dtype == torch.float8_e4m3fn for matrix in [*matrices, ours.head])


def test_float8_is_refused_where_nothing_multiplies_it_and_dense_layers_are_said_to_be_slower(capsys):
    with pytest.raises(KernelsUnavailable):  # never silently dense
        Generator(make("decoder"), float8=True)
    for kernels in ("torch", "triton"):
        with pytest.raises(ValueError, match=f"float8 is True with kernels='{kernels}'"):
            Generator(make("decoder"), kernels=kernels, float8=True)
    generator = Generator(make("decoder"), kernels=None, float8=True)
    assert "steps are slower, because feedforward layers are dense" in capsys.readouterr().err
    with pytest.raises(ValueError, match="65 prompts were passed: pass at most 64 per call in FP8"):
        generator.stream([[1]] * 65, 1)


@pytest.mark.slow
def test_in_bfloat16_texts_part_from_transformers_at_near_ties_only():
    """The residual stream is float32 here and bfloat16 there, so logits differ."""
    decoder, random = make("decoder"), torch.Generator().manual_seed(0)
    weights = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    theirs = conversion.view(weights, decoder.config, Activation.relu, 0).bfloat16()
    prompts = [torch.randint(96, (length,), generator=random).tolist() for length in range(1, 9)]

    def greedy(prompt):
        ids = torch.tensor([prompt])
        settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        return theirs.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()

    expected = [greedy(prompt) for prompt in prompts]
    found = all_of(Generator(decoder, dtype=torch.bfloat16), prompts, 30)
    assert found != expected
    assert_texts_part_at_near_ties(theirs, prompts, expected, found)
    with torch.no_grad():
        theirs.model.layers[1].mlp.down_proj.weight.mul_(1.3)
    with pytest.raises(AssertionError, match=r"no near-tie|come before the texts part"):
        assert_texts_part_at_near_ties(theirs, prompts, [greedy(prompt) for prompt in prompts], found)


def test_a_sequence_ends_with_a_stop_token_and_the_others_go_on():
    free = all_of(Generator(make("decoder")), PROMPTS, 30)
    stop = free[0][7]
    ends = [tokens.index(stop) + 1 if stop in tokens else 30 for tokens in free]
    steps = list(Generator(make("decoder"), stop=[stop]).stream(PROMPTS, 30))
    assert len(steps) == max(ends)
    for sequence, tokens, end in zip(zip(*steps, strict=True), free, ends, strict=True):
        assert list(sequence) == tokens[:end] + [None] * (len(steps) - end)
    assert min(ends) < max(ends)


def test_draws_follow_the_chances_and_the_seed():
    logits = torch.tensor([[0.0, 2.0, -1.0, 1.0]]).log_softmax(-1)
    generator = torch.Generator().manual_seed(0)

    def counts(sampling, draws=40_000):
        tokens = sampling.draw(logits.expand(draws, -1), generator)
        return torch.bincount(tokens, minlength=4) / draws

    chances = logits.exp()[0]
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits / temperature).softmax(-1)[0]
        assert (counts(Sampling(temperature)) - expected).abs().max() < 0.01  # four standard deviations
    # 0.64, 0.24, 0.09, 0.03: the smallest sets that reach 0.5, 0.7 and 0.9
    for top_p, kept in ((0.5, 1), (0.7, 2), (0.9, 3)):
        expected = torch.where(chances >= chances.sort(descending=True)[0][kept - 1], chances, 0)
        expected /= expected.sum()
        assert (counts(Sampling(1.0, top_p)) - expected).abs().max() < 0.01
    decoder = Generator(make("decoder"))
    first, again, other = (all_of(decoder, PROMPTS, 20, Sampling(1.0), seed) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("prompts", "new", "message"),
    [
        ([], 5, "there should be at least one prompt"),
        ([[1], []], 5, r"\[1, 0\] tokens: there should be at least one prompt, with at least one token each"),
        ([[1] * 250], 7, "a prompt of 250 tokens and 7 new ones exceed the model's context of 256"),
        ([[1]], 0, "new_tokens is 0"),
        ([[1, 96]], 5, "token 96 is not in the vocabulary of 96 tokens"),
    ],
)
def test_what_cannot_be_generated_is_refused(prompts, new, message):
    with pytest.raises(ValueError, match=message):
        next(Generator(make("decoder")).stream(prompts, new))


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(-0.7), "temperature is -0.7: it should be 0 or a positive number"),
        (Sampling(float("nan")), "temperature is nan"),
        (Sampling(0.7, 0.0), r"top_p is 0\.0: it should be above 0 and at most 1"),
        (Sampling(0.7, 90), "top_p is 90"),
    ],
)
def test_draws_that_have_no_chances_are_refused(sampling, message):
    with pytest.raises(ValueError, match=message):
        Generator(make("decoder")).stream(PROMPTS, 5, sampling)


def test_one_text_is_not_taken_for_prompts_of_one_character():
    with pytest.raises(ValueError, match="prompts is a string, 'The water': it should be a list of strings"):
        Generator(make("decoder")).text("The water", 5)


def test_a_folder_without_a_model_as_a_runs_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(ValueError, match=r"contains no config\.json: pass a Hugging Face folder, such as hf/ in a"):
        Generator.load(tmp_path)


def test_streams_that_are_under_way_at_once_do_not_disturb_each_other():
    generator = Generator(make("decoder"))
    lists = [PROMPTS, [[7], [8, 9, 10], [11]]]  # of one size, and about one length
    alone = [all_of(Generator(make("decoder")), prompts, 20) for prompts in lists]
    steps = list(zip(*(generator.stream(prompts, 20) for prompts in lists), strict=True))  # alternating
    assert [[list(tokens) for tokens in zip(*of_one, strict=True)] for of_one in zip(*steps, strict=True)] == alone
    dropped = generator.stream(PROMPTS, 20)
    next(dropped)
    assert not generator._idle
    del dropped  # releases its memory
    assert len(generator._idle) == 1
    assert all_of(generator, lists[1], 20) == alone[1]


def test_several_threads_generate_at_once():
    generator = Generator(make("decoder"))
    lists = [[[seed, 2 * seed, 3], [90 - seed], [44, seed]] for seed in range(1, 5)]
    alone = [all_of(generator, prompts, 20) for prompts in lists]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(3):
            assert list(threads.map(lambda prompts: all_of(generator, prompts, 20), lists)) == alone
    assert len(generator._idle) == 1


def test_a_step_that_may_load_kernels_takes_turns_with_captures(monkeypatch):
    generator, batch, held = Generator(make("decoder"), kernels=None), SimpleNamespace(steps=0), []
    monkeypatch.setattr(generator, "device", torch.device("cuda"))
    monkeypatch.setattr(generator, "_decode", lambda *_: held.append(generation.ALONE.locked()))
    for _ in range(generation.UNCAPTURED_STEPS):
        generator._step(batch, generation.GREEDY)
    assert held == [True] * generation.UNCAPTURED_STEPS
    assert not generation.ALONE.locked()


def test_prompts_take_turns_with_captures(monkeypatch):
    generator, held = Generator(make("decoder"), kernels=None), []
    monkeypatch.setattr(generator, "_alone", lambda: generation.ALONE)  # as on a GPU
    layer = layer_forward.of_prompts
    monkeypatch.setattr(layer_forward, "of_prompts", lambda *a: held.append(generation.ALONE.locked()) or layer(*a))
    all_of(generator, PROMPTS, 1)
    assert held == [True] * len(generator.layers)
    assert not generation.ALONE.locked()


def test_prompts_leave_pytorchs_choice_of_attention_as_it_was():
    attention = torch.backends.cuda

    def others():
        return attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled()

    def fail():
        with layer_forward.attention_of_any_shape(torch.device("cuda")):
            assert not attention.cudnn_sdp_enabled()
            assert others() == before
            raise ZeroDivisionError

    before = others()
    for chosen in (True, False):
        attention.enable_cudnn_sdp(chosen)
        try:
            with pytest.raises(ZeroDivisionError):
                fail()
            assert attention.cudnn_sdp_enabled() == chosen
            with layer_forward.attention_of_any_shape(torch.device("cpu")):
                assert attention.cudnn_sdp_enabled() == chosen
        finally:
            attention.enable_cudnn_sdp(True)


def test_triton_launches_on_the_device_of_the_model(monkeypatch):
    """It launches on the current device, which may be another GPU."""
    generator, current, seen = Generator(make("decoder"), kernels=None), [], []

    @contextmanager
    def device_of(tensor):
        current.append(tensor.device)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in ("of_prompts", "of_step"):
        layer = getattr(layer_forward, name)
        monkeypatch.setattr(layer_forward, name, lambda *a, layer=layer: seen.append(list(current)) or layer(*a))
    all_of(generator, PROMPTS, 3)
    assert seen == [[generator.device]] * 3 * len(generator.layers)
    assert not current


def test_a_gpu_without_triton_is_refused_before_the_model_is_changed(monkeypatch):
    def missing(kernels):
        raise KernelsUnavailable(f"{kernels} is missing")

    monkeypatch.setattr(layer_forward, "by_kernels", lambda _: True)  # as on a GPU
    monkeypatch.setattr(backend, "check", missing)
    decoder = make("decoder")
    with pytest.raises(
        KernelsUnavailable, match=r"needs Triton kernels, which do not run here: triton is missing; use device=cpu"
    ):
        Generator(decoder, kernels=None)
    assert decoder.layers[0].mlp.gate_proj.weight.requires_grad


def test_the_whole_context_can_be_filled():
    generator = Generator(make("decoder"))
    assert len(all_of(generator, [[1] * 250], 6)[0]) == 6


def test_the_callers_random_numbers_are_left_alone():
    generator = Generator(make("decoder"))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    all_of(generator, PROMPTS, 5, Sampling(1.0))
    assert torch.equal(torch.rand(2), expected)
