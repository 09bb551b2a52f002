"""An optimizer around another one: its groups, state and defaults are the other's."""

from typing import Any

from torch.optim import Optimizer


class WrappedOptimizer(Optimizer):
    """An optimizer that hands on what it does not do itself.

    It is not initialised as an optimizer: parameters, state and hooks are those of the original. A subclass has a
    `step` and a `zero_grad`.

    Attributes:
        optimizer: the original.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of the original."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """That of the original."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Those of the original."""
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"
