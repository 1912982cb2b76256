"""JAX, flax and optax: one jitted step with its state donated."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .. import works
from ..works import Batch, Recipe, Work
from .base import Contestant, Entry, Stepping

DONATED = "JAX, donated"


def environment(threads: int | None) -> dict[str, str]:
    """Variables that have to be set before JAX is loaded, for that many threads."""
    found = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if threads == 1:
        found |= {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "NPROC": "1"}
    return found


def _step(flax_models: Any, model: Any, recipe: Recipe, optimizer: Any) -> Callable[..., Any]:
    jax, jnp, optax = (importlib.import_module(name) for name in ("jax", "jax.numpy", "optax"))
    apply = flax_models.applying(model)

    def objective(params: Any, stats: Any, inputs: Any, classes: Any) -> Any:
        logits, stats = apply(params, stats, inputs)
        each = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), classes)
        return each.mean(), stats

    def step(state: Any, inputs: Any, classes: Any) -> Any:
        params, stats, opt_state, shadow, count = state
        (loss, stats), gradients = jax.value_and_grad(objective, has_aux=True)(params, stats, inputs, classes)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        weight = jnp.where(count == 0, 1.0, 1 - recipe.ema)
        shadow = jax.tree.map(lambda old, new: old + weight * (new - old), shadow, params)
        return (params, stats, opt_state, shadow, count + 1), loss

    return step


def _optimizer(recipe: Recipe) -> Any:
    jax, optax = (importlib.import_module(name) for name in ("jax", "optax"))

    def mask(params: Any) -> Any:
        return jax.tree.map(lambda p: p.ndim >= 2, params)

    chosen = {"b1": recipe.b1, "b2": recipe.b2, "eps": recipe.eps, "weight_decay": recipe.weight_decay, "mask": mask}
    return optax.chain(optax.clip_by_global_norm(recipe.clip), optax.adamw(recipe.learning_rate, **chosen))


def stats(module: torch.nn.Module) -> Any:
    """BatchNorm's running statistics as flax begins with them."""
    jnp = importlib.import_module("jax.numpy")
    norms = {n: m for n, m in module.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
    return {
        name.replace(".", "_"): {"mean": jnp.zeros(norm.num_features), "var": jnp.ones(norm.num_features)}
        for name, norm in norms.items()
    }


def _place(device: torch.device) -> Any:
    jax = importlib.import_module("jax")
    platform = "gpu" if device.type == "cuda" else "cpu"
    try:
        return jax.devices(platform)[0]
    except RuntimeError as error:
        raise ModuleNotFoundError(f"jax without support for the {platform}") from error


class Prepared(NamedTuple):
    """The pieces of a run."""

    step: Callable[..., Any]  # (state, inputs, classes) -> (state, loss), not jitted
    state: Any  # (params, stats, opt_state, shadow, count)
    batches: list[Any]
    to_torch: Callable[[Any], Any]  # params -> named tensors


def prepared(work: Work, device: torch.device) -> Prepared:
    """Model, state and batches of a work on the device."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax, jnp = (importlib.import_module(name) for name in ("jax", "jax.numpy"))
    flax_models = importlib.import_module("benchmarks.contestants.flax_models")
    if not work.bf16:
        jax.config.update("jax_default_matmul_precision", "highest")  # float32 as torch's, on a GPU too
    place = _place(device)
    module = works.seeded_model(work)
    model = flax_models.like(module, bf16=work.bf16, cuda=device.type == "cuda")
    optimizer = _optimizer(work.recipe)
    # Weights are copied from the host into memory of their own: a donated buffer must not be anybody else's.
    params, shadow = (jax.device_put(flax_models.to_flax(module), place) for _ in range(2))
    state = (params, jax.device_put(stats(module), place), optimizer.init(params), shadow, jnp.zeros((), jnp.int32))

    def moved(batch: Batch) -> Any:
        inputs, classes = flax_models.to_images(batch[0]), batch[1]
        kind = jnp.int32 if not inputs.is_floating_point() else jnp.float32
        return (
            jax.device_put(inputs.numpy().astype(kind), place),
            jax.device_put(classes.numpy().astype(jnp.int32), place),
        )

    return Prepared(
        _step(flax_models, model, work.recipe, optimizer),
        jax.device_put(state, place),
        [moved(batch) for batch in works.batches(work)],
        lambda found: flax_models.to_torch(found, module),
    )


def _jax(work: Work, device: torch.device) -> Contestant:
    made = prepared(work, device)
    jax, state = importlib.import_module("jax"), made.state
    step = jax.jit(made.step, donate_argnums=0)

    def one(batch: Any) -> Any:
        nonlocal state
        state, loss = step(state, *batch)
        return loss

    return Stepping(
        DONATED,
        one,
        made.batches,
        weights=lambda: made.to_torch(state[0]),
        shadow=lambda: made.to_torch(state[3]),
        wait=lambda: jax.block_until_ready(state),
    )


def _fits(work: Work, device: torch.device) -> bool:
    del device  # jax says itself whether it has one
    return work.flax


ENTRIES = (Entry(DONATED, ("jax", "flax", "optax"), _jax, _fits),)
