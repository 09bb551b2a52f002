"""Adapter for Megatron-Core: chunks of a GPTModel, wrapped by its DistributedDataParallel, and a Megatron optimizer.

    recorder = parity.Recorder(model, optimizer, MegatronAdapter())      # model: the list of this rank's chunks

Names are those of one process: layers counted over all stages, experts over all ranks. Shards follow the attributes
that Megatron-Core gives a parameter (`tensor_model_parallel`, `partition_dim`, `partition_stride`). The distributed
optimizer's ranges of weights, gradients and states are recorded by the rank that owns them.
"""

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from threefold_parity.adapters import (
    ACTIVATION,
    WHOLE,
    Adapter,
    AroundCall,
    Placed,
    buffers_of,
    clean_name,
    counters_of,
    modules_of,
)
from threefold_parity.placement import Piece, Placement, fill, flat_range, shard, whole
from threefold_parity.record import OUTPUT_GRADIENT
from threefold_parity.text import UserError

_EMBEDDING, _OUTPUT_LAYER = "embedding.word_embeddings.weight", "output_layer.weight"
_STAGE_COPY: Final = 1 << 20
"""Added to the number of a copy on the last stage of a tied embedding."""


class MegatronAdapter(Adapter):
    """Adapter for Megatron-Core; `place` is for custom parameters and modules.

    Gradients are recorded when the optimizer's step begins, after `finalize_model_grads`, unscaled and before they are
    clipped; the gradient norm is the one that the step returns.
    """

    name = "megatron"
    batch_dim = 1
    clips_before_update = False
    converts = False

    def bind(self, models: list[nn.Module], optimizer: Any) -> None:
        if not hasattr(optimizer, "get_loss_scale"):
            raise UserError(
                f"MegatronAdapter got an optimizer of type {type(optimizer).__name__}; give the one that "
                "get_megatron_optimizer returns."
            )
        self.models, self.optimizer = models, optimizer
        state: Any = importlib.import_module("megatron.core.parallel_state")
        self._tp, self._tp_rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
        self._dp_rank = state.get_data_parallel_rank(with_context_parallel=True)
        self._dp = state.get_data_parallel_world_size(with_context_parallel=True)
        self._expert_rank = state.get_expert_model_parallel_rank()
        self._last = state.get_pipeline_model_parallel_rank() > 0
        self._inner = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        self._config: Any = next(each.config for each in _all_modules(models) if hasattr(each, "config"))
        self._modules = dict(self.modules())

    # ---- names ------------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for model in self.models:
            renamed = self._renamed(model)
            for name, parameter in model.named_parameters():
                called = _rename(clean_name(name), renamed)
                copies = called == _OUTPUT_LAYER and bool(getattr(parameter, "shared_embedding", False))
                yield (_EMBEDDING if copies else called), parameter  # a copy on the last stage of a tied embedding

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        for model in self.models:
            renamed = self._renamed(model)
            for name, module in modules_of(model):
                ends = getattr(module, "post_process", True)  # else its output is only what this stage sends on
                empty = type(module).__name__ in ("IdentityOp", "IdentityFuncOp")  # an absent part of a layer
                if ends and not empty:
                    yield _rename(name, renamed) or WHOLE, module

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        for model in self.models:
            renamed = self._renamed(model)
            for name, buffer in buffers_of(model):
                yield _rename(name, renamed), buffer

    def _renamed(self, model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
        """Return the name prefixes of experts and layers on this rank, each with its prefix in the whole model."""
        experts, layers = {}, {}
        for name, module in model.named_modules():
            layer = re.fullmatch(r"(.*\.layers\.)(\d+)", clean_name(name))
            if layer and hasattr(module, "layer_number") and ".mtp." not in f".{layer[1]}":
                layers[f"{layer[0]}."] = f"{layer[1]}{module.layer_number - 1}."
            expert = re.fullmatch(r"(.*\.local_experts\.)(\d+)", clean_name(name))
            if expert:
                count = len(list(model.get_submodule(name.rpartition(".")[0]).children()))
                experts[f"{expert[0]}."] = f"{expert[1]}{self._expert_rank * count + int(expert[2])}."
        return experts, layers

    # ---- places -----------------------------------------------------------------------------------------------------

    def placement(self, what: str, name: str, tensor: Tensor) -> tuple[Tensor, Placement]:
        if (placed := self.given(what, name, tensor)) is not None:
            return tensor, placed
        return tensor, whole(tensor, self._tp_rank if what in (ACTIVATION, OUTPUT_GRADIENT) else self._dp_rank)

    def _of_parameter(self, name: str, parameter: Any) -> Placement:
        """Return the placement of this rank's whole tensor of a parameter, ignoring the distributed optimizer."""
        if (placed := self.given("parameter", name, parameter)) is not None:
            return placed
        copy = self._dp_rank
        if self._last and bool(getattr(parameter, "shared_embedding", False)):
            copy += _STAGE_COPY
        if not getattr(parameter, "tensor_model_parallel", False) or self._tp == 1:
            return whole(parameter, copy + self._dp * self._tp_rank)
        blocks = max(getattr(parameter, "partition_stride", 1), 1)
        if "linear_fc1." in name and self._config.gated_linear_unit:
            blocks = 2  # gate and up, whatever the attribute says
        return shard(parameter, parameter.partition_dim, self._tp_rank, self._tp, blocks, copy)

    def activation(self, kind: str, name: str, tensor: Tensor) -> tuple[Tensor, Placement]:
        what = kind if kind == OUTPUT_GRADIENT else ACTIVATION
        if (placed := self.given(what, name, tensor)) is not None:
            return tensor, placed
        module: Any = self._modules.get(name)
        type_name = type(module).__name__
        if name == WHOLE or (name.startswith("embedding.") and tensor.dim() > 1):  # (batch, positions, …)
            scattered = getattr(module, "reduce_scatter_embeddings", False)
            if self._config.sequence_parallel and name != WHOLE and scattered:
                return tensor, shard(tensor, 0, self._tp_rank, self._tp)
            tensor = tensor.transpose(0, 1)
            model: Any = next((each for each in _all_modules(self.models) if hasattr(each, "parallel_output")), None)
            if tensor.dim() == 3 and name == WHOLE and model.parallel_output:
                return tensor, shard(tensor, -1, self._tp_rank, self._tp)
            return tensor, whole(tensor, self._tp_rank)
        column, row = "ColumnParallel" in type_name, "RowParallel" in type_name
        attention = name.endswith("core_attention")
        if kind == "output" and (attention or (column and not getattr(module, "gather_output", False))):
            blocks = 2 if name.endswith("linear_fc1") and self._config.gated_linear_unit else 1
            return tensor, shard(tensor, -1, self._tp_rank, self._tp, blocks)
        if kind != "output" and row:
            return tensor, shard(tensor, -1, self._tp_rank, self._tp)
        if kind != "output" and attention:
            return tensor, shard(tensor, 2, self._tp_rank, self._tp)
        inside = name.startswith("decoder.") or (kind != "output" and name == "output_layer")
        if self._config.sequence_parallel and inside and tensor.dim() == 3:
            return tensor, shard(tensor, 0, self._tp_rank, self._tp)
        return tensor, whole(tensor, self._tp_rank)

    # ---- the optimizer ----------------------------------------------------------------------------------------------

    def weight(self, name: str, parameter: nn.Parameter) -> Placed:
        main, span = self._main(parameter)
        return [] if main is None else self._parts(name, parameter, main.detach(), span)

    def gradient(self, name: str, parameter: nn.Parameter) -> Placed:
        gradient = getattr(parameter, "main_grad", parameter.grad)
        main, span = self._main(parameter)
        if gradient is None or main is None:
            return []
        if span is not None:
            gradient = gradient.view(-1)[slice(*span)]
        scale = float(self.optimizer.get_loss_scale())
        return self._parts(name, parameter, gradient if scale == 1 else gradient / scale, span)

    def states(self, name: str, parameter: nn.Parameter) -> Iterator[tuple[str, Placed]]:
        main, span = self._main(parameter)
        if main is not None:
            for key, value in self._state(main).items():
                if isinstance(value, Tensor) and value.shape == main.shape and value.is_floating_point():
                    yield key, self._parts(name, parameter, value, span)

    def counters(self, name: str, parameter: nn.Parameter) -> Mapping[str, float]:
        main, _ = self._main(parameter)
        if main is None:
            return {}
        groups = self._groups_with(main)
        found = counters_of(groups, self._state(main))
        for group in groups:  # some optimizers count in the group
            if group.get("step") is not None:
                found.setdefault("updates", float(group["step"]))
        return found

    def load(self, name: str, parameter: nn.Parameter, read: Callable[[str], Tensor]) -> None:
        fill(parameter.detach(), self._of_parameter(name, parameter), read(name), name)

    def loaded(self) -> None:
        self.optimizer.reload_model_params()  # into the fp32 masters

    def watch(self, before: Callable[[], None], after: Callable[[], None]) -> list[Any]:
        def took_step(returned: Any) -> None:
            norm = returned[1] if isinstance(returned, tuple) and len(returned) > 1 else None
            self._norm = None if norm is None else float(norm)
            after()

        return [AroundCall(self.optimizer, "step", before, took_step)]

    def _optimizers(self) -> Sequence[Any]:
        return [each.optimizer for each in self._inner]

    def _main(self, parameter: Any) -> tuple[Any, tuple[int, int] | None]:
        """Return the tensor that the optimizer updates for a parameter, and its range if it is one.

        None if another rank updates it.
        """
        for each in self._inner:
            has_ranges = getattr(each, "model_param_gbuf_map", None) is not None
            if has_ranges and parameter in each.model_param_group_index_map:
                group, order = each.model_param_group_index_map[parameter]
                span = each._get_model_param_range_map(parameter)["param"]
                return each.optimizer.param_groups[group]["params"][order], (span.start, span.end)
        if any(hasattr(each, "model_param_gbuf_map") for each in self._inner) and parameter.requires_grad:
            return None, None
        main = getattr(parameter, "main_param", None)
        return (parameter if main is None else main), None

    def _parts(self, name: str, parameter: nn.Parameter, value: Tensor, span: tuple[int, int] | None) -> Placed:
        placement = self._of_parameter(name, parameter)
        if span is None:
            return [(value.view(parameter.shape), placement)]
        # A range of the rank's flat tensor, which is itself a shard: each data-parallel rank owns another.
        copy = placement.copy - self._dp_rank
        found: Placed = []
        for piece in flat_range(tuple(parameter.shape), *span).pieces:
            for box in placement.pieces:
                common = _common(piece, box)
                if common is not None:
                    part = piece.of(value.view(-1)) if piece.size != parameter.shape else value.view(parameter.shape)
                    local = Piece((0,) * len(common.size), common.start, common.size)
                    found.append((common.of(part), Placement(placement.shape, (local,), copy)))
        return found


def _all_modules(models: list[nn.Module]) -> Iterator[nn.Module]:
    for model in models:
        yield from model.modules()


def _rename(name: str, renamed: tuple[dict[str, str], dict[str, str]]) -> str:
    for prefixes in renamed:  # the expert's first, whose prefix has its layer's number on this rank
        for local, whole_name in prefixes.items():
            if f"{name}.".startswith(local):
                name = f"{whole_name}{name[len(local) :]}".removesuffix(".")
                break
    return name


def _common(piece: Piece, box: Piece) -> Piece | None:
    """Return the overlap of a piece of a rank's tensor and a box, as a part of the piece."""
    local, start, size = [], [], []
    for at, extent, box_at, box_start, box_size in zip(
        piece.start, piece.size, box.local, box.start, box.size, strict=True
    ):
        first, last = max(at, box_at), min(at + extent, box_at + box_size)
        if first >= last:
            return None
        local.append(first - at)
        start.append(box_start + first - box_at)
        size.append(last - first)
    return Piece(tuple(local), tuple(start), tuple(size))
