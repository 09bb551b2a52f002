"""Measure tokens per second of generation: with the KV cache, without it, and with `transformers`' GPT-2.

    pip install -e '.[benchmark]'
    python benchmarks/generation.py [--rounds 5] [--prompts 1 8]

Each contestant writes NEW tokens after each of several prompts of PROMPT tokens, greedily. "Without" runs all tokens
through the model for each new one. Each runs in its own process with one thread (Threefold's choice for a model this
small), and they take turns.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import shape
import torch
from contest import Contestant, contest, ratio
from hardware import hardware_line
from rich.console import Console
from rich.table import Table

PROMPT, NEW = 128, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the medians are printed")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8], help="how many at once")
    arguments = parser.parse_args()
    ways = {"kept": kept_step, "without": without_step, "transformers": transformers_step}
    contestants = [
        Contestant(f"{name} {batch}", step, (batch,), launched=False)
        for batch in arguments.prompts
        for name, step in ways.items()
    ]
    seconds = contest(contestants, arguments.rounds, 1)
    console = Console()
    console.print(f"{shape.describe()}; {PROMPT} tokens and {NEW} new ones\n{hardware_line()}", soft_wrap=True)
    console.print(_table(seconds, arguments.prompts))


def kept_step(batch: int) -> Callable[[int], None]:
    """Return a step of Threefold with its KV cache."""
    from threefold.inference.generate import GenerationRequest, Sampling, complete

    torch.set_num_threads(1)
    model = _model()

    def step(number: int) -> None:
        complete(model, _prompts(batch, number).tolist(), GenerationRequest(NEW, Sampling(temperature=0)))

    return step


def without_step(batch: int) -> Callable[[int], None]:
    """Return a step that recomputes all tokens for each new one, with the head for the last token only."""
    torch.set_num_threads(1)
    model = _model()

    def step(number: int) -> None:
        tokens = _prompts(batch, number)
        for _ in range(NEW):
            hidden = model.hidden(tokens)
            assert hidden is not None
            tokens = torch.cat([tokens, model.whole_logits(hidden[:, -1]).argmax(-1, keepdim=True)], 1)

    return step


def transformers_step(batch: int) -> Callable[[int], None]:
    """Return a step of `generate` of `transformers`' GPT-2, with its own cache."""
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.set_num_threads(1)
    sizes = {"n_embd": shape.HIDDEN, "n_layer": shape.LAYERS, "n_head": shape.HEADS, "n_inner": shape.FFN}
    config = GPT2Config(
        vocab_size=shape.VOCAB,
        n_positions=shape.SEQUENCE,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()

    def step(number: int) -> None:
        tokens = _prompts(batch, number)
        model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW, do_sample=False)

    return step


def _model():  # type: ignore[no-untyped-def]
    """Return a model of the benchmarks' shape with initial weights."""
    from threefold.checkpoint.folder import Checkpoint
    from threefold.checkpoint.manifest import Facts
    from threefold.comm.mesh import Mesh
    from threefold.inference.model import Model, Trained
    from threefold.models.family import make_model, model_plan
    from threefold.parallel.parallelize import Parallelism, apply_parallelism
    from threefold.parallel.parameter import draw_
    from threefold.parallel.pipeline.partition import StageMap
    from threefold.parallel.pipeline.stage import whole_parameters

    config = shape.config("fp32")
    facts = Facts(0, 0, seed=0, eod=None, tokenizer_sha256=None, tokens=0, documents=0)
    plan, mesh = model_plan(config.model, shape.SEQUENCE), Mesh.alone()
    division = Parallelism(mesh, StageMap((0, len(plan.layers)), (0,)))
    (stage,) = apply_parallelism(lambda: make_model(config.model), plan, division, trains=False).stages
    for name, parameter in whole_parameters([stage]):
        draw_(parameter.detach(), parameter, name, plan, 0)
    trained = Trained(Checkpoint(Path(), facts), config)
    return Model(trained, stage.eval().requires_grad_(False), mesh, torch.float32)


def _prompts(batch: int, number: int) -> torch.Tensor:
    return torch.randint(0, shape.VOCAB, (batch, PROMPT), generator=torch.Generator().manual_seed(number))


def _table(seconds: dict[str, list[float]], batches: list[int]) -> Table:
    table = Table(title="New tokens per second, fp32", title_justify="left")
    for heading in ("prompts", "kept", "without", "ratio", "transformers", "ratio"):
        table.add_column(heading, justify="right")
    for batch in batches:
        ours, without, theirs = (seconds[f"{name} {batch}"] for name in ("kept", "without", "transformers"))
        speeds = [f"{batch * NEW / statistics.median(values):,.0f}" for values in (ours, without, theirs)]
        ratios = [f"{ratio(ours, values):.2f}" for values in (without, theirs)]
        table.add_row(f"{batch}", *speeds[:2], ratios[0], speeds[2], ratios[1])
    return table


if __name__ == "__main__":
    main()
