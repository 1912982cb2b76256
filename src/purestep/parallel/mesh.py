"""Processes in a mesh: torchrun's environment, process groups, and what goes wrong while they start."""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import itertools
import json
import os
import platform
import socket
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from importlib import metadata
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..errors import ConfigError, RankError
from ..state import check_count, is_number

AXES = ("data", "shard", "tensor")
"""The dimensions of a mesh, slowest first: neighbours in the last one are neighbours in rank."""
_WHERE = "parallel.start"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")
"""Variables that launchers set to one value for the processes of one run."""
_LAUNCHERS = {
    "srun": ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpirun (MPICH)": ("PMI_SIZE", "PMI_RANK"),
    "mpirun (MVAPICH)": ("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
}
"""Launchers without torchrun's variables -> their variables: the number of processes, the number of this one, others.
A job's own script has the first of srun's, too, but no step."""
_SRUN = (
    "srun --ntasks-per-node=1 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=2 --rdzv-backend=c10d "
    "--rdzv-endpoint=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):29500 train.py"
)
_NCCL_GRACE = 30.0  # seconds for the host group's error to arrive first
_LONGEST = 1000  # letters of an error
_GRACE = 5.0  # seconds in which the process with the store waits for what the others have to say


class Mesh(NamedTuple):
    """The processes of a run, by axis. Each process has one row of a batch's ``data * shard`` shares.

    Example:
        >>> import purestep as ps
        >>> with ps.parallel.start() as mesh:
        ...     mesh.size, mesh.batch_size, mesh.batch_rank
        (1, 1, 0)

    Args:
        data: processes that hold the same state and compute different examples.
        shard: processes that hold pieces of the state and compute different examples.
        tensor: processes that compute parts of the same layers, of the same examples.
        rank: of this process, in [0, size).
        device_type: "cuda" or "cpu".
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    rank: int = 0
    device_type: str = "cpu"

    @property
    def device_mesh(self) -> Any:
        """Torch's `DeviceMesh` of the open mesh, with these three dimensions; None in a mesh of one.

        It holds the process groups, whose threads must end before the interpreter does. So it is None, and held by no
        `Mesh`, once the ``with`` block of `start` is left.
        """
        groups = current()
        return None if groups is None else groups.device_mesh

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.data * self.shard * self.tensor

    @property
    def batch_size(self) -> int:
        """The number of shares of a batch: ``data * shard``."""
        return self.data * self.shard

    @property
    def batch_rank(self) -> int:
        """The share of a batch that this process computes."""
        return self.rank // self.tensor

    def coordinate(self, axis: str) -> int:
        """The place of this process on an axis."""
        places = {
            "data": self.rank // (self.shard * self.tensor),
            "shard": self.rank // self.tensor % self.shard,
            "tensor": self.rank % self.tensor,
            "batch": self.batch_rank,
            "world": self.rank,
        }
        return places[axis]

    def width(self, axis: str) -> int:
        """The number of processes on an axis: "data", "shard", "tensor", "batch" or "world"."""
        return {"batch": self.batch_size, "world": self.size}.get(axis) or getattr(self, axis)


class Groups(NamedTuple):
    """The process groups of the mesh that this process has started."""

    mesh: Mesh
    device_mesh: Any  # torch's DeviceMesh; None in a mesh of one
    by_axis: Mapping[str, Any]  # axis -> ProcessGroup, for axes of more than one process
    host: Any  # of all processes, on the CPU: for decisions of the host
    timeout: float = 600.0  # seconds
    opened: float = 0.0  # the time of `time.monotonic`
    store: Any = None  # in which a process that fails says so; None in a process group that the user has started


_started: list[Groups] = []
_starts = itertools.count()


def current() -> Groups | None:
    """The groups of the mesh that is open in this process; None outside of `start`."""
    return _started[-1] if _started else None


def here() -> Mesh:
    """The open mesh; outside of `start` a mesh of one."""
    return _started[-1].mesh if _started else Mesh()


def axis_mesh(axis: str) -> Any:
    """Torch's DeviceMesh of one axis of the open mesh. Raises the error of `group`."""
    group(axis)
    return _started[-1].device_mesh[axis]


def group(axis: str) -> Any:
    """The process group of an axis of the open mesh.

    Raises:
        RankError: no mesh with this axis is open.
    """
    found = None if not _started else _started[-1].by_axis.get(axis)
    if found is None:
        raise RankError(
            f"no open mesh has several processes on the axis {axis!r}",
            where="parallel",
            hint="call distributed steps inside `with ps.parallel.start(...) as mesh:`",
        )
    return found


@contextmanager
def start(*, data: int | None = None, shard: int = 1, tensor: int = 1, timeout: float = 600.0) -> Generator[Mesh]:
    """Start the process groups of a mesh, from torchrun's environment, and close them at the end of the ``with`` block.

    Example:
        >>> import purestep as ps
        >>> with ps.parallel.start(data=2, shard=2) as mesh:  # without torchrun
        ...     mesh.size
        1

    Alone, without torchrun, it is a mesh of one process, whatever the sizes are, and every program runs as it does
    without a mesh. The backend is NCCL on CUDA (each process takes the device of its ``LOCAL_RANK``), else gloo. A
    process group that you have started (`torch.distributed.init_process_group`) is used, and stays open. An error that
    leaves the block is recorded for torchrun, whose last lines name the process that failed first.

    Args:
        data: processes with different examples and the same state; None: all that the other axes leave.
        shard: processes with different examples that hold pieces of one state.
        tensor: processes that share the layers of one model.
        timeout: seconds, > 0, after which a collective whose peers do not answer raises. It must be longer than the
            difference between two processes' compile times, and than the slowest start of a process.

    Yields:
        The `Mesh`.

    Raises:
        ConfigError: a size or timeout out of range.
        RankError: a part of torchrun's variables is missing; srun or mpirun has started the processes; the sizes do not
            fit the number of processes; the port is taken; a process did not start in time; two processes have one
            rank; processes have different versions of Python, torch or purestep; a mesh is open already.
    """
    sizes: dict[str, Any] = {"data": 1 if data is None else data, "shard": shard, "tensor": tensor}
    check_count(_WHERE, least=1, **sizes)
    if not is_number(timeout) or not timeout > 0:
        raise ConfigError(f"timeout={timeout!r} must be a number of seconds", where=_WHERE, hint="pass timeout=600")
    if _started:
        raise RankError("a mesh is open already", where=_WHERE, hint="leave its `with` block first, or use it")
    environment, is_users = _environment(), dist.is_initialized()
    with ExitStack() as stack:
        found = Groups(Mesh(), None, MappingProxyType({}), None, timeout=timeout)
        if environment is not None:
            rank, count = environment
            sizes["data"] = _fitting(sizes, count, is_free=data is None)
            stack.enter_context(_on_loopback())
            store = stack.enter_context(_process_group(rank, count, timeout))
            with _joining(rank, count):
                found = _opened(Mesh(**sizes, rank=rank, device_type=_device_type()), timeout)
            found = found._replace(opened=time.monotonic(), store=store)
        _started.append(found)
        stack.callback(_started.remove, found)
        try:
            yield found.mesh
        except BaseException as error:
            if not (isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)):
                _record(error)
                _tell(found, error)
                # To close the groups would wait for the other processes.
                abort(found, but=dist.group.WORLD if is_users and not isinstance(error, RankError) else None)
            raise
        if is_users:
            _destroy(found)


def _destroy(found: Groups) -> None:
    """Destroy the groups of a mesh, whose threads must end, in a process group that the user has started and keeps."""
    axes = [] if found.device_mesh is None else [found.device_mesh.get_group(axis) for axis in AXES]
    for made in {id(group): group for group in (found.host, *found.by_axis.values(), *axes)}.values():
        if made is not None and made is not dist.group.WORLD:
            with contextlib.suppress(Exception):
                dist.destroy_process_group(made)


def _record(error: BaseException) -> None:
    """Record an error as torchrun's `record` does. Its last lines name the first one, so what another process has
    caused is none."""
    if not isinstance(error, RankError):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler  # late: only after an error

        get_error_handler().record_exception(error)


def _tell(groups: Groups, error: BaseException) -> None:
    """Store the first error of a run for the messages of the other processes."""
    if groups.store is None or isinstance(error, RankError):
        return
    with contextlib.suppress(Exception):  # the process with the store may be gone
        if groups.store.add("failures", 1) == 1:
            text = f"process {groups.mesh.rank} raised {type(error).__name__}: {error}"[:_LONGEST]
            groups.store.set("failure", json.dumps(text))


def told_failure(groups: Groups) -> str:
    """The first error of another process that `_tell` has stored; "" if there is none."""
    with contextlib.suppress(Exception):
        if groups.store is not None and groups.store.check(["failure"]):
            return str(json.loads(groups.store.get("failure")))[:_LONGEST]
    return ""


def abort(groups: Groups, but: Any = None) -> None:
    """End the GPU's pending collectives: another process is gone or this one fails, and later work would wait. ``but``:
    a group that is left as it is."""
    for group in {id(group): group for group in groups.by_axis.values()}.values():
        if groups.mesh.device_type == "cuda" and group is not but:
            with contextlib.suppress(Exception):
                group.abort()


def _device_type() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _environment() -> tuple[int, int] | None:
    """``(rank, world size)`` of the process group that the user has started, or from torchrun's variables; None if
    there are none.

    Raises:
        RankError: some are missing, or are no numbers; or another launcher has started several processes.
    """
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if not (os.environ.get("RANK") and os.environ.get("WORLD_SIZE")):
        _check_launcher()
    present, missing = ([name for name in _VARIABLES if bool(os.environ.get(name)) == there] for there in (True, False))
    if not present:
        return None
    hint = "start with `torchrun --nproc-per-node 2 train.py`"
    if missing:
        hint += ", which sets all of them; or unset them. Without them, each process would train another model"
        text = f"the environment has {', '.join(present)}, but not {', '.join(missing)}"
        raise RankError(text, where=_WHERE, hint=hint)
    texts = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not all(map(str.isdecimal, texts)) or int(texts[0]) >= int(texts[1]):
        raise RankError(f"RANK={texts[0]!r} of WORLD_SIZE={texts[1]!r}", where=_WHERE, hint=hint)
    return int(texts[0]), int(texts[1])


def _check_launcher() -> None:
    """Check that no other launcher has started this process as one of several, of which none would find the others.

    Raises:
        RankError: with the command that does.
    """
    for launcher, names in _LAUNCHERS.items():
        texts = [os.environ.get(name, "") for name in names]
        if all(texts) and texts[0].isdecimal() and int(texts[0]) > 1:
            command = _SRUN if launcher == "srun" else f"torchrun --nproc-per-node {texts[0]} train.py"
            raise RankError(
                f"{launcher} has started this process as {texts[1]} of {texts[0]}, without torchrun's variables: each "
                "process would train another model",
                where=_WHERE,
                hint=f"`{command}`; or unset {names[1]} where the processes are unrelated",
            )


def _fitting(sizes: Mapping[str, int], count: int, *, is_free: bool) -> int:
    """The size of the data axis.

    Raises:
        RankError: the sizes do not multiply to the number of processes.
    """
    inner = sizes["shard"] * sizes["tensor"]
    data = count // inner if is_free else sizes["data"]
    if data * inner == count:
        return data
    text = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "data")
    raise RankError(
        f"there are {count} processes, and a mesh of {text}",
        where=_WHERE,
        hint=f"start(data={max(count // inner, 1)}, ...), or torchrun with {sizes['data'] * inner} processes",
    )


@contextmanager
def _process_group(rank: int, count: int, timeout: float) -> Generator[Any]:
    """Start torch's default process group, unless the user has.

    Yields:
        The store of the group; None in one of the user.

    Raises:
        RankError: see `start`.
    """
    if dist.is_initialized():
        yield None
        return
    # Its functions have the group of all processes as a default argument. If a compiler imported it later, they would
    # hold the group until the interpreter ends, and a thread of the group that is at work then aborts the process.
    importlib.import_module("torch.distributed.nn.functional")

    limit = timedelta(seconds=timeout)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank % max(torch.cuda.device_count(), 1))))
    with _joining(rank, count):
        # torchrun keeps its store when it restarts the processes, and so does a process that starts a second mesh:
        # addresses of an earlier one are of no use. Processes of another run on this port find nothing here either.
        run = (os.environ.get(name, "") for name in _RUN)
        whole = _rendezvous(limit)  # where it fails, the start does not count
        prefix = "/".join(("purestep", *run, str(next(_starts))))
        store = torch.distributed.PrefixStore(prefix, whole)  # pyright: ignore[reportPrivateImportUsage]  # documented
        _meet(store, rank, count)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        limit = _device_limit(timeout, _device_type())
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
    try:
        yield store
    finally:
        with contextlib.suppress(Exception):  # a peer may be gone
            dist.destroy_process_group()


@contextmanager
def _joining(rank: int, count: int) -> Generator[None]:
    """Translate torch's errors of a start into one that says what to do.

    Raises:
        RankError: instead of them.
    """
    try:
        yield
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:  # DistError is a RuntimeError in some releases
        if isinstance(error, RankError):
            raise
        address = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise RankError(
            f"process {rank} of {count} could not join the others at {address}: {error}",
            where=_WHERE,
            hint="see the first error of the other processes. If there is none: a process did not start within the "
            "timeout, another program or run uses the port (`torchrun --standalone` finds a free one), or MASTER_ADDR "
            "is wrong",
        ) from error


_stores: dict[tuple[Any, ...], Any] = {}


def _rendezvous(limit: timedelta) -> Any:
    """The store of torchrun's address, one for all meshes of a process: one that leaves a mesh before the others would
    reach the store that process 0 is about to close.

    torch waits without end where another program takes the connection and says nothing. It waits in a thread here,
    which is left behind then.

    Raises:
        TimeoutError: nothing answered in time.
        Exception: torch's own.
    """
    key = (os.getpid(), *(os.environ.get(name) for name in (*_VARIABLES, *_RUN)))
    found: list[Any] = []

    def wait() -> None:
        try:
            found.append(_own_store(limit) or next(rendezvous("env://", timeout=limit))[0])
        except BaseException as error:  # raised below
            found.append(error)

    if key not in _stores:
        thread = threading.Thread(target=wait, name="purestep-rendezvous", daemon=True)
        thread.start()
        thread.join(limit.total_seconds() + _GRACE)
        if not found:
            raise TimeoutError(f"the program at this port did not answer within {limit.total_seconds():g} s")
        if isinstance(found[0], BaseException):
            raise found[0]
        _stores[key] = found[0]
    _stores[key].set_timeout(limit)
    return _stores[key]


def _own_store(limit: timedelta) -> Any:
    """The store of a run on one host, in its first process: it listens on the loopback interface, where torch's would
    listen on all. None in the other processes, for several hosts, and if torchrun has a store already."""
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if os.environ["RANK"] != "0" or is_torchruns or not _is_loopback():
        return None
    host, port, count = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    if not 0 < port < 1 << 16:  # torch's error says so
        return None
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family)
    except OSError:  # the port is taken: by another program, which torch's error says, or by this process
        return None
    store: Any = torch.distributed.TCPStore  # pyright: ignore[reportPrivateImportUsage]  # documented
    return store(host, port, count, True, limit, multi_tenant=True, master_listen_fd=listening.detach())


def _is_loopback() -> bool:
    """True if the first process is reached at an address of this host alone."""
    try:
        found = socket.getaddrinfo(os.environ["MASTER_ADDR"], None)
        return all(ipaddress.ip_address(address[0]).is_loopback for *_, address in found)
    except (OSError, KeyError, ValueError):
        return False


@contextmanager
def _on_loopback() -> Generator[None]:
    """Let gloo listen on the loopback interface of a run on one host, unless its variable is set."""
    name = "GLOO_SOCKET_IFNAME"
    is_one_host = _is_loopback() or os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE", "")
    interface = next((found for _, found in socket.if_nameindex() if found in ("lo", "lo0")), None)
    if not is_one_host or interface is None or name in os.environ:
        yield
        return
    os.environ[name] = interface
    try:
        yield
    finally:
        os.environ.pop(name, None)


def _facts(count: int) -> dict[str, Any]:
    """The versions and the run, which all processes must have in common."""
    try:
        own = metadata.version("purestep")
    except metadata.PackageNotFoundError:  # run from a source tree without installation
        own = "unknown"
    return {"WORLD_SIZE": count, "Python": platform.python_version(), "torch": torch.__version__, "purestep": own}


def _meet(store: Any, rank: int, count: int) -> None:
    """Check that each process is there once, and that all have the same facts.

    Raises:
        RankError: in every process that is there.
        DistError: a process did not start in time.
    """
    if store.add(f"joined/{rank}", 1) > 1:
        raise RankError(
            f"another process is number {rank} of {count} already: two runs use port {os.environ['MASTER_PORT']}, or "
            "two processes have this RANK",
            where=_WHERE,
            hint="a port for each run: `torchrun --standalone` finds a free one; --master-port sets it",
        )
    own = _facts(count)
    store.set(f"facts/{rank}", json.dumps(own))
    for other in range(count):
        theirs = json.loads(store.get(f"facts/{other}"))
        texts = [f"{name} is {own[name]} and {theirs.get(name)}" for name in own if own[name] != theirs.get(name)]
        if texts:
            store.add("differ", 1)
            end = time.monotonic() + _GRACE
            while rank == 0 and store.add("differ", 0) < count and time.monotonic() < end:
                time.sleep(0.02)  # the store ends with process 0: the others read it too
            raise RankError(
                f"processes {rank} and {other} differ: {', '.join(texts)}",
                where=_WHERE,
                hint="install the same versions on every machine, and start all processes by one launcher",
            )


def _opened(mesh: Mesh, timeout: float) -> Groups:
    """Create the groups of a mesh. Every process makes the same calls."""
    device_mesh = dist.device_mesh.init_device_mesh(
        mesh.device_type, tuple(mesh.width(axis) for axis in AXES), mesh_dim_names=AXES
    )
    limit = _device_limit(timeout, mesh.device_type)
    by_axis: dict[str, Any] = {axis: device_mesh.get_group(axis) for axis in AXES if mesh.width(axis) > 1}
    for number in range(mesh.tensor):
        members = [rank for rank in range(mesh.size) if rank % mesh.tensor == number]
        batch = dist.new_group(members, timeout=limit) if mesh.data > 1 and mesh.shard > 1 else None
        if batch is not None and mesh.rank in members:
            by_axis["batch"] = batch
    if "batch" not in by_axis and mesh.batch_size > 1:
        by_axis["batch"] = by_axis["data"] if mesh.data > 1 else by_axis["shard"]
    if mesh.size > 1:
        by_axis["world"] = dist.group.WORLD
    # torch 2.14 made this public. A mesh takes no timeout, and torch gives new groups its default of 10 or 30 minutes.
    limited: Any = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # pyright: ignore
    for found in by_axis.values():
        limited(limit, found)
    host = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout)) if mesh.size > 1 else None
    return Groups(mesh, device_mesh, MappingProxyType(by_axis), host, timeout=timeout)


def _device_limit(timeout: float, device_type: str) -> timedelta:
    """The timeout of collectives on the device. NCCL's watchdog ends the process and names no peer, so it waits longer
    than the host group, whose error does."""
    return timedelta(seconds=timeout + (_NCCL_GRACE if device_type == "cuda" else 0.0))
