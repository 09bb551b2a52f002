"""Adapters of frameworks: a right run of the real package is equal to one process, and a wrong one is named."""

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from parity_support import parity, sweep

EXAMPLES = Path(__file__).parents[2] / "examples/parity"


@dataclass(frozen=True)
class Case:
    """A candidate layout of an example, and a mistake put into its text.

    Attributes:
        package: module that the example needs.
        script: file of the example.
        candidate: arguments of the candidate.
        ranks: processes of the candidate.
        old, new: text that the mistake replaces, and with what.
        said: part of the verdict on the mistake.
        reference: arguments of the reference.
        bf16: whether both compute in bf16.
        options: further options of the comparison of the right run.
    """

    package: str
    script: str
    candidate: tuple[str, ...]
    ranks: int
    old: str
    new: str
    said: str
    reference: str = ""
    bf16: bool = False
    options: tuple[str, ...] = ()

    @property
    def precision(self) -> str:
        return " --bf16" if self.bf16 else ""


FP32 = {
    "accelerate, a wrapper bypassed": Case(
        "accelerate",
        "with_accelerate.py",
        ("--accumulate", "2"),
        2,
        "model(part[:, :-1])",
        "model.module(part[:, :-1])",
        "from rank to rank, and the mean over ranks would be right",
    ),
    "accelerate, accumulated gradients not divided": Case(
        "accelerate",
        "with_accelerate.py",
        ("--accumulate", "2"),
        2,
        "accelerator.backward(loss)",
        "accelerator.backward(loss * accumulate)",
        "all 29 are 2 (ranks or micro-batches) times the reference",
    ),
    "transformers, mean of means": Case(
        "transformers",
        "with_transformers.py",
        ("--accumulate", "2"),
        2,
        "    trainer.train()",
        "    trainer.model_accepts_loss_kwargs = False\n    trainer.train()",
        "first the gradient of transformer.ln_f.bias",
    ),
    "transformers' Llama and one's own, another rotary base": Case(
        "transformers",
        "own_llama.py",
        ("--own",),
        1,
        "10000 **",
        "20000 **",
        "first the output of model.layers.0.self_attn.o_proj",
    ),
    **{
        f"deepspeed, ZeRO {stage}, loss scaled": Case(
            "deepspeed",
            "with_deepspeed.py",
            ("--zero", str(stage), "--accumulate", "2"),
            2,
            "engine.backward(loss)",
            "engine.backward(2 * loss)",
            "all 29 are 2 (",
        )
        for stage in range(4)
    },
    "megatron, tp, an input gradient not summed": Case(
        "megatron.core",
        "with_megatron.py",
        ("--tp", "2"),
        2,
        "    model.broadcast_params()",
        "    column = gpt.decoder.layers[1].mlp.linear_fc1\n"
        "    column.explicit_expert_comm, column.allreduce_dgrad = True, False\n"
        "    model.broadcast_params()",
        "first the gradient of the output of decoder.layers.1.pre_mlp_layernorm",
    ),
    "megatron, pp, a tied gradient not summed": Case(
        "megatron.core",
        "with_megatron.py",
        ("--pp", "2"),
        2,
        "    model.broadcast_params()",
        "    import sys\n"
        '    ends = sys.modules["megatron.core.distributed.finalize_model_grads"]\n'
        "    ends._allreduce_word_embedding_grads = lambda *_, **__: None\n"
        "    model.broadcast_params()",
        "first the gradient of embedding.word_embeddings.weight",
    ),
    "megatron, distributed optimizer, gradients not summed over dp": Case(
        "megatron.core",
        "with_megatron.py",
        ("--zero",),
        2,
        "finalize_model_grads_func=finalize_model_grads",
        "finalize_model_grads_func=None",
        "gradients of parameters depart at step 1",
    ),
    "megatron, gated tp · pp · distributed optimizer, a wrong layer scale": Case(
        "megatron.core",
        "with_megatron.py",
        ("--gated", "--tp", "2", "--pp", "2", "--zero"),
        4,
        "    model.broadcast_params()",
        "    if not ends['pre_process']:\n"
        "        gpt.decoder.layers[0].mlp.register_forward_hook(lambda _, __, out: (out[0] * 1.01, out[1]))\n"
        "    model.broadcast_params()",
        "first the output of decoder.layers.1.mlp",
        reference="--gated",
    ),
    "torchtitan, FSDP, gradients divided by the replicas": Case(
        "torchtitan",
        "with_torchtitan.py",
        ("--dp", "2"),
        2,
        "reduce_by_sums(part)",
        "reduce_by_sums(part, 2.0)",
        "all 17 are 1/2 (1 / dp) times the reference",
    ),
    "torchtitan, tp, a norm's weight trained on one rank's samples": Case(
        "torchtitan",
        "with_torchtitan.py",
        ("--tp", "2"),
        2,
        "        reduce_by_sums(part)",
        "        reduce_by_sums(part)\n"
        "        part.layers['1'].attention_norm.weight.register_post_accumulate_grad_hook(\n"
        "            lambda parameter: parameter.grad.mul_(2)\n"
        "        )",
        "first the gradient of layers.1.attention_norm.weight: it is 2 (tp) times the reference",
    ),
}
CASES = FP32 | {
    f"{name}, bf16": replace(FP32[name], bf16=True, **changes)
    for name, changes in {
        # Too small a factor for noise in the last place of bf16, but not for the distance from fp64.
        "accelerate, accumulated gradients not divided": {
            "new": "accelerator.backward(loss * 1.01)",
            "said": "first the gradient of head.weight: it is about 1.0",
            "options": ("--wide",),
        },
        # In bf16 and without ZeRO, AdamW's count of updates begins at 1, so that the stages differ.
        **{
            f"deepspeed, ZeRO {stage}, loss scaled": {"reference": f"--zero {stage}", "said": "is 2 (dp or micro-b"}
            for stage in range(4)
        },
        "megatron, tp, an input gradient not summed": {},
        "megatron, distributed optimizer, gradients not summed over dp": {},
        "torchtitan, FSDP, gradients divided by the replicas": {},
    }.items()
}


def has(package: str) -> bool:
    """Return whether a package is installed, without running it."""
    return find_spec(package.partition(".")[0]) is not None


@sweep("name", list(CASES), ids=str, slow=(0,))
def test_a_right_run_is_equal_and_a_wrong_one_named(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    if not has(case.package):
        pytest.skip(f"{case.package} is not installed")
    script = EXAMPLES / case.script
    torchrun = (
        f"torchrun --standalone --nproc-per-node {case.ranks} {script} {' '.join(case.candidate)}{case.precision}"
    )
    arguments = (
        "run",
        "--reference",
        f"python {script} {case.reference}{case.precision}",
        "--candidate",
        torchrun,
        "--steps",
        "2",
    )
    right = parity(*arguments, "--noise", "1", *case.options, "--out", "records", folder=tmp_path)
    assert right.returncode == 0, right.stdout + right.stderr
    assert "Equal up to rounding in 2 steps" in right.stdout

    text = script.read_text()
    assert text.count(case.old) == 1
    (tmp_path / "wrong.py").write_text(text.replace(case.old, case.new))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "THREEFOLD_PARITY": "wrong", "THREEFOLD_PARITY_STEPS": "2"}
    environment |= {"THREEFOLD_PARITY_LOAD": "records/weights", "THREEFOLD_PARITY_STOP": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES), *environment.get("PYTHONPATH", "").split(os.pathsep)])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.ranks)]
    subprocess.run(
        [*command, "wrong.py", *case.candidate, *case.precision.split()], cwd=tmp_path, env=environment, check=True
    )
    wide = ("--wide", "records/wide") if case.options else ()
    wrong = parity("compare", "records/reference", "wrong", "--noise", "records/noise-1", *wide, folder=tmp_path)
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert case.said in " ".join(wrong.stdout.split()), wrong.stdout


@pytest.mark.sweep
def test_accelerates_padded_batches_are_equal_until_the_last_repeats_samples(tmp_path: Path) -> None:
    """Of 20 rows, the third batch of 8 has 4, and `even_batches` fills it up with the first ones."""
    if not has("accelerate"):
        pytest.skip("accelerate is not installed")
    script = Path(__file__).parent / "padded_accelerate.py"
    runs = ("--reference", f"python {script} 20", "--candidate")
    arguments = ("run", *runs, f"torchrun --standalone --nproc-per-node 2 {script} 20", "--noise", "1", "--steps")
    right = parity(*arguments, "2", folder=tmp_path)
    assert right.returncode == 0, right.stdout + right.stderr
    assert "seen of an epoch of 3 steps: 1 to 2, not its last batch" in right.stdout
    assert "at the positions that are no padding" in right.stdout
    wrong = parity(*arguments, "3", folder=tmp_path)
    assert wrong.returncode == 1, wrong.stdout + wrong.stderr
    assert "The runs read different samples at step 3" in wrong.stdout
    assert "are repeated from steps before" in wrong.stdout
