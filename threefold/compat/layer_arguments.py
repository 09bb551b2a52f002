"""Arguments of parallel layers as other systems call them, and what to write instead."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import Concatenate, Final, ParamSpec, TypeVar

from threefold.errors import UserError
from threefold.parallel.split_layer import AN_AXIS

_Layer = TypeVar("_Layer")
_P = ParamSpec("_P")
_ELSEWHERE: Final = {
    "has_bias": "use bias",
    "use_bias": "use bias",
    "init_method": "use weight_init",
    "weight_attr": "use weight_init",
    "bias_attr": "use bias for whether there is one, and bias_init for its values",
    "gather_out": "use gather_output of ColumnParallelLinear",
    "parallel_input": "use input_is_parallel of RowParallelLinear",
    "skip_bias_add": "it returns the output alone, with its bias; use bias=False and add a bias of your own",
    "skip_weight_param_allocation": "use threefold.parallelize with tied weights, or assign the other layer's weight",
    "sequence_parallel": "use sequence_dim",
    "sequence_parallel_enabled": "use sequence_dim",
    "mp_group": "use axis",
    "tp_group": "use axis",
    "process_group": "use axis",
    "config": "its sizes are its arguments",
    "dtype": "call its .to(dtype)",
    "device": "make it in `with torch.device(…):`",
    "padding_idx": "make it by VocabParallelEmbedding.from_embedding",
}
"""Arguments of such layers in other systems, and what to write instead."""
_OF_A_LAYER: Final = {
    ("RowParallelLinear", "gather_output"): "its output is always whole; for an input that is split already, use "
    "input_is_parallel",
    ("ColumnParallelLinear", "input_is_parallel"): "its input is always whole; for a part of the output on each rank, "
    "use gather_output=False",
    ("VocabParallelEmbedding", "bias"): "a table has none; leave it out",
    ("VocabParallelEmbedding", "gather_output"): "its output is always whole; leave it out",
}


def explaining_arguments(
    init: Callable[Concatenate[_Layer, _P], None],
) -> Callable[Concatenate[_Layer, _P], None]:
    """Make the constructor of a layer raise a `UserError` that says which argument it lacks or does not have."""
    signature = inspect.signature(init)
    names = list(signature.parameters)[1:]

    @wraps(init)
    def checked(self: _Layer, /, *args: _P.args, **options: _P.kwargs) -> None:
        kind = type(self).__name__
        for name in options:
            if name in names:
                continue
            instead = _OF_A_LAYER.get((kind, name)) or _ELSEWHERE.get(name)
            if instead is not None:
                raise UserError(f"{kind} has no {name}: {instead}.")
            (near,) = get_close_matches(name, names, n=1, cutoff=0)
            raise UserError(f"{kind} has no argument {name!r}; the nearest is {near!r}.")
        try:
            signature.bind(self, *args, **options)
        except TypeError:
            given = {*names[: len(args)], *options}
            for name, parameter in list(signature.parameters.items())[1:]:
                if parameter.default is parameter.empty and name not in given:
                    use = AN_AXIS if name == "axis" else f"give {name}=1, say"
                    raise UserError(f"{kind} lacks {name}; {use}.") from None
            positional = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in signature.parameters.values()) - 1
            raise UserError(
                f"{kind} has {positional} arguments without a name ({', '.join(names[:positional])}) but got "
                f"{len(args)}, or one of them by its name too; name those after {names[positional - 1]}."
            ) from None
        init(self, *args, **options)

    return checked
