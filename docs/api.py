"""Reference of the Python library, from the signatures and docstrings of the public names.

`docs/generate.py` writes it into the site; each name is an object of Sphinx's Python domain. The sources are parsed,
not imported.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent, indent
from typing import Any, Final

from threefold.doors import added

ROOT = Path(__file__).parents[1]
PACKAGE: Final = "threefold"
GROUPS: Final[dict[str, tuple[str, str, tuple[str, ...]]]] = {
    "run": (
        "A run from a config",
        "The work of `threefold train` and `threefold verify`, from Python.",
        ("Trainer", "Stopped", "verify_model", "types.VerifiedModel", "load_config", "Config", "UserError"),
    ),
    "plan": (
        "Layouts in a notebook",
        "The page of `threefold show`, the timeline of `threefold simulate`, and a step whose ranks are threads.",
        (
            *("show", "types.LayoutPage", "simulate", "types.SimulatedStep"),
            *("explain", "types.Lesson", "types.LessonEvent", "types.LessonPass"),
        ),
    ),
    "ranks": (
        "Starting ranks",
        "From a script or a notebook, or under `torchrun` and `srun`, which start the ranks themselves.",
        (
            *("run", "spawn", "notebook_launcher", "init_mesh", "Mesh", "types.Axis", "types.Layout"),
            *("types.Coordinates", "RankFailed"),
        ),
    ),
    "model": (
        "Your own model",
        "A model in plain PyTorch, and the plan that describes how it is split.",
        (
            *("Plan", "Column", "Row", "Vocab", "Replicated", "PerHead", "Sharded", "Normal", "Constant", "inspect"),
            *("types.Inspection", "types.InspectedModule", "PipelineLayers", "types.ModelPlan", "types.Split"),
        ),
    ),
    "loop": (
        "Your own loop",
        "A model distributed over the mesh, its optimizer, data and checkpoints.",
        (
            *(
                "parallelize",
                "types.DistributedModel",
                "add_adapter",
                "CountedLoss",
                "LossTerm",
                "distributed_optimizer",
                "Schedule",
            ),
            *(
                "types.ModelOptimizer",
                "DistributedDataLoader",
                "GlobalBatchSampler",
                "save",
                "load",
                "types.LossFunction",
            ),
            "types.LossSums",
        ),
    ),
    "prepare": (
        "Any module in one call",
        "Data parallelism, ZeRO and mixed precision for an existing model.",
        (
            *("prepare", "backward", "clip_grad_norm_", "gather_for_metrics", "types.PreparedModule"),
            *("types.PreparedOptimizer", "types.PreparedLoader", "types.PreparedScheduler"),
        ),
    ),
    "layers": (
        "Parallel layers",
        "Single layers, for a model that you write with them.",
        (
            *("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "ParallelCrossEntropy"),
            "types.Initializer",
        ),
    ),
    "random": (
        "Random numbers",
        "Random numbers that are the same on any number of ranks.",
        ("Dropout", "sample_keys", "RandomStreams"),
    ),
    "pipeline": (
        "Stages of a pipeline",
        "The division of layers among stages.",
        (
            *("pipeline.partition_uniform", "pipeline.partition_uniform_chunks", "pipeline.partition_by_cost"),
            *("pipeline.partition_by_class", "pipeline.layers_by_rank"),
        ),
    ),
    "callbacks": (
        "Callbacks",
        "Code that runs at the events of a run, ready-made or your own.",
        (
            *("Callback", "callbacks.StepRecord", "callbacks.EvaluationRecord", "callbacks.RunContext"),
            *("callbacks.ModelView", "callbacks.ActivationWatch"),
            *("callbacks.CallbackFailed", "callbacks.CSVLog", "callbacks.EarlyStopping", "callbacks.EpochMetrics"),
            *("callbacks.MLflowRun", "callbacks.PhaseTimers", "callbacks.WeightsAndBiases"),
        ),
    ),
    "horovod": (
        "In Horovod's manner",
        "The optimizer sums the gradients; `loss.backward()` stays as it is.",
        (
            *("compat.horovod.DistributedOptimizer", "compat.horovod.broadcast_parameters"),
            *("compat.horovod.broadcast_optimizer_state", "compat.horovod.broadcast_object"),
            *("compat.horovod.allgather_object", "compat.horovod.init", "compat.horovod.rank", "compat.horovod.size"),
            *("compat.horovod.local_rank", "compat.horovod.local_size", "compat.horovod.is_initialized"),
            *("compat.horovod.shutdown", "compat.horovod.allreduce", "compat.horovod.allreduce_"),
            *("compat.horovod.allreduce_async", "compat.horovod.allreduce_async_"),
            *("compat.horovod.grouped_allreduce", "compat.horovod.grouped_allreduce_", "compat.horovod.allgather"),
            *("compat.horovod.allgather_async", "compat.horovod.broadcast", "compat.horovod.broadcast_"),
            *("compat.horovod.broadcast_async", "compat.horovod.broadcast_async_", "compat.horovod.poll"),
            *("compat.horovod.synchronize", "compat.horovod.barrier", "compat.horovod.join"),
            *("compat.horovod.PendingResult", "compat.horovod.Compression", "compat.horovod.Compressor"),
            *("compat.horovod.ReduceOperation", "compat.horovod.Average", "compat.horovod.Sum", "compat.horovod.Min"),
            *("compat.horovod.Max", "compat.horovod.Product", "compat.horovod.Adasum", "compat.horovod.nccl_built"),
            *("compat.horovod.gloo_built", "compat.horovod.mpi_built"),
        ),
    ),
    "paddle": (
        "In Paddle's manner",
        "Calls with the names and arguments that Fleet's users know.",
        ("split", "compat.paddle.Splitter", "compat.paddle.DistributedBatchSampler"),
    ),
}
"""File of docs/api → its title, what it is about, and its names in order."""

MEMBERS: Final[dict[str, tuple[str, ...]]] = {
    "Mesh": ("alone", "is_alone", "is_first_stage", "is_last_stage", "local_rank", "check_group", "new_axis"),
    "Layout": ("world_size", "coordinates", "rank_of", "groups"),
    "Plan": ("build",),
    "ModelPlan": (),
    "Axis": (
        *("size", "first", "last", "previous", "next", "is_first", "is_last", "barrier", "all_reduce", "all_reduce_"),
        *("all_gather", "reduce_scatter", "broadcast_", "gather_objects"),
    ),
    "DistributedModel": (
        *("parameters", "named_parameters", "train_batch", "eval_batch"),
        *("state_dict", "load_state_dict", "publish"),
    ),
    "ModelOptimizer": ("param_groups", "step", "zero_grad"),
    "RandomStreams": ("add", "use"),
    "UserError": (),
    "Config": (),
    "Split": (),
    "Inspection": ("undecided", "parameters"),
    "PreparedModule": ("state_dict", "load_state_dict"),
    "PreparedOptimizer": ("loss", "step_was_skipped", "step", "state_dict", "load_state_dict"),
    "PreparedLoader": (),
    "DistributedOptimizer": (
        *("step", "zero_grad", "synchronize", "skip_synchronize", "state_dict", "load_state_dict"),
    ),
}
"""The members of a class that the page has, where these are not all public ones that have a docstring."""

MADE_ELSEWHERE: Final = (
    *("ActivationWatch", "Axis", "Config", "Coordinates", "DistributedModel", "EvaluationRecord", "InspectedModule"),
    *(
        "Inspection",
        "LossSums",
        "ModelOptimizer",
        "ModelView",
        "PreparedLoader",
        "PreparedModule",
        "PreparedOptimizer",
        "PreparedScheduler",
    ),
    *("RankFailed", "RunContext", "Split", "StepRecord", "Stopped", "UserError"),
)
"""The classes that a user does not construct."""

Definition = ast.FunctionDef | ast.ClassDef | ast.Assign
"""An assignment is that of a type, explained by the text after it."""


@dataclass(frozen=True)
class Found:
    """A public name where it is defined."""

    node: Definition
    file: Path
    text: str


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def find(module: str, name: str) -> Found:
    """The definition of a name that a module has, or imports from another."""
    file = file_of(module)
    body = parsed(file).body
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return Found(node, file, ast.get_docstring(node) or "")
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            explained = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            return Found(node, file, str(following.value.value) if explained else "")
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            assert node.module is not None
            return find(node.module, name)
    raise SystemExit(f"{module} defines no {name}")


def literal(module: str, name: str) -> Any:
    """The value of a constant of a module."""
    for node in parsed(file_of(module)).body:
        target = (
            node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if hasattr(node, "targets") else None
        )
        if isinstance(target, ast.Name) and target.id == name and isinstance(node, ast.Assign | ast.AnnAssign):
            assert node.value is not None
            return ast.literal_eval(node.value)
    raise SystemExit(f"{module} has no {name}")


def decorators(node: ast.FunctionDef) -> list[str]:
    return [ast.unparse(each) for each in node.decorator_list]


def fields(found: Found) -> list[str]:
    """The fields of a dataclass or named tuple, as arguments of its constructor."""
    assert isinstance(found.node, ast.ClassDef)
    named = []
    for node in found.node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and not node.target.id.startswith("_"):
            kind = ast.unparse(node.annotation)
            if kind.startswith("ClassVar"):
                continue
            default = "" if node.value is None else f" = {default_of(node.value)}"
            named.append(f"{node.target.id}: {kind.strip(QUOTES)}{default}")
    return named


QUOTES: Final = "'\""


def default_of(value: ast.expr) -> str:
    """A default value; what `field(default_factory=...)` makes as what it is."""
    text = ast.unparse(value)
    made = re.fullmatch(r"field\(default_factory=(\w+)\)", text)
    return {"dict": "{}", "list": "[]"}.get(made[1], f"{made[1]}()") if made else text


def parameters(node: ast.FunctionDef, is_method: bool) -> list[str]:
    """The parameters of a function as they are written, one text each, with `*` and `/`."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    texts = [shown(each, default) for each, default in zip(plain, defaults, strict=True)]
    if is_method and "staticmethod" not in decorators(node):
        texts = texts[1:]
    if arguments.vararg:
        texts.append("*" + shown(arguments.vararg, None))
    elif arguments.kwonlyargs:
        texts.append("*")
    texts += [shown(each, value) for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg and arguments.kwarg.arg != "unknown":  # which are refused
        texts.append("**" + shown(arguments.kwarg, None))
    return texts


def shown(argument: ast.arg, default: ast.expr | None) -> str:
    kind = "" if argument.annotation is None else f": {ast.unparse(argument.annotation).strip(QUOTES)}"
    value = "" if default is None else f" = {default_of(default)}" if kind else f"={default_of(default)}"
    return f"{argument.arg}{kind}{value}"


def directive(kind: str, path: str, arguments: list[str] | None = None, result: str = "", option: str = "") -> str:
    """An object of Sphinx's Python domain: `path` is its name after the package's, `option` a line of the directive."""
    signature = "" if arguments is None else f"({', '.join(arguments)})"
    arrow = f" -> {result}" if result else ""
    return f"```{{py:{kind}}} {PACKAGE}.{path}{signature}{arrow}\n" + (f":{option}\n" if option else "") + "```"


def arguments_of(found: Found, is_method: bool = False) -> list[str]:
    """The arguments of a function, or of a class's constructor."""
    if isinstance(found.node, ast.FunctionDef):
        return parameters(found.node, is_method)
    if isinstance(found.node, ast.Assign):
        return []
    for node in found.node.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return parameters(node, True)
    return fields(found)


def result_of(node: Definition) -> str:
    if not isinstance(node, ast.FunctionDef) or node.returns is None:
        return ""
    return ast.unparse(node.returns).strip(QUOTES)


SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Attributes|Example):$")
LABELS: Final = {"Args": "Arguments"}


def sections(text: str) -> Iterator[tuple[str, str]]:
    """The parts of a docstring in order: those without a heading have an empty one."""
    heading, lines = "", list[str]()
    for line in text.splitlines():
        if found := SECTION.match(line):
            yield heading, dedent("\n".join(lines)).strip("\n")
            heading, lines = found[1], []
        elif heading and line and not line.startswith(" "):  # text after a section
            yield heading, dedent("\n".join(lines)).strip("\n")
            heading, lines = "", [line]
        else:
            lines.append(line)
    yield heading, dedent("\n".join(lines)).strip("\n")


def entries(body: str) -> list[tuple[str, str]]:
    """Name and text of each line of `Args` and the like; texts go on in lines that are indented."""
    found: list[tuple[str, str]] = []
    for line in body.splitlines():
        if line and not line.startswith(" ") and ": " in line:
            name, _, text = line.partition(": ")
            found.append((name, text))
        elif found:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{line.strip()}")
        else:
            found.append(("", line))
    return found


def described(text: str) -> str:
    """A docstring as Markdown."""
    parts = []
    for heading, body in sections(text):
        if not body:
            continue
        label = LABELS.get(heading, heading)
        if heading in ("Args", "Attributes", "Raises"):
            items = [f"- `{name}`: {indented(each)}" if name else f"- {each}" for name, each in entries(body)]
            parts.append(f"**{label}**\n\n" + "\n".join(items))
        elif heading == "Example":
            parts.append(f"```python\n{example(body)}\n```")
        elif heading:
            parts.append(f"**{label}** {body}")
        else:
            parts.append(body)
    return "\n\n".join(parts)


def example(body: str) -> str:
    """The code of an example, without prompts; what it prints as comments."""
    lines = []
    prompted, block = ">>> " in body, False
    for line in body.splitlines():
        if line.startswith(("```", ">>> import threefold")):
            continue
        if line.startswith((">>> ", "... ")):
            if block and line.startswith(">>> "):
                lines.append("\n")
            block = line.startswith((">>> def ", ">>> class ")) or (block and line.startswith("... "))
            lines.append(line[4:])
        elif line in (">>>", "..."):
            lines.append("")
        else:
            lines.append(f"# {line}" if prompted and line else line)
    code = re.sub(r"  # doctest:.*", "", "\n".join(lines))
    code = re.sub(r"^((?:from|import) .*\n)(?!from |import |\n)", r"\1\n", code, flags=re.MULTILINE)
    return re.sub(r"(?<!from )\bthreefold\.", "t3.", code)


def indented(text: str) -> str:
    first, *rest = text.splitlines()
    return "\n".join([first, *(indent(line, "  ") for line in rest)])


def inherited(found: Found) -> list[ast.FunctionDef]:
    """The methods and properties of the classes of another module of the package that a class is made of."""
    assert isinstance(found.node, ast.ClassDef)
    bases = {ast.unparse(base) for base in found.node.bases}
    ours = [
        find(node.module, alias.name)
        for node in parsed(found.file).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        for alias in node.names
        if alias.name in bases
    ]
    return [node for each in ours for node in each.node.body if isinstance(node, ast.FunctionDef)]


def members(name: str, found: Found) -> Iterator[ast.FunctionDef]:
    """The public methods and properties of a class that the page has."""
    assert isinstance(found.node, ast.ClassDef)
    chosen = MEMBERS.get(name)
    nodes = [
        node for node in found.node.body if isinstance(node, ast.FunctionDef) and "overload" not in decorators(node)
    ]
    if chosen is not None:
        nodes += inherited(found)
        missing = set(chosen) - {node.name for node in nodes}
        if missing:
            raise SystemExit(f"docs/api.py: {name} has no {', '.join(sorted(missing))}")
        yield from (next(node for node in nodes if node.name == each) for each in chosen)
        return
    for node in nodes:
        if not node.name.startswith("_") and ast.get_docstring(node):
            yield node


def entry(name: str, found: Found, path: str) -> Iterator[str]:
    """The Markdown of a name: a heading, the object with its signature, its description, and its members."""
    yield f"## `{PACKAGE}.{path}`"
    if isinstance(found.node, ast.Assign):
        yield directive("data", path, option=f"value: {ast.unparse(found.node.value)}")
    else:
        kind = "class" if isinstance(found.node, ast.ClassDef) else "function"
        made = None if name in MADE_ELSEWHERE else arguments_of(found)
        yield directive(kind, path, made, result_of(found.node))
    yield described(found.text)
    if not isinstance(found.node, ast.ClassDef):
        return
    for node in members(name, found):
        text = described(ast.get_docstring(node) or "")
        result, member = result_of(node), f"{path}.{node.name}"
        if any(each in ("property", "cached_property") for each in decorators(node)):
            shown = directive("property", member, option=f"type: {result}" if result else "")
            yield f"### `{name}.{node.name}`\n\n{shown}\n\n{text}"
        else:
            shown = directive("method", member, parameters(node, True), result)
            yield f"### `{name}.{node.name}()`\n\n{shown}\n\n{text}"


def modules() -> dict[str, str]:
    """Public name → the module that defines it, relative to the package."""
    names = {name: module for module, names in literal(PACKAGE, "_NAMES").items() for name in names.split()}
    return names | attached("NAMES")


def attached(kind: str) -> dict[str, str]:
    """Public name that an attached room adds → the module that defines it, relative to the package."""
    paths = (path.partition(":") for path in added(kind).values())
    return {name: module.removeprefix(f"{PACKAGE}.") for module, _, name in paths}


ATTACHED: Final = {"types": "TYPES", "callbacks": "CHOSEN_CALLBACKS"}
"""Room of public names → what attached rooms add to it."""


def public(path: str) -> Found:
    """The definition of a public name, such as `Plan` or `pipeline.partition_uniform`."""
    *rooms, name = path.split(".")
    for room, kind in ATTACHED.items():
        if rooms == [room] and name in attached(kind):
            return find(f"{PACKAGE}.{attached(kind)[name]}", name)
    module = literal(PACKAGE, "_ROOMS")[rooms[0]] if rooms else modules()[name]
    return find(".".join([PACKAGE, module, *rooms[1:]]), name)


def table() -> str:
    """The pages of the library, with the names that each has."""
    rows = ["| | |", "|---|---|"]
    for file, (title, what, paths) in GROUPS.items():
        rows.append(f"| [{title}](api/{file}.md) | {what} {', '.join(f'`{path}`' for path in paths)} |")
    return "\n".join(rows) + "\n"


def page(file: str) -> str:
    """The entries of a page of docs/api."""
    parts = [part for path in GROUPS[file][2] for part in entry(path.split(".")[-1], public(path), path)]
    return "\n\n".join(part for part in parts if part) + "\n"


def public_paths() -> Iterator[str]:
    """Each public name, and those that a room lists, except the ones that the package itself has."""
    rooms = literal(PACKAGE, "_ROOMS")
    yield from modules()
    listing = {**rooms, "compat.horovod": "compat.horovod", "compat.paddle": "compat.paddle"}
    for room in listing.keys() - {"compat"}:
        module = f"{PACKAGE}.{listing[room]}"
        imports = [node for node in parsed(file_of(module)).body if isinstance(node, ast.ImportFrom)]
        shown = [each.name for node in imports for each in node.names if each.asname == each.name]
        for name in shown or literal(module, "__all__"):
            if name not in modules():
                yield f"{room}.{name}"
    yield from (f"{room}.{name}" for room, kind in ATTACHED.items() for name in attached(kind))


def problems() -> Iterator[str]:
    """A sentence for each public name that the page has not once, and for each argument without a word."""
    grouped = [path for _, _, paths in GROUPS.values() for path in paths]
    for path in sorted({*public_paths()} ^ {*grouped}):
        yield f"{path} is {'no public name' if path in grouped else 'in no group of docs/api.py'}"
    for path in grouped:
        found, name = public(path), path.split(".")[-1]
        text = found.text
        if not text:
            yield f"{path} has no docstring"
            continue
        explained = {
            each.strip().lstrip("*")
            for heading, body in sections(text)
            if heading in ("Args", "Attributes")
            for names, _ in entries(body)
            for each in names.split(",")
        }
        for argument in () if name in MADE_ELSEWHERE else arguments_of(found):
            word = re.split(r"[:=]", argument)[0].strip().lstrip("*")
            if word and word not in explained:
                yield f"{path} does not say what {word} is"
