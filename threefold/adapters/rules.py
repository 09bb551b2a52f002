"""Rules between adapters and other settings."""

from threefold.config import Config
from threefold.config.rules import Broken


def adapter_rules(config: Config) -> Broken:
    """Yield settings that adapters exclude, or that have no effect without adapters."""
    adapter = config.adapter
    if not adapter.rank:
        for name in adapter.settings():
            if name != "rank" and getattr(adapter, name) != type(adapter).model_fields[name].default:
                yield f"adapter.{name}", "adapter.rank is 0, so there is no adapter; use rank 8 or leave it out"
        return
    if config.precision.fp8:
        yield "precision.fp8", f"adapter.rank is {adapter.rank}, and adapters are not computed in float8; use false"
    if config.train.compile and adapter.dropout:
        yield "train.compile", f"adapter.dropout is {adapter.dropout:g}, which compiled layers do not draw; use false"
    if config.train.exact and adapter.dora:
        yield (
            "train.exact",
            "adapter.dora is true, and norms of rows are not summed in an order of their own; use false",
        )
