"""AdamW with the recipe's settings (DESIGN §3), or Muon and AdamW, which skip steps with a non-finite gradient.

Clipping and skipping do not synchronize with the device: the fused kernel reads scale and flag from tensors. A skipped
step leaves weights, moments and Adam's step count unchanged, but advances the schedule. In a sharded model, each
rank updates its own shards.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsellm.config import OptimizerConfig, Schedule, decay_start
from sparsellm.distributed.groups import whole
from sparsellm.training import muon
from sparsellm.training.sharding import mesh_of, shard_of


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate at `step`, 1 to `steps`: linear warm-up, then cosine decay, or constant with a final linear
    decay (wsd)."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == Schedule.wsd:
        start = decay_start(config, steps)
        decayed = max(0, step - start) / (steps - start)
        return config.learning_rate * (1 - (1 - config.final_lr_fraction) * decayed)
    progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.final_lr_fraction + (1 - config.final_lr_fraction) * cosine)


class Optimizer:
    """Fused AdamW over a model's parameters, with weight decay on matrices only, including the embedding. With
    `config.muon`, Muon updates the matrices of the layers instead.

    Moments are float32 and exist before the first step, so checkpoints have the same tensors at every step.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.config = config
        self.parameters = dict(model.named_parameters())
        device = next(iter(self.parameters.values())).device
        self.moments = {
            p: torch.zeros_like(p)
            for name, p in self.parameters.items()
            if config.muon and p.dim() == 2 and name.startswith("layers.")
        }
        self.mesh = mesh_of(next(iter(self.moments))) if self.moments else None
        matrices = [p for p in self.parameters.values() if p.dim() >= 2 and p not in self.moments]
        vectors = [p for p in self.parameters.values() if p.dim() < 2]
        self.adamw = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for p in (*matrices, *vectors):
            self.adamw.state[p] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_in_row = torch.zeros((), dtype=torch.int64, device=device)

    def step(self, rate: float) -> Tensor:
        """Clip the gradients, update the weights if all gradients are finite, and clear the gradients. Returns the norm
        before clipping: 0-d float32 on the device, the same on all ranks if gradients were reduced."""
        norm = whole(nn.utils.get_total_norm(cast(list[Tensor], [p.grad for p in self.parameters.values()])))
        not_finite = ~norm.isfinite()
        # The fused kernel divides gradients by grad_scale and does nothing where found_inf is 1.
        adamw: Any = self.adamw  # AdamW's type declares neither attribute
        adamw.grad_scale = (norm / self.config.grad_clip).clamp(min=1)
        adamw.found_inf = not_finite.to(torch.float32)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        muon.step(self.moments, rate, self.config.weight_decay, adamw.grad_scale, not_finite, self.mesh)
        self.drop_gradients()
        self.skipped += not_finite
        self.skipped_in_row.add_(1).mul_(not_finite)
        return norm

    def drop_gradients(self) -> None:
        for p in self.parameters.values():
            p.grad = None

    def forget(self, parameter: Tensor, rows: Tensor) -> None:
        """Zero the moments of `rows` (bool [R], on the device) of a parameter [R, C]. Adam's step count is kept."""
        for key, tensor in self._state_of(parameter).items():
            if key != "step":
                tensor.masked_fill_(shard_of(rows[:, None], tensor), 0)

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        momentum = self.moments.get(cast(nn.Parameter, parameter))
        return self.adamw.state[parameter] if momentum is None else {"momentum": momentum}

    def state(self) -> dict[str, Tensor]:
        """All tensors that the next step depends on, by name. Writing into these tensors restores a state."""
        moments = {
            f"{name}.{key}": tensor for name, p in self.parameters.items() for key, tensor in self._state_of(p).items()
        }
        return moments | {"skipped": self.skipped, "skipped_in_row": self.skipped_in_row}
