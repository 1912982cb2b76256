"""Blocks that are computed again, frozen weights in pieces, and states made of modules on the meta device."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep import optim, tree

from . import cases
from .processes import DEVICE

MIB = 2**20


class Repeated(cases.Perceptron):
    """Two regions that the backward pass computes again, one of them inside of the other's block alone."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8)
        self.last.weight.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor, *, debug: float) -> Tensor:
        """``debug``: a keyword that `checkpoint` has, too."""
        hidden = checkpoint(lambda x: debug * torch.relu(self.up(self.norm(x))), x, use_reentrant=False)
        hidden = self.down(hidden)
        return x + checkpoint(lambda x: self.last(x).tanh(), hidden, use_reentrant=False)


class Stacked(nn.Module):
    """A block that runs twice; ``around``: a region around all blocks is computed again, too."""

    def __init__(self, *, around: bool) -> None:
        super().__init__()
        self.around = around
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Repeated(), Repeated()])

    def body(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, self.blocks[0]):
            x = block(x, debug=0.9)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return checkpoint(self.body, x, use_reentrant=False) if self.around else self.body(x)


def repeated(tx: str = "adamw", *, around: bool = False, **options: Any) -> ps.Program:
    torch.manual_seed(0)
    net = Stacked(around=around).double().to(DEVICE)
    return ps.program(net, ps.supervised(nn.MSELoss()), cases.rules()[tx](), precision="64-true", ema=0.9, **options)


class Adapted(nn.Module):
    """A frozen layer with a trained adapter, of sizes that two processes do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.base = nn.Linear(8, 19).requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 19, bias=False)
        self.out = nn.Linear(19, 8).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.out(torch.relu(self.base(hidden) + self.up(self.down(hidden))))


def adapted(tx: str = "adamw", **options: Any) -> ps.Program:
    torch.manual_seed(0)
    first = nn.Linear(8, 8).requires_grad_(requires_grad=False)
    net = nn.Sequential(first, Adapted(), Adapted(), nn.Linear(8, 8)).double().to(DEVICE)
    return ps.program(net, ps.supervised(nn.MSELoss()), cases.rules()[tx](), precision="64-true", ema=0.9, **options)


def hugging_face(kind: str, way: str) -> dict[str, Any]:
    """Train a small model of Hugging Face, its layers as units, and compare with one process. ``way``: "enabled" for
    its gradient checkpointing, else ""."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 31, "tie_word_embeddings": True}
    if kind == "llama":
        few = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
        config: Any = transformers.LlamaConfig(**sizes, **few, **heads)
        net, units = transformers.LlamaForCausalLM(config), ["model.layers.*"]
    else:
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(**sizes, **drops, n_embd=16, n_layer=2, n_head=2, n_positions=16)
        net, units = transformers.GPT2LMHeadModel(config), ["transformer.h.*"]
    net = net.double()
    if way:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    program = ps.program(net, ps.hf_loss(), optim.adamw(1e-2), precision="64-true")
    ids = torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids}
    expected = program.init(seed=0)
    for _ in range(2):
        expected, _ = program.train_step(expected, batch)
    with ps.parallel.start(shard=2, timeout=60) as mesh:
        several = ps.distribute(program, mesh, params="shard", units=units)
        state = several.init(seed=0)
        for _ in range(2):
            with cases.counted() as counts:
                state, _ = several.train_step(state, ps.parallel.share(batch, mesh))
        far, path = cases.difference(ps.full(state), expected)
    return {"far": far, "path": path, "collectives": counts}


def frozen_dtypes() -> list[str]:
    """The dtypes of frozen weights that change when they are cut and gathered."""
    dtypes = [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
    net = nn.Linear(4, 4)
    for dtype in dtypes:
        value = torch.arange(15).reshape(5, 3).to(dtype)
        setattr(net, str(dtype).replace("torch.", "as_"), nn.Parameter(value, requires_grad=False))
    program = ps.program(net, ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    whole = program.init(seed=0)
    with ps.parallel.start(shard=2, timeout=60) as mesh:
        several = ps.distribute(program, mesh, params="shard")
        state = several.init(seed=0)
        batch = ps.parallel.share((torch.ones(2, 4), torch.ones(2, 4)), mesh)
        state, _ = several.train_step(state, batch)
        found = ps.full(state)
        half = [name for name, value in state.frozen.items() if len(value) != 3]
    same = [name for name, value in found.frozen.items() if torch.equal(value, whole.frozen[name])]
    return [name for name in whole.frozen if name not in same] + half


def saved(folder: str) -> int:
    """Write a snapshot of a state with frozen weights in pieces: their numbers in this process."""
    program = adapted()
    with ps.parallel.start(shard=2, timeout=60) as mesh:
        state = ps.distribute(program, mesh, params="shard").init(seed=0)
        with ps.Snapshots(folder) as snapshots:
            snapshots.save(1, state)
    return sum(value.numel() for value in state.frozen.values())


# --- peaks ------------------------------------------------------------------------------------------------------------


def _water(run: Any) -> tuple[Any, int]:
    """The function's value, and by how much the memory of this process rose meanwhile."""
    gc.collect()
    cases._reset_high_water()
    before = cases._high_water()
    found = run()
    return found, cases._high_water() - before


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(*sizes).requires_grad_(requires_grad=False) for sizes in ((width, 4 * width), (4 * width, width))
        )
        self.adapter = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x))) + self.adapter(x)


class Frozen(nn.Module):
    """88 MiB in float32: 16 blocks of frozen layers (80 MiB), each with a trained one."""

    def __init__(self, width: int = 400, count: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def frozen_peaks() -> dict[str, dict[str, float]]:
    """For each placement: the numbers at rest and at the peak of a call, over those of the frozen weights."""
    if DEVICE == "cpu":
        ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: freed memory returns to the system
    from purestep.step import gradient

    found: dict[str, dict[str, float]] = {}
    original = gradient._micro
    for name, params, units in (
        ("whole", [("adapter", "shard")], []),
        ("pieces", "shard", []),
        ("units", "shard", ["blocks.*"]),
    ):
        torch.manual_seed(0)
        whole = ps.program(Frozen().to(DEVICE), ps.supervised(nn.MSELoss()), optim.sgd(1e-3))
        total = sum(value.nbytes for value in whole.init(seed=0).frozen.values())
        rises: list[int] = []

        def measured(*args: Any, rises: list[int] = rises) -> Any:
            result, rise = _water(lambda: original(*args))
            rises.append(rise)
            return result

        (batch,) = cases.placed([[torch.randn(4, 400), torch.randn(4, 400)]])
        with ps.parallel.start(timeout=90, shard=2) as mesh, mock.patch.object(gradient, "_micro", measured):
            program = ps.distribute(whole, mesh, params=params, units=units)
            state = program.init(seed=0)
            del whole
            rest = sum(value.nbytes for value in state.frozen.values())
            for _ in range(3):
                state, _ = program.train_step(state, ps.parallel.share(batch, mesh))
        found[name] = {"rest": rest / total, "peak": rises[-1] / total, "MiB": total / MIB}
    return found


def drawn(name: str) -> Tensor:
    """Values of a parameter of `Wide` that depend on its name alone."""
    with torch.device("meta"):
        shape = cases.Wide().get_parameter(name).shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 0.02


def init_peaks(path: str) -> dict[str, Any]:
    """States of `Wide`, from weights that exist, are drawn or are in a file, and with all of them whole before they are
    cut: how far they are off, and the peak of resident memory over the bytes of the pieces."""
    if DEVICE == "cpu":
        ctypes.CDLL(None).mallopt(-3, 2**17)
    found: dict[str, Any] = {}
    with ps.parallel.start(timeout=90, shard=2) as mesh, safe_open(path, "pt") as file:
        for name, weights in (("module", None), ("drawn", drawn), ("file", file.get_tensor), ("at once", drawn)):
            torch.manual_seed(0)
            with torch.device("meta" if weights is not None else DEVICE):
                net = cases.Wide()
            program = ps.program(net, ps.supervised(nn.MSELoss()), optim.adamw(1e-3), ema=0.9)
            several = ps.distribute(program, mesh, params="shard")
            several.init.__self__.cuts_first = name != "at once"
            state, rise = _water(lambda several=several, weights=weights: several.init(seed=0, weights=weights))
            size = sum(leaf.nbytes for leaf in tree.leaves(state))
            full = ps.full(state)
            of = {"file": file.get_tensor, "module": dict(net.named_parameters()).__getitem__}.get(name, drawn)
            far = max(float((value.cpu() - of(key).cpu()).abs().max()) for key, value in full.params.items())
            found[name] = {"far": far, "peak": rise / size, "MiB": size / MIB}
            del net, program, several, state, full
    return found


def wide_file(path: Path) -> None:
    """Write the weights of a `Wide`."""
    from safetensors.torch import save_file

    torch.manual_seed(5)
    save_file({name: value.detach().clone() for name, value in cases.Wide().named_parameters()}, path)


def small(*, meta: bool) -> nn.Module:
    with torch.device("meta" if meta else "cpu"):
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))


def differing() -> str:
    """The error of a state whose weights are drawn otherwise in each process."""
    with ps.parallel.start(timeout=60, shard=2) as mesh:
        program = ps.program(small(meta=True), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
        several = ps.distribute(program, mesh, params="shard", batchnorm="average")
        shapes = {**dict(small(meta=True).named_parameters()), **dict(small(meta=True).named_buffers())}
        torch.manual_seed(mesh.rank)
        try:
            several.init(seed=0, weights=lambda name: torch.randn(shapes[name].shape))
        except ps.errors.RankError as error:
            return str(error)
    return ""


def masks_by_size() -> list[float]:
    """The difference of a run whose mask looks at sizes, and the rows that its state's first parameter has here."""

    def program() -> ps.Program:
        torch.manual_seed(0)
        rule = optim.adamw(1e-2, weight_decay=0.5, mask=lambda params: {n: p.numel() > 50 for n, p in params.items()})
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).double().to(DEVICE)
        return ps.program(net, ps.supervised(nn.MSELoss()), rule, precision="64-true")

    examples = cases.vectors()
    expected, _ = cases.trained(program(), examples)
    with ps.parallel.start(timeout=60, shard=2) as mesh:
        several = ps.distribute(program(), mesh, params="shard")
        state, _ = cases.trained(several, [ps.parallel.share(batch, mesh) for batch in examples])
        return [cases.difference(ps.full(state), expected)[0], len(state.params["0.weight"])]
