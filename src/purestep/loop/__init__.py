"""The outer loop: `fit`, `run_epoch`, `evaluate`; what goes with it before, during and after a run.

fit               the loop, from the restore to the end
loop_state        the state of the loop: plain numbers, one value
inputs            settings, program, state, loaders and sinks, checked and opened
train_call        the call of the train step, compiled if the settings say so
resume            the directory of snapshots, and the state and position to start from
saving            the snapshots of a run, and the state of its best row
policy            which row is the best, when to stop, when to evaluate
metric_queue      metrics that arrive late
accounting        metrics of calls as sums of the history, log lines, and updates that were applied; ensembles
callbacks         events to sinks and callbacks
signals           SIGINT, SIGTERM and SIGUSR1 during a run
environment       torch's switches during a run
nonfinite_steps   states that stopped at a number that is not finite
purity_check      a check of the first calls
decisions         what is decided between two calls, by one process or several
ranks             how many processes a run has, and what it needs for several
evaluate          `run_epoch`, `evaluate`

The path of a batch, with five files between a DataLoader with indices and the step; each file takes it from the next by
``next``::

    train_call                     calls the step; before that data/batch_spec checks the batch
    fit                            does what is due at this position, then takes the next batch
    data/device                    copies the batch to the device, two ahead on CUDA, and times the wait
    signals                        ends the wait at a signal
    data/feed                      names the batch in errors, and ends the epoch
    data/map_style                 draws the order; in a worker, seeds and loads the items
    data/workers                   the DataLoader that runs

For other loaders data/iterable takes the place of the last two. From the step back: `fit` replaces state and position,
`accounting` holds the metrics until `metric_queue` reads them.

The path of a snapshot, six files. `decisions` says if one is due by `Snapshots.due`, for several processes by one
clock. `_boundary` also saves for a best row, a stop or a limit, `_decide` for a signal::

    fit                            asks between two calls (`_decide`), and at a boundary (`_boundary`)
    saving                         `Checkpointer`: is this call saved? adds `LoopState` and what the feed stores
    snapshot/snapshots             the policy, and one save at a time
    snapshot/staging               copies the state to the host
    snapshot/writer                in a thread: writes, syncs, reads back, renames, deletes old ones
    snapshot/orbax_io              the arrays

A run that was killed inside an epoch finds its place in `resume.starting_point`: the newest whole snapshot has the
`LoopState` and what identifies the loader; a loader with ``state_dict`` gets its state back there. `fit._open_epoch`
enters the epoch at its batch: ``Feed.epoch(epoch, start)``.
"""

from __future__ import annotations

from .evaluate import check_pair as check_pair
from .evaluate import evaluate as evaluate
from .evaluate import pair_of as pair_of
from .evaluate import run_epoch as run_epoch
from .fit import fit as fit
from .loop_state import FitResult as FitResult
