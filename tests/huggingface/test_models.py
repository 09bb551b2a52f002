"""Both ways between Threefold and transformers: the same logits, the same tokens, the same bits."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.huggingface.hand_made import file_tensors, refused, stored
from tests.huggingface.small_models import LENGTH, MODELS
from tests.support.command import Silent
from tests.support.double import Fp64
from tests.support.sweep import sweep
from threefold.checkpoint.errors import MODEL
from threefold.checkpoint.folder import newest, stored_config
from threefold.huggingface import files as weights
from threefold.huggingface import gpt
from threefold.huggingface.export_hf import Export, export_model
from threefold.huggingface.import_hf import Import, import_model
from threefold.huggingface.mapping import huggingface_types
from threefold.inference.generate import GenerationRequest, Sampling, complete
from threefold.inference.model import Trained
from threefold.models.family import make_model, model_plan
from threefold.models.gpt import Activation
from threefold.models.plan import tie_
from threefold.ops.kernels import ACTIVATIONS

same_bits = partial(torch.testing.assert_close, rtol=0, atol=0)
TOLERANCE = 1e-5
SHARD = 20_000  # bytes: several files for every model here


@pytest.fixture(scope="module")
def transformers() -> Any:
    """The library, which takes seconds to import."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@pytest.fixture(autouse=True)
def many_pieces() -> Iterator[None]:
    """Cut also small weights into pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "SMALL", 0)
        patch.setattr(weights, "BOXES", 3)
        yield


def random_model(transformers: Any, name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model whose weights are all random: norms and biases too."""
    kind, settings = MODELS[name]
    config = transformers.AutoConfig.for_model(
        kind, **settings, attn_implementation="eager", experts_implementation="eager"
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        centre = 1.0 if parameter.dim() == 1 and key.endswith("weight") and "gemma" not in kind else 0.0
        parameter.data = (torch.randn(parameter.shape, generator=generator) * 0.15 + centre).to(dtype)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.15)
    return model


def model_of(run: Path) -> nn.Module:
    """Return the model of a run's newest checkpoint, in fp32."""
    checkpoint = newest(run)
    assert checkpoint is not None
    config = stored_config(checkpoint.path)
    with torch.device("meta"):
        model = make_model(config.model)
    weights = {name.removeprefix(MODEL): tensor.float() for name, tensor in stored(run).items()}
    ties = model_plan(config.model, 16).ties
    model.load_state_dict(weights | {name: weights[owner] for name, owner in ties.items()}, assign=True)
    return model.eval()


@sweep("name", MODELS, quick=(2,), slow=(0, 4, 5, 7, 8, 9, 10, 12, 21, 22, 23, len(MODELS) - 1))
@torch.no_grad()
def test_same_logits_and_bits_both_ways(transformers: Any, tmp_path: Path, name: str) -> None:
    theirs = random_model(transformers, name)
    theirs.save_pretrained(tmp_path / "hf")
    progress = Silent()
    import_model(Import(tmp_path / "hf", tmp_path / "run"), progress)
    assert sum(moved for *_, moved in progress.phases) == sum(total for _, total, _ in progress.phases) > 0
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 31 % 97
    if name == "llama dynamic":  # transformers stretches for the longest sequence it has seen, so one of them alone
        tokens = tokens[:1]
    expected = theirs(tokens).logits
    assert expected.std() > 0.1
    assert (model_of(tmp_path / "run")(tokens) - expected).abs().max() < TOLERANCE

    export_model(Export(tmp_path / "run", tmp_path / "back", shard_bytes=SHARD), Silent())
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 1
    same_bits(file_tensors(tmp_path / "back"), file_tensors(tmp_path / "hf"))
    load = transformers.AutoModelForCausalLM.from_pretrained
    again = load(tmp_path / "back", attn_implementation="eager", experts_implementation="eager").eval()
    assert type(again) is type(theirs)
    assert torch.equal(again(tokens).logits, expected)

    import_model(Import(tmp_path / "back", tmp_path / "run2"), Silent())
    same_bits(stored(tmp_path / "run2"), stored(tmp_path / "run"))


BLOCKS = [name for name in MODELS if name.startswith(("olmo", "gemma", "glm", "phi", "gpt_oss"))]


@sweep("name", BLOCKS, quick=(3, 5), slow=(0, 1, 2, 7, 8))
def test_loss_and_gradients_of_weights_that_transformers_wrote(transformers: Any, tmp_path: Path, name: str) -> None:
    with Fp64():
        theirs = random_model(transformers, name).double()
    theirs.save_pretrained(tmp_path / "hf")
    import_model(Import(tmp_path / "hf", tmp_path / "run"), Silent())
    theirs.get_input_embeddings().padding_idx = None  # the row of padding would get no gradient
    config = Trained.find(tmp_path / "run").config.model
    ours = tie_(model_of(tmp_path / "run").double(), model_plan(config, LENGTH).ties)  # of numbers that fp32 has too
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 31 % 97
    labels = tokens.roll(-1, 1)
    with Fp64():
        expected = nn.functional.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten())
    expected.backward()
    loss = ours(tokens, labels) / labels.numel()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    shapes = {key: tuple(parameter.shape) for key, parameter in ours.named_parameters()}
    found: dict[str, torch.Tensor] = {}
    for weight in huggingface_types()[MODELS[name][0]].weights(config, shapes):
        found |= weights.split(weight, ours.get_parameter(weight.name).grad)
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    assert found.keys() == gradients.keys()
    for key, gradient in gradients.items():
        largest = gradient.abs().max()
        assert largest > 1e-7, key
        assert (found[key] - gradient).abs().max() <= 1e-6 * largest, key


def test_multi_token_prediction_comes_and_goes_or_is_left_out(transformers: Any, tmp_path: Path) -> None:
    theirs = random_model(transformers, "deepseek_v3")
    theirs.save_pretrained(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors, last, module = file_tensors(tmp_path / "hf"), "model.layers.2.", "model.layers.3."
    import_model(Import(tmp_path / "hf", tmp_path / "without"), Silent())  # as transformers writes it
    copies = {module + name.removeprefix(last): each * 1.5 for name, each in tensors.items() if name.startswith(last)}
    copies |= {f"{module}{name}.weight": torch.rand(24) for name in ("enorm", "hnorm", "shared_head.norm")}
    repeated = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    copies |= {f"{module}{name}.weight": tensors[f"{whole}.weight"].clone() for name, whole in repeated.items()}
    copies[f"{module}eh_proj.weight"] = torch.rand(24, 48)
    save_file(tensors | copies, path, {"format": "pt"})
    config = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))

    import_model(Import(tmp_path / "hf", tmp_path / "run"), Silent())
    found, without = (
        {name.removeprefix(MODEL): tensor for name, tensor in stored(tmp_path / each).items()}
        for each in ("run", "without")
    )
    assert torch.equal(found["head.depths.0.join.weight"], copies[f"{module}eh_proj.weight"])
    for name in (name for name in without if name.startswith("blocks.2.")):
        assert torch.equal(found[f"head.depths.0.block.{name.removeprefix('blocks.2.')}"], without[name] * 1.5), name
    exported = export_model(Export(tmp_path / "run", tmp_path / "back"), Silent())
    same_bits(file_tensors(tmp_path / "back"), tensors | copies)
    assert exported.parameters == sum(tensor.numel() for tensor in found.values())  # repeated ones count once
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    tokens = torch.arange(LENGTH).view(1, LENGTH) % 97
    with torch.no_grad():
        assert torch.equal(model_of(tmp_path / "run")(tokens), model_of(tmp_path / "without")(tokens))
    request = GenerationRequest(max_new_tokens=5, sampling=Sampling(temperature=0))
    models = [Trained.find(tmp_path / each).load() for each in ("run", "without")]
    assert [*models[0].stage.state_dict()] == [*models[1].stage.state_dict()]
    assert complete(models[0], [[1, 2, 3]], request) == complete(models[1], [[1, 2, 3]], request)

    for name, whole in repeated.items():
        other = copies[f"{module}{name}.weight"].clone()
        other[-1, -1] += 1
        save_file(tensors | copies | {f"{module}{name}.weight": other}, path, {})
        told = refused(tmp_path / "hf", tmp_path / "other")
        assert f"says num_nextn_predict_layers 1, and {module}{name}.weight is not {whole}.weight; give --ign" in told
    ignored = Import(tmp_path / "hf", tmp_path / "ignored", ignored=("num_nextn_predict_layers",))
    import_model(ignored, Silent())
    same_bits(stored(tmp_path / "ignored"), stored(tmp_path / "without"))
    save_file(tensors | copies | {"model.layers.4.enorm.weight": torch.zeros(24)}, path, {})
    assert "holds model.layers.4.enorm.weight, which a deepseek_v3" in refused(tmp_path / "hf", tmp_path / "other")


@pytest.mark.parametrize(
    "name", ["deepseek_v3", *(pytest.param(f"deepseek_v2{kind}", marks=pytest.mark.slow) for kind in ("", " lite"))]
)
def test_same_loss_and_gradients(transformers: Any, tmp_path: Path, name: str) -> None:
    """Of latent attention, whose rows are rearranged, and of the router's three ways to choose experts."""
    theirs = random_model(transformers, name)
    theirs.save_pretrained(tmp_path / "hf")
    import_model(Import(tmp_path / "hf", tmp_path / "run"), Silent())
    ours = model_of(tmp_path / "run")
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 31 % 97
    labels = tokens.roll(-1, 1)
    losses = ours(tokens, labels) / labels.numel(), nn.functional.cross_entropy(theirs(tokens).logits.mT, labels)
    for loss in losses:
        loss.backward()
    assert abs(losses[0] / losses[1] - 1) < TOLERANCE
    kind, _ = weights.read_model(theirs.config.to_dict(), "config.json")
    parameters = dict(ours.named_parameters())
    config = Trained.find(tmp_path / "run").config.model
    maps = kind.weights(config, {key: tuple(p.shape) for key, p in parameters.items()})
    found = [weights.split(each, parameters[each.name].grad) for each in maps]
    expected = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    for key in [key for key in expected if ".experts." in key]:  # transformers holds experts stacked
        stack = expected.pop(key)
        names = ("gate_proj", "up_proj") if "gate_up" in key else ("down_proj",)
        for number, each in enumerate(stack):
            place = f"{key.rpartition('.')[0]}.{number}"
            parts = zip(names, each.chunk(len(names)), strict=True)
            expected |= {f"{place}.{part}.weight": tensor for part, tensor in parts}
    assert sorted(key for each in found for key in each) == sorted(expected)
    for key, gradient in (pair for each in found for pair in each.items()):
        assert (gradient - expected[key]).abs().max() <= 1e-4 * expected[key].abs().max(), key


def test_activation_functions_are_those_of_transformers(transformers: Any) -> None:
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    for theirs, ours in gpt._ACTIVATIONS.items():
        assert torch.allclose(ACTIVATIONS[ours](x), transformers.activations.ACT2FN[theirs](x), rtol=1e-12, atol=1e-15)
    assert set(gpt._ACTIVATIONS.values()) == set(ACTIVATIONS) == set(get_args(Activation))


def test_narrow_weights_stay_as_they_are(transformers: Any, tmp_path: Path) -> None:
    theirs = random_model(transformers, "llama", torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    import_model(Import(tmp_path / "hf", tmp_path / "run"), Silent())
    export_model(Export(tmp_path / "run", tmp_path / "back"), Silent())
    assert [path.name for path in (tmp_path / "back").glob("*.safetensors*")] == ["model.safetensors"]
    same_bits(file_tensors(tmp_path / "back"), file_tensors(tmp_path / "hf"))
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == torch.bfloat16
    export_model(Export(tmp_path / "run", tmp_path / "wide", dtype="fp32"), Silent())
    widened = {name: tensor.float() for name, tensor in file_tensors(tmp_path / "hf").items()}
    same_bits(file_tensors(tmp_path / "wide"), widened)


@sweep("name", MODELS, quick=(0, 11), slow=(2, 5, 8, 10, 13, 22, 23))
@torch.no_grad()
def test_the_same_tokens_are_likeliest(transformers: Any, tmp_path: Path, name: str) -> None:
    theirs = random_model(transformers, name)
    theirs.config.eos_token_id = theirs.generation_config.eos_token_id = None  # a random model would end at once
    theirs.save_pretrained(tmp_path / "hf")
    import_model(Import(tmp_path / "hf", tmp_path / "run"), Silent())
    prompts = torch.randint(97, (50, 6), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(prompts)  # else token 0 would be taken for padding
    expected = theirs.generate(prompts, attention_mask=seen, max_new_tokens=12, do_sample=False, pad_token_id=0)[:, 6:]
    assert len({tuple(row) for row in expected.tolist()}) > 20
    request = GenerationRequest(max_new_tokens=12, sampling=Sampling(temperature=0), batch_size=50)
    got = complete(Trained.find(tmp_path / "run").load(), prompts.tolist(), request)
    assert got == expected.tolist()
