"""Runs that are interrupted three times and go on: state, order of batches, metrics and history are those of the run
that nobody interrupted, bit for bit.

The model has dropout and BatchNorm, the program an fp16 scaler, an average, a clipped AdamW with a schedule, and
windows of three batches; what differs from trial to trial is the loader, and where the run is stopped.
"""

from __future__ import annotations

import random
import signal
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from helpers import image_batch, tiny_convnet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import purestep as ps
from purestep import events, metrics, optim, schedules
from purestep.types import Program
from rigs.faults.runs import fit, same

TRIALS = 64
REPRESENTATIVE = (0, 6, 13, 20, 27, 42)  # both numbers of workers, all loaders, every place and ending
ITEMS, SIZE = 26, 4

LOADERS = ("items", "augmented", "own state", "stream")
PLACES = ("first batch", "middle", "last batch", "after the epoch", "in a window", "in an evaluation")
ENDINGS = ("Ctrl-C", "Ctrl-C", "an error")


class Setting(NamedTuple):
    """What one trial is about."""

    loader: str
    workers: int
    persistent: bool
    shuffle: bool
    drop_last: bool
    prefetch: int | None
    fields: dict[str, Any]  # of fit
    every_steps: int | None  # snapshots inside an epoch
    places: tuple[str, ...]
    endings: tuple[str, ...]


def setting(number: int) -> Setting:
    """The trial of that number: each choice is met with each other over the 64."""
    drawn = random.Random(f"resuming {number}")
    workers = 2 * (number % 2)
    patience = {"epochs": 4, "monitor": "lr", "mode": "min", "early_stopping": 2}  # the rate rises: no improvement
    kind = LOADERS[number // 2 % 4]
    inside = {
        "epochs": 3,
        "evaluate_every": 1 if kind == "stream" else 0.3,
    }  # no share of a stream
    return Setting(
        loader=kind,
        workers=workers,
        persistent=bool(workers and number // 8 % 2),
        shuffle=bool(number // 16 % 2),
        drop_last=bool(number // 32 % 2),
        prefetch=drawn.choice((None, 1, 4)) if workers else None,
        fields=drawn.choice(({"epochs": 3}, inside, patience)),
        every_steps=drawn.choice((None, 1, 2)),
        places=tuple(drawn.sample(PLACES, 3)),
        endings=tuple(drawn.choice(ENDINGS) for _ in range(3)),
    )


def trial(number: int, folder: Path) -> str | None:
    """None where the run that was interrupted three times is the whole one; else the difference."""
    with warnings.catch_warnings():
        # orbax starts JAX's threads; workers that are forked afterwards never use JAX.
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        warnings.filterwarnings("ignore", r"This process .* use of fork\(\)", DeprecationWarning)
        return _trial(setting(number), folder)


def _trial(chosen: Setting, folder: Path) -> str | None:
    order, seen = Recorder(), Recorder()
    expected = run(chosen, None, order)
    for place, ending in zip(chosen.places, chosen.endings, strict=True):
        seen.stop = Stop(place, ending, done=len(seen.batches), an_epoch=batches_of(chosen))
        try:
            run(chosen, folder, seen)
        except (KeyboardInterrupt, Crash):
            continue
        break  # it came to its end before
    seen.stop = None
    found = run(chosen, folder, seen)
    try:
        same(found, expected)
    except AssertionError as error:
        return f"{chosen}: {error}"
    return None if seen.batches == order.batches else f"{chosen}: other batches, or another order"


# --- the run ----------------------------------------------------------------------------------------------------------


class Crash(Exception):
    """Of a callback."""


class Stop:
    """Ends a part of a run at one place.

    Args:
        place, ending: of `PLACES` and `ENDINGS`.
        done: batches before this part.
        an_epoch: batches an epoch.
    """

    def __init__(self, place: str, ending: str, *, done: int, an_epoch: int) -> None:
        self.ending = ending
        self.place = place
        left = an_epoch - done % an_epoch
        ahead = {"first batch": left + 1, "middle": max(1, left // 2), "last batch": left, "in a window": left + 2}
        self.at = ahead.get(place)
        self.calls = 0

    def step(self) -> None:
        """Before each train step."""
        self.calls += 1
        if self.calls == self.at and self.ending == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)

    def callback(self, event: Any) -> None:
        """The other places; and an error comes out of a callback, since one in a step has no update."""
        evaluated = isinstance(event, events.EvalStepEnd) and event.index == 1 and self.place == "in an evaluation"
        ended = isinstance(event, events.EpochEnd) and self.place == "after the epoch"
        stepped = isinstance(event, events.StepEnd) and self.at is not None and self.calls >= self.at
        if evaluated or ended or (stepped and self.ending == "an error"):
            if self.ending == "an error":
                raise Crash
            signal.raise_signal(signal.SIGINT)


class Recorder:
    """What went through the train step, and who ends it."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.stop: Stop | None = None

    def around(self, program: Program) -> Program:
        def train_step(state: Any, batch: Any) -> Any:
            if self.stop is not None:
                self.stop.step()
            self.batches.append(zlib.crc32(batch[0].numpy().tobytes()))
            return program.train_step(state, batch)

        return program._replace(train_step=train_step)


def run(chosen: Setting, folder: Path | None, recorder: Recorder) -> Any:
    """To the end, or to where the recorder stops it."""
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy})
    rate = schedules.warmup_cosine(peak=0.01, warmup=12, total=40)
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate))
    made = ps.program(tiny_convnet(), objective, tx, precision="16-mixed", ema=0.9, accumulate=3)
    program = recorder.around(made)
    loaders = {"train": loader(chosen), "val": [image_batch(6, 9), image_batch(3, 10)]}
    callbacks = [recorder.stop.callback] if recorder.stop is not None else []
    # A recorder is no pure step: it would take fit's looks at its first calls for calls.
    common: dict[str, Any] = {"log_every": 2, "check_every": None, **chosen.fields}
    if folder is None:
        return fit(program.init(seed=5), loaders, program, **common)
    with ps.Snapshots(folder, every_steps=chosen.every_steps) as snapshots:
        state = program.init(seed=5)
        return fit(state, loaders, program, snapshots=snapshots, callbacks=callbacks, **common)


# --- the loaders ------------------------------------------------------------------------------------------------------


def batches_of(chosen: Setting) -> int:
    return ITEMS // SIZE if chosen.drop_last or chosen.loader in ("stream", "own state") else -(-ITEMS // SIZE)


class Images(Dataset[Any]):
    """Items; with noise where they are augmented, drawn from each of the three generators."""

    def __init__(self, noisy: bool) -> None:
        self.rows = image_batch(ITEMS)
        self.noisy = noisy

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.rows[0][index], self.rows[1][index]
        if self.noisy:
            x = x + 0.1 * torch.randn(x.shape) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return x, y


class Stream:
    """Batches without indices and without a state, drawn anew each epoch."""

    def __iter__(self) -> Iterator[Any]:
        return (image_batch(SIZE, int(torch.randint(0, 10**6, ()))) for _ in range(ITEMS // SIZE))


class OwnState:
    """A loader that knows its place, in the protocol of torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.epoch, self.place = -1, ITEMS // SIZE
        self.entered = False

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]
        self.entered = self.place < ITEMS // SIZE

    def __len__(self) -> int:
        return ITEMS // SIZE

    def __iter__(self) -> Iterator[Any]:
        if not self.entered:
            self.epoch, self.place = self.epoch + 1, 0
        self.entered = False
        while self.place < ITEMS // SIZE:
            self.place += 1
            yield image_batch(SIZE, 100 * self.epoch + self.place)


def loader(chosen: Setting) -> Any:
    if chosen.loader == "stream":
        return Stream()
    kind: Callable[..., Any] = DataLoader
    if chosen.loader == "own state":
        try:
            from torchdata.stateful_dataloader import StatefulDataLoader as kind  # pyright: ignore
        except ImportError:
            return OwnState()
    settings: dict[str, Any] = {"num_workers": chosen.workers, "persistent_workers": chosen.persistent}
    if chosen.prefetch is not None:
        settings["prefetch_factor"] = chosen.prefetch
    drop_last = chosen.drop_last or chosen.loader == "own state"
    data = Images(noisy=chosen.loader == "augmented")
    return kind(data, SIZE, shuffle=chosen.shuffle, drop_last=drop_last, **settings)
