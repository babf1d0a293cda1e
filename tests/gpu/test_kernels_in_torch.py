"""The operator on CUDA kernels within torch: determinism, graphs, streams, compiling, autograd, models."""

import copy
import threading
from contextlib import suppress

import kernel_cases as cases
import pytest
import torch
from kernel_cases import DEVICE, ENGINE, GATED, assert_as_accurate, assert_equal
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import ArceeConfig, ArceeForCausalLM, LlamaConfig, LlamaForCausalLM

import sparsellm
from sparsellm.config import Activation, ModelConfig
from sparsellm.inference.engine_choice import EngineChoice
from sparsellm.model import Decoder
from sparsellm.ops import ENGINES, Plan, borders, cuda, feedforward
from sparsellm.ops.feedforward import forward
from sparsellm.policy import Policy

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]


def assert_same(found, expected, what):
    for name, ours, theirs in zip(expected._fields, found, expected, strict=True):
        assert_equal(ours, theirs, f"{what}: {name}")


# The same bits.


@GATED
@ENGINE
@pytest.mark.parametrize("m", [1, 64, 129, 2048, 9001, 65_536])
def test_two_runs_give_the_same_bits(m, engine, gated):
    x, ws = cases.normal(m, 2048, 5632, gated, rate=0.05)
    choice = EngineChoice(engine, Policy())
    first = cases.run(engine, x, ws, choice=choice)
    for _ in range(5):
        cases.poison()
        assert_same(cases.run(engine, x, ws, choice=choice), first, "alone")
    side, busy = torch.cuda.Stream(), x.new_ones((4096, 4096))
    side.wait_stream(torch.cuda.current_stream())
    for rounds in range(1, 6):  # in each round, other work occupies SMs for longer
        with torch.cuda.stream(side):
            for _ in range(rounds):
                busy @ busy
        assert_same(cases.run(engine, x, ws, choice=choice), first, "during other work")
    torch.cuda.synchronize()


@GATED
@pytest.mark.parametrize("engine", ["row", "dense"])
@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 300, 1343])
def test_calls_that_are_not_checked_again_give_the_same_bits(m, engine, gated, monkeypatch):
    monkeypatch.setattr(borders, "MIN_FUSED_TOKENS", borders.MANY_TOKENS)  # as outside tests: no call here fuses
    x, ws = cases.normal(m, 2048, 5632, gated, rate=0.05)
    choice, weights = EngineChoice(engine, Policy()), cases.layer(ws)
    with torch.no_grad():
        expected = choice.output(x, *weights)
        if engine == "row":
            assert_equal(choice.run(x, *weights)[0], expected, "with statistics")
        for _ in range(3):
            cases.poison()
            assert_equal(choice.output_as_before(x[None], *weights)[0], expected, "not checked again")


@GATED
@ENGINE
@pytest.mark.parametrize("m", [1, 300, 3000])
def test_a_captured_graph_computes_what_its_buffers_hold(m, engine, gated):
    k, n = 264, 1000
    x, ws = cases.integers(m, k, n, gated)
    choice = EngineChoice(engine, Policy())
    cases.run(engine, x, ws, choice=choice)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cases.run(engine, x, ws, choice=choice)
    none, all_ = torch.zeros(m, n, dtype=torch.bool, device=DEVICE), torch.ones(m, n, dtype=torch.bool, device=DEVICE)
    for seed, fires in enumerate([none, all_, none, *[None] * 3]):
        new_x, new_ws = cases.integers(m, k, n, gated, seed + 1)
        if fires is not None:  # x is zero except for its column of ones, so the threshold alone decides
            new_x[:, 1:] = 0
            new_ws[0][:, 0] = 3.0 if fires.any() else -3.0
        x.copy_(new_x)
        for w, new in zip(ws[:-1], new_ws, strict=False):
            w.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(captured, cases.run(engine, x, ws, choice=choice), f"replay {seed}")
        assert_equal(captured.y, cases.stepwise(x, ws)[-1], f"replay {seed}: y")


@GATED
@ENGINE
def test_nothing_waits_for_the_device(engine, gated):
    layers = [cases.integers(m, 264, 1000, gated) for m in (1, 64, 300, 3000)]
    choices = [EngineChoice(engine, Policy()) for _ in layers]

    def calls():
        given = [cases.run(engine, x, ws, choice=choice) for (x, ws), choice in zip(layers, choices, strict=True)]
        return given + [cases.run(engine, x, ws) for x, ws in layers]

    calls()
    with cases.no_waiting():
        calls()


@ENGINE
@pytest.mark.parametrize("m", [16, 300])
def test_work_goes_to_the_current_stream(m, engine):
    """A side stream writes the input late, so work on another stream would read the old contents."""
    x, ws = cases.integers(m, 264, 1000)
    late, choice = torch.full_like(x, torch.nan), EngineChoice(engine, Policy())
    expected = cases.run(engine, x, ws, choice=choice)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(x)
        found = cases.run(engine, late, ws, choice=choice)
    side.synchronize()
    assert_same(found, expected, "on a side stream")


@pytest.mark.parametrize("engine", ["row", "tile"])
def test_a_copy_of_w_down_that_one_stream_makes_late_is_whole_on_another(engine):
    x, ws = cases.integers(300, 264, 1000)
    expected, choice = cases.run(engine, x, ws), EngineChoice(engine, Policy())
    torch.cuda.synchronize()
    for _ in range(2):  # a new copy, and one that is renewed in the same memory
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            cases.run(engine, x, ws, choice=choice)
        assert_same(cases.run(engine, x, ws, choice=choice), expected, "on another stream")
        ws[-1].copy_(-ws[-1])
        expected = cases.run(engine, x, ws)
        torch.cuda.synchronize()


# Compilers, autocast, autograd.


def test_a_new_plan_does_not_recompile():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    function = torch.compile(feedforward, fullgraph=True, backend=counter)
    x, ws = cases.integers(300, 264, 1000)
    for engine in (*ENGINES, *ENGINES):
        for room in (40, 320):
            found = function(x, *ws, Plan.of(engine, room).tensor())
            assert_same(found, cases.run(engine, x, ws), f"compiled, {engine}")
    assert counter.frame_count == 1


@GATED
@ENGINE
def test_autocast_casts(engine, gated):
    x, ws = cases.integers(130, 264, 1000, gated)
    expected = cases.run(engine, x, ws)
    with torch.autocast("cuda", torch.bfloat16):
        wide = [w.float() for w in ws]
        found = cases.run(engine, x.float(), wide)
    assert found.y.dtype == torch.bfloat16
    assert_same(found, expected, "under autocast")


@GATED
@ENGINE
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("m", [16, 130])
def test_opcheck(m, stored, engine, gated):
    x, ws = cases.integers(m, 64, 264, gated)
    saving = engine != "row"  # row has no backward
    x, *ws = (t.requires_grad_(saving) for t in (x, *(w.to(stored) for w in ws)))
    inputs = (x, *cases.layer(ws), Plan.of(engine).tensor(), saving)
    # The unused end of the tile engine's lists is undefined, so the saved buffers of two calls cannot be compared.
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tests += ["test_aot_dispatch_dynamic"] if engine != "tile" else []
    torch.library.opcheck(torch.ops.sparsellm.feedforward, inputs, test_utils=tests)


@GATED
@pytest.mark.parametrize("engine", ["dense", "tile"])
@pytest.mark.parametrize(("m", "k", "n"), [(16, 264, 1000), (300, 768, 1000), (1024, 2048, 5632)])
def test_gradients_are_as_accurate_as_dense_pytorchs(m, k, n, engine, gated):
    x, ws = cases.normal(m, k, n, gated)
    dy = torch.randn(m, k, device=DEVICE, generator=cases.random(9)).bfloat16()

    def dense(x, *ws):
        g = torch.relu(x @ ws[0].T)
        h = g * (x @ ws[1].T) if gated else g
        return h @ ws[-1].T, h.abs().sum(dtype=torch.promote_types(h.dtype, torch.float32))

    def gradients(function, dtype):
        inputs = [t.detach().to(dtype).requires_grad_() for t in (x, *ws)]
        y, l1 = function(*inputs)
        return [y.detach(), *torch.autograd.grad([y, l1], inputs, [dy.to(dtype), torch.full_like(l1, 0.1)])]

    exact, theirs = gradients(dense, torch.float64), gradients(dense, torch.bfloat16)
    ours = gradients(lambda x, *ws: cases.run(engine, x, ws)[:2], torch.bfloat16)
    names = ["y", "dx", "dw_gate", "dw_up", "dw_down"] if gated else ["y", "dx", "dw_up", "dw_down"]
    for name, *tensors in zip(names, ours, theirs, exact, strict=True):
        assert_as_accurate(*tensors, name)


@GATED
@ENGINE
def test_a_changed_weight_is_heeded(engine, gated):
    """An EngineChoice keeps a copy of w_down, which it must renew when the weight has changed."""
    x, ws = cases.integers(130, 264, 1000, gated)
    choice = EngineChoice(engine, Policy())
    assert_same(cases.run(engine, x, ws, choice), cases.run(engine, x, ws), "fresh")
    ws[-1].mul_(2)
    assert_equal(cases.run(engine, x, ws, choice).y, cases.stepwise(x, ws)[-1], "changed in place: y")
    ws[-1] = ws[-1] * 2
    assert_equal(cases.run(engine, x, ws, choice).y, cases.stepwise(x, ws)[-1], "another tensor: y")


# Models.

SIZE = {"vocab_size": 96, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
SETTINGS = {"num_attention_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.1, "hidden_act": "relu"}


def hugging_face(name):
    torch.manual_seed(0)
    config, model = (LlamaConfig, LlamaForCausalLM) if name == "llama" else (ArceeConfig, ArceeForCausalLM)
    return model(config(**SIZE, **SETTINGS)).to(DEVICE, torch.bfloat16).eval()


def token_ids(sequences, positions):
    return torch.randint(96, (sequences, positions), device=DEVICE, generator=cases.random(positions))


@pytest.mark.parametrize("engine", [None, *ENGINES])
@pytest.mark.parametrize("name", ["llama", "arcee"])
@torch.no_grad()
def test_an_accelerated_model_is_as_accurate_as_its_own(name, engine):
    model = hugging_face(name)
    precise = copy.deepcopy(model).float()
    for ids in (token_ids(2, 100), token_ids(1, 5)):  # more and fewer tokens than a token tile
        theirs, exact = model(ids).logits, precise(ids).logits.double()
        sparsellm.accelerate(model, "cuda", engine)
        for call in range(3):
            assert_as_accurate(model(ids).logits, theirs, exact, f"{ids.numel()} tokens, call {call}")
            torch.cuda.synchronize()  # so that counts have arrived, and the next call may choose another engine
        sparsellm.restore(model)
        assert_equal(model(ids).logits, theirs, "restored")


@pytest.mark.parametrize("engine", [None, *ENGINES])
@pytest.mark.parametrize("name", ["llama", "arcee"])
def test_an_accelerated_model_generates(name, engine):
    model = sparsellm.accelerate(hugging_face(name), "cuda", engine)
    ids = token_ids(2, 70)
    once, again = (model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False) for _ in range(2))
    assert once.shape == (2, 78)
    assert torch.equal(once[:, :70], ids)
    if engine is not None:  # the automatic choice may differ from run to run
        assert torch.equal(once, again)


@GATED
@pytest.mark.parametrize("engine", [None, *ENGINES])
@torch.no_grad()
def test_our_decoder_under_autocast(engine, gated):
    """The decoder as validation runs it: float32 weights, bfloat16 products."""
    torch.manual_seed(0)
    config = ModelConfig(96, 256, 512, 2, 4, context_length=256, init_std=0.1, gated=gated)
    model = Decoder(config, Activation.relu).to(DEVICE).eval()
    ids = token_ids(2, 100)
    exact = model.logits(ids).double()

    def under_autocast():
        with torch.autocast("cuda", torch.bfloat16):
            return model.logits(ids), model(ids, ids)

    theirs, plain = under_autocast()
    sparsellm.accelerate(model, "cuda", engine)
    for _ in range(2):
        logits, out = under_autocast()
        assert_as_accurate(logits, theirs, exact, "logits")
        # Both have the same input to the first layer, so its counts differ only where a z near zero rounds to different
        # sides.
        assert abs(out.nnz[0] - plain.nnz[0]) <= 1 + plain.nnz[0] * 2**-8
        assert out.fired.shape == plain.fired.shape
        assert out.ce.isfinite()
        torch.cuda.synchronize()


@ENGINE
def test_where_memory_is_short_an_engine_says_so_as_torch_does(engine):
    torch.cuda.empty_cache()  # frees large segments of earlier tests, one of which would be kept for x alone
    x, ws = cases.normal(4096, 264, 8000, True, rate=0.05)
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (16 << 20)) / total)
    taken = []
    try:
        with suppress(torch.OutOfMemoryError):  # what earlier tests, or their CUDA graphs, left free inside segments
            while True:
                taken.append(torch.empty(4 << 20, dtype=torch.uint8, device="cuda"))
        with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
            feedforward(x, *ws, Plan.of(engine))
    finally:
        taken.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
    cases.run(engine, x, ws)


@GATED
@pytest.mark.parametrize("m", [1, 64, 65, 300, 1343, 1344])
def test_without_statistics_the_dense_engine_gives_the_same_y(m, gated):
    x, ws = cases.normal(m, 264, 1000, gated, rate=0.05)
    inputs = x, *cases.layer(ws), Plan(), None, False
    with torch.no_grad():
        y, *_ = forward(*inputs)
        without, l1, fired, counts, _ = forward(*inputs, counting=False)
    assert_equal(without, y, f"M {m}")
    assert [t.numel() for t in (l1, fired, counts)] == ([1, 1000, cuda.COUNTS] if borders.fuses(m) else [0, 0, 0])


@GATED
@pytest.mark.parametrize(("engine", "m"), [("row", 300), ("tile", 300), ("dense", 300), ("dense", 2048)])
def test_a_threads_first_call_of_cuda_may_be_the_operators(engine, m, gated):
    """A new thread has no CUDA context until the runtime gives it one, and the driver, not the runtime, makes tensor
    maps. The same holds for autograd's own thread, whose first call may be the backward pass."""
    x, ws = cases.integers(m, 264, 1000, gated)
    x.requires_grad_(engine != "row")
    plan, found = Plan.of(engine), []

    def work():
        try:
            out = feedforward(x, *([] if gated else [None]), *ws, plan)
            if x.requires_grad:
                torch.autograd.grad(out.y, x, out.y.detach())
            found.append(out)
        except BaseException as error:
            found.append(error)

    with torch.set_grad_enabled(engine != "row"):
        expected = feedforward(x, *([] if gated else [None]), *ws, plan)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    assert_same(found[0], expected, "in the thread")


@GATED
def test_threads_with_layers_of_other_sizes_do_not_disturb_each_other(gated):
    """The shared memory limit of a kernel is an attribute that all threads share, so a thread with a narrow layer must
    not lower it for a thread with a wide layer."""
    layers = [cases.integers(300, 264, n, gated) for n in (1000, 16_384)]
    expected = [cases.run("tile", x, ws) for x, ws in layers]
    problems = []

    def work(i):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(200):
                    assert_same(cases.run("tile", *layers[i]), expected[i], f"layer {i}")
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def test_a_compiled_model_replays_cuda_graphs_of_the_engines_it_was_captured_with():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = sparsellm.accelerate(hugging_face("llama"), "cuda")
    for block in model.model.layers:
        block.mlp.choice.calls[0] = 1  # otherwise the first call would be counted, and another engine chosen
    ids = token_ids(4, 1)
    with torch.no_grad():
        run = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        outputs = [run(ids, use_cache=False).logits.clone() for _ in range(4)]
        expected = model(ids, use_cache=False).logits
    counters = torch._dynamo.utils.counters
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert counters["stats"]["unique_graphs"] == 1
    assert [block.mlp.choice.plans[0].engine.name for block in model.model.layers] == ["row", "row"]
    calls = [block.mlp.choice.calls[0] for block in model.model.layers]
    for output in outputs:
        assert_equal(output, outputs[0], "a replay")
    # inductor rounds at other points than eager PyTorch
    assert (outputs[0] - expected).norm() <= 2**-6 * expected.norm()
    with torch.no_grad():
        run(ids, use_cache=False)
    assert [block.mlp.choice.calls[0] for block in model.model.layers] == calls  # a replay runs no Python
