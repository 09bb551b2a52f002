"""A user's own model in plain torch modules, planned with `Plan`, is equal in every layout: initial values as well."""

from pathlib import Path

import torch

from tests.support import custom_token_model
from tests.support.sweep import sweep
from tests.verify.support import task, verify
from threefold.config import load_config
from threefold.models.source import ConfigSource, FileSource, ObjectSource
from threefold.verify.compare import INITIAL
from threefold.verify.verifier import EQUAL

FILE = Path(custom_token_model.__file__)


def custom_config(folder: Path, text: str = "") -> Path:
    path = folder / "own.yaml"
    path.write_text(
        "data: {path: tokens, sequence_length: 40}\n"
        f"model: {{file: '{FILE}:Tiny', vocab_size: 1001, arguments: {{blocks: 3}}{text}}}\n"
        "train: {global_batch_size: 64}\n"
    )
    return path


def results(pool, folder: Path, *layouts: str, dtype: str = "fp64", source=ConfigSource()):  # noqa: B008
    todo = task(*layouts, dtype=dtype, given=load_config(custom_config(folder)), source=source)
    return verify(pool, todo, folder, *layouts)


@sweep("dtype", ("fp64", "fp32"), slow=(0,))
def test_custom_model_is_equal_in_every_layout(pool, tmp_path: Path, dtype: str) -> None:
    layouts = ("tp3", "dp2·tp2 zero1 full", "pp3", "dp2 zero3")
    for result in results(pool, tmp_path, *layouts, dtype=dtype):
        assert result.verdict == EQUAL, (str(result.spec), result.worst, result.message)


def test_initial_values_have_the_same_bits_in_every_layout(pool, tmp_path: Path) -> None:
    for layout in ("tp3", "tp2·pp2", "dp2 zero3"):
        [report, *others] = _reports(pool, tmp_path, layout)
        errors = [error for each in (report, *others) for error in each.errors if error.what == INITIAL]
        assert errors
        assert {error.relative for error in errors} == {0.0}


def _reports(pool, folder: Path, layout: str):
    from threefold.comm.layout import parse
    from threefold.verify.layouts import compose
    from threefold.verify.rank_worker import run_rank
    from threefold.verify.reference import write_trace

    todo, spec = task(layout, dtype="fp32", given=load_config(custom_config(folder))), parse(layout)
    pool.run(1, write_trace, todo.source, todo.config, todo.rows, 1, str(folder))
    return pool.run(spec.world_size, run_rank, todo.source, compose(todo.config, spec), todo.rows, 1, str(folder))


def test_a_class_of_an_imported_module_is_found_by_the_workers(pool, tmp_path: Path) -> None:
    source = ObjectSource(custom_token_model.Tiny)
    [result] = results(pool, tmp_path, "tp2", source=source)
    assert result.verdict == EQUAL
    assert str(source) == "Tiny"


def test_the_constructor_draws_the_same_in_spite_of_what_was_drawn_before(tmp_path: Path) -> None:
    from threefold.models.source import construct

    source = FileSource(FILE, "Tiny")
    config = load_config(custom_config(tmp_path, ", max_position_embeddings: 40"))
    make_model, _ = source.load(config)
    first = construct(make_model, 3).state_dict()
    torch.randn(7)
    before = torch.random.get_rng_state()
    again, other = construct(make_model, 3).state_dict(), construct(make_model, 4).state_dict()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.out.weight"], other["blocks.0.out.weight"])
