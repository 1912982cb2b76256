"""The models of models.py in flax, with the same names of parts, and weights there and back."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from .. import models

Weights = dict[str, Any]  # nested, as flax has them
EPS = 1e-5  # torch's, of both norms


class MLP(nn.Module):
    sizes: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for index, size in enumerate(self.sizes):
            x = nn.Dense(size, name=f"lin{index}")(jnp.tanh(x) if index else x)
        return x


class ConvNet(nn.Module):
    """Images come as [B, S, S, 3]."""

    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for index, width in enumerate(self.widths):
            stride = 2 if index else 1
            conv = nn.Conv(width, (3, 3), strides=stride, padding=1, use_bias=False, name=f"convs_{index}")
            norm = nn.BatchNorm(use_running_average=False, momentum=0.9, epsilon=EPS, name=f"norms_{index}")
            x = nn.relu(norm(conv(x)))
        return nn.Dense(10, name="head")(x.mean(axis=(1, 2)))


class Block(nn.Module):
    heads: int
    causal: bool
    dtype: Any
    kernel: str | None  # which attention jax.nn takes

    @nn.compact
    def __call__(self, x: Any) -> Any:
        width, dtype = x.shape[-1], self.dtype
        norm = {"epsilon": EPS, "dtype": jnp.float32}
        qkv = nn.Dense(3 * width, dtype=dtype, name="qkv")(nn.LayerNorm(**norm, name="norm1")(x))
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * self.heads, -1), 3, axis=2)
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=self.causal, implementation=self.kernel)
        x = x + nn.Dense(width, dtype=dtype, name="out")(seen.reshape(x.shape))
        hidden = nn.Dense(4 * width, dtype=dtype, name="up")(nn.LayerNorm(**norm, name="norm2")(x))
        return x + nn.Dense(width, dtype=dtype, name="down")(nn.gelu(hidden, approximate=True))


class GPT(nn.Module):
    size: models.GPTSize
    dtype: Any
    kernel: str | None

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        size = self.size
        token = nn.Embed(size.vocabulary, size.width, name="token")
        position = nn.Embed(size.context, size.width, name="position")
        x = token(tokens) + position.embedding[: tokens.shape[1]]
        for index in range(size.layers):
            x = Block(size.heads, True, self.dtype, self.kernel, name=f"blocks_{index}")(x)
        x = nn.LayerNorm(epsilon=EPS, dtype=jnp.float32, name="norm")(x)
        return x.astype(self.dtype) @ token.embedding.astype(self.dtype).T


class ViT(nn.Module):
    """Images come as [B, S, S, 3]."""

    patch: int
    width: int
    heads: int
    layers: int
    classes: int

    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(self.width, (self.patch, self.patch), strides=self.patch, name="patch")(x)
        x = x.reshape(x.shape[0], -1, self.width)
        x = x + self.param("position", nn.initializers.zeros, (1, x.shape[1], self.width))
        for index in range(self.layers):
            x = Block(self.heads, False, jnp.float32, None, name=f"blocks_{index}")(x)
        x = nn.LayerNorm(epsilon=EPS, name="norm")(x)
        return nn.Dense(self.classes, name="head")(x.mean(axis=1))


def like(module: torch.nn.Module, *, bf16: bool, cuda: bool) -> nn.Module:
    """The flax model of that torch one."""
    dtype, kernel = (jnp.bfloat16 if bf16 else jnp.float32), ("cudnn" if cuda and bf16 else None)
    if isinstance(module, models.GPT):
        return GPT(module.size, dtype, kernel)
    if isinstance(module, models.ConvNet):
        return ConvNet(tuple(conv.out_channels for conv in _convs(module)))
    if isinstance(module, models.ViT):
        conv, head = module.patch, module.head
        return ViT(conv.kernel_size[0], conv.out_channels, module.heads, len(module.blocks), head.out_features)
    return MLP(tuple(layer.out_features for layer in module.modules() if isinstance(layer, torch.nn.Linear)))


def _convs(module: models.ConvNet) -> list[torch.nn.Conv2d]:
    return [layer for layer in module.modules() if isinstance(layer, torch.nn.Conv2d)]


# --- weights ----------------------------------------------------------------------------------------------------------

_NAMES: dict[type, str] = {
    torch.nn.Linear: "kernel",
    torch.nn.Conv2d: "kernel",
    torch.nn.LayerNorm: "scale",
    torch.nn.BatchNorm2d: "scale",
    torch.nn.Embedding: "embedding",
}
# Where each dimension of a torch tensor goes, and comes from.
_TO: dict[type, tuple[int, ...]] = {torch.nn.Linear: (1, 0), torch.nn.Conv2d: (2, 3, 1, 0)}
_FROM: dict[type, tuple[int, ...]] = {torch.nn.Linear: (1, 0), torch.nn.Conv2d: (3, 2, 0, 1)}


def _places(module: torch.nn.Module) -> dict[str, tuple[tuple[str, ...], type]]:
    """Torch's name of each parameter -> its path in flax, and the module that holds it."""
    found: dict[str, tuple[tuple[str, ...], type]] = {}
    for name, _ in module.named_parameters():
        *parts, leaf = name.split(".")
        holder = type(module.get_submodule(".".join(parts)))
        if leaf == "weight":
            leaf = _NAMES[holder]
        joined = re.sub(r"\.(\d+)", r"_\1", ".".join(parts))  # blocks.0.qkv is blocks_0.qkv
        found[name] = ((*filter(None, joined.split(".")), leaf), holder)
    return found


def to_flax(module: torch.nn.Module) -> Weights:
    """The module's weights, nested."""
    params: Weights = {}
    parameters = dict(module.named_parameters())
    for name, (path, holder) in _places(module).items():
        value = parameters[name].detach().cpu().numpy()
        if value.ndim > 1 and holder in _TO:
            value = value.transpose(_TO[holder])
        node = params
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = jnp.array(value)
    return params


def to_torch(params: Weights, module: torch.nn.Module) -> dict[str, Tensor]:
    """Back, by the module's names."""
    found: dict[str, Tensor] = {}
    for name, (path, holder) in _places(module).items():
        node: Any = params
        for part in path:
            node = node[part]
        value = np.asarray(node)
        found[name] = torch.tensor(value.transpose(_FROM[holder]) if value.ndim > 1 and holder in _FROM else value)
    return found


def to_images(inputs: Tensor) -> Tensor:
    """[B, C, H, W] -> [B, H, W, C]; other inputs as they are."""
    return inputs.permute(0, 2, 3, 1).contiguous() if inputs.dim() == 4 else inputs


Apply = Callable[[Weights, Weights, Any], tuple[Any, Weights]]


def applying(model: nn.Module) -> Apply:
    """``(params, batch_stats, inputs) -> (logits, batch_stats)``."""

    def apply(params: Weights, stats: Weights, inputs: Any) -> tuple[Any, Weights]:
        logits, changed = model.apply({"params": params, "batch_stats": stats}, inputs, mutable=["batch_stats"])
        return logits, changed.get("batch_stats", {})

    return apply
