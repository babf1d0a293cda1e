"""Stands in for torchao, which need not be installed: the functions that sparsellm calls, on any device.

`install(monkeypatch)` makes `import torchao` find them. Values are rounded to e4m3 as torchao's are, and multiplied in
float32; a weight's gradient is that of the rounded values.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

LARGEST = torch.finfo(torch.float8_e4m3fn).max


def rounded(x, rows=True):
    """x after rounding to e4m3, with a scale per row or for the whole tensor. The rounding has the gradient 1."""
    largest = x.detach().abs().amax(-1, keepdim=True) if rows else x.detach().abs().amax()
    scale = largest.float().clamp(min=1e-12) / LARGEST
    value = (x.detach().float() / scale).to(torch.float8_e4m3fn).float() * scale
    return x + (value.to(x.dtype) - x).detach()


class Float8Linear(nn.Linear):
    def forward(self, x):
        rows = self.recipe == "rowwise"
        return nn.functional.linear(rounded(x, rows), rounded(self.weight, rows), self.bias)


def convert_to_float8_training(module, config):
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                with torch.device("meta"):
                    made = Float8Linear(child.in_features, child.out_features, bias=False)
                made.weight, made.bias, made.recipe = child.weight, child.bias, config
                setattr(parent, name, made)
    return module


def quantize_(module, config):
    assert config == "PerRow"
    for child in module.modules():
        if isinstance(child, nn.Linear):
            child.weight = nn.Parameter(rounded(child.weight.detach()), requires_grad=False)


def install(monkeypatch):
    contents = {
        "torchao": {},
        "torchao.float8": {
            "Float8LinearConfig": SimpleNamespace(from_recipe_name=str),
            "convert_to_float8_training": convert_to_float8_training,
        },
        "torchao.quantization": {
            "Float8DynamicActivationFloat8WeightConfig": lambda granularity, **_: granularity,
            "PerRow": lambda: "PerRow",
            "quantize_": quantize_,
        },
    }
    for name, names in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
