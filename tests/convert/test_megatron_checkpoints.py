"""Checkpoints that megatron-core wrote (`megatron_core.py`), as runs of ours: logits, an update after them, refusals."""

import pickle
import subprocess
import sys
import tarfile
import zipfile
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tests.support.command import Silent
from tests.support.other_systems import write_megatron
from threefold.checkpoint.folder import newest, stored_config
from threefold.checkpoint.tensors import read_tensor, stored_tensors
from threefold.cli.main import app
from threefold.convert.megatron_export import check_model, export_megatron
from threefold.convert.megatron_import import import_megatron
from threefold.convert.megatron_models import read_model, weight_maps
from threefold.convert.pickled import NotData, read
from threefold.convert.torch_files import DistributedFolder
from threefold.errors import UserError
from threefold.models.family import make_model

HERE = Path(__file__).parent
STEP = "iter_0000003"


def unpacked(kind: str, folder: Path) -> Path:
    """Unpack a checkpoint of megatron-core into `folder`, and return its own folder."""
    with tarfile.open(HERE / "data" / "megatron_core" / f"{kind}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / kind


def imported(source: Path, run: Path) -> dict[str, Tensor]:
    """Import a checkpoint, and return all tensors of ours."""
    import_megatron(source, run, False, False, Silent())
    return tensors_of(run)


def tensors_of(run: Path) -> dict[str, Tensor]:
    checkpoint = newest(run)
    assert checkpoint is not None
    return {name: read_tensor(checkpoint.path, name) for name in stored_tensors(checkpoint.path)}


def refused(source: Path, run: Path) -> str:
    """Return the sentence that an import ends with; nothing is left where it was to go."""
    with pytest.raises(UserError) as caught:
        import_megatron(source, run, False, False, Silent())
    assert not list(run.parent.glob(f"{run.name}*"))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800
    return str(caught.value)


GPT = pytest.param("gpt", marks=pytest.mark.slow)


@pytest.mark.parametrize("kind", ["llama", GPT])
def test_logits_are_those_of_megatron_core(tmp_path: Path, kind: str) -> None:
    source = unpacked(kind, tmp_path)
    weights = imported(source, tmp_path / "run")
    checkpoint = newest(tmp_path / "run")
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.facts.consumed_samples) == (3, 6)
    model = make_model(stored_config(checkpoint.path).model)
    model.load_state_dict({name: weights[f"model.{name}"] for name, _ in model.named_parameters()}, strict=False)
    theirs = torch.load(source / "tensors.pt", weights_only=True)
    assert (model(theirs["tokens"][:, :-1]) - theirs["logits"][:, :-1]).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_a_resumed_run_makes_the_update_that_megatron_core_makes(tmp_path: Path, kind: str) -> None:
    """The data are one text of two samples, so that a step of either system has the same batch."""
    source = unpacked(kind, tmp_path)
    theirs = torch.load(source / "tensors.pt", weights_only=True)
    text = [*theirs["tokens"][0].tolist(), *theirs["tokens"][1, 1:].tolist()]
    data, run = write_megatron(tmp_path / "text", [[text]]), tmp_path / "run"
    assert CliRunner().invoke(app, ["checkpoint", "import", str(source), "--out", str(run)]).exit_code == 0
    changed = (f"data.path={data}", "train.max_steps=4", "train.device=cpu", "train.eval_every=0")
    options = [part for setting in changed for part in ("--set", setting)]
    command = ["train", str(run / "config.yaml"), "--run-dir", str(run), "--resume", *options]
    ended = subprocess.run(
        [sys.executable, "-m", "threefold", *command], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    ours = tensors_of(run)
    names = {name.removeprefix("model."): tuple(each.shape) for name, each in ours.items() if name.startswith("model.")}
    for weight in weight_maps(names, theirs["after"]):
        differing = (ours[f"model.{weight.name}"] - read_whole(weight, theirs["after"])).abs()
        if weight.name.endswith("qkv.bias"):  # gradients of the keys' are rounding alone, of which Adam makes steps
            differing = differing.view(6, 3, 2)[:, ::2]
        assert differing.max() < 1e-6, weight.name
    assert {float(each) for name, each in ours.items() if name.endswith(".step")} == {4.0}


def read_whole(weight: Any, tensors: dict[str, Tensor]) -> Tensor:
    """Return a parameter of ours, put together by hand."""
    tensor = tensors[weight.sources[0].name]
    if len(weight.sources) == 1:
        return tensor
    gates, ups = tensor.chunk(2)
    return torch.stack([gates, ups], 1).flatten(0, 1)


@pytest.mark.parametrize("kind", ["llama-ranks", pytest.param("gpt-ranks", marks=pytest.mark.slow)])
def test_files_of_ranks_hold_what_torch_dist_holds(tmp_path: Path, kind: str) -> None:
    """The same model of tp × pp (× parts), saved in both formats: weights and moments have the same bits."""
    source = unpacked(kind, tmp_path)
    ranks = imported(source, tmp_path / "ranks")
    whole = imported(source / "torch_dist" / STEP, tmp_path / "whole")
    assert ranks.keys() == whole.keys()
    assert any(name.endswith("exp_avg_sq") for name in ranks)
    assert [name for name in ranks if not torch.equal(ranks[name], whole[name])] == []


@pytest.mark.parametrize("kind", ["llama", GPT])
def test_an_export_has_the_bits_of_the_import(tmp_path: Path, kind: str) -> None:
    """Once imported, once more exported and imported: the same weights, and the same files of them."""
    source, out = unpacked(kind, tmp_path), tmp_path / "out"
    weights = {name: each for name, each in imported(source, tmp_path / "run").items() if name.startswith("model.")}
    export_megatron(tmp_path / "run", out, None, False, False, None, Silent())
    again = imported(out, tmp_path / "again")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in again)
    theirs, ours = DistributedFolder(source / STEP), DistributedFolder(out / STEP)
    assert {name for name in theirs.tensors if not name.startswith("optimizer.")} == ours.tensors.keys()
    assert all(torch.equal(theirs.read(name), ours.read(name)) for name in ours.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt"])
def test_megatron_core_reads_an_export(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("megatron.core")
    source, out = unpacked(kind, tmp_path), tmp_path / "out"
    imported(source, tmp_path / "run")
    export_megatron(tmp_path / "run", out, None, False, False, None, Silent())
    subprocess.run([sys.executable, str(HERE / "megatron_core.py"), "read", kind, str(out)], check=True, timeout=300)
    found, theirs = torch.load(out / "read.pt", weights_only=True), torch.load(source / "tensors.pt", weights_only=True)
    assert torch.equal(found["logits"], theirs["logits"])
    assert found["args"]["num_layers"] == 3


def test_an_export_refuses_what_the_format_has_no_place_for(tmp_path: Path) -> None:
    import_megatron(unpacked("llama", tmp_path), tmp_path / "run", False, False, Silent())
    checkpoint = newest(tmp_path / "run")
    assert checkpoint is not None
    config = stored_config(checkpoint.path)
    for setting, value in (("sliding_window", 4), ("norm_position", "after"), ("architecture", "olmo")):
        model = config.model.model_copy(update={setting: value})
        with pytest.raises(UserError, match=rf"^model\.{setting} is {value}"):
            check_model(config.model_copy(update={"model": model}))


class Harmful:
    """Object whose pickle makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        import os

        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_nothing_of_a_harmful_file_is_run(tmp_path: Path, name: str) -> None:
    source, marker = unpacked("llama", tmp_path), tmp_path / "was-run"
    file, harmful = source / STEP / name, Harmful(marker)
    if name == ".metadata":
        file.write_bytes(pickle.dumps(harmful))
    elif name == "common.pt":
        torch.save({"args": Namespace(num_layers=harmful), "iteration": 3}, file)
    else:
        content = file.read_bytes()
        harmless = content.index(b"torch._utils")
        file.write_bytes(content[:harmless] + b"posix\nsystem" + content[harmless + 12 :])
    said = refused(source, tmp_path / "run")
    assert name in said
    assert "cannot be read" in said
    assert not marker.exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "subprocess.Popen"])
def test_a_harmful_call_is_named(name: str) -> None:
    module, _, function = name.rpartition(".")
    with pytest.raises(NotData, match=rf"would call {name}, as a harmful file does \(nothing of it was run\)"):
        read(b"c" + f"{module}\n{function}\n".encode() + b"(S'x'\ntR.")


def test_pickles_are_read_as_the_values_they_hold() -> None:
    value = {"a": [1, 2.5, None, True, -(1 << 70)], "b": ("x", b"\xff\x00", {3}), 4: {"nested": [[]]}}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert read(pickle.dumps(value, protocol)) == value
    whole = pickle.dumps(value)
    for length in range(len(whole)):
        with pytest.raises(NotData):
            read(whole[:length])


@pytest.mark.slow
@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp", "__0_1.distcp"])
def test_damaged_files_are_refused_in_a_sentence(tmp_path: Path, name: str) -> None:
    source = unpacked("llama", tmp_path)
    file = source / STEP / name
    whole = file.read_bytes()
    for length in (0, 3, 400, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert name in refused(source, tmp_path / "run")
    for place in range(40, len(whole), len(whole) // 7):  # such bytes may be of a name or of a weight
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        run = tmp_path / f"damaged-{place}"
        try:
            import_megatron(source, run, False, True, Silent())
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017
    file.unlink()
    assert refused(source, tmp_path / "run")


def test_a_rank_or_a_checkpoint_that_is_not_there_is_named(tmp_path: Path) -> None:
    source = unpacked("llama-ranks", tmp_path)
    gone = source / STEP / "mp_rank_01_000" / "model_optim_rng.pt"
    gone.unlink()
    assert "mp_rank_01_000" in refused(source, tmp_path / "run")
    gone.parent.rmdir()
    assert "lacks mp_rank_01_000; copy the folders of all ranks" in refused(source, tmp_path / "run")
    (source / "latest_checkpointed_iteration.txt").write_text("900")
    assert "names iter_0000900, which is not there" in refused(source, tmp_path / "run")
    torch.save({"model": {}}, source / STEP / "mp_rank_00_000" / "model_optim_rng.pt")
    assert "holds no checkpoint of Megatron-LM" in refused(tmp_path / "nothing", tmp_path / "run")


ARGS = {
    "num_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 6,
    "padded_vocab_size": 40,
    "max_position_embeddings": 16,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"num_experts": 8}, "num_experts is 8"),
        ({"multi_latent_attention": True}, "multi_latent_attention is True"),
        ({"window_size": (8, 0)}, r"window_size is \(8, 0\)"),
        ({"rotary_interleaved": True}, "rotary_interleaved is True"),
        ({"add_bias_linear": True}, "add_bias_linear is True; Threefold has no biases"),
        ({"normalization": "LayerNorm"}, "normalization is 'LayerNorm'"),
        ({"swiglu": False}, "normalization is 'RMSNorm'"),
        ({"hidden_size": "big"}, "hidden_size is 'big', which is not a number"),
        ({"num_layers": None}, "num_layers is missing"),
        ({"position_embedding_type": "none"}, "position_embedding_type is 'none'"),
        ({"swiglu": False, "normalization": "LayerNorm"}, "add_bias_linear is False; Threefold has biases"),
    ],
)
def test_a_model_that_is_not_read_is_refused_by_name(args: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        read_model({**ARGS, **args}, "common.pt")


def test_other_rotary_positions_norms_and_biases_arrive() -> None:
    more = {"use_rope_scaling": True, "apply_layernorm_1p": True, "add_qkv_bias": True, "qk_layernorm": True}
    found = read_model({**ARGS, **more, "rotary_percent": 0.5, "rotary_base": 500000}, "common.pt")
    expected = {"rope_scaling": "llama3", "rope_factor": 8.0, "norm_offset": True, "qkv_bias": True, "qk_norm": True}
    assert found.items() >= {**expected, "rotary_share": 0.5, "rope_theta": 500000.0}.items()


def test_weights_alone_become_a_run_to_start_from(tmp_path: Path) -> None:
    source = unpacked("llama", tmp_path)
    common = source / STEP / "common.pt"
    with zipfile.ZipFile(common) as archive:
        members = {each.filename: archive.read(each) for each in archive.infolist()}
    pickled = next(name for name in members if name.endswith("data.pkl"))
    members[pickled] = members[pickled].replace(b"common_step", b"commonXstep")
    with zipfile.ZipFile(common, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    made = import_megatron(source, tmp_path / "run", False, False, Silent())
    assert (made.step, made.state) == (0, "left out: it does not say after how many updates it is")
    assert not any(name.startswith("optimizer.") for name in tensors_of(tmp_path / "run"))
    assert "init_from" in (tmp_path / "run" / "config.yaml").read_text()
