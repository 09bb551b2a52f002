"""A model of a billion parameters, imported and given to four ranks: what each holds at most, and what it reads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.huggingface.hand_made import LLAMA, write_llama
from tests.support.command import Silent
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.host import keep_freed_memory
from threefold.huggingface.import_hf import Import, import_model
from threefold.inference.model import Trained
from threefold.parallel.leaf import local
from threefold.verify.worker_pool import WorkerPool

BILLION = LLAMA | {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "tie_word_embeddings": False,
}
MB = 10**6
BESIDE = 300 * MB


def _random(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random enough, and quick: one row of numbers over and over, turned by the seed."""
    row = torch.randn(1 << 16, generator=torch.Generator().manual_seed(seed)).mul_(0.02).bfloat16()
    count = torch.Size(shape).numel()
    return row.repeat(-(-count // len(row)))[:count].view(shape).clone()


def write_billion(folder: Path) -> int:
    """A Llama of 1.1 billion parameters in bf16, a file for each layer; returns how many."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BILLION))
    hidden, inner, narrow = BILLION["hidden_size"], BILLION["intermediate_size"], 8 * 64
    files = {
        f"layer-{layer}.safetensors": {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (hidden, hidden),
                "self_attn.k_proj": (narrow, hidden),
                "self_attn.v_proj": (narrow, hidden),
                "self_attn.o_proj": (hidden, hidden),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
        for layer in range(BILLION["num_hidden_layers"])
    }
    table = (BILLION["vocab_size"], hidden)
    files["ends.safetensors"] = {
        "model.embed_tokens.weight": table,
        "lm_head.weight": table,
        "model.norm.weight": (hidden,),
    }
    for number, (name, shapes) in enumerate(files.items()):
        save_file({key: _random(shape, number) for key, shape in shapes.items()}, folder / name)
    weight_map = {key: name for name, shapes in files.items() for key in shapes}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(torch.Size(shape).numel() for shapes in files.values() for shape in shapes.values())


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def read_bytes() -> int:
    """Return the bytes read from files so far, from disk or cache."""
    return int(Path("/proc/self/io").read_text().split()[1])


def import_rank(source: Path, out: Path) -> int:
    """Import in this process, and return by how much its memory grew at most."""
    import_model(Import(write_llama(out / "small"), out / "of small"), Silent())  # for what is made only once
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    import_model(Import(source, out / "run"), Silent())
    return status("VmHWM") - before


def load_rank(run: Path, layout: Layout) -> tuple[int, int, int]:
    """Take this rank's place in a layout, and its part of a run's weights, in fp32.

    Returns:
        bytes of its shard, by how much its memory grew at most, and what it read.
    """
    keep_freed_memory()
    mesh = Mesh(layout, torch.device("cpu"))
    trained = Trained.find(run)
    before, read = status("VmRSS"), read_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    model = trained.load(mesh)
    grown, read = status("VmHWM") - before, read_bytes() - read
    shard = sum(local(parameter).numel() * 4 for parameter in model.stage.parameters())
    return shard, grown, read


@pytest.mark.slow
def test_a_rank_holds_and_reads_its_own_part_alone(pool: WorkerPool, tmp_path: Path) -> None:
    count = write_billion(tmp_path / "hf")
    assert count > 10**9
    (grown,) = pool.run(1, import_rank, tmp_path / "hf", tmp_path)
    print(f"import: {grown / MB:.0f} MB")
    assert grown < BESIDE
    ranks = pool.run(4, load_rank, tmp_path / "run", Layout(dp=1, tp=2, pp=2))
    for rank, (shard, grown, read) in enumerate(ranks):
        print(f"rank {rank}: shard {shard / MB:.0f} MB, grew by {grown / MB:.0f} MB, read {read / MB:.0f} MB")
        assert grown < shard + BESIDE
        assert read < 1.1 * shard / 2  # bf16 on the disk, fp32 in memory
    assert sum(shard for shard, _, _ in ranks) < 1.01 * 4 * count
