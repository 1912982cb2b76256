"""Five years of carbon dioxide with three quarters of them hidden: a masked autoencoder of curves.

    python examples/masked_reconstruction.py              # under a minute on two CPU cores
    python examples/masked_reconstruction.py --device cuda --compile

A curve is 256 weekly means over Mauna Loa (statsmodels has them: nothing is downloaded), minus its mean, over its
standard deviation, as a spectrum would be prepared. Each step draws 4 of its 16 blocks, which the encoder sees and
reduces to 64 numbers; a decoder computes all 256 weeks from these. Interrupt it with Ctrl-C and run it again: it
continues. It writes `training_history.json`, `checkpoints`, and `best_model.pt` (the averaged weights). Expect a last
line of about `hidden weeks: error 0.10, that of predicting the mean 0.45`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from statsmodels.datasets import co2
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import optim, schedules


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/masked_reconstruction")
    fresh: bool = False
    seed: int = 0
    epochs: int = 100
    warmup_epochs: int = 5
    batch_size: int = 64
    length: int = 256
    latent: int = 64
    blocks: int = 16
    hidden: int = 12
    width: int = 64
    layers: int = 2
    learning_rate: float = 2e-4
    weight_decay: float = 0.05
    clip: float = 1.0
    ema: float = 0.999
    loss: str = "mse"
    reduction: str = "mean"
    patience: int = 20
    start_ratio: float = 0.5
    precision: str = "bf16-mixed"
    device: str | None = None
    compile: bool = False


def curves(length: int) -> dict[str, TensorDataset]:
    """Pairs ``(x, meta)``: a curve [length], and its first week, which training does not look at.

    From 1958 on to train, from 1985 to choose an epoch, from 1992 held out.
    """
    weekly = torch.tensor(co2.load_pandas().data["co2"].interpolate().to_numpy(), dtype=torch.float32)
    cuts = {"train": (0, 1400, 2), "val": (1400, 1800, 1), "test": (1800, len(weekly), 1)}
    parts: dict[str, TensorDataset] = {}
    for name, (first, last, stride) in cuts.items():
        raw = weekly[first:last].unfold(0, length, stride)
        x = (raw - raw.mean(dim=1, keepdim=True)) / raw.std(dim=1, keepdim=True)
        parts[name] = TensorDataset(x, first + stride * torch.arange(len(x)))
    return parts


class MaskedAutoencoder(nn.Module):
    """[batch, length] -> reconstruction [batch, length], latent [batch, latent], visible [batch, length] of dtype bool.

    The masks come from torch's generator, which a step seeds from the state's key: training draws new ones at every
    step, also after a resume, and evaluation the same ones every time.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.blocks, self.shown = config.blocks, config.blocks - config.hidden
        self.embed = nn.Linear(config.length // config.blocks, config.width)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, config.width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(config.blocks, config.width))
        layer = nn.TransformerEncoderLayer(
            config.width, nhead=4, dim_feedforward=2 * config.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, config.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(config.width)
        self.latent = nn.Linear(config.width, config.latent)
        self.decoder = nn.Sequential(nn.Linear(config.latent, 256), nn.GELU(), nn.Linear(256, config.length))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        batch, size = len(x), x.shape[1] // self.blocks
        shown = torch.rand(batch, self.blocks, device=x.device).argsort(dim=1)[:, : self.shown]
        tokens = self.embed(x.unflatten(1, (self.blocks, size))) + self.pos_embed
        tokens = tokens.gather(1, shown.unsqueeze(2).expand(-1, -1, tokens.shape[2]))
        encoded = self.encoder(torch.cat([self.cls_token.expand(batch, -1, -1), tokens], dim=1))
        latent = self.latent(self.norm(encoded[:, 0]))
        visible = torch.zeros(batch, self.blocks, dtype=torch.bool, device=x.device).scatter(1, shown, True)
        return self.decoder(latent), latent, visible.repeat_interleave(size, dim=1)


def main(config: Config) -> dict[str, Any]:
    """Train, and return ``{"best": {"epoch", "val_loss"}, "epochs"}``; say the errors on the held-out curves."""
    if config.fresh:
        shutil.rmtree(config.runs, ignore_errors=True)
    data = curves(config.length)
    test, mean = data.pop("test"), data["train"].tensors[0].mean(dim=0)
    loaders = {name: DataLoader(part, config.batch_size, shuffle=name == "train") for name, part in data.items()}

    torch.manual_seed(config.seed)
    model = MaskedAutoencoder(config)
    updates = len(loaders["train"])
    learning_rate = schedules.warmup_cosine(
        peak=config.learning_rate, warmup=config.warmup_epochs * updates, total=config.epochs * updates
    )
    decayed = optim.decay_mask(model, skip=("cls_token", "pos_embed"))
    program = ps.program(
        model,
        ps.masked_reconstruction(config.loss, config.reduction),
        optim.chain(
            optim.clip_by_global_norm(config.clip),
            optim.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=decayed),
        ),
        precision=config.precision,
        ema=ps.ema.average(config.ema, warmup=True),
    )

    def keep_best(event: Any) -> None:
        if isinstance(event, ps.events.EpochEnd) and event.improved:
            ps.export_weights(config.runs / "best_model.pt", program, event.state)

    result = ps.fit(
        program.init(seed=config.seed),
        loaders,
        program,
        epochs=config.epochs,
        device=config.device,
        early_stopping=ps.EarlyStopping(config.patience, start_ratio=config.start_ratio),
        snapshots=config.runs / "checkpoints",
        sinks=[ps.sinks.progress(), ps.sinks.history_json(config.runs / "training_history.json")],
        callbacks=[keep_best],
        compile=config.compile,
    )
    model.load_state_dict(torch.load(config.runs / "best_model.pt", weights_only=True))
    x = test.tensors[0]
    with ps.rng.scoped(config.seed), torch.no_grad():
        recon, _, visible = model.eval()(x)
    error = ps.masked_mse(recon, x, ~visible).item()
    mean_error = ps.masked_mse(mean.expand_as(x), x, ~visible).item()
    print(f"stopped after {result.epochs} epochs ({result.stop_reason}), best {result.summary()['best']}")
    print(f"hidden weeks: error {error:.2f}, that of predicting the mean {mean_error:.2f}")
    return result.summary()


if __name__ == "__main__":
    torch.set_num_threads(1)  # kernels this small gain little from a second one, and lose much on a busy machine
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
