"""DP-SGD: steps whose update reveals little about any single example, and what a run of them has revealed."""

from __future__ import annotations

import importlib
import math
from typing import Annotated, Any, Literal, TypeAlias

import torch

from .analysis import chunks
from .errors import ConfigError, StepContractError
from .metrics import mean as means
from .metrics import merge
from .state import at_least, in_range, known_keywords
from .step import Micro, Parts, check_divisible, finite_mean, parts_for, wide
from .types import Form, Mean, Metrics, Program, TrainState

_Noise: TypeAlias = Annotated[float, in_range(0.0, ends="[)")]


@known_keywords
def dp_sgd(
    program: Program,
    *,
    max_norm: Annotated[float, in_range(0.0)],
    noise_multiplier: _Noise,
    expected_batch_size: Annotated[int, at_least(1)] | None = None,
    chunk_size: Annotated[int, at_least(1)] | None = None,
) -> Program:
    r"""Return the program with gradients that are clipped for each example and noised (Abadi et al., 2016).

    In place of the batch's gradient, the optimizer gets
    :math:`(\sum_i g_i \min(1, C / (|g_i| + 10^{-6})) + \sigma C z) / B`: the gradients :math:`g_i` of single examples
    as in `per_example`, the norm over all parameters together, standard normal numbers z, and the expected batch size
    B. These are the formulas of Opacus. Everything else is the program's: optimizer, EMA, `fit`, snapshots, compiling.
    ``grad_norm`` is that of the noised gradient; the metric ``clipped`` is the share of examples whose gradient was
    clipped.

    z comes from the generator that the state's key seeds, so a run can be resumed and repeated. It is not a
    cryptographic generator, and who knows the seed knows the noise: keep ``program.init(seed=...)`` and the snapshots
    secret where that matters. Metrics (the loss, ``clipped``, whether a loss is finite) contain no noise and are not
    private.

    The guarantee of `epsilon` is for batches to which each example belongs independently with probability
    ``sample_rate`` (Poisson sampling); pass ``expected_batch_size`` for those, which also may be empty.

    Args:
        program: from `program`, not distributed, with ``accumulate=1`` and ``microbatches=1`` (``chunk_size`` bounds
            the memory), without ``sam``, loss scaling and ``reduction="sum"``. BatchNorm raises an error, as in
            `per_example`.
        max_norm: C > 0.
        noise_multiplier: :math:`\sigma` >= 0; 0: no noise and no privacy.
        expected_batch_size: B >= 1. None: the number of rows of each batch.
        chunk_size: number of examples whose gradients are in memory at a time; None: as many as have 256 MiB of
            gradients.

    Raises:
        ConfigError: an argument is out of range, or the program is none of these.
        DataError, StepContractError: from train_step: as `per_example`; the objective has a metric ``clipped``.

    Example:
        >>> import torch, purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> private = ps.privacy.dp_sgd(program, max_norm=1.0, noise_multiplier=1.1)
        >>> state, metrics = private.train_step(private.init(device="cpu"), (torch.randn(8, 2), torch.randn(8, 1)))
        >>> 0 <= float(metrics["clipped"]) <= 1
        True
    """
    where = "privacy.dp_sgd"
    parts = parts_for(program, where)
    check_divisible(parts, where)
    for name, value in (("accumulate", parts.spec.accumulate), ("microbatches", parts.spec.microbatches)):
        if value > 1:
            raise ConfigError(
                f"the program has {name}={value}: each part would get noise of its own",
                where=where,
                hint=f"set {name}=1 and pass a whole batch to each call; chunk_size=... bounds the memory",
            )
    if parts.spec.is_sharp:
        raise ConfigError("the program has sam=: its second gradient is not clipped", where=where, hint="sam=None")
    if parts.spec.is_scaled:
        raise ConfigError("the program scales its loss", where=where, hint='precision="bf16-mixed", or "32-true"')

    def gradients(parts: Parts, form: Form, state: TrainState, batch: Any, context: tuple[Any, ...]) -> Micro:
        if form.exchange is not None:
            raise ConfigError("the program runs on several processes", where=where, hint="use it in one process")
        params = form.expand(state.params)
        named = state._replace(params=params)
        total = {name: torch.zeros(p.shape, dtype=wide(p.dtype), device=p.device) for name, p in params.items()}
        zero = torch.zeros((), dtype=torch.float32, device=state.step.device)
        metrics: Metrics = {"loss": Mean(zero, zero), "clipped": Mean(zero, zero)}
        rows = 0
        for chunk in chunks(parts, named, batch, context, chunk_size=chunk_size, train=True, where=where):
            factors = (max_norm / (chunk.norms + 1e-6)).clamp(max=1.0)
            for name, grad in chunk.grads.items():
                total[name] = total[name] + torch.einsum("n,n...->...", factors.to(grad.dtype), grad)
            rows += chunk.norms.shape[0]
            if "clipped" in chunk.metrics:
                text = "privacy.dp_sgd has a metric of this name"
                raise StepContractError(text, where="metrics/clipped", hint="choose another name")
            loss = Mean((means.at_least_float32(chunk.losses) * chunk.weights).sum(), chunk.weights.sum())
            clipped = Mean((factors < 1).float().sum(), torch.ones_like(factors, dtype=torch.float32).sum())
            metrics = merge(metrics, {**chunk.metrics, "loss": loss, "clipped": clipped})
        size = expected_batch_size or max(1, rows)
        loss = metrics["loss"]
        metrics = {name: means.with_sums(mean, *finite_mean(*mean)) for name, mean in metrics.items()}
        metrics |= {name: Mean(value, torch.ones_like(value)) for name, value in parts.spec.values_at(state).items()}
        one = torch.ones_like(zero)
        mean = torch.where(loss.weight > 0, loss.total / loss.weight, torch.zeros_like(loss.total))
        if noise_multiplier:  # not randn * std: one operation rounds as Opacus does
            std = noise_multiplier * max_norm
            total = {name: grad + torch.empty_like(grad).normal_(0.0, std) for name, grad in total.items()}
        grads = {name: (grad / size).to(params[name].dtype) for name, grad in total.items()}
        return Micro(form.collect(grads), mean, one, state.buffers, metrics, frozenset(), one)

    return parts.with_gradients(gradients)


@known_keywords
def epsilon(
    *,
    steps: Annotated[int, at_least(0)],
    sample_rate: Annotated[float, in_range(0.0, 1.0, "(]")],
    noise_multiplier: _Noise,
    delta: Annotated[float, in_range(0.0, 1.0)],
    accountant: Literal["prv", "rdp"] = "prv",
) -> float:
    r"""Compute the privacy budget that a run of `dp_sgd` spends: the :math:`\epsilon` of :math:`(\epsilon, \delta)`.

    Opacus computes it: ``pip install 'purestep[privacy]'``.

    Args:
        steps: number of calls of train_step, at least 0.
        sample_rate: probability with which an example is in a batch, in (0, 1].
        noise_multiplier: as in `dp_sgd`; 0 gives inf.
        delta: in (0, 1), less than 1 / the number of examples.
        accountant: "prv" (Gopi et al., 2021), or "rdp" (Mironov, 2017), which is looser and faster.

    Raises:
        ConfigError: an argument is out of range, Opacus is not installed, or its accountant fails: "prv" does for
            little noise and for a tiny delta.

    Example:
        >>> epsilon(steps=1000, sample_rate=0.01, noise_multiplier=0.0, delta=1e-5)
        inf
    """
    where = "privacy.epsilon"
    if steps == 0:
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    try:
        accountants: Any = importlib.import_module("opacus.accountants")
    except ImportError as error:
        raise ConfigError("Opacus is not installed", where=where, hint="pip install 'purestep[privacy]'") from error
    found: Any = accountants.create_accountant(accountant)
    found.history.append((noise_multiplier, sample_rate, steps))
    try:
        return max(0.0, float(found.get_epsilon(delta)))
    except (ArithmeticError, MemoryError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"noise_multiplier={noise_multiplier}, delta={delta}: the accountant {accountant!r} fails: {error}",
            where=where,
            hint='accountant="rdp"' if accountant == "prv" else "a larger noise_multiplier, or a larger delta",
        ) from error
