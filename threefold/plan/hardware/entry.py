"""What the planner knows about a type of device: peak rates, memory, links, and the fractions of them that are reached.

All in SI units: bytes, seconds, floating-point operations. Peaks are those of data sheets; what programs reach of them
is a handful of constants for each type (`Achievable`), fitted to published training steps (docs/planner/cost-model.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from threefold.errors import UserError


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
