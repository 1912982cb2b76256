"""Hugging Face models that compute their own loss: a GPT-2 reads Python, then is fine-tuned to tell its packages apart.

    pip install -c constraints.txt -e '.[examples,hf]'     # transformers as well
    python examples/finetune_hf.py                        # under two minutes on two CPU cores
    python examples/finetune_hf.py --device cuda --compile

Nothing is downloaded: both models are built from a configuration, and the text is the standard library's. Fine-tuning
has the usual numbers (AdamW, weight decay 0.01, 3 epochs) except for the learning rate: 5e-5 is for weights that were
trained on billions of tokens, and these are random. Expect a last line of `held-out nats a token 2.92, unigram entropy
4.47`.
"""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

import purestep as ps
from purestep import optim, schedules

PAD, UNKNOWN = 0, 1
PACKAGES = ("asyncio", "email", "importlib", "multiprocessing", "unittest", "xml")
Rows = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/finetune_hf")
    fresh: bool = False
    seed: int = 0
    epochs: int = 3
    classifier_epochs: int = 8
    patience: int = 2
    batch_size: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    scheduler_step_per_epoch: bool = False
    context: int = 48
    width: int = 96
    layers: int = 2
    vocabulary: int = 1000
    every: int = 2  # of the rows, one in so many is used
    device: str | None = None
    compile: bool = False


def read() -> dict[str, list[tuple[int, list[str]]]]:
    """(package, words) of every file; every fourth file is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: dict[str, list[tuple[int, list[str]]]] = {"train": [], "val": []}
    for label, package in enumerate(PACKAGES):
        for index, path in enumerate(sorted(root.joinpath(package).rglob("*.py"))):
            words = re.findall(r"\n *|\w+|[^\w\s]", path.read_text("utf-8"))
            parts["val" if index % 4 == 3 else "train"].append((label, words))
    return parts


def rows(files: list[tuple[int, list[str]]], numbers: dict[str, int], config: Config) -> tuple[Rows, Rows]:
    """The text cut into rows, the last of a file padded: for the language model, and for the classifier."""
    labelled: Rows = []
    for package, words in files:
        tokens = [numbers.get(word, UNKNOWN) for word in words]
        for first in range(0, len(tokens) - 1, config.context * config.every):
            ids = torch.full((config.context,), PAD)
            ids[: len(tokens) - first] = torch.tensor(tokens[first : first + config.context])
            row = {"input_ids": ids, "attention_mask": (ids != PAD).long()}
            labelled.append({**row, "labels": torch.tensor(package)})
    ignored = [row["input_ids"].masked_fill(row["input_ids"] == PAD, -100) for row in labelled]
    return [{**row, "labels": labels} for row, labels in zip(labelled, ignored, strict=True)], labelled


def unigram_entropy(train: Rows, val: Rows, size: int) -> float:
    """Nats a token of guessing the held-out text by the frequency of its words: what there is to beat."""
    train_tokens, tokens = (torch.cat([row["input_ids"] for row in part]) for part in (train, val))
    count = torch.bincount(train_tokens, minlength=size)[1:] + 1.0
    return -(count / count.sum()).log()[tokens[tokens != PAD] - 1].mean().item()


def log(event: Any) -> None:
    """A callback that prints some metrics of each epoch."""
    if isinstance(event, ps.events.EpochEnd):
        found = {name: f"{event.record[name]:.3f}" for name in ("train_loss", "val_loss")}
        print(f"epoch {event.epoch}, {event.updates} updates: {found}")


def accuracy(outputs: Any, labels: Tensor) -> tuple[Tensor, int]:
    """Your own metric: how many are right, and of how many. Batches of any size add up."""
    return (outputs.logits.argmax(dim=1) == labels).sum(), len(labels)


def language_model(config: Config, gpt: GPT2Config, data: dict[str, DataLoader[Any]]) -> tuple[Any, ps.FitResult]:
    """A schedule by the batch (linear to zero), or by the epoch (half of it after each)."""
    model, epoch = GPT2LMHeadModel(gpt), len(data["train"])
    model.loss_type = "ForCausalLM"  # which transformers falls back to with a warning
    rate = schedules.linear(config.learning_rate, 0.0, transition_steps=config.epochs * epoch)
    if config.scheduler_step_per_epoch:
        rate = schedules.per_epoch(schedules.exponential(config.learning_rate, 0.5), updates_per_epoch=epoch)
    adamw = optim.adamw(rate, weight_decay=config.weight_decay)
    program = ps.program(model, ps.hf_loss(), optim.chain(optim.clip_by_global_norm(config.max_grad_norm), adamw))
    on = {"device": config.device, "compile": config.compile, "snapshots": config.runs / "language"}
    result = ps.fit(program.init(config.seed), data, program, callbacks=[log], epochs=config.epochs, **on)
    ps.load_into(model, result.state)
    return model, result


def classifier(config: Config, gpt: GPT2Config, body: Any, data: dict[str, DataLoader[Any]]) -> ps.FitResult:
    """The language model's body under a new head; a plateau lowers the rate, the best epoch is that of most right."""
    model = GPT2ForSequenceClassification(gpt)
    model.transformer.load_state_dict(body.state_dict())
    tx = optim.inject(optim.adamw)(learning_rate=config.learning_rate / 4, weight_decay=config.weight_decay)
    program = ps.program(model, ps.hf_loss(metrics={"accuracy": accuracy}), tx)
    plateau = ps.reduce_on_plateau("val_loss", factor=0.3, patience=0)
    best = {"monitor": "val_accuracy", "mode": "max", "early_stopping": config.patience, "compile": config.compile}
    fields = {"snapshots": config.runs / "classifier", "device": config.device, "epochs": config.classifier_epochs}
    return ps.fit(program.init(config.seed), data, program, callbacks=[log, plateau], **fields, **best)


def main(config: Config) -> tuple[float, float]:
    """Train both; return the held-out nats a token over the unigram entropy, and the best share that is right."""
    if config.fresh:
        shutil.rmtree(config.runs, ignore_errors=True)
    files = read()
    count = Counter(word for _, words in files["train"] for word in words).most_common(config.vocabulary - 2)
    numbers = {word: number for number, (word, _) in enumerate(count, 2)}
    cut = {name: rows(part, numbers, config) for name, part in files.items()}
    (train, _), (val, packages) = cut["train"], cut["val"]
    entropy = unigram_entropy(train, val, config.vocabulary)
    torch.manual_seed(config.seed)
    sizes = {"n_embd": config.width, "n_layer": config.layers, "n_head": 4, "n_positions": config.context}
    ends = {"bos_token_id": PAD, "eos_token_id": PAD, "pad_token_id": PAD}
    gpt = GPT2Config(vocab_size=config.vocabulary, num_labels=len(PACKAGES), **sizes, **ends)
    text, labelled = (
        {name: DataLoader(part[task], config.batch_size, shuffle=name == "train") for name, part in cut.items()}
        for task in (0, 1)
    )
    model, first = language_model(config, gpt, text)
    second = classifier(config, gpt, model.transformer, labelled)
    nats, right = first.history["val_loss"][-1], max(second.history["val_accuracy"])
    largest = Counter(int(row["labels"]) for row in packages).most_common(1)[0][1] / len(val)
    print(f"classifier right on {100 * right:.0f} % of the rows, the largest package is {100 * largest:.0f} % of them")
    print(f"held-out nats a token {nats:.2f}, unigram entropy {entropy:.2f}")
    return nats / entropy, right


if __name__ == "__main__":
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
