"""Hardware for the planner: rates, memory, links and prices of GPU types, from a catalogue that users extend."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from threefold.config.document import read_document
from threefold.errors import UserError
from threefold.files import shown
from threefold.host import usable_cores
from threefold.plugins import one_of


@dataclass(frozen=True)
class Link:
    """A connection of one device to others.

    Attributes:
        bandwidth: bytes per second, of each device in one direction.
        latency: seconds that one step of a collective takes whatever its size.
    """

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Achievable:
    """What programs reach of the peaks of a device.

    Attributes:
        matrix: fraction of the matrix rate, in products that are large in every dim.
        matrix_depth: the inner dim at which a product spends as long on its start and end as on multiplying.
        attention: fraction of the matrix rate, in the forward pass of fused (flash) attention, at its best.
        attention_backward: the same, of its backward pass.
        attention_length: positions at which it reaches half of that, as blocks of the diagonal are half masked.
        attention_depth: width of a head at which it reaches half of that.
        general_attention: share of these that kernels reach which are not written for the type of device.
        memory: fraction of the memory bandwidth, in work on each element of a large tensor.
        link: fraction of the bandwidth inside a node, in large collectives.
        network: the same between nodes.
        kernel: seconds between the end of one kernel and the start of the next.
        block: seconds that a block's forward and backward pass of a micro-batch take beside its kernels: Python and
            autograd, where nothing hides them.
        sharded_block, tensor_block, context_block: seconds by which they take longer on a CPU with `parallel.zero` 3,
            tensor or context parallelism, with the latency of their collectives but without what their bytes take.
        step: seconds of a step that no other cause accounts for.
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


@dataclass(frozen=True)
class Hardware:
    """A type of device, in nodes of several.

    Attributes:
        name: in the catalogue.
        title: for people.
        device: `cuda` or `cpu`.
        matrix_rates: peak operations per second by dtype: `fp32`, `tf32`, `bf16`, `fp16`, `fp8`, `fp64`.
        memory_bytes: of a device.
        memory_bandwidth: bytes per second.
        multiprocessors: that share the tiles of a matrix product; 1 where tiles make no difference.
        gpus_per_node: devices of a node.
        inside: the links between the devices of a node.
        between: the links from node to node.
        achievable: what programs reach of these peaks.
        system: the training system whose kernels and overlap an estimate takes by default.
        gpt_system: the same for GPTs, where most of those trained on it were of earlier years; empty for `system`.
        sharded_system: the same with `parallel.zero` 2 or 3; empty for `system`.
        uncertainty: by which share of the step most estimates are wrong at most; 9 of 10 published steps, where there
            are any.
        cores: of a CPU, which the ranks of a node take in turns where they are more; 0 where each has its own.
        dollars_per_hour: of a device; None where it is not known.
        sources: of the figures.
    """

    name: str
    title: str
    device: str
    matrix_rates: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    multiprocessors: int
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
        """Peak operations per second of matrix products in a dtype.

        Raises:
            UserError: the device has no such products.
        """
        if dtype not in self.matrix_rates:
            known = ", ".join(self.matrix_rates)
            raise UserError(f"The hardware {self.name} has no matrix rate for {dtype}; use one of {known}.")
        return self.matrix_rates[dtype]

    def fills_nodes(self, ranks: int) -> bool:
        """Whether so many devices are a part of one node or whole nodes, as they are rented; of a CPU always."""
        return self.device == "cpu" or ranks <= self.gpus_per_node or ranks % self.gpus_per_node == 0

    def shared_by(self, ranks: int) -> "Hardware":
        """What each of so many ranks of one host has of a CPU, whose cores and memory they share; a GPU as it is."""
        if self.device != "cpu" or ranks == self.gpus_per_node:
            return self
        share = self.gpus_per_node / ranks
        faster = self._turns(self.gpus_per_node) / self._turns(ranks)
        link = Link(self.inside.bandwidth * faster, self.inside.latency / faster)
        reached = self.achievable
        return replace(
            self,
            matrix_rates={dtype: rate * share for dtype, rate in self.matrix_rates.items()},
            memory_bytes=int(self.memory_bytes * share),
            memory_bandwidth=self.memory_bandwidth * share,
            gpus_per_node=ranks,
            inside=link,
            between=link,
            achievable=replace(
                reached,
                kernel=reached.kernel / faster,
                block=reached.block / faster,
                sharded_block=reached.sharded_block / faster,
                tensor_block=reached.tensor_block / faster,
                context_block=reached.context_block / faster,
            ),
        )

    def _turns(self, ranks: int) -> float:
        """How many ranks take turns on a core."""
        return max(1.0, ranks / self.cores) if self.cores else 1.0

    def __hash__(self) -> int:
        return hash((self.name, self.gpus_per_node))


_DTYPES: Final = ("fp8", "fp16", "bf16", "tf32", "fp32", "fp64")
_WHOLE: Final = ("memory_bytes", "multiprocessors", "gpus_per_node", "cores")
_TEXTS: Final = ("title", "device", "system", "gpt_system", "sharded_system")
_DEVICES: Final = ("cuda", "cpu")
_UNLESS_GIVEN: Final = {
    "device": "cuda",
    "multiprocessors": 1,
    "system": "own",
    "gpt_system": "",
    "sharded_system": "",
    "uncertainty": 0.3,
    "cores": 0,
}
_FRACTIONS: Final = ("matrix", "memory", "link", "network", "uncertainty")
"""Shares of which none is above 1; that of attention, which doctor measures beside small products, may be."""
_ZERO_ALLOWED: Final = (
    "latency",
    "matrix_depth",
    "attention_length",
    "attention_depth",
    "kernel",
    "block",
    "sharded_block",
    "tensor_block",
    "context_block",
    "step",
    "cores",
    "dollars_per_hour",
)

Entries = dict[str, dict[str, Any]]


def read_entries(path: Path) -> Entries:
    """The entries of a YAML file by name, `like` among their keys.

    Raises:
        UserError: the file cannot be read, or is no mapping of names to mappings.
    """
    value, _ = read_document(path, "the hardware entry ")
    if not isinstance(value, dict) or not value or not all(isinstance(entry, dict) for entry in value.values()):
        raise UserError(f"{shown(path)} must hold hardware entries, each a name with figures such as memory_bytes.")
    return {str(name): entry for name, entry in value.items()}


def one_entry(given: object, names: list[str]) -> str:
    """What a name must be that is none of `names`, with the nearest: if any begins with what is given, that one."""
    begun = [name for name in names if name.startswith(str(given))]
    return f"one of {', '.join(names)}; the nearest is {begun[0]}" if begun else one_of(given, names)


def build(name: str, entries: Entries, where: str) -> Hardware:
    """An entry as `Hardware`.

    Args:
        name: in `entries`.
        entries: all that `like` may name.
        where: the file, for sentences.

    Raises:
        UserError: a figure is missing, unknown, or no number above 0.
    """
    return _hardware(name, {**_UNLESS_GIVEN, **_expanded(name, entries, where)}, f"{where}, {name}")


def _expanded(name: str, entries: Entries, where: str, depth: int = 0) -> dict[str, Any]:
    """The figures of an entry with those of the entry that `like` names."""
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


def _hardware(name: str, values: dict[str, Any], where: str) -> Hardware:
    known = [each.name for each in fields(Hardware) if each.name != "name"]
    _require_known(values, [*known, "like"], where)
    for needed in known:
        if needed not in values and needed not in ("achievable", "dollars_per_hour", "sources"):
            raise UserError(f"{where}: {needed} is missing; give it, or take over an entry with like: h100.")
    for key in _TEXTS:
        if not isinstance(values[key], str):
            raise UserError(f"{where}: {key} is {shown(repr(values[key]))} but must be text.")
    if values["device"] not in _DEVICES:
        raise UserError(f"{where}: device is {shown(values['device'])} but must be cuda or cpu.")
    rates = _mapping(values, "matrix_rates", where)
    _require_known(rates, list(_DTYPES), f"{where}, matrix_rates")
    price, sources = values.get("dollars_per_hour"), values.get("sources") or ()
    if not isinstance(sources, list | tuple):
        raise UserError(f"{where}: sources is {shown(repr(sources))} but must be a list of text.")
    reached = _mapping(values, "achievable", where) if values.get("achievable") is not None else {}
    _require_known(reached, [each.name for each in fields(Achievable)], f"{where}, achievable")
    return Hardware(
        name=name,
        title=values["title"],
        device=values["device"],
        matrix_rates={dtype: _number(rates, dtype, f"{where}, matrix_rates") for dtype in rates},
        memory_bytes=int(_number(values, "memory_bytes", where)),
        memory_bandwidth=_number(values, "memory_bandwidth", where),
        multiprocessors=int(_number(values, "multiprocessors", where)),
        gpus_per_node=int(_number(values, "gpus_per_node", where)),
        inside=_link(values, "inside", where),
        between=_link(values, "between", where),
        achievable=Achievable(**{key: _number(reached, key, f"{where}, achievable") for key in reached}),
        system=values["system"],
        gpt_system=values["gpt_system"],
        sharded_system=values["sharded_system"],
        uncertainty=_number(values, "uncertainty", where),
        cores=int(_number(values, "cores", where)),
        dollars_per_hour=None if price is None else _number(values, "dollars_per_hour", where),
        sources=tuple(str(source) for source in sources),
    )


def _link(values: dict[str, Any], key: str, where: str) -> Link:
    link, where = _mapping(values, key, where), f"{where}, {key}"
    _require_known(link, ["bandwidth", "latency"], where)
    return Link(_number(link, "bandwidth", where), _number(link, "latency", where))


def _mapping(values: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    if not isinstance(values[key], dict) or not values[key]:
        raise UserError(f"{where}: {key} is {shown(repr(values[key]))} but must be a mapping of figures.")
    return dict(values[key])


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
            raise UserError(f"{where}: {shown(str(key))} is no figure of it; it must be {one_of(key, known)}.")


def as_yaml(hardware: Hardware) -> str:
    """An entry as `read_entries` reads it."""
    import yaml

    values = asdict(hardware)
    name = values.pop("name")
    values["matrix_rates"], values["sources"] = dict(values["matrix_rates"]), list(values["sources"])
    return yaml.safe_dump({name: values}, sort_keys=False, allow_unicode=True, width=120)


THIS_MACHINE: Final = "this-machine"
"""The entry that `threefold doctor` measures and saves."""
_CATALOGUE: Final = Path(__file__).with_name("hardware.yaml")
_SUFFIXES: Final = (".yaml", ".yml")


def user_folder() -> Path:
    """Where a user's own entries are, each NAME.yaml."""
    from platformdirs import user_config_path

    return user_config_path("threefold") / "hardware"


@lru_cache(1)
def _entries() -> Entries:
    """Those of the package, which do not change while it runs."""
    return read_entries(_CATALOGUE)


def hardware_names() -> list[str]:
    """Every name that `find_hardware` knows, those of the user's folder after those of the package."""
    own = sorted(path.stem for path in user_folder().glob("*.yaml")) if user_folder().is_dir() else []
    return [*_entries(), *(name for name in own if name not in _entries())]


def find_hardware(name_or_path: str) -> Hardware:
    """The entry of a name, which the user's folder may replace, or the one entry of a YAML file.

    Args:
        name_or_path: a name of the catalogue or of the user's folder, in any case; or the path of a `.yaml` file whose
            entry may be `like` one of the catalogue.

    Raises:
        UserError: there is no such entry, or it has a mistake.
    """
    if name_or_path.lower().endswith(_SUFFIXES):
        return _of_file(Path(name_or_path), "")
    name = name_or_path.lower()
    own = user_folder() / f"{name}.yaml"
    if Path(name).name == name and own.is_file():
        return _of_file(own, name)
    if name in _entries():
        return build(name, _entries(), "catalogue")
    if name == THIS_MACHINE:
        raise UserError(f"The hardware {THIS_MACHINE} is not measured yet; run threefold doctor, which saves it.")
    choice = one_entry(name, hardware_names())
    called = shown(name_or_path) or repr(name_or_path)
    if Path(f"{name_or_path}.yaml").is_file():
        raise UserError(f"The hardware {called} is no entry, but there is a file {called}.yaml here; use that.")
    raise UserError(f"The hardware {called} is unknown; give the path of a YAML file or {choice}.")


def _of_file(path: Path, wanted: str) -> Hardware:
    entries = read_entries(path)
    name = wanted if wanted in entries else next(iter(entries))
    if len(entries) > 1 and name != wanted:
        raise UserError(f"{shown(path)} holds {len(entries)} hardware entries; leave one in a file.")
    return build(name, {**_entries(), **entries}, shown(path))


def save_hardware(hardware: Hardware) -> Path:
    """Write an entry to the user's folder, in place of one of its name.

    Raises:
        UserError: the folder cannot be written.
    """
    path = user_folder() / f"{hardware.name}.yaml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_yaml(hardware), encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write the hardware entry {shown(path)}: {error.strerror}.") from None
    return path


_OTHER_VARIANTS = ("pcie", "nvl", "max-q", "laptop")
"""In names of GPUs that are slower than the entry of their type."""


def cpu_name() -> str:
    """The processor of this machine, with the cores that this process may use; by this a saved entry is recognised."""
    found = re.search(r"^(?:model name|Processor|cpu model)\s*:\s*(.+)$", _processors(), re.MULTILINE)
    name = " ".join(found[1].split()) if found else _architecture()
    cores = usable_cores()
    return f"{name}, {cores} {'core' if cores == 1 else 'cores'}"


def saved_entry(title: str) -> Hardware | None:
    """What `threefold doctor` has measured; None where it has not, or on a machine of another `title`."""
    if not (user_folder() / f"{THIS_MACHINE}.yaml").is_file():
        return None
    entry = _readable(THIS_MACHINE)
    return entry if entry is not None and entry.title == title else None


def entry_of_gpu(name: str, memory: int) -> Hardware | None:
    """The entry of a type of GPU; None where the catalogue has none.

    Args:
        name: as the driver has it, such as `NVIDIA A100-SXM4-80GB`.
        memory: bytes, by which types of the same name are told apart.
    """
    words = set(re.split(r"[\s_/-]+", name.lower()))
    if any(variant in words for variant in _OTHER_VARIANTS):
        return saved_entry(name)
    of_type = [each for each in hardware_names() if each != THIS_MACHINE and each.split("-")[0] in words]
    entries = [entry for each in of_type if (entry := _readable(each)) is not None and entry.device == "cuda"]
    return min(entries, key=lambda entry: abs(entry.memory_bytes - memory), default=saved_entry(name))


def peak_rate(dtype: str, device: str, local_ranks: int, gpu: tuple[str, int] | None = None) -> float | None:
    """FLOP/s of matrix products that a rank of this machine can reach at most; None where that is not known.

    Args:
        dtype: as `precision.dtype`.
        device: `cpu` or `cuda`.
        local_ranks: of this machine; they share the cores of a CPU.
        gpu: name and bytes of memory of the rank's GPU.
    """
    if device == "cuda":
        entry = entry_of_gpu(*gpu) if gpu is not None else None
        return entry.matrix_rates.get(dtype) if entry is not None else None
    entry = saved_entry(cpu_name())
    if entry is None or entry.device != "cpu" or dtype not in entry.matrix_rates:
        return None
    return entry.matrix_rates[dtype] * entry.gpus_per_node / local_ranks


def _readable(name: str) -> Hardware | None:
    """An entry; None where it has a mistake, for which no run ends."""
    try:
        return find_hardware(name)
    except UserError:
        return None


def _processors() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ""


def _architecture() -> str:
    import platform

    return platform.processor() or platform.machine()
