"""The FP8 quality benchmark on a tiny model on the CPU, with stand-ins for torchao and the kernels."""

import float8_stand_in
import pytest
import torch

from scripts.benchmarks import bench_float8_quality
from sparsellm.config import Activation, ModelConfig
from sparsellm.model import Decoder
from sparsellm.ops import float8


@pytest.mark.parametrize("gated", [True, False])
def test_each_variant_is_compared_with_the_exact_model_on_the_same_text(gated, monkeypatch):
    def accelerate(decoder, _kernels, _engine, float8):
        for layer in decoder.layers if float8 is True else ():
            bench_float8_quality.float8.quantize_linears(layer.self_attn)

    float8_stand_in.install(monkeypatch)
    monkeypatch.setattr(bench_float8_quality, "accelerate", accelerate)
    torch.manual_seed(0)
    config = ModelConfig(256, 64, 128, 2, 4, gated=gated, context_length=33)
    weights = Decoder(config, Activation.relu).state_dict()
    blocks = torch.randint(256, (20, 33))
    found = bench_float8_quality.measure(
        (config, Activation.relu, weights), blocks, list(bench_float8_quality.VARIANTS), "cpu"
    )
    exact, dense, sparse, gate = found.values()
    assert exact["tokens"] == 20 * 32
    assert 0 < exact["nonzeros"] < 128
    assert exact["difference"] == exact["differing_of_all"] == gate["difference"] == 0  # a stand-in computes the gate
    for row in (dense, sparse, gate):
        assert 0 < row["differing_of_all"] < row["differing_of_firing"] < 0.2
        assert row["nonzeros"] == pytest.approx(exact["nonzeros"], rel=0.05)
        assert row["difference"] == pytest.approx(row["cross_entropy"] - exact["cross_entropy"], abs=1e-9)
    for row in (dense, sparse):
        assert 0 < abs(row["difference"]) < 0.05
        assert row["standard_error"] > 0


def test_a_model_without_text_of_its_own_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(float8, "obstacle", lambda: None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit):
        bench_float8_quality.main([str(tmp_path)])
    assert "belongs to no run: it needs --text FILE" in capsys.readouterr().err
