"""purestep: a training library for PyTorch in which the training state is a value.

    program = ps.program(model, ps.supervised(criterion), ps.optim.adamw(3e-4), precision="bf16-mixed", ema=0.999)
    state = program.init(seed=0)
    state, metrics = program.train_step(state, batch)          # pure: the state that went in is what it was
    result = ps.fit(state, {"train": train, "val": val}, program, epochs=10, snapshots="runs/name")

The map, from the bottom up; imports run only downward. Above the line there is no I/O, no clock, no logging, and the
global random generators are touched only inside `rng.scoped`. One exception: `compile` starts the C++ compiler and
keeps its code in the compiler's cache directory.

    errors  types                                     the vocabulary
    torch_ext                                         what torch hides or lacks: generators, traces, layouts, foreach
    tree  rng                                         trees (optree), keys
    state                                             other forms of one state; checks of arguments
    model                                             a module as a pure function of its tensors
    optim  schedules  ema  scaler  precision          optimizers and their algebra, ...
    metrics  stopping  objective                      objective imports metrics
    step                                              the train step
    analysis                                          gradients of single examples, their noise
    ensembles                                         many models in one step
    compile                                           one graph, donation; compile/cpu: a plug-in for x86
    curvature  privacy                                second derivatives; DP-SGD
    --------------------------------------------------------------------------------------------------
    parallel                                          several processes: meshes, placements, collectives
    files  events  config  data                       atomic files, events of fit, settings, loaders
    snapshot  sinks  diagnostics                      orbax, progress, impurity and nan
    loop  tools  testing  report                      fit, benchmarks and export, checks for unit tests, runs for people
    __main__                                          python -m purestep

`import purestep` loads the modules above the line down to `step`; the others load at first use (`ps.fit`), so that
a script or a worker process waits only for what it uses.

Every public name is listed in README.md beside this file.
"""

from __future__ import annotations

import importlib as _importlib
import logging as _logging
import typing as _typing

from . import ema as ema
from . import errors as errors
from . import metrics as metrics
from . import optim as optim
from . import rng as rng
from . import scaler as scaler
from . import schedules as schedules
from . import tree as tree
from .objective import hf_loss as hf_loss
from .objective import masked_mse as masked_mse
from .objective import masked_reconstruction as masked_reconstruction
from .objective import masked_sse as masked_sse
from .objective import supervised as supervised
from .precision import auto_device as auto_device
from .state import member as member
from .state import stack as stack
from .state import view as view
from .step import Sam as Sam
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


def _cleaned(record: _logging.LogRecord) -> bool:
    record.msg, record.args = errors.printable(record.getMessage()), ()
    return True


_logging.getLogger("purestep").addFilter(_cleaned)  # adding it twice has no effect

if _typing.TYPE_CHECKING:
    from . import config as config
    from . import curvature as curvature
    from . import events as events
    from . import parallel as parallel
    from . import privacy as privacy
    from . import sinks as sinks
    from . import testing as testing
    from .analysis import gradient_noise_scale as gradient_noise_scale
    from .analysis import per_example as per_example
    from .compile import compile_program as compile_program
    from .compile import compile_step as compile_step
    from .compile import donate as donate
    from .config import FitConfig as FitConfig
    from .data import open_feed as open_feed
    from .data import to_device as to_device
    from .ensembles import ensemble as ensemble
    from .events import Stop as Stop
    from .loop import FitResult as FitResult
    from .loop import evaluate as evaluate
    from .loop import fit as fit
    from .loop import run_epoch as run_epoch
    from .parallel import distribute as distribute
    from .parallel import full as full
    from .snapshot import Snapshots as Snapshots
    from .tools import benchmark as benchmark
    from .tools import export_weights as export_weights
    from .tools import find_batch_size as find_batch_size
    from .tools import find_learning_rate as find_learning_rate
    from .tools import load_into as load_into
    from .tools import predict as predict
    from .tools import reduce_on_plateau as reduce_on_plateau
    from .tools import refresh_batchnorm as refresh_batchnorm
    from .tools import save_pretrained as save_pretrained
    from .tools import summary as summary
else:
    _LATE = {
        "analysis": ("gradient_noise_scale", "per_example"),
        "compile": ("compile_program", "compile_step", "donate"),
        "config": ("FitConfig",),
        "curvature": (),
        "data": ("open_feed", "to_device"),
        "ensembles": ("ensemble",),
        "events": ("Stop",),
        "loop": ("FitResult", "evaluate", "fit", "run_epoch"),
        "parallel": ("distribute", "full"),
        "privacy": (),
        "sinks": (),
        "snapshot": ("Snapshots",),
        "testing": (),
        "tools": (
            *("benchmark", "export_weights", "find_batch_size", "find_learning_rate", "load_into", "predict"),
            *("reduce_on_plateau", "refresh_batchnorm", "save_pretrained", "summary"),
        ),
    }
    _HOME = {name: module for module, names in _LATE.items() for name in names}

    def __getattr__(name):
        """Load a name of `_HOME`, or a module of the map, at its first use."""
        home = _HOME.get(name, name)
        try:
            module = None if name.startswith("_") else _importlib.import_module(f".{home}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{home}":
                raise
            module = None
        if module is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(module, name) if name in _HOME else module)

    def __dir__():
        return sorted({*globals(), *_LATE, *_HOME})
