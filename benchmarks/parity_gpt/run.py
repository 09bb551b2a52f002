"""What a run is asked for, and what every part of it needs to know."""

import argparse
from dataclasses import MISSING, dataclass, field, fields

import torch

from .grid import Grid


@dataclass
class Options:
    """Settings of a run; each is a command-line option of the same name."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sp: bool = False
    """Sequence parallelism over tp."""
    ulysses: bool = False
    """Context parallelism by exchanging heads instead of gathering keys and values."""
    hybrid: int = 1
    """Reduce gradients over groups of this many data ranks, then over the groups."""
    zero: int = 0
    """1: sharded optimizer; 2: sharded gradients too."""
    bucket: int = 2048
    """Elements of a gradient bucket."""
    micro_batches: int = 1
    """Micro-batches of one pass through the pipeline."""
    accumulate: int = 1
    """Passes through the pipeline in a step."""
    zero_bubble: bool = False
    """Add weight gradients only after the pipeline has drained."""
    recompute: bool = False
    save_parts: bool = False
    """With recompute, keep only this tp rank's part of each block's input."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 0
    """0: as many as heads."""
    vocab: int = 64
    length: int = 16
    swiglu: bool = False
    tied: bool = False
    rotary: bool = False
    rotary_base: float = 1000.0
    qk_norm: bool = False
    sink: bool = False
    layer_scale: bool = False
    """Divide attention scores by the number of the layer."""
    experts: int = 0
    top_k: int = 2
    groups: int = 1
    """Choose experts only in the better half of so many groups."""
    dense_layers: tuple[int, ...] = ()
    """Layers without experts."""
    unbalanced_layers: tuple[int, ...] = ()
    """Layers whose experts are not balanced by a bias."""
    auxiliary: float = 0.0
    expert_bias: float = 0.0
    """Rate of the bias that balances experts."""
    adapters: bool = False
    """Low-rank adapters of the experts."""
    extra_head: bool = False
    """Predict the token after the next one too."""
    chunked_loss: bool = False
    dropout: float = 0.0

    batch: int = 4
    steps: int = 3
    start_step: int = 0
    """Steps before recording starts."""
    seed: int = 1
    masked: bool = False
    """Leave labels out, of some samples more than of others."""
    documents: bool = False
    """Documents longer than a sample, with positions that go on."""
    variable: bool = False
    """Every other pass has sequences of half the length."""
    samples: int = 4096
    mixture: bool = False
    """Draw from two sources by weight."""
    optimizer: str = "adam"
    lr: float = 3e-3
    clip: float = 1.0
    dtype: str = "float32"
    loss_scale: float = 0.0
    """Scale the loss as fp16 needs it; 0: not."""
    evaluate: bool = False
    joins: int = 0
    """Step after which the last replica joins the others, with the optimizer state it then gets."""

    save: str = ""
    """Folder for checkpoints of the steps before recording starts."""
    final: str = ""
    """Folder for a checkpoint of the last step."""
    load: str = ""
    """Folder of checkpoints to continue from."""
    load_step: int = -1
    """Step to continue from; -1: the latest."""
    weights_only: bool = False
    """Leave the optimizer's states, the data's and the counters as they are."""
    export: str = ""
    """File to write the trained model to, in another project's names."""
    load_export: str = ""
    mistake: str = ""

    def __post_init__(self) -> None:
        self.kv_heads = self.kv_heads or self.heads


def parse(arguments: list[str] | None = None) -> Options:
    """Read the options of a run from a command line."""
    parser = argparse.ArgumentParser(prog="parity_gpt")
    for each in fields(Options):
        name = "--" + each.name.replace("_", "-")
        default = each.default if each.default is not MISSING else None
        if isinstance(default, bool):
            parser.add_argument(name, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(name, type=int, nargs="*", default=default)
        else:
            parser.add_argument(name, type=type(default), default=default)
    parser.add_argument("--bug", dest="mistake", help="another name of --mistake")
    return Options(**vars(parser.parse_args(arguments)))


@dataclass
class Run:
    """Options, grid and state that the parts of a run share.

    Attributes:
        options: what was asked for.
        grid: ranks and groups.
        generator: random state of dropout; each rank has its own where it has tokens of its own.
        step: number of the current step.
        recomputing: whether the forward pass is the one of a recomputation.
        micro_batch: number of the micro-batch in the pass.
        counts: per layer, tokens that each expert got in this step.
        shown: quantities to log, by name.
    """

    options: Options
    grid: Grid
    generator: torch.Generator = field(default_factory=torch.Generator)
    step: int = 0
    recomputing: bool = False
    micro_batch: int = 0
    counts: dict[int, torch.Tensor] = field(default_factory=dict)
    shown: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        grid = self.grid
        stream = (
            grid.data.rank * grid.tp.size + (grid.tp.rank if self.options.sp else 0)
        ) * grid.pp.size + grid.pp.rank
        self.generator.manual_seed(self.options.seed * 1000 + stream)

    def mistake(self, *names: str) -> bool:
        """Whether one of these mistakes is put in."""
        return self.options.mistake in names

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.options.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def replicas(self) -> int:
        """Number of ranks that gradients of dense parameters are averaged over."""
        return self.grid.data.size
