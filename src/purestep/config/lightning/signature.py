"""The arguments of Lightning's Trainer, and what every reader of them needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import ConfigError

HERE = "from_lightning"

DEFAULTS: dict[str, Any] = {
    "accelerator": "auto",
    "strategy": "auto",
    "devices": "auto",
    "num_nodes": 1,
    "precision": None,
    "logger": None,
    "callbacks": None,
    "fast_dev_run": False,
    "max_epochs": None,
    "min_epochs": None,
    "max_steps": -1,
    "min_steps": None,
    "max_time": None,
    "limit_train_batches": None,
    "limit_val_batches": None,
    "limit_test_batches": None,
    "limit_predict_batches": None,
    "overfit_batches": 0.0,
    "val_check_interval": None,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": None,
    "log_every_n_steps": None,
    "enable_checkpointing": None,
    "enable_progress_bar": None,
    "enable_model_summary": None,
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
    "deterministic": None,
    "benchmark": None,
    "inference_mode": True,
    "use_distributed_sampler": True,
    "profiler": None,
    "detect_anomaly": False,
    "barebones": False,
    "plugins": None,
    "sync_batchnorm": False,
    "reload_dataloaders_every_n_epochs": 0,
    "default_root_dir": None,
    "enable_autolog_hparams": True,
    "model_registry": None,
}
"""The signature of Lightning 2.6."""

EXAMPLES = {
    "accumulate_grad_batches": "accumulate_grad_batches=4",
    "check_val_every_n_epoch": "check_val_every_n_epoch=1",
    "fast_dev_run": "fast_dev_run=True",
    "limit_train_batches": "limit_train_batches=0.1, or 10",
    "limit_val_batches": "limit_val_batches=0.1, or 10",
    "log_every_n_steps": "log_every_n_steps=50",
    "max_epochs": "max_epochs=10",
    "max_steps": "max_steps=1000",
    "max_time": 'max_time="00:08:00:00"',
    "min_epochs": "min_epochs=1",
    "min_steps": "min_steps=1",
    "overfit_batches": "overfit_batches=10",
    "val_check_interval": "val_check_interval=1.0 for each epoch, 100 for every 100 batches",
}


def checked(name: str, value: Any, check: Callable[[Any], Any]) -> Any:
    """``check(value)``, its complaint with the argument's name and an example.

    Raises:
        ConfigError: what ``check`` raised as a ValueError.
    """
    try:
        return check(value)
    except ValueError as error:
        raise ConfigError(f"{name}={value!r}: {error}", where=HERE, hint=EXAMPLES.get(name, f"{name}=True")) from None
