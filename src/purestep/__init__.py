"""purestep: a training library for PyTorch in which the training state is a value.

    program = ps.program(model, ps.supervised(criterion), ps.optim.adamw(3e-4), precision="bf16-mixed", ema=0.999)
    state = program.init(seed=0)
    state, metrics = program.train_step(state, batch)          # pure: the state that went in is what it was
    result = ps.fit(state, {"train": train, "val": val}, program, epochs=10, snapshots="runs/name")

The map, from the bottom up; imports run only downward. Above the line there is no I/O, no clock, no logging, and the
global random generators are touched only inside `rng.scoped`.

    errors  types                                        the vocabulary
    tree  rng                                            trees (optree), random keys
    model  transform  schedules  ema  scaler             a module as a function, gradient transformations, ...
    precision  metrics  objective  stopping
    optim  step  packed                                  named optimizers, the train step, its flat form
    compile                                              one graph, donation
    -----------------------------------------------------------------------------------------------------
    files  events  config  signals  data                 atomic files, what fit tells, settings, loaders
    purity  anomaly                                      what a step must not do; where a nan comes from
    snapshot  export  sinks  incident                    orbax, weights in and out, progress, a step written down
    loop  testing  bench                                 fit, checks for unit tests, benchmarks

Every public name is listed in README.md beside this file.
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

from . import ema as ema
from . import errors as errors
from . import events as events
from . import metrics as metrics
from . import optim as optim
from . import precision as precision
from . import rng as rng
from . import scaler as scaler
from . import schedules as schedules
from . import sinks as sinks
from . import testing as testing
from . import tree as tree
from .bench import benchmark as benchmark
from .bench import find_batch_size as find_batch_size
from .compile import compile_program as compile_program
from .compile import compile_step as compile_step
from .data import to_device as to_device
from .ema import view as view
from .events import Stop as Stop
from .export import export_weights as export_weights
from .export import load_into as load_into
from .loop import FitResult as FitResult
from .loop import evaluate as evaluate
from .loop import fit as fit
from .loop import run_epoch as run_epoch
from .objective import hf_loss as hf_loss
from .objective import masked_mse as masked_mse
from .objective import masked_reconstruction as masked_reconstruction
from .objective import masked_sse as masked_sse
from .objective import supervised as supervised
from .precision import auto_device as auto_device
from .snapshot import Snapshots as Snapshots
from .step import program as program
from .stopping import EarlyStopping as EarlyStopping
from .tree import clone as clone
from .types import Empty as Empty
from .types import Loss as Loss
from .types import Mean as Mean
from .types import Metrics as Metrics
from .types import Model as Model
from .types import Program as Program
from .types import TrainState as TrainState

__version__ = "0.1.0"

if _typing.TYPE_CHECKING:
    from . import config as config
    from .config import FitConfig as FitConfig
else:

    def __getattr__(name):
        """`config` and `FitConfig` where they are asked for: pydantic takes as long to load as all of this."""
        if name not in ("config", "FitConfig"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = _importlib.import_module(".config", __name__)
        return found if name == "config" else found.FitConfig

    def __dir__():
        return sorted({*globals(), "config", "FitConfig"})
