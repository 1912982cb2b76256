"""Programs whose launches are counted, small ones of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import purestep as ps
from purestep import optim, schedules

Made = tuple[ps.Program, Any]  # a program, and a batch on the device


def mlp(**fields: Any) -> Made:
    """Dropout, clipping, a schedule, decay by mask, and an average."""
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Dropout(0.1), nn.Linear(128, 10))
    rate = schedules.warmup_cosine(peak=1e-2, warmup=20, total=300)
    adamw = optim.adamw(rate, weight_decay=0.1, mask=optim.decay_mask(net))
    tx = optim.chain(optim.clip_by_global_norm(1.0), adamw)
    program = ps.program(net, ps.supervised(nn.CrossEntropyLoss()), tx, ema=0.99, **fields)
    return program, (torch.zeros(16, 64, device="cuda"), torch.zeros(16, dtype=torch.long, device="cuda"))


def plain(tx: optim.Transform | None = None, **fields: Any) -> Made:
    """A linear layer and one optimizer."""
    net = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))
    program = ps.program(net, ps.supervised(nn.CrossEntropyLoss()), tx or optim.adamw(1e-3), **fields)
    return program, (torch.zeros(16, 64, device="cuda"), torch.zeros(16, dtype=torch.long, device="cuda"))


def norms() -> Made:
    """BatchNorm, whose buffers are state, and an average."""
    net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    program = ps.program(net, ps.supervised(nn.CrossEntropyLoss()), optim.adamw(1e-3), ema=0.9)
    return program, (torch.zeros(16, 64, device="cuda"), torch.zeros(16, dtype=torch.long, device="cuda"))


class Block(nn.Module):
    """Attention and a perceptron, each behind a LayerNorm, with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        split = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1))
        p = 0.1 if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(*split, is_causal=True, dropout_p=p)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.narrow(nn.functional.gelu(self.wide(self.between(x)))))


class GPT(nn.Module):
    """One block, with the head tied to the embedding."""

    def __init__(self, words: int = 256, width: int = 64, places: int = 32) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(words, width), nn.Embedding(places, width)
        self.block = Block(width, 4)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.block(x)))


def _of_words(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def gpt(**fields: Any) -> Made:
    """bfloat16, clipping, a schedule and an average."""
    tx = optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(schedules.warmup_cosine(peak=1e-2, warmup=20, total=300))
    )
    program = ps.program(GPT(), ps.supervised(_of_words), tx, ema=0.99, precision="bf16-mixed", **fields)
    ids = torch.zeros(4, 32, dtype=torch.long, device="cuda")
    return program, (ids, ids.clone())


def hugging_face(**fields: Any) -> Made:
    """GPT-2 with an attention mask and dropout on its attention: the memory-efficient kernel."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 32}
    config = GPT2Config(**sizes, attn_pdrop=0.1, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # which transformers falls back to with a warning
    program = ps.program(model, ps.hf_loss(), optim.adamw(1e-3), **fields)
    ids = torch.zeros(4, 32, dtype=torch.long, device="cuda")
    return program, {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def _groups() -> optim.Transform:
    tx = {"slow": optim.adamw(1e-5), "fast": optim.sgd(1e-2)}
    return optim.partition(tx, [(r"^0\.", "slow"), ("", "fast")])


PROGRAMS: dict[str, Callable[[], Made]] = {
    "mlp": mlp,
    "norms": norms,
    "gpt": gpt,
    "hugging face": hugging_face,
    "adamw": plain,
    "sgd": lambda: plain(optim.sgd(0.1, momentum=0.9)),
    "lion": lambda: plain(optim.lion(1e-3)),
    "groups": lambda: plain(_groups()),
    "from torch": lambda: plain(optim.from_torch(torch.optim.AdamW, lr=1e-3)),
    "16-mixed": lambda: mlp(precision="16-mixed"),
    "bf16-true": lambda: plain(precision="bf16-true"),
    "accumulate": lambda: mlp(accumulate=4),
    "microbatches": lambda: mlp(microbatches=4),
}
