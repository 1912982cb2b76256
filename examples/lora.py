"""LoRA fine-tuning with PEFT: a small Llama reads Python's code, and adapters teach it the prose of Python's manual.

    pip install -c constraints.txt -e '.[examples,hf]'    # transformers and peft as well
    python examples/lora.py                               # about a minute on one CPU core

The model is built from a configuration and the text is on the machine: nothing is downloaded. The first run trains all
weights, and transformers saves them; the second loads them, trains only the adapters, and PEFT saves those. In the end
`from_pretrained` loads both. Expect a last line of about `bits a byte of prose: 3.3 as it was, 2.4 with
the adapters, 12 % of the size`.
"""

from __future__ import annotations

import math
import shutil
import sysconfig
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import purestep as ps
from purestep import optim, schedules


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/lora")
    fresh: bool = False
    seed: int = 0
    updates: int = 400
    adapter_updates: int = 300
    batch_size: int = 16
    context: int = 96
    width: int = 96
    layers: int = 2
    size: int = 500_000  # bytes of each text
    rank: int = 8
    learning_rate: float = 3e-3
    adapter_learning_rate: float = 1e-2
    device: str | None = None
    compile: bool = False


def texts(size: int) -> dict[str, bytes]:
    """So many bytes of the standard library's code, and of the manual that `help()` prints."""
    from pydoc_data import topics

    root = Path(sysconfig.get_path("stdlib"))
    code = b"".join(path.read_bytes() for name in ("email", "asyncio") for path in sorted((root / name).glob("*.py")))
    return {"code": code[:size], "prose": "\n".join(topics.topics.values()).encode()[:size]}


def loaders(text: bytes, config: Config) -> dict[str, DataLoader[dict[str, Tensor]]]:
    """Rows of `context` bytes; the last tenth is held out."""
    rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    rows = rows[: len(rows) // config.context * config.context].view(-1, config.context)
    parts = {"train": rows[: len(rows) * 9 // 10], "val": rows[len(rows) * 9 // 10 :]}
    return {
        name: DataLoader(
            [{"input_ids": row, "labels": row} for row in part], config.batch_size, shuffle=name == "train"
        )
        for name, part in parts.items()
    }


def llama(config: Config) -> nn.Module:
    """A language model of bytes."""
    sizes = {"hidden_size": config.width, "intermediate_size": 2 * config.width, "num_hidden_layers": config.layers}
    heads = {"num_attention_heads": 4, "max_position_embeddings": config.context}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # no text has this byte
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes, **heads, **ends))
    model.loss_type = "ForCausalLM"  # which transformers falls back to with a warning
    return model


def with_adapters(model: nn.Module, config: Config) -> nn.Module:
    """The model with its weights frozen and a product of two thin matrices beside each of its linear layers."""
    lora = peft.LoraConfig(
        r=config.rank, lora_alpha=2 * config.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # a name of transformers that PEFT still uses
        return peft.get_peft_model(model, lora)


def trained(
    model: nn.Module, data: dict[str, Any], updates: int, rate: float, name: str, config: Config
) -> ps.FitResult:
    """Train what `requires_grad` says, evaluate five times, and save the model in its own form."""
    tx = optim.adamw(schedules.warmup_cosine(peak=rate, warmup=updates // 10, total=updates), weight_decay=0.01)
    program = ps.program(model, ps.hf_loss(), optim.chain(optim.clip_by_global_norm(1.0), tx))
    fields = {"device": config.device, "compile": config.compile, "snapshots": config.runs / f"{name}_run"}
    every = max(updates // 5, 1)
    result = ps.fit(program.init(config.seed), data, program, steps=updates, evaluate_every=every, **fields)
    ps.load_into(model, result.state)
    model.save_pretrained(config.runs / name)
    return result


@torch.no_grad()
def bits(model: nn.Module, data: dict[str, Any]) -> float:
    """Bits a byte of held-out text, in plain torch."""
    nats = [(model.eval()(**batch).loss.item(), len(batch["labels"])) for batch in data["val"]]
    return sum(loss * rows for loss, rows in nats) / sum(rows for _, rows in nats) / math.log(2)


def main(config: Config) -> tuple[float, float]:
    """Train both; return the bits a byte of held-out prose without the adapters and with them."""
    if config.fresh:
        shutil.rmtree(config.runs, ignore_errors=True)
    data = {name: loaders(text, config) for name, text in texts(config.size).items()}
    torch.manual_seed(config.seed)
    trained(llama(config), data["code"], config.updates, config.learning_rate, "model", config)
    model = LlamaForCausalLM.from_pretrained(config.runs / "model")
    before = bits(model, data["prose"])

    model = with_adapters(model, config)
    rate = config.adapter_learning_rate
    trained(model, data["prose"], config.adapter_updates, rate, "adapters", config)

    base = LlamaForCausalLM.from_pretrained(config.runs / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        loaded = peft.PeftModel.from_pretrained(base, config.runs / "adapters")
    after = bits(loaded, data["prose"])
    files = ("adapters/adapter_model.safetensors", "model/model.safetensors")
    sizes = [(config.runs / name).stat().st_size for name in files]
    share = f"{100 * sizes[0] / sizes[1]:.0f} % of the size"
    print(f"bits a byte of prose: {before:.1f} as it was, {after:.1f} with the adapters, {share}")
    return before, after


if __name__ == "__main__":
    torch.set_num_threads(1)  # kernels this small gain little from a second one, and lose much on a busy machine
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
