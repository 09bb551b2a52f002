"""From a single-device model to this rank's part of it: cut into stages, split layers, fill with the keyed weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from threefold.comm.mesh import Mesh
from threefold.models.sharding import ModelPlan, Normal
from threefold.parallel.context.sequence import Region
from threefold.parallel.data.zero import Sharing, share_out
from threefold.parallel.parameter import like, local, offset, replace_parameters
from threefold.parallel.pipeline.placement import StageMap
from threefold.parallel.pipeline.stage import Stage
from threefold.parallel.plan_check import check_plan
from threefold.parallel.shard_modules import shard_modules
from threefold.random.keys import stream_key
from threefold.random.philox import fill_normal_


@dataclass(frozen=True)
class Division:
    """How a model is divided among ranks.

    Attributes:
        mesh: this rank's place.
        stages: the pipeline's stages.
        sequence_parallel: whether activations between split layers are cut along the sequence over tp.
        dtype: what the parameters compute in.
        sharing: what the replicas share; None where each has its own copy of everything.
        cp_method: how keys and values reach the queries of other context ranks, as in `parallel.cp_method`.
        master_weights: whether parameters narrower than fp32 are updated, and their gradients added up, in fp32.
    """

    mesh: Mesh
    stages: StageMap
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32
    sharing: Sharing | None = None
    cp_method: str = "all-gather"
    master_weights: bool = True

    @property
    def region(self) -> Region:
        """What the splits of single layers are told."""
        return Region(self.mesh.tp, self.mesh.cp, self.mesh.ep, self.sequence_parallel, self.cp_method)

    @property
    def master_dtype(self) -> torch.dtype:
        """What weights are updated and gradients added up in."""
        return torch.promote_types(self.dtype, torch.float32) if self.master_weights else self.dtype


def parallelize(make_model: Callable[[], nn.Module], plan: ModelPlan, division: Division) -> list[Stage]:
    """This rank's part of a model, stage by stage, its weights allocated but not yet set (`draw_` sets one).

    The model is made on the meta device, so no rank ever holds more than its own part.

    Args:
        make_model: makes the whole, single-device model.
        plan: the model's layers and how each weight is cut.
        division: which part this rank has.

    Raises:
        UserError: the plan does not fit the model.
    """
    with torch.device("meta"):
        model = make_model()
    check_plan(model, plan)
    numbers = division.stages.held_by(division.mesh.pp.index)
    stages = [Stage(model, plan, *division.stages.layers(number)) for number in numbers]
    shard_modules(stages, plan.split, division.region)
    _tie(stages, plan)
    if division.sharing is None:
        _allocate(nn.ModuleList(stages), division.mesh.device, division.dtype)
    else:
        # Still without memory, so that no rank ever holds more than its own part; in the width of the masters.
        _allocate(nn.ModuleList(stages), torch.device("meta"), division.master_dtype)
        share_out(stages, division.sharing, division.mesh, division.dtype)
    return stages


@torch.no_grad()
def draw_(into: Tensor, parameter: Tensor, name: str, plan: ModelPlan, seed: int) -> Tensor:
    """Fill `into`, of the local shape of `parameter`, with the initial values of that part.

    Args:
        into: the tensor to fill, of any float dtype (a master copy may be wider than the parameter).
        parameter: gives the whole shape and where the local part starts.
        name: the parameter's name in the whole model.
        plan: says which values it starts from.
        seed: the run's seed.
    """
    initial = plan.initial(name)
    if isinstance(initial, Normal):
        key = stream_key("weights", seed, name)
        return fill_normal_(into, initial.std, key, tuple(parameter.shape), offset(parameter))
    return into.fill_(initial.value)


def _tie(stages: Sequence[Stage], plan: ModelPlan) -> None:
    """Share tied weights again where a rank holds several uses: splitting made a parameter of each."""
    kept: dict[str, nn.Parameter] = {}
    for stage in stages:
        for name, parameter in list(stage.named_parameters(remove_duplicate=False)):
            first = kept.setdefault(plan.whole_name(name), parameter)
            if first is not parameter:
                module, _, attribute = name.rpartition(".")
                setattr(stage.get_submodule(module), attribute, first)


def _allocate(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    def allocated(parameter: nn.Parameter) -> nn.Parameter:
        shard = torch.empty_like(local(parameter), device=device, dtype=dtype, requires_grad=False)
        return nn.Parameter(like(parameter, shard))

    for child in module.modules():
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise TypeError(
                    f"{type(child).__name__} keeps the buffer {name!r}, which nobody initialises; compute it instead"
                )
    replace_parameters(module, allocated)
