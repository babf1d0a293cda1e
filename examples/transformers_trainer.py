"""Trains a sparse Llama with the Trainer of transformers: python examples/transformers_trainer.py TEXT_FILE OUTPUT_DIR

On the 8 GPUs of a machine: torchrun --nproc_per_node 8 examples/transformers_trainer.py TEXT_FILE OUTPUT_DIR
The same command resumes a run that was stopped. (On a finished run, the Trainer of transformers 5.23 takes one step
more, with dense layers too.)
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import sparsellm

L1_COEFFICIENT = 1e-3  # larger: fewer active neurons, at a higher loss
STEPS = 400
SIZES = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}


class SparseTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if model.training:  # a mean over the tokens of this micro-batch, while gradients are summed over micro-batches
            l1 = sparsellm.l1_loss(model) / self.current_gradient_accumulation_steps
            loss = loss + L1_COEFFICIENT * l1
        return (loss, outputs) if return_outputs else loss


def main(text: Path, output: Path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_act="relu", **SIZES))
    sparsellm.accelerate(model, training=True)
    blocks = torch.tensor(list(text.read_bytes())).split(256)[:-1]  # one token per byte
    arguments = TrainingArguments(
        output, max_steps=STEPS, per_device_train_batch_size=4, gradient_accumulation_steps=2, learning_rate=2e-3,
        bf16=torch.cuda.is_available(), use_cpu=not torch.cuda.is_available(), ddp_find_unused_parameters=False,
        logging_steps=10, save_steps=STEPS // 2, report_to="none",
    )  # fmt: skip
    trainer = SparseTrainer(model, arguments, train_dataset=[{"input_ids": b, "labels": b} for b in blocks])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(output) if output.is_dir() else None)
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
