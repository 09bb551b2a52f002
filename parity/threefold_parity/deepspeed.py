"""Adapter for DeepSpeed: an engine with ZeRO 0 to 3.

    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    recorder = parity.Recorder(engine, adapter=DeepSpeedAdapter())

Weights, gradients and optimizer states are those of the fp32 masters. With ZeRO 1 to 3, each rank records its own
ranges of the flat partitions, without communication, so that a departure names the rank that holds it.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import methodcaller
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor, nn

from threefold_parity.adapters import Adapter, AroundCall, Placed, counters_of
from threefold_parity.placement import fill, flat_range, whole
from threefold_parity.text import UserError


class DeepSpeedAdapter(Adapter):
    """Adapter for DeepSpeed.

    Gradients are recorded when `engine.step` begins the update, after the last micro-batch, unscaled and before they
    are clipped; the gradient norm is the one that the engine reports.
    """

    name = "deepspeed"
    clips_before_update = False  # the optimizer clips its flat partitions
    converts = False

    def bind(self, models: list[nn.Module], optimizer: Any) -> None:
        if len(models) != 1 or not hasattr(models[0], "_take_model_step"):
            raise UserError(
                f"DeepSpeedAdapter got a model of type {type(models[0]).__name__}; give the engine that "
                "deepspeed.initialize returns."
            )
        self._engine = cast(Any, models[0])
        super().bind(models, self._engine.optimizer)
        if dist.is_initialized():
            self._copy = dist.get_rank(self._engine.seq_data_parallel_group)
        # The groups of an optimizer of partitions hold flat ones, so a parameter is found by its partition's group.
        self._groups: dict[int, tuple[int, Any]] = {}
        optimizer = self.optimizer
        for attribute, flat in _PARTITIONS:
            for number, group in enumerate(getattr(optimizer, attribute, ()) if hasattr(optimizer, flat) else ()):
                which = getattr(optimizer, "sub_group_to_group_id", {}).get(number, number)
                self._groups |= {id(each): (which, getattr(optimizer, flat)[number]) for each in group}
        # Without ZeRO or fusion, each narrow parameter has a whole fp32 master, with its states.
        self._masters: dict[int, nn.Parameter] = {}
        if not self._groups and hasattr(optimizer, "fp16_groups"):
            for narrow, wide in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
                self._masters |= {id(each): master for each, master in zip(narrow, wide, strict=True)}

    def weight(self, name: str, parameter: nn.Parameter) -> Placed:
        if hasattr(parameter, "ds_id"):
            if not parameter.requires_grad:
                return self._local(parameter, parameter.ds_tensor)  # type: ignore[attr-defined]
            return self._local(parameter, self.optimizer.get_local_fp32_param(parameter))
        if hasattr(parameter, "_hp_mapping"):
            return self._fragment(parameter, methodcaller("get_hp_fragment"))
        return super().weight(name, self._masters.get(id(parameter), parameter))

    def gradient(self, name: str, parameter: nn.Parameter) -> Placed:
        if not parameter.requires_grad:
            return []
        if hasattr(parameter, "ds_id"):
            found = self._local(parameter, self.optimizer.get_local_fp32_grad_for_param(parameter))
        elif hasattr(parameter, "_hp_mapping"):
            found = self._fragment(parameter, lambda mapping: self._of_fragment(mapping, parameter))
        else:
            found = super().gradient(name, parameter)
        scale = float(getattr(self.optimizer, "loss_scale", 1) or 1)
        return found if scale == 1 else [(tensor / scale, placement) for tensor, placement in found]

    def states(self, name: str, parameter: nn.Parameter) -> Iterator[tuple[str, Placed]]:
        if not hasattr(parameter, "ds_id") and not hasattr(parameter, "_hp_mapping"):
            yield from super().states(name, self._masters.get(id(parameter), parameter))
            return
        flat = self._groups.get(id(parameter), (0, None))[1]
        for key, value in (self._inner_state(flat) if flat is not None else {}).items():
            if not isinstance(value, Tensor) or value.shape != flat.shape:
                continue
            if hasattr(parameter, "ds_id"):
                yield key, self._local(parameter, self.optimizer.get_local_fp32_param(parameter, key))
            else:
                yield key, self._fragment(parameter, methodcaller("get_hp_fragment", key))

    def counters(self, name: str, parameter: nn.Parameter) -> Mapping[str, float]:
        if id(parameter) not in self._groups:
            return super().counters(name, self._masters.get(id(parameter), parameter))
        number, flat = self._groups[id(parameter)]
        return counters_of([self.optimizer.param_groups[number]], self._inner_state(flat))

    def numbers(self) -> Mapping[str, float]:
        norm = self._engine.get_global_grad_norm()
        return {} if norm is None else {"gradient norm": float(norm)}

    def load(self, name: str, parameter: nn.Parameter, read: Callable[[str], Tensor]) -> None:
        value = read(name)
        for tensor, placement in self.weight(name, parameter):
            fill(tensor, placement, value, name)
        if hasattr(parameter, "ds_id"):  # the working copy, that forward passes gather
            for tensor, placement in self._local(parameter, parameter.ds_tensor):  # type: ignore[attr-defined]
                fill(tensor, placement, value, name)
        else:
            fill(parameter.detach(), whole(parameter), value, name)

    def watch(self, before: Callable[[], None], after: Callable[[], None]) -> list[Any]:
        return [AroundCall(self._engine, "_take_model_step", before, lambda _: after())]  # a pipeline's too

    # ---- parts of parameters ----------------------------------------------------------------------------------------

    def _local(self, parameter: Any, partition: Tensor) -> Placed:
        """Return the elements of ZeRO 3's partition of a parameter, without the padding at the end of the last."""
        group = getattr(parameter, "ds_process_group", self._engine.seq_data_parallel_group)
        size = parameter.ds_tensor.numel()
        start = min(size * dist.get_rank(group), parameter.ds_numel)
        stop = min(start + size, parameter.ds_numel)
        placement = flat_range(tuple(parameter.ds_shape), start, stop)
        return [(partition.view(-1)[: stop - start], placement)]

    def _fragment(self, parameter: Any, part: Callable[[Any], Tensor]) -> Placed:
        """Return the part of a parameter in this rank's flat partition of ZeRO 1 and 2: a range of it, or nothing."""
        mapping = parameter._hp_mapping
        if mapping is None:
            return []
        at = mapping.lp_fragment_address
        placement = flat_range(tuple(parameter.shape), at.start, at.start + at.numel)
        return [(part(mapping).view(-1), placement)]

    def _of_fragment(self, mapping: Any, parameter: Any) -> Tensor:
        gradient = mapping.get_lp_grad_fragment(parameter._index_in_param_group).reshape(-1)
        at = mapping.lp_fragment_address
        if gradient.numel() != at.numel:  # bf16 without ZeRO keeps whole gradients
            gradient = gradient[at.start : at.start + at.numel]
        return gradient

    def _inner_state(self, flat: Tensor) -> Mapping[str, Any]:
        return cast(Mapping[str, Any], getattr(self.optimizer, "optimizer", self.optimizer).state.get(flat, {}))

    def _like(self, name: str, parameter: nn.Parameter, value: Tensor) -> Placed:
        return [(value, super().placement("parameter", name, parameter.detach())[1])]


_PARTITIONS = (
    ("bit16_groups", "single_partition_of_fp32_groups"),
    ("bf16_groups", "fp32_groups_flat_partition"),
    ("fp16_groups", "fp32_partitioned_groups_flat"),
)
"""Attributes of DeepSpeed's optimizers with the parameters of each group and the flat fp32 partition of each."""
