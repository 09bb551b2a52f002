"""`parallel.fallbacks`: the layouts with which a run that has lost ranks goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from threefold.comm.layout import Layout
from threefold.comm.layout_spec import LayoutSpec, parse
from threefold.config import Config
from threefold.config.config_error import problem
from threefold.config.loading import config_of
from threefold.config.resolve import check_settings
from threefold.config.rules.batch import batch_sizes
from threefold.errors import UserError
from threefold.files import shown

_NAMED = ("cp_method", "schedule", "stage_chunks", "sequence_parallel", "zero", "zero_shards")
"""Settings of `parallel` beside the axes that the text of a layout names, or leaves at their default."""


@dataclass(frozen=True)
class Fallback:
    """A layout with which a run can go on.

    Attributes:
        spec: the layout, and settings that go with it.
        config: of the run in it, as given.
    """

    spec: LayoutSpec
    config: Config

    @property
    def world_size(self) -> int:
        return self.spec.world_size

    def __str__(self) -> str:
        return str(self.spec)


def fallbacks_of(config: Config) -> tuple[Fallback, ...]:
    """The fallbacks of a config, checked as far as that goes without its data.

    Args:
        config: as given, in its own layout.

    Raises:
        UserError: one is malformed, or cannot train this model with the global batch of the config's own layout.
    """
    if not config.parallel.fallbacks:
        return ()
    batch = batch_sizes(config, largest=1).global_batch_size
    return tuple(_fallback(config, text, batch) for text in config.parallel.fallbacks)


@contextmanager
def naming_fallback(config: Config, text: str) -> Iterator[None]:
    """Within the block a `UserError` says that it is about the fallback `text` of a config."""
    try:
        yield
    except UserError as error:
        raise UserError(
            f"{config.origin('parallel.fallbacks')}parallel.fallbacks has {shown(text)}, with which this run cannot go "
            f"on: {error}"
        ) from None


def smaller(fallbacks: tuple[Fallback, ...], ranks: int) -> Fallback | None:
    """The first fallback with fewer ranks."""
    return next((each for each in fallbacks if each.world_size < ranks), None)


def in_world(config: Config, fallbacks: tuple[Fallback, ...], ranks: int, because: str) -> tuple[Config, str]:
    """The config for a world of so many ranks, and the fallback that it follows, empty where it is the given one.

    Args:
        because: as of `Layout.require_world`.

    Raises:
        UserError: neither the config's own layout nor a fallback has so many.
    """
    layout = Layout.of(config.parallel)
    if layout.world_size == ranks:
        return config, ""
    found = next((each for each in fallbacks if each.world_size == ranks), None)
    if found is not None:
        return found.config, str(found)
    if fallbacks:
        listed = ", ".join(f"{each} {each.world_size}" for each in fallbacks)
        raise problem(
            config,
            "parallel.fallbacks",
            f"the world has {ranks} ranks, the layout {layout} needs {layout.world_size}, and of the fallbacks {listed}"
            f"; start {_nearest(layout, fallbacks, ranks)} or add a layout of {ranks} ranks",
            value=list(config.parallel.fallbacks or ()),
        )
    layout.require_world(ranks, because)
    raise AssertionError


def _nearest(layout: Layout, fallbacks: tuple[Fallback, ...], ranks: int) -> int:
    sizes = {layout.world_size, *(each.world_size for each in fallbacks)}
    return min(sizes, key=lambda size: (abs(size - ranks), size))


def _fallback(config: Config, text: str, batch: int) -> Fallback:
    with naming_fallback(config, text):
        spec = parse(text)
        found = _composed(config, spec, batch)
        check_settings(found)
    return Fallback(spec, found)


def _composed(config: Config, spec: LayoutSpec, batch: int) -> Config:
    """The config in another layout, its global batch as a given setting and the parts of it derived."""
    sections = config.given()
    parallel, train, layout = sections["parallel"], sections["train"], spec.layout
    parallel.update({axis: layout.size(axis) for axis in ("dp", "pp", "cp", "tp", "ep")})
    for key in _NAMED:
        parallel.pop(key, None)
    if not isinstance(config.parallel.partition, str):  # the stages of one layout
        parallel.pop("partition", None)
    train["global_batch_size"] = batch
    train.pop("gradient_accumulation_steps", None)
    if (micro := train.get("micro_batch_size")) and (batch // layout.dp) % micro:
        train.pop("micro_batch_size")
    for key, value in spec.settings:
        section, name = key.split(".")
        sections[section][name] = value
    made = config_of(sections)
    made._origins = {key: origin for key, origin in config._origins.items() if not key.startswith("parallel.")}
    return made
