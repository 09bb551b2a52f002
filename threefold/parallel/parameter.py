"""Parameters sharded over mesh axes: how they are made, cut and gathered; weights with their masters and initial
values.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from threefold.comm.axis import Axis, gather_uneven, local_part
from threefold.comm.layout import shard_bounds
from threefold.models.sharding import Constant, Drawn, ModelPlan, Normal
from threefold.models.source import ConstructedModel, drawn
from threefold.parallel.gradients import Gradients
from threefold.parallel.leaf import SPLIT_TENSOR, as_stored, held, like, local, with_marks
from threefold.random.rng import fill_normal_, stream_key
from threefold.torch_private.distributed import fresh_parameter, split_like
from threefold.torch_private.tensors import foreach_copy_


def split_parameter(whole: Tensor, *cuts: tuple[Axis, int]) -> nn.Parameter:
    """Return a parameter stored as this rank's shard of `whole`, whose sizes need not be divisible.

    It is trained if `whole` is, and keeps the attributes that were set on `whole`, which may be on the meta device, for
    the shape alone. Each of `cuts` is an axis and the dim that it shards. Of two axes the outer one comes first; its
    `device_mesh` has both, and alone it cuts by its own part of that mesh.
    """
    part = whole.detach()
    for axis, dim in cuts:
        part = local_part(part, axis, dim)
    # A dense copy, so that nothing refers to the whole tensor's storage.
    dense = part.clone(memory_format=torch.contiguous_format)
    # The global stride must be contiguous, as the shard is.
    shape, dims = torch.empty(whole.shape, device="meta"), [dim for _, dim in cuts]
    return with_marks(_as_parameter(dense, shape, cuts[0][0], dims, whole.requires_grad), whole)


def empty_parameter(shape: tuple[int, ...], axis: Axis, dim: int, device: torch.device | None = None) -> nn.Parameter:
    """Return a parameter of global shape `shape`, with an uninitialised shard along `dim` on this rank."""
    start, end = shard_bounds(shape[dim], axis.size, axis.index)
    shard = torch.empty(*shape[:dim], end - start, *shape[dim + 1 :], device=device)
    return _as_parameter(shard, torch.empty(shape, device="meta"), axis, [dim])


def _as_parameter(
    shard: Tensor, whole: Tensor, axis: Axis, dims: Sequence[int], requires_grad: bool = True
) -> nn.Parameter:
    """Wrap a rank's shard as a parameter of the shape of `whole`, whose `dims` the axes of `axis.device_mesh` shard."""
    if axis.device_mesh is None and axis.size == 1:  # of `Mesh.alone`
        return fresh_parameter(shard, requires_grad)
    if axis.device_mesh is None:
        raise ValueError(f"axis {axis.name!r} is not an axis of the mesh, so no parameter can be split over it")
    mesh = axis.device_mesh if axis.device_mesh.ndim == len(dims) else axis.device_mesh[axis.name]
    stored = as_stored(shard, mesh, [Shard(dim) for dim in dims], whole)
    return fresh_parameter(split_like(SPLIT_TENSOR, shard, stored), requires_grad)


def whole(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor on every rank (all-gather). Collective over the axes that shard it."""
    if not isinstance(tensor, DTensor):
        return tensor
    joined = tensor.to_local()
    for axis, dim in enumerate(cut_dims(tensor)):  # the last split is gathered first
        if dim is not None:
            joined = gather_uneven(joined.detach(), tensor.device_mesh.get_group(axis), dim)
    return joined


def offset(parameter: Tensor) -> tuple[int, ...]:
    """Return where this rank's shard starts in the whole parameter, per dim."""
    starts, sizes = [0] * parameter.dim(), list(parameter.shape)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, dim in reversed(list(enumerate(cut_dims(parameter)))):
            if dim is not None:
                start, end = shard_bounds(sizes[dim], mesh.size(axis), mesh.get_local_rank(axis))
                starts[dim], sizes[dim] = starts[dim] + start, end - start
    return tuple(starts)


def slice_of(parameter: Tensor, value: Tensor) -> Tensor:
    """Return this rank's shard, as a view, of a value with the global shape of a `stored` parameter."""
    for dim, (start, size) in enumerate(zip(offset(parameter), held(parameter).shape, strict=True)):
        value = value.narrow(dim, min(start, value.shape[dim]), size)
    return value


def axes_of(parameter: Tensor) -> frozenset[str]:
    """Return the names of the axes that shard a parameter."""
    return frozenset(parameter.device_mesh.mesh_dim_names or ()) if isinstance(parameter, DTensor) else frozenset()


def is_split(parameter: Tensor) -> bool:
    """Return whether a parameter is sharded over the tensor axis."""
    return "tp" in axes_of(parameter)


def is_of_experts(parameter: Tensor) -> bool:
    """Return whether a parameter is sharded over the expert axis."""
    return "ep" in axes_of(parameter)


def _tensor_cut(parameter: Tensor) -> tuple[int, int] | None:
    """Return the dim that the tensor axis shards, and the size of that axis; None if it shards none."""
    if not isinstance(parameter, DTensor) or not is_split(parameter):
        return None
    place = (parameter.device_mesh.mesh_dim_names or ()).index("tp")
    dim = cut_dims(parameter)[place]
    assert dim is not None
    return dim, parameter.device_mesh.size(place)


def longest_shard(parameter: Tensor) -> int:
    """Return the number of elements of the longest shard on any tensor rank, the same on every rank."""
    sizes = list(held(parameter).shape)
    if (cut := _tensor_cut(parameter)) is not None:
        dim, ranks = cut
        sizes[dim] = -(-parameter.shape[dim] // ranks)
    return prod(sizes)


def has_uneven_shards(parameter: Tensor) -> bool:
    """Return whether tensor ranks hold shards of different lengths."""
    cut = _tensor_cut(parameter)
    return cut is not None and parameter.shape[cut[0]] % cut[1] > 0


def replace_parameters(module: nn.Module, make: Callable[[nn.Parameter], nn.Parameter]) -> None:
    """Replace each parameter by `make(parameter)`, which keeps its attributes; tied ones stay one parameter."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for child in module.modules():
        for name, parameter in list(child.named_parameters(recurse=False, remove_duplicate=False)):
            if parameter not in made:
                made[parameter] = with_marks(make(parameter), parameter)
            setattr(child, name, made[parameter])


_Replacing = TypeVar("_Replacing", bound=nn.Module)


def in_place_of(made: _Replacing, original: nn.Module) -> _Replacing:
    """Give a module that replaces another the other's mode (`training`) and the attributes that it lacks."""
    made.train(original.training)
    for name, value in vars(original).items():
        if not hasattr(made, name):
            setattr(made, name, value)
    return made


def set_in(root: nn.Module, name: str, value: Tensor | nn.Module) -> None:
    """Replace the parameter, buffer or module `name` in a module."""
    parent, _, attribute = name.rpartition(".")
    setattr(root.get_submodule(parent), attribute, value)


def cut_dims(tensor: DTensor) -> list[int | None]:
    """Return the dim that each mesh axis cuts; if axes cut the same dim, the last cuts first, the others its shards."""
    return [getattr(placement, "dim", None) for placement in tensor.placements]


class ShardedMatrix:
    """All-gather of matrices, the last two dims of tensors that are sharded like a parameter, or of a vector.

    Dims before the last two are a batch of matrices (experts); axes that cut only those are not gathered, unless
    `every_dim` is true, which gathers the whole parameter.
    """

    def __init__(self, parameter: Tensor, axes: Iterable[Axis], every_dim: bool = False) -> None:
        self._cuts: list[tuple[Axis, int, int]] = []
        """Axis, dim, and size of the dim before that cut, in the order in which the cuts are undone."""
        first = 0 if every_dim else max(0, parameter.dim() - 2)
        self._matrix_start = offset(parameter)[first:]
        if not isinstance(parameter, DTensor):
            return
        by_ranks = {axis.ranks: axis for axis in axes}
        sizes, mesh = list(parameter.shape), parameter.device_mesh
        for number, dim in reversed(list(enumerate(cut_dims(parameter)))):  # the last axis cuts first
            if dim is None or mesh.size(number) == 1:
                continue
            axis = by_ranks[tuple(dist.get_process_group_ranks(mesh.get_group(number)))]
            if dim >= first:
                self._cuts.insert(0, (axis, dim, sizes[dim]))
            start, end = shard_bounds(sizes[dim], axis.size, axis.index)
            sizes[dim] = end - start

    @property
    def is_whole(self) -> bool:
        """Whether no axis cuts the matrices."""
        return not self._cuts

    def gather(self, shard: Tensor) -> Tensor:
        """Gather whole matrices [..., m, n] from local shards (collective over the axes that cut them)."""
        whole = shard
        for axis, dim, size in self._cuts:
            longest = -(-size // axis.size)
            if whole.shape[dim] < longest:  # the last shards may be shorter
                missing = [*whole.shape[:dim], longest - whole.shape[dim], *whole.shape[dim + 1 :]]
                whole = torch.cat([whole, whole.new_zeros(missing)], dim)
            whole = axis.all_gather_equal(whole.contiguous(), dim).narrow(dim, 0, size)
        return whole

    def shard(self, whole: Tensor, like: Tensor) -> Tensor:
        """Return this rank's shard of whole matrices: a view, of the shape of `like`."""
        for dim, start in zip(range(-len(self._matrix_start), 0), self._matrix_start, strict=True):
            whole = whole.narrow(dim, start, like.shape[dim])
        return whole


@dataclass(frozen=True)
class Weight:
    """A parameter of a rank, named as in the whole model, stored as `parameter` and computed with as `leaf`.

    `master` is the weight that is updated, of the leaf's shape: the leaf itself unless that is too narrow. A frozen
    weight has no other.
    """

    name: str
    parameter: Tensor
    leaf: Tensor
    master: Tensor

    @property
    def is_trained(self) -> bool:
        """Whether it has a gradient; a frozen one keeps its value."""
        return self.leaf.requires_grad

    def stored(self, shard: Tensor) -> Tensor:
        """Wrap a tensor of the local shape as a global one, the way the parameter is stored."""
        return like(self.parameter, shard)


def make_weights(parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> list[Weight]:
    """Make the weights of parameters, given with their names in the whole model; masters in `dtype`, not yet set."""
    weights = []
    for name, parameter in parameters:
        leaf = local(parameter)
        is_own = leaf.requires_grad and leaf.dtype != dtype
        master = leaf.detach().to(dtype).requires_grad_() if is_own else leaf
        with_marks(master, parameter)
        weights.append(Weight(name, parameter, leaf, master))
    return weights


def initialise_(
    weights: Sequence[Weight],
    plan: ModelPlan,
    seed: int,
    gradients: Gradients,
    constructed: ConstructedModel | None = None,
) -> None:
    """Set the masters to the initial weights of `seed`, drawn at their full width, and the model to these, rounded."""
    for weight in weights:
        draw_(weight.master, weight.parameter, weight.name, plan, seed, constructed)
    publish_(weights, gradients)


@torch.no_grad()
def publish_(weights: Sequence[Weight], gradients: Gradients) -> None:
    """Round the masters into the tensors that the model computes with."""
    gradients.weights_changed()
    narrow = [weight for weight in weights if weight.master is not weight.leaf]
    if narrow:
        foreach_copy_([weight.leaf.detach() for weight in narrow], [weight.master for weight in narrow])


@torch.no_grad()
def draw_(
    into: Tensor, parameter: Tensor, name: str, plan: ModelPlan, seed: int, constructed: ConstructedModel | None = None
) -> Tensor:
    """Fill `into`, of the local shape of `parameter`, with this rank's part of the initial values.

    `into` may be wider than the parameter (a master copy); `constructed` has the values that the constructor draws.
    """
    initial, starts = plan.initial(name), offset(parameter)
    if isinstance(initial, Normal):
        return fill_normal_(into, initial.std, stream_key("weights", seed, name), tuple(parameter.shape), starts)
    if isinstance(initial, Constant):
        return into.fill_(initial.value)
    if isinstance(initial, Drawn):
        whole = drawn(initial.fill, name, tuple(parameter.shape), seed)
    else:
        assert constructed is not None  # `apply_parallelism` passes it
        whole = constructed.parameter(name)
    return into.copy_(slice_of(parameter, whole))
