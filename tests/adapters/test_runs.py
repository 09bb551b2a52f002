"""Runs with adapters: a warm start from a base without them, resuming in another layout, generation, and refusals."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.train.support import Run, same, steps_of, train_rank
from threefold.checkpoint.errors import MODEL, OPTIMIZER
from threefold.checkpoint.folder import newest, path_of
from threefold.checkpoint.index import weight_names
from threefold.checkpoint.resume import find_warm_start
from threefold.checkpoint.tensors import load_tensors, read_tensor, stored_tensors
from threefold.config import Config
from threefold.errors import UserError
from threefold.huggingface.peft_format import export_adapter
from threefold.inference.generate import GenerationRequest, Sampling, complete
from threefold.inference.model import Trained
from threefold.models.source import ConfigSource

ADAPTER = (("adapter.rank", 3), ("adapter.alpha", 6.0), ("adapter.dropout", 0.1), ("checkpoint.every", 2))
PLAIN = (("model.tie_embeddings", False),)
WITH = (("adapter.targets", ["blocks.**", "head.output", "embed.tokens"]), *ADAPTER[:2], *PLAIN)


def values(run_dir: Path) -> dict[str, torch.Tensor]:
    checkpoint = newest(run_dir)
    assert checkpoint is not None
    stored = stored_tensors(checkpoint.path)
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored.items()}
    load_tensors(tensors, checkpoint.path, alone=True)
    return tensors


@pytest.fixture(scope="module")
def trained(pool, small_run: Run, tmp_path_factory) -> Callable[..., Path]:
    """Trains a run of a name once."""
    folder = tmp_path_factory.mktemp("adapters")

    def of(name: str, settings: Run, resume: bool = False) -> Path:
        if resume or not (folder / name).exists():
            pool.run(settings.world_size, train_rank, settings, folder / name, resume)
        return folder / name

    return of


def adapted(small_run: Run, base: Path, **changes: object) -> Run:
    settings = (*PLAIN, ("train.init_from", str(base)), *ADAPTER)
    return small_run.but(dtype="fp64", dropout=0.0, set=settings, **changes)


def test_a_base_opens_and_every_layout_resumes(trained, small_run: Run) -> None:
    base = trained("base", small_run.but(dtype="fp64", dropout=0.0, set=PLAIN))
    alone = trained("alone", adapted(small_run, base, steps=5))
    cut = trained("cut", adapted(small_run, base, steps=2, tp=2, dp=2))
    cut = trained("cut", adapted(small_run, base, steps=5, pp=3), resume=True)
    one, other = ([line["loss"] for line in steps_of(each).values()] for each in (alone, cut))
    assert same(one, other, "fp64")
    before, after = values(base), values(alone)
    frozen = {name for name in before if name.startswith(MODEL)}
    assert frozen
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    added = {name.rpartition(".")[2] for name in after.keys() - before.keys()}
    assert {"lora_a", "lora_b"} <= added
    assert not any(name.startswith(OPTIMIZER) and "lora_" not in name for name in after)
    assert any(after[name].any() for name in after if name.endswith("lora_b"))
    again = values(cut)
    assert all(torch.allclose(after[name], again[name], rtol=1e-10, atol=1e-13) for name in after)


def test_generation_uses_the_adapters(trained, small_run: Run) -> None:
    """With the KV cache, as the whole model computes token by token."""
    folder = trained("all", small_run.but(dtype="fp64", dropout=0.0, steps=3, set=(*WITH, ("optimizer.lr", 0.3))))
    found = Trained.find(folder)
    make, _ = ConfigSource().load(found.config)
    model = make().double().eval()
    parameters = {f"{MODEL}{name}": each for name, each in model.named_parameters()}
    load_tensors(parameters, found.checkpoint.path, alone=True)
    loaded = found.load(dtype="fp64")
    prompt = [5, 9, 2]
    [written] = complete(loaded, [prompt], GenerationRequest(6, Sampling(temperature=0)))
    expected = list(prompt)
    with torch.no_grad():
        for _ in written:
            expected.append(int(model(torch.tensor([expected]))[0, -1, : loaded.tokens].argmax()))
    assert written == expected[3:]
    assert written


@pytest.mark.slow
def test_adapters_of_a_step_and_averages_of_adapters_are_exported(trained, small_run: Run, tmp_path: Path) -> None:
    settings = (*WITH, *ADAPTER[3:], ("optimizer.lr", 0.3), ("optimizer.ema_decay", 0.5))
    best = (("checkpoint.keep_best", "valid_loss"), ("train.eval_every", 1))
    folder = trained("averaged", small_run.but(dtype="fp64", dropout=0.0, steps=4, set=(*settings, *best)))
    for number, chosen in enumerate(({}, {"step": "2"}, {"step": "best"}, {"average": True})):
        out = tmp_path / str(number)
        made = export_adapter(folder, out, **chosen)
        path = path_of(folder, made.step)
        key = weight_names(path, "average" in chosen)["blocks.1.mlp.up.lora_b"]
        expected = read_tensor(path, key)
        assert torch.equal(exported_tensor(out, "base_model.model.transformer.h.1.mlp.c_fc.lora_B.weight"), expected)
        assert made.step == {0: 4, 1: 2, 3: 4}.get(number, made.step)
    plain, averaged = (read_tensor(path, weight_names(path, each)["blocks.1.mlp.up.lora_b"]) for each in (False, True))
    assert not torch.equal(plain, averaged)


@pytest.mark.slow
@pytest.mark.parametrize(
    "targets", [["blocks.**", "head.depths.**"], ["head.depths.0.block.attn.*"]], ids=["all", "one"]
)
def test_adapters_of_layers_that_predict_further_tokens_do_not_generate(
    trained, small_run: Run, targets: list[str]
) -> None:
    llama = (("model.architecture", "llama"), ("model.mtp_layers", 1), ("model.position_embedding", "rope"))
    settings = (*llama, *PLAIN, ("adapter.rank", 3), ("adapter.targets", targets), ("optimizer.lr", 0.3))
    folder = trained(f"further {len(targets)}", small_run.but(dtype="fp64", dropout=0.0, steps=3, set=settings))
    after = values(folder)
    assert any(after[name].any() for name in after if "head.depths" in name and name.endswith("lora_b"))
    loaded = Trained.find(folder).load(dtype="fp64")
    make, _ = ConfigSource().load(Trained.find(folder).config)
    whole = make().double().eval()
    load_tensors({f"{MODEL}{name}": each for name, each in whole.named_parameters()}, newest(folder).path, alone=True)
    tokens = torch.arange(8).unsqueeze(0)
    hidden = loaded.hidden(tokens)
    assert hidden is not None
    torch.testing.assert_close(loaded.logits(hidden), whole(tokens), rtol=1e-11, atol=1e-11)


def exported_tensor(folder: Path, name: str) -> torch.Tensor:
    with safe_open(folder / "adapter_model.safetensors", framework="pt") as file:
        return file.get_tensor(name)


@pytest.mark.slow
def test_magnitudes_resume_in_another_layout_and_generate(trained, small_run: Run) -> None:
    settings = (*PLAIN, *ADAPTER, ("adapter.dora", True))
    run = small_run.but(dtype="fp64", dropout=0.0, set=settings)
    alone = trained("dora alone", run.but(steps=5))
    cut = trained("dora cut", run.but(steps=2, tp=2, dp=2))
    cut = trained("dora cut", run.but(steps=5, pp=3), resume=True)
    after, again = values(alone), values(cut)
    assert any(after[name].any() for name in after if name.endswith("lora_magnitude"))
    assert all(torch.allclose(after[name], again[name], rtol=1e-10, atol=1e-13) for name in after)
    with_tp = GenerationRequest(6, Sampling(temperature=0))
    [[written], [same_written]] = (
        complete(Trained.find(each).load(dtype="fp64"), [[5, 9, 2]], with_tp) for each in (alone, cut)
    )
    assert written == same_written
    for dora in (False, True):
        changed = small_run.but(set=(*settings[:-1], ("adapter.dora", dora), ("train.init_from", str(alone)))).config
        if dora:
            find_warm_start(changed)
        else:
            with pytest.raises(
                UserError, match=r"adapter\.dora is False but .* has adapters with True; set it to True"
            ):
                find_warm_start(changed)


def test_another_adapter_is_refused(trained, small_run: Run, tmp_path: Path, pool) -> None:
    folder = trained("all", small_run.but(dtype="fp64", dropout=0.0, steps=3, set=(*WITH, ("optimizer.lr", 0.3))))
    for settings, says in (
        (PLAIN, r"adapter\.rank is 0 but .* has adapters with 3; set it to 3"),
        ((*PLAIN, ("adapter.rank", 2)), r"adapter\.rank is 2 but .* has adapters with 3"),
        ((*PLAIN, ("adapter.rank", 3)), r"adapter\.targets is None but .* has adapters with \['blocks"),
    ):
        config: Config = small_run.but(set=(*settings, ("train.init_from", str(folder)))).config
        with pytest.raises(UserError, match=says):
            find_warm_start(config)
