"""Training systems, as the few features that decide which physical work a step does.

An estimate for a GPU is of a run with the kernels and the overlap that are usual on it, because that is what published
steps were measured with; this package's own kernels are the system `own`. A system only switches work on and off: no
rate and no fraction depends on it.
"""

from dataclasses import dataclass, field, replace
from typing import Final

from threefold.errors import UserError
from threefold.files import shown
from threefold.planner.activations import Attention, Kernels
from threefold.plugins import one_of


@dataclass(frozen=True)
class System:
    """How a training system computes a step.

    Attributes:
        name: of the system.
        flash: whether attention is one fused kernel; otherwise its weights go through memory.
        tuned_attention: whether that kernel is written for the type of GPU (cuDNN's, flash attention 3), not for all.
        drops_in_flash: whether that kernel has dropout.
        fused: whether bias, activation, dropout and residual sum, and rotation, are one kernel each.
        fused_norm: whether a norm is one kernel; otherwise one for each of its operations.
        fused_norm_recomputed: whether it is in blocks that are recomputed as a whole, too.
        fused_loss: whether softmax and cross-entropy go over the logits in one kernel each way.
        fused_gradients: whether products for weights add to the fp32 gradients themselves.
        gradient_bytes: of an element in the sum over data-parallel ranks; 0 for that of the gradients.
        overlap_tensor: whether tensor-parallel collectives run in pieces beside the products before and after them.
        overlap_tensor_backward: whether those of the backward pass run beside the products for weights.
        overlap_context: whether those of context parallelism run beside attention.
        overlap_gradients: whether sums of gradients run beside the last backward pass, and gathers of weights beside
            the first forward pass.
        scatters_sends: whether tensor ranks send a part each of what a stage hands on, and gather it there.
        overlap_sends: whether the pipeline sends and receives beside computing, with several stages a rank.
        sharded_optimizer: whether replicas share the optimizer's work even where `parallel.zero` is 0.
        replays_operations: whether `selective` recompute replays every second product and all work between, not only
            the attention core.
        narrow_gradients: dtypes of the computation in which gradients are added up themselves, not in fp32.
        whole_logits: whether every tensor-parallel rank gathers the logits of the whole vocabulary for the loss.
        data_inside_pipeline: whether ranks are ordered pp × dp × cp × tp, not dp × pp × cp × tp.
        chunked_loss: whether `train.loss_chunk_size` is followed.
        about: for people.
    """

    name: str
    flash: bool = True
    tuned_attention: bool = True
    drops_in_flash: bool = True
    fused: bool = True
    fused_norm: bool = True
    fused_norm_recomputed: bool = True
    fused_loss: bool = False
    fused_gradients: bool = True
    gradient_bytes: int = 0
    overlap_tensor: bool = False
    overlap_tensor_backward: bool = True
    overlap_context: bool = True
    overlap_gradients: bool = True
    scatters_sends: bool = True
    overlap_sends: bool = True
    sharded_optimizer: bool = False
    replays_operations: bool = False
    narrow_gradients: tuple[str, ...] = ()
    whole_logits: bool = False
    data_inside_pipeline: bool = True
    chunked_loss: bool = False
    about: str = ""

    def __hash__(self) -> int:
        return hash(self.name)


_CORE: Final = System(
    "megatron-core", about="Megatron-LM since 2023: flash attention, fused kernels, sums of gradients overlapped"
)
_OWN: Final = System(
    "own",
    tuned_attention=False,
    scatters_sends=False,
    drops_in_flash=False,
    fused=False,
    fused_norm=False,
    fused_gradients=False,
    overlap_tensor_backward=False,
    overlap_context=False,
    overlap_sends=False,
    data_inside_pipeline=False,
    chunked_loss=True,
    about="this package: PyTorch's kernels one by one, flash attention, sums of gradients overlapped",
)
_MEGATRON_2021: Final = System(
    "megatron-2021",
    narrow_gradients=("fp16",),
    flash=False,
    overlap_tensor_backward=False,
    overlap_gradients=False,
    overlap_sends=False,
    about="Megatron-LM of 2021: attention weights in memory, fused kernels, nothing overlapped",
)
_ROWS: Final = (
    _OWN,
    replace(_OWN, name="own-compiled", fused=True, fused_norm=True, about="this package with train.compile"),
    replace(
        _OWN,
        name="own-cpu",
        overlap_gradients=False,
        about="this package on a CPU, whose cores communicate too",
    ),
    _MEGATRON_2021,
    replace(
        _MEGATRON_2021,
        name="megatron-2022",
        overlap_tensor_backward=True,
        about="Megatron-LM of 2022: tensor-parallel collectives of the backward pass beside products for weights",
    ),
    System(
        "llama-2023",
        narrow_gradients=("bf16", "fp16"),
        whole_logits=True,
        fused=False,
        fused_norm_recomputed=False,  # as in arXiv 2311.05610, none of whose runs has both
        scatters_sends=False,
        overlap_tensor_backward=False,
        overlap_sends=False,
        about="trainers of 2023 with flash attention 2 and fused norms, and no overlap of tensor-parallel collectives",
    ),
    System(
        "llama-2023-plain-norm",
        narrow_gradients=("bf16", "fp16"),
        whole_logits=True,
        fused=False,
        scatters_sends=False,
        fused_norm=False,
        overlap_tensor_backward=False,
        overlap_sends=False,
        about="the same with root-mean-square norms of single operations",
    ),
    _CORE,
    replace(
        _CORE,
        name="simumax",
        overlap_tensor_backward=False,
        overlap_gradients=False,
        about="Megatron-Core with every overlap switched off",
    ),
    replace(
        _CORE,
        name="fsdp",
        tuned_attention=False,
        replays_operations=True,
        fused=False,
        fused_gradients=False,
        data_inside_pipeline=False,
        about="PyTorch's fully sharded data parallelism with flash attention and unfused work between",
    ),
    replace(
        _CORE,
        name="nemo",
        fused_loss=True,
        overlap_tensor=True,
        sharded_optimizer=True,
        gradient_bytes=2,
        about="NeMo of 2024: tensor-parallel collectives in pieces beside products, gradients summed in bf16",
    ),
    replace(
        _CORE,
        name="torchtitan",
        tuned_attention=False,
        fused=False,
        fused_norm=False,  # the releases of PyTorch that its published runs had computed a norm operation by operation
        fused_gradients=False,
        replays_operations=True,
        data_inside_pipeline=False,
        about="torchtitan without torch.compile: PyTorch's kernels, FSDP with gathers overlapped",
    ),
    replace(
        _CORE,
        name="torchtitan-compiled",
        tuned_attention=False,
        fused_gradients=False,
        replays_operations=True,
        data_inside_pipeline=False,
        about="torchtitan with torch.compile",
    ),
)
SYSTEMS: Final = {row.name: row for row in _ROWS}
"""Name → system."""


def find_system(name: str) -> System:
    """The system of a name.

    Raises:
        UserError: there is none.
    """
    if name not in SYSTEMS:
        raise UserError(f"The training system {shown(name)} is unknown; it must be {one_of(name, list(SYSTEMS))}.")
    return SYSTEMS[name]


_NARROW: Final = 2
FRAGMENTATION: Final = 0.05
"""What the caching allocator of a GPU loses between blocks of different sizes, as a share of the tensors that come and
go."""


@dataclass(frozen=True)
class Keeps:
    """What a system keeps on a device.

    Attributes:
        kernels: what its kernels keep.
        flash: whether attention is fused.
        drops_in_flash: whether fused attention has dropout, and masks of documents.
        chunked_loss: whether `train.loss_chunk_size` is followed.
        shards_optimizer: whether replicas share masters and optimizer state even where `parallel.zero` is 0.
        narrow_gradients: dtypes of the computation in which gradients are added up themselves.
        whole_logits: whether every tensor rank gathers all logits for the loss.
        casts_logits: whether the loss casts narrow logits to fp32 in kernels of their own, on a GPU: what the allocator
            took for the narrow ones is too small for the wide ones, and stays with it.
        fragmentation: what the allocator loses, as a share of what comes and goes.
    """

    kernels: Kernels = field(default_factory=Kernels)
    flash: bool = True
    drops_in_flash: bool = False
    chunked_loss: bool = True
    shards_optimizer: bool = False
    narrow_gradients: tuple[str, ...] = ()
    whole_logits: bool = False
    casts_logits: bool = False
    fragmentation: float = 0.0

    def attention(self, own: Attention) -> Attention:
        """How attention computes, where this package's kernels for the device would compute as `own` says."""
        if not self.flash:
            return "dropped" if own in ("dropped", "dropped again") else "plain"
        return "fused" if self.drops_in_flash else own


def keeps_of(system: str, device: str) -> Keeps:
    """What a training system keeps.

    Args:
        system: its name, as `plan.cost.system` knows it.
        device: `cpu` or `cuda`.

    Raises:
        UserError: there is no such system.
    """
    found = find_system(system)
    if device == "cpu":
        return Keeps()
    if found.name.startswith("own"):
        kernels = Kernels(fused_norm=True, wide_statistics=True, grouped=True, widens_logits=True)
        return Keeps(kernels, fragmentation=FRAGMENTATION)
    kernels = Kernels(
        fused_norm=found.fused_norm,
        fused_gate=found.fused,
        fused_rotary=found.fused,
        fused_softmax=True,
        mask_bytes=1,
        replays_operations=found.replays_operations,
        wide_statistics=True,
        grouped=True,
        keeps_probabilities=True,
        widens_logits=True,
        gradients_in_place=found.fused_gradients,
    )
    return Keeps(
        kernels,
        found.flash,
        found.drops_in_flash,
        found.chunked_loss,
        found.sharded_optimizer,
        ("bf16", "fp16") if found.gradient_bytes == _NARROW else found.narrow_gradients,
        found.whole_logits,
        not found.fused_loss,
        FRAGMENTATION,
    )
