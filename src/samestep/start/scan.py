"""Reads from a script's source whether its processes join a run, or whether it starts ranks itself."""

import ast
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

_JOINS = (
    "samestep accelerate lightning lightning_fabric pytorch_lightning ignite deepspeed horovod transformers composer "
    "fairscale colossalai idr_torch mpi4py ray submitit torchft megatron torchtitan trl ezpz catalyst mmengine "
    "detectron2 fastai xformers"
)
JOINS = frozenset(_JOINS.split())
_READS_ARGUMENTS = re.compile(
    "argv|argparse|getopt|optparse|click|typer|fire|tyro|hydra|absl|Parser|docopt|lightning|mmengine"
)
_STOPS = re.compile("Checkpoint|SIGUSR1|lightning|composer|submitit|hydra")
_EARLY = re.compile("(OMP|KMP|GOMP|MKL|OPENBLAS|TORCH|ATEN)_[A-Z]")
_MOST_FILES = 50


def remark_on(script: Path, size: int) -> str | None:
    """A warning to print before `size` copies of this script are started; None if there is none."""
    files = list(_files(script))
    names = {name for _, tree in files for name in imported(tree)}
    tops = {name.partition(".")[0] for name in names}
    if "torch" not in tops:
        return None
    for path, tree in files:
        if (line := _spawn(tree)) is not None:
            return (
                f"{path.name}:{line} starts ranks itself, and {size} copies of it would each start their own; run it "
                f"with `python {script.name}`, or let samestep run start the ranks and leave the spawn out"
            )
    if tops & JOINS or any(name.startswith("torch.distributed") for name in names):
        return None
    return (
        f"{script.name} and what it imports name neither samestep nor torch.distributed, so these {size} processes "
        f"train {size} copies of one model, each on all samples; `samestep convert {script.name}` prints the change "
        "that lets them share"
    )


def imports_torch(script: Path) -> bool:
    """Whether the script, or a file beside it that it imports, imports torch or samestep."""
    names = {name.partition(".")[0] for _, tree in _files(script) for name in imported(tree)}
    return bool(names & {"torch", "samestep"})


def may_stop_early(script: Path) -> bool:
    """Whether the script, or a file beside it that it imports, may react to a signal; True if unknown."""
    files = list(_files(script))
    return not files or any(_STOPS.search(ast.dump(tree)) for _, tree in files)


def reads_arguments(script: Path) -> bool:
    """Whether the script, or a file beside it that it imports, may read the command's arguments; True if unknown."""
    files = list(_files(script))
    return not files or any(_READS_ARGUMENTS.search(ast.dump(tree)) for _, tree in files)


def names_early_variable(script: Path) -> bool:
    """Whether a string names a variable that torch reads at import: the script may set it before its import."""
    constants = (
        node.value for _, tree in _files(script) for node in ast.walk(tree) if isinstance(node, ast.Constant)
    )
    return any(isinstance(value, str) and _EARLY.match(value) for value in constants)


def imports_relatively(script: Path) -> bool:
    """Whether it imports from its own package by a dot, and so can only be run as a module."""
    nodes = ast.walk(ast.parse(script.read_bytes()))
    return any(isinstance(node, ast.ImportFrom) and node.level for node in nodes)


def as_module(script: Path) -> tuple[str, str]:
    """How to start a file of a package from here: what to write before the command, and `-m package.module`."""
    path, here = Path(os.path.abspath(script)), Path.cwd()
    top = next(folder for folder in path.parents if not (folder / "__init__.py").exists())
    if top == path.parent:  # a package without __init__.py
        top = here if here in top.parents else top.parent
    name = ".".join(path.relative_to(top).with_suffix("").parts).removesuffix(".__main__")
    return "" if top == here else f"PYTHONPATH={shlex.quote(os.path.relpath(top))} ", f"-m {name}"


def _files(script: Path) -> Iterator[tuple[Path, ast.Module]]:
    """The script and the files beside it that it imports, directly or not."""
    waiting, seen = [script], set[Path]()
    while waiting and len(seen) < _MOST_FILES:
        path = waiting.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue
        yield path, tree
        for name in imported(tree):
            place = script.parent.joinpath(*name.split("."))
            waiting += [place.with_suffix(".py"), place / "__init__.py"]


def imported(tree: ast.Module) -> Iterator[str]:
    """Every imported module, every name imported from a module, and `torch.distributed` as an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            yield "torch.distributed"


def _spawn(tree: ast.Module) -> int | None:
    """The line that calls torch.multiprocessing.spawn."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            within = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {alias.asname: within + alias.name for alias in node.names if alias.asname}
            names |= {alias.name: within + alias.name for alias in node.names if within and not alias.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            if names.get(first, first) + dot + rest == "torch.multiprocessing.spawn":
                return node.lineno
    return None
