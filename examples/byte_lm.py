"""A language model of bytes: a GPT of 0.85 million parameters reads the source of Python's own standard library.

    python examples/byte_lm.py                            # two minutes on two CPU cores
    python examples/byte_lm.py --device cuda --compile
    torchrun --nproc-per-node 2 examples/byte_lm.py       # the same run in two processes

Nothing is downloaded. Muon trains the matrices inside the blocks, AdamW everything else. The held-out bits per byte
fall from 8 (a uniform guess) to below 2.5; then the model writes some Python.
"""

from __future__ import annotations

import math
import shutil
import sysconfig
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import optim, schedules

# Shapes: B batch, T context, D width, H heads, K = D / H.


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/byte_lm")
    fresh: bool = False
    seed: int = 0
    updates: int = 350
    batch_size: int = 8
    accumulate: int = 2
    context: int = 128
    width: int = 128
    heads: int = 4
    layers: int = 4
    sample: int = 300
    precision: str = "32-true"
    device: str | None = None
    compile: bool = False


def library_text() -> tuple[Tensor, Tensor]:
    """Training and held-out bytes: every 20th file is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    aside = {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
    files = [path for path in sorted(root.rglob("*.py")) if not aside & set(path.relative_to(root).parts)]
    texts = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in files if path.stat().st_size]
    return torch.cat([text for i, text in enumerate(texts) if i % 20]), torch.cat(texts[::20])


def rotary(x_BHTK: Tensor) -> Tensor:
    """Unit vectors turned by an angle that grows with the position: their dot products tell distances."""
    T, K = x_BHTK.shape[2:]
    frequency = 1e4 ** -torch.linspace(0, 1, K // 2, device=x_BHTK.device)
    angle = torch.arange(T, device=x_BHTK.device).outer(frequency)
    a, b = functional.rms_norm(x_BHTK, (K,)).chunk(2, dim=3)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=3).type_as(x_BHTK)


class Block(nn.Module):
    """Causal attention, then a squared-ReLU network; each is added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_BTD)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y_BHTK = functional.scaled_dot_product_attention(rotary(q), rotary(k), v, is_causal=True)
        x_BTD = x_BTD + self.out(y_BHTK.transpose(1, 2).flatten(2))
        return x_BTD + self.down(functional.relu(self.up(self.norm2(x_BTD))).square())


def gpt(width: int, heads: int, layers: int) -> nn.Sequential:
    """bytes [B, T] -> logits [B, T, 256]."""
    head = nn.Linear(width, 256, bias=False)
    nn.init.zeros_(head.weight)
    blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
    return nn.Sequential(OrderedDict(embed=nn.Embedding(256, width), blocks=blocks, norm=nn.RMSNorm(width), head=head))


def bits_per_byte(model: ps.Model, batch: tuple[Tensor]) -> ps.Loss:
    """Your own objective: the mean is differentiated; the weight is the number of bytes in the mean."""
    text_BT = batch[0].long()
    logits, targets = model(text_BT[:, :-1]).flatten(0, 1).float(), text_BT[:, 1:].flatten()
    bits = functional.cross_entropy(logits, targets) / math.log(2)
    return ps.Loss(bits, torch.full_like(bits.detach(), targets.numel()), {})


@torch.no_grad()
def write(predict: Callable[[Tensor], Tensor], text: bytes, *, length: int, context: int, device: torch.device) -> str:
    """``text`` and ``length`` bytes more, drawn one after the other at temperature 0.7."""
    generator = torch.Generator(device).manual_seed(0)
    for _ in range(length):
        logits = predict(torch.tensor([list(text[-context:])], device=device))[0, -1].float()
        text += bytes([int(torch.multinomial((logits / 0.7).softmax(0), 1, generator=generator))])
    return text.decode(errors="replace")


def main(config: Config) -> float:
    """Train, print a sample, and return the held-out bits per byte."""
    with ps.parallel.start() as mesh:  # without torchrun: one process
        return train(config, mesh)


def train(config: Config, mesh: ps.parallel.Mesh) -> float:
    if config.fresh and mesh.rank == 0:
        shutil.rmtree(config.runs, ignore_errors=True)
    # Windows of T + 1 bytes, each starting with the last byte of the one before; of the held-out ones every 40th.
    train, held_out = (TensorDataset(text.unfold(0, config.context + 1, config.context)) for text in library_text())
    few = DataLoader(TensorDataset(held_out.tensors[0][::40]), 25)
    loaders = {"train": DataLoader(train, config.batch_size, shuffle=True), "held_out": few}
    torch.manual_seed(config.seed)
    model = gpt(config.width, config.heads, config.layers)
    rate = schedules.warmup_stable_decay(1.0, config.updates // 20, decay=config.updates // 2, total=config.updates)
    muon = optim.muon(lambda count: 0.02 * rate(count))
    adamw = optim.adamw(lambda count: 0.003 * rate(count), b2=0.95, mask=optim.decay_mask(model))
    tx = optim.partition({"muon": muon, "adamw": adamw}, optim.muon_labels(model, skip=("head",)))
    program = ps.program(model, bits_per_byte, tx, precision=config.precision, accumulate=config.accumulate)
    program = ps.distribute(program, mesh)
    state = program.init(seed=config.seed)

    with ps.Snapshots(config.runs, every_steps=100) as snapshots:
        fields = {"steps": config.updates, "evaluate_every": 50, "monitor": "held_out_loss"}
        fields |= {"device": config.device, "compile": config.compile}
        state = ps.fit(state, loaders, program, snapshots=snapshots, **fields).state
    bits = ps.evaluate(state, few, program.eval_step)["loss"]
    predict = program.bind(state)
    if mesh.rank == 0:
        print(write(predict, b"def ", length=config.sample, context=config.context, device=state.step.device))
        print(f"held-out bits per byte {bits:.2f}")
    return bits


if __name__ == "__main__":
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
