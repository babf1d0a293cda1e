"""Trains torchtitan's Llama 3 with sparse feedforward layers. With this file in the working directory:

torchrun --nproc_per_node 8 -m torchtitan.train --module torchtitan_llama3 --config sparse_1b --hf_assets_path FOLDER

Written for torchtitan 0.3.0. FOLDER has Llama 3's tokenizer. Not for tensor, context or pipeline parallelism.
"""

from dataclasses import dataclass, replace

from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.llama3 import Llama3StateDictAdapter, config_registry, model_registry
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

import sparsellm

L1_COEFFICIENT = 2e-5  # larger: fewer active neurons, at a higher loss
PROJECTIONS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class SparseFeedForward(sparsellm.SparseFeedForward, Module):
    """sparsellm's layer, with the sizes and the initialization that torchtitan's layer would have."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def __init__(self, config):
        super().__init__(config.w1.in_features, config.w1.out_features)
        for projection, name in PROJECTIONS.items():
            setattr(self, projection, getattr(config, name).build())


@override(target=FeedForward.Config)  # torchtitan replaces each layer's configuration
def sparse_feedforward(config):
    return derive(config, SparseFeedForward.Config, sharding_config=None)


class StateDictAdapter(Llama3StateDictAdapter):
    """Reads and writes Hugging Face checkpoints with the names of sparsellm's layer."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        for projection in PROJECTIONS:
            name = f"layers.{{}}.feed_forward.{projection}.weight"
            self.from_hf_map[f"model.layers.{{}}.mlp.{projection}.weight"] = name


class SparseTrainer(Trainer):
    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config):
        super().__init__(config)
        task_loss = self.loss_fn

        def loss(pred, labels, global_valid_tokens, **others):
            ce, metrics = task_loss(pred, labels, global_valid_tokens, **others)
            share = labels.numel() / global_valid_tokens  # gradients are summed over ranks and micro-batches
            return ce + L1_COEFFICIENT * share * sparsellm.l1_loss(self.model_parts[0]), metrics

        self.loss_fn = loss


def sparse_1b():
    config = derive(config_registry.llama3_8b(), SparseTrainer.Config)
    config.model_spec = replace(model_registry("1B"), state_dict_adapter=StateDictAdapter)
    config.override.imports = [f"{__name__}.sparse_feedforward"]
    config.training.disable_cuda_graphs = True  # a graph would keep the engines of its capture
    return config
