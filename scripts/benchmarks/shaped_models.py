"""Whole decoders with random weights whose neurons fire at chosen rates.

Rates: layer l of L uses the rates of recorded layer floor(R l / L), with R recorded layers. Without a recording, rates
are lognormal (patterns.py). With a mean, all rates are scaled by one factor.

Weights: a token's embedding is the sum of a constant direction, an individual vector of heavy-tailed length, and, for a
locality above 0, a vector shared by a cluster of the vocabulary (`shape_embedding`). Random text stays inside one
cluster for 48 tokens (`random_text`). Then, in one calibrating forward pass, each gate row becomes w_i - t_i e, where e
is the mean direction of the layer's input, and t_i the quantile at which neuron i fires at its rate (`shape_to_rates`).

Tokens share fewer neurons than in a trained model, so the union of 128 tokens is larger, and the tile engine slower. At
the recorded rates, the union was 1.20 times the recorded one on real text; on random text it was 1.20, 1.05 and 0.88
times the recorded one for a locality of 0.3, 0.5 and 0.7 (K 256, N 1,408, every second recorded layer).

Symbols: L layers, K model width, N neurons, M tokens, V vocabulary.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from scripts.benchmarks import patterns
from sparsellm.config import Config
from sparsellm.distributed.groups import Ranks
from sparsellm.model import Decoder

CALIBRATION = 16_384  # tokens in the calibrating forward pass, as many as in a recording
CLUSTERS = 64  # clusters in the vocabulary; few, so that each cluster occurs often during calibration
CLUSTER_RUN = 48  # number of consecutive tokens from one cluster in random text
DEFAULT_MEAN = 36.0  # nonzeros per token without a recording


def layer_rates(layers: int, neurons: int, activations: Path | None, mean: float | None) -> np.ndarray:
    """float64 [L, N]: how often each neuron should fire.

    `mean`: nonzeros per token, averaged over layers; None leaves the rates as recorded. If the model's N differs from
    the recorded one, quantiles of the recorded rates are used. Raises ValueError if the rates cannot be scaled to
    `mean`, or the folder `activations` has no recording.
    """
    if mean is not None and not mean > 0:
        raise ValueError(f"the mean is {mean:g} nonzeros per token: it should be above 0")
    if activations is None:
        mean = DEFAULT_MEAN if mean is None else mean
        rates = np.stack([patterns.firing_rates(mean, neurons, seed) for seed in range(layers)])
    else:
        rates = patterns.recorded_rates(activations)
        if neurons != rates.shape[1]:
            rates = np.quantile(rates, (np.arange(neurons) + 0.5) / neurons, axis=1).T
        rates = rates[np.arange(layers) * len(rates) // layers]
        if mean is None:
            return rates
        rates = patterns.scaled_rates(rates, mean)
    if not np.isclose(rates.sum(1).mean(), mean, rtol=1e-3):
        raise ValueError(
            f"the mean is {mean:g} nonzeros per token: for {neurons:,} neurons it should be lower, because some never"
            f" fire and the others for at most {patterns.RATE_CAP:.0%} of the tokens"
        )
    return rates


def random_text(sequences: int, length: int, vocabulary: int, device: str, locality: float, seed: int) -> Tensor:
    """Random tokens, int64 [sequences, length]. For locality above 0, each run of 48 tokens comes from one cluster."""
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.randint(vocabulary, (sequences, length), device=device, generator=generator)
    if not locality:
        return tokens
    runs = -(-length // CLUSTER_RUN)
    cluster = torch.randint(CLUSTERS, (sequences, runs), device=device, generator=generator)
    cluster = cluster.repeat_interleave(CLUSTER_RUN, dim=1)[:, :length]
    return (tokens // CLUSTERS * CLUSTERS + cluster).clamp_(max=vocabulary - 1)


class ClusteredTokens:
    """Replaces a run's data (sparsellm.data.Data) with `random_text`, different for every step and rank."""

    def __init__(self, config: Config, ranks: Ranks, locality: float) -> None:
        self.size = config.training.batch_size // ranks.world_size, config.training.sequence_length + 1
        self.vocabulary, self.locality, self.ranks = config.model.vocab_size, locality, ranks

    def batches(self, _state: None) -> Iterator[tuple[Tensor, dict]]:
        for step in itertools.count():
            seed = step * self.ranks.world_size + self.ranks.rank
            tokens = random_text(*self.size, self.vocabulary, "cpu", self.locality, seed)
            yield tokens.pin_memory() if self.ranks.device.type == "cuda" else tokens, {}


def shape_embedding(embedding: Tensor, locality: float) -> None:
    """Overwrite the embedding [V, K] in place, as described at the top of this file."""
    vocabulary, width = embedding.shape
    device = embedding.device
    own, centre = torch.randn_like(embedding), torch.randn(CLUSTERS, width, device=device).to(embedding)
    shared = centre[torch.arange(vocabulary, device=device) % CLUSTERS]
    length = torch.exp(patterns.TOKEN_SIGMA * torch.randn(vocabulary, 1, device=device))
    token = (1 - locality) ** 0.5 * own + locality**0.5 * shared
    constant = width**0.5 * nn.functional.normalize(torch.randn(width, device=device), dim=0)
    embedding.copy_(token * length + constant)


@torch.no_grad()
def shape_to_rates(decoder: Decoder, tokens: Tensor, rates: np.ndarray) -> None:
    """Shift each layer's gate weight, layer by layer in one forward pass over `tokens`, so that neurons fire at
    `rates`.

    `tokens`: int64 [B, T]; `rates`: float64 [L, N]. The shift is computed in float32, even under autocast.
    """

    def calibrate(weight: Tensor, wanted: Tensor):
        def before(_, args: tuple) -> None:
            with torch.autocast(weight.device.type, enabled=False):
                weight.copy_(shifted(args[0].flatten(0, 1).float(), weight.float(), wanted))

        return before

    def shifted(x: Tensor, w: Tensor, wanted: Tensor) -> Tensor:
        e = nn.functional.normalize(x.mean(0), dim=0)
        w = w - torch.outer(w @ e, e)
        along = (x @ e).clamp_(min=1e-3)
        # A neuron fires for a token if w x > t e x, that is if (w x) / (e x) > t. So t must lie between the ratio
        # of the last token that should fire the neuron and the ratio of the first token that should not.
        ratio = ((x @ w.T) / along[:, None]).T.sort(dim=1, descending=True).values
        count = (wanted * len(x)).round().long().clamp_(max=len(x) - 1)
        above = ratio.gather(1, (count - 1).clamp_(min=0)[:, None])[:, 0]
        below = ratio.gather(1, count[:, None])[:, 0]
        never = 2 * ratio[:, 0].abs() + 1
        t = torch.where(count > 0, (above + below) / 2, never)
        return w - torch.outer(t, e)

    wanted = torch.from_numpy(rates).float().to(tokens.device)
    handles = [
        layer.mlp.register_forward_pre_hook(calibrate(gate(layer.mlp).data, of_layer))
        for layer, of_layer in zip(decoder.layers, wanted, strict=True)
    ]
    decoder.hidden(tokens)
    for handle in handles:
        handle.remove()


@torch.no_grad()
def firing_statistics(decoder: Decoder, tokens: Tensor) -> tuple[list[float], list[float]]:
    """Returns two lists with one entry per layer: nonzeros per token, and the union over 128 consecutive tokens."""
    found = []

    def count(mlp: nn.Module, args: tuple) -> None:
        found.append(patterns.counts(args[0].flatten(0, 1), gate(mlp)))

    handles = [layer.mlp.register_forward_pre_hook(count) for layer in decoder.layers]
    decoder.hidden(tokens)
    for handle in handles:
        handle.remove()
    tiles = -(-tokens.numel() // patterns.TOKEN_TILE)
    return [nnz / tokens.numel() for nnz, _ in found], [union / tiles for _, union in found]


def gate(mlp: nn.Module) -> Tensor:
    """The weight [N, K] that decides which neurons fire: the gate's, or W_up in a non-gated block."""
    return (mlp.gate_proj if hasattr(mlp, "gate_proj") else mlp.up_proj).weight


@torch.no_grad()
def shaped_decoder(config: Config, tokens: Tensor, rates: np.ndarray, locality: float) -> Decoder:
    """A float32 Decoder with `config` whose neurons fire at `rates` on `tokens` int64 [B, T], on the tokens' device.

    The calibrating pass runs in the precision set by the caller's autocast.
    """
    torch.manual_seed(config.training.seed)
    with tokens.device:
        decoder = Decoder(config.model, config.sparsity.activation)
    shape_embedding(decoder.embed_tokens.weight, locality)
    # Layers should add little to the residual stream compared with the embedding, as they do early in training.
    std = config.model.init_std / (2 * len(decoder.layers)) ** 0.5
    for layer in decoder.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.weight.normal_(0, std)
    if config.model.tie_embeddings:  # the embedding's entries are of order 1; logits should be, too
        decoder.norm.weight.fill_(config.model.hidden_size**-0.5)
    shape_to_rates(decoder, tokens, rates)
    return decoder
