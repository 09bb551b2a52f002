"""Hardware for the planner: rates, memory, links and prices of GPU types, from a catalogue that users extend."""

import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from threefold.config.loading import read_document
from threefold.errors import UserError
from threefold.files import of_user, shown
from threefold.host import usable_cores
from threefold.plugins import one_of


@dataclass(frozen=True)
class Link:
    """Link of a device: bytes per second in one direction, and seconds of latency per step of a collective."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Achievable:
    """Fractions of a device's peak rates that programs achieve, and their fixed overheads in seconds.

    Attributes:
        matrix: fraction of the matrix rate in products that are large in every dim.
        matrix_depth: inner dim at which a product spends as long on start and end as on multiplying.
        attention, attention_backward: best fraction of the matrix rate in each pass of fused (flash) attention.
        attention_length: positions at which attention reaches half of its best, as diagonal blocks are half masked.
        attention_depth: head dim at which attention reaches half of its best.
        general_attention: part of these fractions that kernels not tuned for the device type reach.
        memory: fraction of the memory bandwidth in elementwise work on large tensors.
        link, network: fraction of the bandwidth inside a node, and between nodes, in large collectives.
        kernel: time between the end of one kernel and the start of the next.
        block: Python and autograd per block and micro-batch, both passes, where no kernels hide them.
        sharded_block, tensor_block, context_block: further time per block on a CPU with `parallel.zero` 3, tensor or
            context parallelism, including the latency of its collectives but not the transfer of their bytes.
        step: time of a step that no other cause accounts for.
    """

    matrix: float = 0.75
    matrix_depth: float = 200.0
    attention: float = 0.5
    attention_backward: float = 0.4
    attention_length: float = 500.0
    attention_depth: float = 20.0
    general_attention: float = 1.0
    memory: float = 0.8
    link: float = 0.75
    network: float = 0.8
    kernel: float = 4e-6
    block: float = 0.0
    sharded_block: float = 0.0
    tensor_block: float = 0.0
    context_block: float = 0.0
    step: float = 0.02


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Device type in nodes of several devices; rates are peaks, in operations or bytes per second.

    Attributes:
        title: name for people.
        matrix_rates: rates of matrix products by dtype: `fp32`, `tf32`, `bf16`, `fp16`, `fp8`, `fp64`.
        multiprocessors: multiprocessors that share the tiles of a matrix product; 1 where tiles make no difference.
        inside, between: links between the devices of a node, and between nodes.
        system: training system whose kernels and overlap an estimate assumes by default.
        gpt_system: default system for GPTs, as most were trained on the device in earlier years; empty for `system`.
        sharded_system: default system with `parallel.zero` 2 or 3; empty for `system`.
        uncertainty: largest error of most estimates (9 of 10 published steps, if any), as a fraction of the step.
        cores: CPU cores, which the ranks of a node take in turns if they are more; 0 if each rank has its own.
        dollars_per_hour: price of a device; None if unknown.
    """

    name: str
    title: str
    device: str = "cuda"
    matrix_rates: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    multiprocessors: int = 1
    gpus_per_node: int
    inside: Link
    between: Link
    achievable: Achievable = field(default_factory=Achievable)
    system: str = "own"
    gpt_system: str = ""
    sharded_system: str = ""
    uncertainty: float = 0.3
    cores: int = 0
    dollars_per_hour: float | None = None
    sources: tuple[str, ...] = ()

    def matrix_rate(self, dtype: str) -> float:
        """Return the peak operations per second of matrix products in a dtype."""
        if dtype not in self.matrix_rates:
            known = ", ".join(self.matrix_rates)
            raise UserError(f"The hardware {self.name} has no matrix rate for {dtype}; use one of {known}.")
        return self.matrix_rates[dtype]

    def fills_nodes(self, ranks: int) -> bool:
        """Return whether `ranks` devices fit in one node or fill whole nodes, as rented; always true for a CPU."""
        return self.device == "cpu" or ranks <= self.gpus_per_node or ranks % self.gpus_per_node == 0

    def shared_by(self, ranks: int) -> "Hardware":
        """Return a CPU's share for each of `ranks` ranks on one host; a GPU is unchanged."""
        if self.device != "cpu" or ranks == self.gpus_per_node:
            return self
        fraction = self.gpus_per_node / ranks
        # Ranks that are more than the cores take turns on them.
        before, after = (max(1.0, count / self.cores) if self.cores else 1.0 for count in (self.gpus_per_node, ranks))
        faster = before / after
        link = Link(self.inside.bandwidth * faster, self.inside.latency / faster)
        of_host = ("kernel", "block", "sharded_block", "tensor_block", "context_block")
        return replace(
            self,
            matrix_rates={dtype: rate * fraction for dtype, rate in self.matrix_rates.items()},
            memory_bytes=int(self.memory_bytes * fraction),
            memory_bandwidth=self.memory_bandwidth * fraction,
            gpus_per_node=ranks,
            inside=link,
            between=link,
            achievable=replace(self.achievable, **{name: getattr(self.achievable, name) / faster for name in of_host}),
        )

    def __hash__(self) -> int:
        return hash((self.name, self.gpus_per_node))


_DTYPES: Final = ("fp8", "fp16", "bf16", "tf32", "fp32", "fp64")
_WHOLE: Final = ("memory_bytes", "multiprocessors", "gpus_per_node", "cores")
_TEXTS: Final = ("title", "device", "system", "gpt_system", "sharded_system")
_FRACTIONS: Final = ("matrix", "memory", "link", "network", "uncertainty")
"""Figures that are at most 1. Attention may exceed 1, since `threefold doctor` measures it next to small products."""
_ZERO_ALLOWED: Final = (
    *("latency", "matrix_depth", "attention_length", "attention_depth", "kernel", "block", "sharded_block"),
    *("tensor_block", "context_block", "step", "cores", "dollars_per_hour"),
)

Entries = dict[str, dict[str, Any]]


def read_entries(path: Path) -> Entries:
    """Read the entries of a YAML file by name, keeping their `like` keys."""
    value, _ = read_document(path, "the hardware entry ")
    if not isinstance(value, dict) or not value or not all(isinstance(entry, dict) for entry in value.values()):
        raise UserError(f"{shown(path)} must hold hardware entries, each a name with figures such as memory_bytes.")
    return {str(name): entry for name, entry in value.items()}


def one_entry(given: object, names: list[str]) -> str:
    """Return the end of a message: one of `names`, with the first that begins with `given` or else the nearest."""
    begun = [name for name in names if name.startswith(str(given))]
    return f"one of {', '.join(names)}; the nearest is {begun[0]}" if begun else one_of(given, names)


def _expanded(name: str, entries: Entries, where: str, depth: int = 0) -> dict[str, Any]:
    """Return the figures of an entry merged over those of the entry that `like` names."""
    given = dict(entries[name])
    base = given.pop("like", None)
    if base is None:
        return given
    if not isinstance(base, str) or base not in entries or depth > len(entries):
        others = [other for other in entries if other != name]
        raise UserError(f"{where}, {name}: like is {shown(repr(base))} but must be {one_entry(base, others)}.")
    inherited = _expanded(base, entries, where, depth + 1)
    for key in ("matrix_rates", "inside", "between", "achievable"):
        if isinstance(given.get(key), dict) and isinstance(inherited.get(key), dict):
            given[key] = {**inherited[key], **given[key]}
    if "sources" in given and isinstance(given["sources"], list):
        given["sources"] = [*inherited.get("sources", ()), *given["sources"]]
    return {**inherited, **given}


def build(name: str, entries: Entries, where: str) -> Hardware:
    values, where = _expanded(name, entries, where), f"{where}, {name}"
    known = fields(Hardware)[1:]
    _require_known(values, [*(each.name for each in known), "like"], where)
    for each in known:
        if each.name not in values and each.default is MISSING and each.default_factory is MISSING:
            raise UserError(f"{where}: {each.name} is missing; give it, or take over an entry with like: h100.")
    made: dict[str, Any] = {"name": name}
    for key, value in values.items():
        if key in _TEXTS:
            if not isinstance(value, str):
                raise UserError(f"{where}: {key} is {shown(repr(value))} but must be text.")
            if key == "device" and value not in ("cuda", "cpu"):
                raise UserError(f"{where}: device is {shown(value)} but must be cuda or cpu.")
            made[key] = value
        elif key in ("inside", "between"):
            made[key] = Link(**_numbers(values, key, where, ["bandwidth", "latency"], whole=True))
        elif key == "matrix_rates":
            made[key] = _numbers(values, key, where, list(_DTYPES))
        elif key == "sources":
            if not isinstance(value or (), list | tuple):
                raise UserError(f"{where}: sources is {shown(repr(value))} but must be a list of text.")
            made[key] = tuple(map(str, value or ()))
        elif key == "achievable" and value is not None:
            made[key] = Achievable(**_numbers(values, key, where, [each.name for each in fields(Achievable)]))
        elif value is not None or key not in ("achievable", "dollars_per_hour"):
            number = _number(values, key, where)
            made[key] = int(number) if key in _WHOLE else number
    return Hardware(**made)


def _numbers(
    values: Mapping[str, Any], key: str, where: str, known: list[str], whole: bool = False
) -> dict[str, float]:
    """Return the figures of a nested mapping, all of the known ones if `whole`."""
    if not isinstance(values[key], dict) or not values[key]:
        raise UserError(f"{where}: {key} is {shown(repr(values[key]))} but must be a mapping of figures.")
    _require_known(values[key], known, f"{where}, {key}")
    return {name: _number(values[key], name, f"{where}, {key}") for name in (known if whole else values[key])}


def _number(values: Mapping[str, Any], key: str, where: str) -> float:
    if key not in values:
        raise UserError(f"{where}: {key} is missing.")
    value = values[key]
    least = "at least 0" if key in _ZERO_ALLOWED else "above 0"
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise UserError(f"{where}: {key} is {shown(repr(value))} but must be a number {least}.")
    if (value == 0 and key not in _ZERO_ALLOWED) or (key in _WHOLE and value != int(value)):
        raise UserError(f"{where}: {key} is {value:g} but must be a {'whole ' * (key in _WHOLE)}number {least}.")
    if value > 1 and key in _FRACTIONS:
        raise UserError(f"{where}: {key} is {value:g} but must be a share of at most 1; use 1.")
    return float(value)


def _require_known(values: Mapping[str, Any], known: list[str], where: str) -> None:
    for key in values:
        if key not in known:
            raise UserError(f"{where}: {shown(str(key))} is not a figure of it; it must be {one_of(key, known)}.")


def as_yaml(hardware: Hardware) -> str:
    """Return an entry as YAML that `read_entries` reads."""
    import yaml

    values = asdict(hardware)
    name = values.pop("name")
    values["matrix_rates"], values["sources"] = dict(values["matrix_rates"]), list(values["sources"])
    return yaml.safe_dump({name: values}, sort_keys=False, allow_unicode=True, width=120)


THIS_MACHINE: Final = "this-machine"
"""Name of the entry that `threefold doctor` measures and saves."""


def user_folder() -> Path | None:
    """Return the folder of the user's entries, each in NAME.yaml; None for a user without a home folder."""
    from platformdirs import user_config_path

    return None if (folder := of_user(lambda: user_config_path("threefold"))) is None else folder / "hardware"


def _custom_file(name: str) -> Path | None:
    """Return the file of an entry of the user; None if there is none that can be read."""
    folder = user_folder()
    path = None if folder is None else folder / f"{name}.yaml"
    return path if path is not None and os.path.isfile(path) and os.access(path, os.R_OK) else None


@cache
def _entries() -> Entries:
    """Read the package's catalogue."""
    return read_entries(Path(__file__).with_name("hardware.yaml"))


def hardware_names() -> list[str]:
    """List every name that `find_hardware` knows: the package's, then those of the user's folder."""
    custom = list[str]()
    if (folder := user_folder()) is not None:
        with suppress(OSError):
            custom = sorted(name.removesuffix(".yaml") for name in os.listdir(folder) if name.endswith(".yaml"))
    return [*_entries(), *(name for name in custom if name not in _entries())]


def find_hardware(name_or_path: str) -> Hardware:
    """Find an entry by its name in any case, where the user's folder takes precedence over the catalogue, or the one
    entry of a `.yaml` file, which may be `like` one of the catalogue."""
    if name_or_path.lower().endswith((".yaml", ".yml")):
        return _of_file(Path(name_or_path), "")
    name = name_or_path.lower()
    custom = _custom_file(name) if Path(name).name == name else None
    if custom is not None:
        return _of_file(custom, name)
    if name in _entries():
        return build(name, _entries(), "catalogue")
    if name == THIS_MACHINE:
        raise UserError(f"The hardware {THIS_MACHINE} is not measured yet; run threefold doctor, which saves it.")
    choice = one_entry(name, hardware_names())
    called = shown(name_or_path) or repr(name_or_path)
    if Path(f"{name_or_path}.yaml").is_file():
        raise UserError(f"The hardware {called} is not an entry, but there is a file {called}.yaml here; use that.")
    raise UserError(f"The hardware {called} is unknown; give the path of a YAML file or {choice}.")


def _of_file(path: Path, wanted: str) -> Hardware:
    entries = read_entries(path)
    name = wanted if wanted in entries else next(iter(entries))
    if len(entries) > 1 and name != wanted:
        raise UserError(f"{shown(path)} holds {len(entries)} hardware entries; leave one in a file.")
    return build(name, {**_entries(), **entries}, shown(path))


def save_hardware(hardware: Hardware, path: Path | None = None) -> Path:
    """Write an entry to a file, by default the one of its name in the user's folder, and return the path."""
    folder = user_folder()
    if path is None and folder is None:
        raise UserError(
            "The hardware entry has no folder, as this user has no home (no HOME, no entry in /etc/passwd); set "
            "XDG_CONFIG_HOME to a folder, or name a file for it."
        )
    target = path or (folder or Path()) / f"{hardware.name}.yaml"
    try:
        if path is None:
            target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(as_yaml(hardware), encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write the hardware entry {shown(target)}: {error.strerror}.") from None
    return target


def cpu_name() -> str:
    """Return this machine's processor and the number of usable cores, which identify a saved entry."""
    told = ""
    with suppress(OSError):  # not Linux
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^(?:model name|Processor|cpu model)\s*:\s*(.+)$", told, re.MULTILINE)
    name = " ".join(found[1].split()) if found else platform.processor() or platform.machine()
    cores = usable_cores()
    return f"{name}, {cores} {'core' if cores == 1 else 'cores'}"


def _readable(name: str) -> Hardware | None:
    """Find an entry; None if it is invalid, which must not end a run."""
    with suppress(UserError):
        return find_hardware(name)
    return None


def saved_entry(title: str) -> Hardware | None:
    """Return the entry that `threefold doctor` saved; None if there is none or its title differs from `title`."""
    entry = _readable(THIS_MACHINE) if _custom_file(THIS_MACHINE) else None
    return entry if entry is not None and entry.title == title else None


def entry_of_gpu(name: str, memory: int) -> Hardware | None:
    """Find the entry of a GPU type by the driver's name for it, such as `NVIDIA A100-SXM4-80GB`, and its memory, which
    distinguishes types of the same name; None if the catalogue has none."""
    words = set(re.split(r"[\s_/-]+", name.lower()))
    if words & {"pcie", "nvl", "max-q", "laptop"}:  # slower than the entry of their type
        return saved_entry(name)
    of_type = [each for each in hardware_names() if each != THIS_MACHINE and each.split("-")[0] in words]
    entries = [entry for each in of_type if (entry := _readable(each)) is not None and entry.device == "cuda"]
    return min(entries, key=lambda entry: abs(entry.memory_bytes - memory), default=saved_entry(name))


def peak_rate(dtype: str, device: str, local_ranks: int, gpu: tuple[str, int] | None = None) -> float | None:
    """Return the peak FLOP/s of one local rank's matrix products, if known; `gpu` is its GPU's name and bytes of
    memory."""
    if device == "cuda":
        entry = entry_of_gpu(*gpu) if gpu is not None else None
        return entry.matrix_rates.get(dtype) if entry is not None else None
    entry = saved_entry(cpu_name())
    if entry is None or entry.device != "cpu" or dtype not in entry.matrix_rates:
        return None
    return entry.matrix_rates[dtype] * entry.gpus_per_node / local_ranks
