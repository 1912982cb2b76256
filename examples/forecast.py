"""Carbon dioxide over Mauna Loa, thirteen weeks ahead: a small transformer against persistence.

    python examples/forecast.py                           # under a minute on two CPU cores
    python examples/forecast.py --device cuda --precision bf16-mixed --compile

The 2,284 weekly means (1958-2001) come with statsmodels: nothing is downloaded. Adam at 1e-4, ten epochs, four
batches an update and two in the last update of an epoch, float16 with a loss scaler. It saves the weights of
its best epoch as `best_model.pth`. Expect a last line of about
`test error 0.33 ppm^2; persistence 4.48, the same weeks a year ago 0.62`.
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
from purestep import optim

PPM = 5.0  # what the network calls 1, in parts per million
YEAR = 52  # weeks


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/forecast")
    fresh: bool = False
    seed: int = 0
    epochs: int = 10
    batch_size: int = 8
    accumulate: int = 4
    learning_rate: float = 1e-4
    context: int = 2 * YEAR
    horizon: int = 13
    width: int = 64
    precision: str = "16-mixed"
    device: str | None = None
    compile: bool = False


def windows(config: Config) -> dict[str, TensorDataset]:
    """Two years and the quarter that follows, from 1958 on to train, from 1988 to choose an epoch, from 1994 held out.

    Both are differences from the last week of the two years: a forecast of 0 is persistence.
    """
    weekly = torch.tensor(co2.load_pandas().data["co2"].interpolate().to_numpy(), dtype=torch.float32) / PPM
    cuts = {"train": (0, 1600), "val": (1600 - config.context, 1900), "test": (1900 - config.context, len(weekly))}
    parts: dict[str, TensorDataset] = {}
    for name, (first, last) in cuts.items():
        window = weekly[first:last].unfold(0, config.context + config.horizon, 1)
        now = window[:, config.context - 1, None]
        parts[name] = TensorDataset(window[:, : config.context] - now, window[:, config.context :] - now)
    return parts


class Forecaster(nn.Module):
    """[batch, context] -> [batch, horizon]: a token for every eight weeks, two layers, one linear read-out."""

    def __init__(self, config: Config, weeks: int = 8) -> None:
        super().__init__()
        self.weeks = weeks
        tokens = config.context // weeks
        self.embed = nn.Linear(weeks, config.width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, config.width))
        layer = nn.TransformerEncoderLayer(
            config.width, nhead=4, dim_feedforward=2 * config.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(tokens * config.width, config.horizon)

    def forward(self, past: Tensor) -> Tensor:
        tokens = self.embed(past.unflatten(1, (-1, self.weeks))) + self.position
        return self.head(self.encoder(tokens).flatten(1))


def baselines(test: TensorDataset, horizon: int) -> dict[str, float]:
    """Mean squared errors in ppm^2 of two forecasts that need no training."""
    past, future = test.tensors
    year_ago = past[:, -YEAR : horizon - YEAR] - past[:, -YEAR - 1, None]  # what these weeks brought last time
    return {
        "persistence": PPM**2 * future.square().mean().item(),
        "the same weeks a year ago": PPM**2 * (future - year_ago).square().mean().item(),
    }


def main(config: Config) -> float:
    """Train, and return the mean squared error on the held-out years in ppm^2."""
    if config.fresh:
        shutil.rmtree(config.runs, ignore_errors=True)
    data = windows(config)
    test = data.pop("test")
    loaders = {name: DataLoader(part, config.batch_size, shuffle=name == "train") for name, part in data.items()}

    torch.manual_seed(config.seed)
    model = Forecaster(config)
    program = ps.program(
        model,
        ps.supervised(nn.MSELoss()),
        optim.adam(config.learning_rate),
        precision=config.precision,
        accumulate=config.accumulate,
    )
    best = config.runs / "best_model.pth"

    def keep_best(event: Any) -> None:
        if isinstance(event, ps.events.EpochEnd) and event.improved:
            ps.export_weights(best, program, event.state)
            print(f"Validation loss improved to {event.record['val_loss']:.4f}. Model saved.")

    result = ps.fit(
        program.init(seed=config.seed),
        loaders,
        program,
        epochs=config.epochs,
        device=config.device,
        snapshots=config.runs,
        callbacks=[keep_best],
        compile=config.compile,
    )
    model.load_state_dict(torch.load(best, weights_only=True))  # as any other PyTorch program would
    with torch.no_grad():
        forecast = model.eval()(test.tensors[0])
    error = PPM**2 * nn.functional.mse_loss(forecast, test.tensors[1]).item()
    known = baselines(test, config.horizon)
    print(f"finished after {result.epochs} epochs ({result.stop_reason}), best epoch {(result.best or {})['epoch']}")
    print(f"test error {error:.2f} ppm^2; " + ", ".join(f"{name} {value:.2f}" for name, value in known.items()))
    return error


if __name__ == "__main__":
    torch.set_num_threads(1)  # kernels this small gain little from a second one, and lose much on a busy machine
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
