"""A prepared model: computes in the given precision, and holds the original."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from threefold.api.prepared.grad_sync import GradSync
from threefold.api.prepared.nested import map_tensors
from threefold.api.prepared.shards import slice_of
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.parallel.parameter import local, stored, whole
from threefold.random.keys import signed, stream_key

_NARROW = (torch.float16, torch.bfloat16)


class LoadedKeys(NamedTuple):
    """What `load_state_dict` returns, as that of `nn.Module` does."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class PreparedModule(nn.Module):
    """What `prepare` returns for an `nn.Module`.

    Calls, attributes, names of parameters and `state_dict` are those of the original; the state is that of whole
    tensors, whatever the layout, so that saving it is collective with ZeRO or tensor parallelism.

    Attributes:
        module: the original, its parameters now this rank's.
        sync: its gradients.
        mesh: of the ranks.
    """

    module: nn.Module

    def __init__(self, module: nn.Module, sync: GradSync, mesh: Mesh, autocast: torch.dtype | None) -> None:
        super().__init__()
        self.module = module
        self.sync, self.mesh, self._autocast = sync, mesh, autocast
        self._forwards = 0
        self._dropout_seed = 0
        if mesh.tp.size > 1:
            # From the generator's seed, not drawn: the order of a loader that shuffles would depend on tp.
            seed = torch.tensor([stream_key("prepared", torch.initial_seed(), mesh.dp.index)], device=mesh.device)
            self._dropout_seed = int(mesh.tp.broadcast_(seed, 0))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward pass, in the given precision; what it returns narrow is widened to fp32."""
        with self._precision(), self._same_dropout():
            outputs = self.module(*args, **kwargs)
        if self._autocast is not None:
            outputs = map_tensors(outputs, lambda tensor: tensor.float() if tensor.dtype in _NARROW else tensor)
        if torch.is_grad_enabled():
            self.sync.mark(outputs)
        return outputs

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of the original, under its names."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Those of the original, under its names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The original's, of whole tensors. Collective where they are sharded."""
        state = self.module.state_dict(*args, **kwargs)
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name in state:
            if name in parameters:
                state[name] = whole(stored(parameters[name])).detach()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> LoadedKeys:
        """Load whole tensors; each rank keeps its shards.

        Raises:
            UserError: names are missing or unknown and `strict`, or shapes differ.
        """
        if assign:
            raise UserError("assign is true but a prepared model keeps its own tensors; use false.")
        own = self.module.state_dict()
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        missing = [name for name in own if name not in state_dict]
        unexpected = [name for name in state_dict if name not in own]
        if strict and (missing or unexpected):
            what = f"lacks {missing[0]!r}" if missing else f"has {unexpected[0]!r}, which the model has not"
            raise UserError(f"The state {what}; pass that of the same model, or strict=False.")
        self.sync.weights_changed()
        with torch.no_grad():
            for name, tensor in own.items():
                if name in state_dict:
                    _load(name, parameters.get(name, tensor), state_dict[name])
        return LoadedKeys(missing, unexpected)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def _precision(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.mesh.device.type, dtype=self._autocast)

    def _same_dropout(self) -> AbstractContextManager[Any]:
        """Random numbers that all tensor ranks draw alike: what they hold whole has to stay the same on all."""
        if self.mesh.tp.size == 1 or not self.training:
            return nullcontext()
        self._forwards += 1
        return _drawing_from(signed(stream_key("prepared", self._dropout_seed, self._forwards), 63), self.mesh.device)


def _load(name: str, tensor: Tensor, value: Tensor) -> None:
    into = stored(tensor) if isinstance(tensor, nn.Parameter) else tensor
    if into.shape != value.shape:
        raise UserError(
            f"The state has {name!r} of shape {[*value.shape]} but the model's has {[*into.shape]}; pass that of the "
            "same model."
        )
    local(into).detach().copy_(slice_of(into, value))


@contextmanager
def _drawing_from(seed: int, device: torch.device) -> Iterator[None]:
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.manual_seed(seed)
        yield
