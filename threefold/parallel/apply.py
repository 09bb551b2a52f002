"""From a single-device model to this rank's part of it: cut into stages, split layers, fill with the keyed weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from threefold.parallel.mesh import Mesh
from threefold.parallel.parameter import like, local, offset
from threefold.parallel.pipeline.stage import Stage
from threefold.parallel.random import fill_normal_, stream_key
from threefold.parallel.split import ModelPlan, Normal, split_modules


def parallelize(
    make_model: Callable[[], nn.Module], plan: ModelPlan, mesh: Mesh, dtype: torch.dtype = torch.float32
) -> Stage:
    """This rank's part of a model, its weights allocated but not yet set (`draw_` sets one).

    The model is made on the meta device, so no rank ever holds more than its own part.

    Args:
        make_model: makes the whole, single-device model.
        plan: the model's layers and how each weight is cut.
        mesh: this rank's place.
        dtype: what the parameters compute in.

    Raises:
        UserError: there are more stages than layers.
    """
    with torch.device("meta"):
        model = make_model()
    bounds = plan.stage_bounds(mesh.pp.size)
    stage = Stage(model, plan, *bounds[mesh.pp.index : mesh.pp.index + 2])
    split_modules(stage, plan.split, mesh.tp)
    _tie(stage)
    _allocate(stage, mesh.device, dtype)
    return stage


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


def _tie(stage: Stage) -> None:
    """Share tied weights again where a stage holds both uses: splitting made a parameter of each."""
    held = dict(stage.named_parameters(remove_duplicate=False))
    for borrower, owner in stage.plan.ties.items():
        if borrower in held and owner in held:
            module, _, attribute = borrower.rpartition(".")
            setattr(stage.get_submodule(module), attribute, held[owner])


def _allocate(module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied modules share one parameter
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None:
                continue
            if parameter not in made:
                shard = torch.empty_like(local(parameter), device=device, dtype=dtype, requires_grad=False)
                made[parameter] = nn.Parameter(like(parameter, shard))
            setattr(child, name, made[parameter])
        for name, buffer in child._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise TypeError(
                    f"{type(child).__name__} keeps the buffer {name!r}, which nobody initialises; compute it instead"
                )
