"""Step time against the number of processes, on paper: what a step computes and sends, over what an H100 cluster can.

    python benchmarks/scaling.py

Only the bytes are measured: `run.py --only parallel` counts one gradient collective of 4 bytes a parameter
(``replicate``), or a gather and a scatter of 4 bytes a parameter (``shard``); ``units`` gathers twice. A step computes
6 floating point operations for each parameter and token (Kaplan et al., 2020), and 2 more where blocks are computed
again. Bandwidths are those of the data sheets, times 0.8 for a ring.
"""

from __future__ import annotations

from typing import NamedTuple

GIGA = 1e9


class Model(NamedTuple):
    """A model, and the tokens that a GPU computes."""

    name: str
    parameters: float
    tokens: int  # that one GPU computes in a step


class Cluster(NamedTuple):
    """The GPUs and their links."""

    flops: float = 989e12  # of an H100 SXM, dense bfloat16 (data sheet)
    utilization: float = 0.45  # share of it that a transformer's step reaches (assumed)
    inside: float = 0.8 * 450e9  # B/s of a GPU over NVLink 4, one direction (data sheet x ring)
    between: float = 0.8 * 50e9  # B/s of a GPU between nodes: an adapter of 400 Gb/s each (data sheet x ring)
    node: int = 8  # GPUs
    latency: float = 15e-6  # s, of one hop of a ring (assumed)
    memory: float = 80e9  # B


class Step(NamedTuple):
    """One way to train on W GPUs."""

    compute: float  # s
    communication: float  # s
    rest: float  # B on each GPU between steps

    @property
    def serial(self) -> float:
        """Seconds if nothing overlaps, as it is today: a collective waits before the next operation."""
        return self.compute + self.communication

    @property
    def hidden(self) -> float:
        """Seconds if all communication ran beside the computation: the bound of what overlap could gain."""
        return max(self.compute, self.communication)


MODELS = (Model("GPT-2 1.5 B", 1.56e9, 8 * 1024), Model("7 B", 6.74e9, 2 * 4096))
WAYS = ("replicate", "shard", "shard, units", "hybrid, shard in a node")
STATE = 16  # B a parameter: weights, two moments and an average in float32


def ring(size: float, width: int, bandwidth: float, latency: float) -> float:
    """Seconds of an all_gather or reduce_scatter of ``size`` bytes over ``width`` GPUs; an all_reduce is two of them.

    Each GPU sends (W - 1) / W of the bytes in W - 1 hops.
    """
    return size * (width - 1) / width / bandwidth + (width - 1) * latency


def step(model: Model, way: str, world: int, cluster: Cluster | None = None) -> Step:
    """The time and memory of one step.

    Args:
        model: with the tokens of one GPU: the batch grows with the number of GPUs.
        way: one of `WAYS`.
        world: GPUs.
        cluster: None: an H100 cluster.
    """
    cluster = cluster or Cluster()
    size = 4 * model.parameters
    recompute = 8 if way == "shard, units" else 6
    compute = recompute * model.parameters * model.tokens / (cluster.flops * cluster.utilization)
    # Rings over several nodes use all adapters of a node at once.
    whole = min(cluster.inside, cluster.node * cluster.between) if world > cluster.node else cluster.inside
    once = ring(size, world, whole, cluster.latency)
    if way == "replicate":
        return Step(compute, 2 * once, STATE * model.parameters)
    if way == "shard":
        return Step(compute, 2 * once, STATE * model.parameters / world)
    if way == "shard, units":
        return Step(compute, 3 * once, STATE * model.parameters / world)
    inner = min(world, cluster.node)
    # A gather and a scatter inside the node, and an all_reduce of a GPU's piece over its own adapter.
    communication = 2 * ring(size, inner, cluster.inside, cluster.latency)
    communication += 2 * ring(size / inner, world // inner, cluster.between, cluster.latency)
    return Step(compute, communication, STATE * model.parameters / inner)


def table() -> str:
    """All models, ways and numbers of GPUs, as Markdown."""
    lines = ["| model | way | GPUs | compute ms | communication ms | serial ms | if hidden ms | GB at rest |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for model in MODELS:
        for way in WAYS:
            for world in (8, 16, 64, 512):
                found = step(model, way, world)
                times = [1e3 * each for each in (found.compute, found.communication, found.serial, found.hidden)]
                numbers = " | ".join(f"{value:.0f}" for value in times)
                lines.append(f"| {model.name} | {way} | {world} | {numbers} | {found.rest / GIGA:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
