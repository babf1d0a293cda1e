"""Model FLOP utilisation (MFU): the FLOP that a dense model needs, as a fraction of what the GPUs could compute."""

import re

import torch

from sparsellm.config import ModelConfig, embedding_weights, parameters

# Peak FLOP/s of dense bfloat16 matmuls with float32 accumulation: half of a data sheet's figure "with sparsity". If
# a name contains another name, the longer one comes first. Sources, all by NVIDIA:
# data sheets: A100 (312 TFLOP/s), H100 (with sparsity: SXM 1,979, PCIe 1,513, NVL 1,671), H200 (with sparsity: SXM
#   1,979, NVL 1,671), GH200 (with sparsity: 1,979), L40S (362), L40 (181), L4 (121), HGX B200 (with sparsity: 36,000
#   for 8 GPUs), GB200 NVL72 (with sparsity: 360,000 for 72 GPUs);
# white papers: "Ampere GA102" (RTX 3090 and 3090 Ti), "Ada GPU Architecture" (RTX 4090, RTX 6000 Ada), "RTX Blackwell
#   GPU Architecture" (RTX 5090), "RTX Blackwell PRO GPU Architecture" (RTX PRO 6000).
PEAK_FLOPS = {
    "GB200": 2500e12, "B200": 2250e12, "GH200": 989e12, "H200 NVL": 835e12, "H200": 989e12, "H100 NVL": 835e12,
    "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L40": 181e12, "L4": 121e12,
    "RTX PRO 6000 Blackwell Max-Q": 438.9e12, "RTX PRO 6000 Blackwell": 503.8e12, "RTX 6000 Ada": 364.2e12,
    "RTX 5090": 209.5e12, "RTX 4090": 165.2e12, "RTX 3090 Ti": 80e12, "RTX 3090": 71e12,
}  # fmt: skip
SLOWER = r"\b(MIG|Laptop|D)\b"  # marks slower variants with an unknown peak, such as "RTX 4090 D"


def mfu(tokens_per_s: float, model: ModelConfig, sequence_length: int, peak: float) -> float:
    """Model FLOP utilisation (DESIGN §6), with sparse layers counted as dense. `peak`: FLOP/s of all devices."""
    multiplied = parameters(model) - embedding_weights(model) + model.vocab_size * model.hidden_size
    attention = model.num_layers * sequence_length * model.num_heads * model.head_width
    return tokens_per_s * (6 * multiplied + 6 * attention) / peak


def peak_flops(device: torch.device) -> float | None:
    """The peak FLOP/s of `device`; None if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    if re.search(SLOWER, name):
        return None
    return next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)
