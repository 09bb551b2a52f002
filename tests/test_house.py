"""Rules of the package that no linter checks."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

from tests.support.modules import module_names

ROOT = Path(__file__).parents[1]
SLOW_TO_IMPORT = ("torch", "numpy", "tokenizers", "matplotlib", "yaml")


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The syntax tree of a file, flat."""
    return tuple(ast.walk(ast.parse(path.read_text())))


def test_modules_import_in_no_circle() -> None:
    graph = grimp.build_graph("threefold", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 200
    TopologicalSorter(imports).prepare()  # raises CycleError, which names one


def test_what_is_imported_is_there() -> None:
    """Also by benchmarks and examples, which no test imports; mypy passes over a module of ours that is gone."""
    missing = []
    for folder in ("threefold", "benchmarks", "examples", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.is_relative_to(ROOT / "docs/_build"):  # copies
                continue
            for node in nodes(path):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "threefold":
                    for name in node.names:
                        if not importable(str(node.module), name.name):
                            missing.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.module} {name.name}")
            if folder == "threefold":  # what doors and other tables name
                paths = re.findall(r'"(threefold(?:\.\w+)+):(\w+)', path.read_text())
                missing += [
                    f"{path.relative_to(ROOT)} {module}:{name}"
                    for module, name in paths
                    if not importable(module, name)
                ]
    assert missing == []


def importable(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


def test_a_class_has_one_meaning() -> None:
    """No two rooms have a class of one name; the parts that each family of models has are named alike."""
    places: dict[str, list[str]] = {}
    for path in (ROOT / "threefold").rglob("*.py"):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and path.name != "model.py":
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["data", "--help"], ["--version"]])
def test_help_imports_nothing_slow(arguments: list[str]) -> None:
    script = (
        f"import sys; sys.argv = ['threefold', *{arguments!r}]\n"
        "from threefold.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        f"print('imported:', *sorted(set({SLOW_TO_IMPORT!r}) & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1].strip() == "imported:"


def test_importing_the_package_starts_nothing() -> None:
    """No work at import: no threads, no process group, no files opened for writing."""
    script = (
        "import threading, threefold.verify.worker_pool, threefold.launch.training_run, torch.distributed\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


UNPICKLING = re.compile(
    r"\b(?:c?pickle|dill|cloudpickle|marshal|shelve|joblib)\.(?:load|loads|open|_?Unpickler)\b|\b_?Unpickler\b"
    r"|\btorch\.load\b|\bread_pickle\b|\ballow_pickle\b|\bnp\.load\b|\bfrom (?:pickle|marshal|shelve|joblib)\b"
    r"|\bFileSystemReader\b|\bdcp\.load\("
)
"""What makes objects of bytes, and may run what the bytes say."""
ADMITTED = {
    "threefold/checkpoint/tensors.py": {
        "dcp.load(detached(tensors), storage_reader=Reader(folder, ": "our reader, whose files hold no pickle",
    },
    "threefold/verify/reference.py": {
        "torch.load(folder / FILE, mmap=True, weights_only=True)": "our own file; only tensors"
    },
    "threefold/comm/axis.py": {
        "pickle.loads(each)": "a message between ranks of one run, never a file",
        "that `pickle.loads` reads": "says what reads such a message",
    },
    "threefold/verify/worker_pool.py": {
        "pickle.loads(workers[rank].connection.recv_bytes())": "an answer of a process that this one forked",
        "pickle.loads(raw)": "a request of the process that forked this one",
        "pickle.loads(call)": "the same",
    },
    "threefold/launch/failure.py": {
        "pickle.loads(data)": "what this process has just pickled",
        "pickle.loads(self.raised)": "an exception of a process that this one started",
    },
    "threefold/api/launch.py": {"pickle.loads(result)": "the result of a process that this one started"},
}
"""The places where that is safe, by file: what the line has, and why."""


def test_no_file_is_unpickled() -> None:
    found = [
        (str(path.relative_to(ROOT)), line.strip())
        for path in sorted((ROOT / "threefold").rglob("*.py"))
        for line in path.read_text().splitlines()
        if UNPICKLING.search(line)
    ]
    refused = [(path, line) for path, line in found if not any(known in line for known in ADMITTED.get(path, ()))]
    assert refused == []
    idle = [
        (path, known)
        for path, places in ADMITTED.items()
        for known in places
        if not any(path == place and known in line for place, line in found)
    ]
    assert idle == [], "admitted, and no longer there"


def test_models_import_nothing_distributed() -> None:
    """Import-linter sees to `threefold.comm` and `threefold.parallel`; this to torch's own."""
    files = sorted((ROOT / "threefold/models").rglob("*.py"))
    assert len(files) > 10
    assert [str(path) for path in files if re.search(r"torch\.distributed|import distributed", path.read_text())] == []


SAME_AS_TORCH = ("threefold.ops", "threefold.random")
"""What a reader of a model need not open: faster or layout-independent ways to compute what torch's own `linear`,
`scaled_dot_product_attention`, `cross_entropy` and `dropout` compute."""
NOT_PART_OF_GPT = {
    "threefold.models.gpt": "its config section",
    "threefold.models.layers.rope_scaling": "stretches rotary positions to longer sequences: an option, off by default",
}


def test_gpts_forward_pass_is_read_in_three_files_and_400_lines() -> None:
    """From the model down, everything of `threefold.models` that it is made of; config classes are no code to follow,
    and sharding tables are not imported by models."""
    lines: dict[str, int] = {}
    beside: set[str] = set()
    ahead = ["threefold.models.gpt.model"]
    while ahead:
        module = ahead.pop()
        if module in lines or module in NOT_PART_OF_GPT:
            continue
        text = (ROOT / (module.replace(".", "/") + ".py")).read_text()
        lines[module] = len(text.splitlines())
        imported = set(re.findall(r"^from (threefold[\w.]*) import", text, re.MULTILINE))
        assert not re.search(r"^import threefold", text, re.MULTILINE), "the imports above are not all"
        ahead += [name for name in imported if name.startswith("threefold.models")]
        beside |= {name for name in imported if not name.startswith(("threefold.models", *SAME_AS_TORCH))}
    assert len(lines) <= 3, lines
    assert sum(lines.values()) <= 400, lines
    assert beside <= {"threefold.config", "threefold.config.model", "threefold.constants"}


OTHERS = {"_asdict", "_replace", "_fields", "_exit", "_Unpickler"}
"""Underscored names of Python's own library: namedtuples, `os._exit`, `pickle._Unpickler`."""
OTHERS |= {"_hp_mapping", "_index_in_param_group", "_take_model_step", "_get_model_param_range_map"}
"""And those of DeepSpeed's parameters and engines and of Megatron's optimizers, which have no public name."""


def private_names(path: Path, own: set[str]) -> list[str]:
    """Underscored names that a file imports from torch, or looks up on anything though it is not among `own`."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and node.attr not in own:
            names = [node.attr]
        else:
            continue
        found += [f"line {node.lineno}: {name}" for name in names if re.match(r"_(?!_)|__(?!.*__$)", name)]
    return found


def defined(path: Path) -> Iterator[str]:
    """Names that a module defines: functions, classes, variables, and attributes that are assigned to."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_private_parts_of_torch_are_in_one_place() -> None:
    """`threefold/torch_private/`, where each has its reason, and a canary in tests/test_torch_private.py."""
    files = [path for path in (ROOT / "threefold").rglob("*.py") if "torch_private" not in path.parts]
    own = {name for path in files for name in defined(path)} | OTHERS
    found = {str(path.relative_to(ROOT)): names for path in files if (names := private_names(path, own))}
    assert found == {}


def test_no_private_method_of_torch_is_overridden() -> None:
    """Outside of `threefold/torch_private/`; what a class of ours has under an underscore, no base of torch's has."""
    overrides = []
    for found in module_names():
        if "torch_private" in found:
            continue
        for kind in vars(importlib.import_module(found)).values():
            if not isinstance(kind, type) or kind.__module__ != found:
                continue
            bases = [base for base in kind.__mro__[1:] if base.__module__.split(".")[0] == "torch"]
            for name in set(vars(kind)) - {"_abc_impl", "_backward_cls"}:
                private = name.startswith("_") and not name.startswith("__")
                if private and any(name in vars(base) for base in bases):
                    overrides.append((kind, name))
    assert overrides == []


IMPORT_OF_A_TEST = re.compile(
    r"^\s*from tests\.(?:[\w.]+\.)?test_\w+ import"
    r"|^\s*from tests(?:\.\w+)* import .*\btest_"
    r"|^\s*import tests\.[\w.]*\btest_"
    r"|^\s*from tests\.(?:[\w.]+\.)?conftest import",
    re.MULTILINE,
)


def test_test_modules_import_helpers_from_support_and_not_from_each_other() -> None:
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in (ROOT / "tests").rglob("*.py")
        if (match := IMPORT_OF_A_TEST.search(path.read_text()))
    }
    assert found == {}


FOLDERS_OF_THEIR_OWN = {
    "gpu": "compares a GPU with the CPU, whatever the room",
    "support": "helpers of the tests",
    "fuzz": "damages the files of every reader in turn",
    "mutations": "makes mistakes in any file of the package, one at a time",
}
"""Folders of tests/ that threefold/ does not have, and why."""


def test_tests_mirror_the_package() -> None:
    """A folder of tests has the name of a folder of the package, or of a module that needs several test files."""
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    lost = [
        str(folder)
        for folder in sorted(folders)
        if str(folder).split("/")[0] not in FOLDERS_OF_THEIR_OWN
        and not (ROOT / "threefold" / folder).is_dir()
        and not (ROOT / "threefold" / folder).with_suffix(".py").is_file()
    ]
    assert lost == []
    idle = [name for name in FOLDERS_OF_THEIR_OWN if not (ROOT / "tests" / name).is_dir()]
    assert idle == []
