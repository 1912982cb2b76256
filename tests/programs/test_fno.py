"""A Fourier neural operator (Li et al., 2021): complex weights on the lowest frequencies of a function on a grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import optim

EPOCHS, GRID, WIDTH, MODES = 6, 32, 8, 6


class SpectralConv(nn.Module):
    """(K v)(x) = F^-1(R . F v)(x), with R zero above the lowest frequencies: equation 4 of the paper."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH, MODES, dtype=torch.cfloat) / WIDTH**2)

    def forward(self, v: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(v)
        kept = torch.einsum("bix,iox->box", spectrum[..., :MODES], self.weight)
        padded = torch.zeros(len(v), WIDTH, spectrum.shape[-1], dtype=torch.cfloat, device=v.device)
        padded[..., :MODES] = kept
        return torch.fft.irfft(padded, n=v.shape[-1])


class Fno(nn.Module):
    """[batch, grid] -> [batch, grid]."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = nn.Conv1d(2, WIDTH, 1), nn.Conv1d(WIDTH, 1, 1)
        self.spectral = nn.ModuleList(SpectralConv() for _ in range(2))
        self.local = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(2))

    def forward(self, a: Tensor) -> Tensor:
        place = torch.linspace(0, 1, a.shape[1], device=a.device).expand_as(a)
        v = self.lift(torch.stack([a, place], dim=1))
        for spectral, local in zip(self.spectral, self.local, strict=True):
            v = nn.functional.gelu(spectral(v) + local(v))
        return self.project(v).squeeze(1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return Fno()


def functions() -> list[tuple[Tensor, Tensor]]:
    """Smooth functions, and the solutions of the heat equation that begins with them."""
    drawn, frequency = torch.Generator().manual_seed(1), torch.arange(GRID // 2 + 1)
    spectrum = torch.randn(64, GRID // 2 + 1, dtype=torch.cfloat, generator=drawn) / (1 + frequency) ** 2 * GRID
    later = spectrum * torch.exp(-0.02 * frequency**2)
    return list(zip(*(torch.fft.irfft(each, n=GRID).split(16) for each in (spectrum, later)), strict=True))


def relative_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target).norm(dim=1) / target.norm(dim=1)).mean()


def loop() -> tuple[nn.Module, nn.Module]:
    module = network()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=1e-4)
    average = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(EPOCHS):
        for inputs, targets in functions():
            optimizer.zero_grad()
            relative_error(module(inputs), targets).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            average.update_parameters(module)
    return module, average.module


def test_it_is_the_plain_loop(tmp_path: Path) -> None:
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2, weight_decay=1e-4))
    program = ps.program(network(), ps.supervised(relative_error), tx, ema=ps.ema.average(0.9))
    run: Any = {"progress": False, "device": "cpu", "snapshots": tmp_path}
    ps.fit(program.init(), functions(), program, epochs=1, **run)
    result = ps.fit(program.init(), functions(), program, epochs=EPOCHS, **run)  # goes on where it stopped
    for found, module in zip((result.state.params, result.state.ema.params), loop(), strict=True):
        expected = {name: p.detach() for name, p in module.named_parameters()}
        assert found["spectral.0.weight"].dtype == torch.cfloat
        assert_trees_close(found, expected, rtol=1e-3, atol=2e-5)
    assert result.history["train_loss"][-1] < 0.8 * result.history["train_loss"][0]
