"""What goes wrong in the passes of a user's own model, in a sentence that names the module."""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from torch import nn

from threefold.errors import UserError

_OF_SIZES = re.compile(r"size|shape|dimension|number of elements|channels|normalized_shape", re.IGNORECASE)
_IN_PLACE = re.compile(r"modified by an inplace operation.*?which is output \d+ of (?:As\w+Backward\d*|(\w+))")
_VIEW_IN_PLACE = "is a view and is being modified inplace"
_ON_META = re.compile(r"\bmeta\b", re.IGNORECASE)


def is_of_sizes(error: BaseException) -> bool:
    """Whether an error says that sizes of tensors do not go together."""
    return isinstance(error, RuntimeError | ValueError) and _OF_SIZES.search(str(error)) is not None


def module_of(error: BaseException, modules: Mapping[str, nn.Module]) -> str:
    """The innermost of the modules whose method an error comes from; empty for none.

    Args:
        error: that was raised, or the cause of it.
        modules: by name.
    """
    names = {id(module): name for name, module in modules.items() if name}
    found = ""
    for each in _causes(error):
        for owner in _owners(each.__traceback__):
            found = names.get(id(owner), found)
    return found


def _causes(error: BaseException) -> Iterator[BaseException]:
    """From the first cause to the error itself."""
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)
    yield error


def _owners(traceback: TracebackType | None) -> Iterator[object]:
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            yield owner
        traceback = traceback.tb_next


@contextmanager
def explaining_passes(roots: Iterable[nn.Module], tp: int = 1) -> Iterator[None]:
    """Within the block, errors of forward and backward passes that have a usual cause become one sentence.

    Args:
        roots: have the modules under their names in the whole model.
        tp: ranks of the tensor axis that cut them.

    Raises:
        UserError: an operation in place has overwritten what the backward pass needs, the loss has no graph, a tensor
            has no values, or the sizes of a rank's parts do not go together.
    """
    try:
        yield
    except (RuntimeError, ValueError, NotImplementedError) as error:
        if isinstance(error, UserError):
            raise
        modules = {name: module for root in roots for name, module in root.named_modules()}
        first = next(_causes(error))
        sentence = _sentence(first, module_of(error, modules), tp)
        if sentence is None:
            raise
        raise UserError(sentence) from error


def _sentence(error: BaseException, module: str, tp: int) -> str | None:
    text = " ".join(str(error).split())
    where = f"the forward pass of {module!r}" if module else "a forward pass"
    if found := _IN_PLACE.search(text):
        operation = (found[1] or "").removesuffix("0").removesuffix("Backward")
        result = f"the result of {operation}" if operation else "a tensor"
        return (
            f"A forward pass changes {result} in place, which its backward pass needs as it was; use an operation "
            "without a trailing underscore there, such as y = y + 1 in the place of y.add_(1)."
        )
    if _VIEW_IN_PLACE in text:
        return (
            f"In {where} an input is changed in place, which sharded weights (parallel.zero) do not allow; use an "
            "operation without a trailing underscore there, such as y = y + 1 in the place of y.add_(1) or y += 1."
        )
    if "does not require grad and does not have a grad_fn" in text:
        return (
            "The loss does not depend on any parameter, as detach(), .data or torch.no_grad() has cut it from them, so "
            "that there are no gradients; compute it of what the last layer returns."
        )
    if _ON_META.search(text) and ("device" in text or "meta tensor" in text):
        return (
            f"In {where} a tensor has no values ({told_once(text)}), as the constructor keeps it outside parameters "
            "and buffers; use register_buffer."
        )
    if tp > 1 and is_of_sizes(error):
        return f"With tp {tp}, {where} fails on the part of one rank: {told_once(text)}; {ADVICE}."
    return None


ADVICE = (
    "name in shard the bare parameters and buffers that have a value for each head or feature of a cut layer, as "
    "Shard(dim), and take sizes from the tensors, as with -1 in view"
)
"""What to do about sizes that do not go together."""


def told_once(text: str) -> str:
    """The first sentence of a message."""
    return text.split(". ")[0].rstrip(".!")
