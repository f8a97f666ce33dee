"""The plan of the house, read from its source: floors, imports, public names, sizes and words."""

import ast
import inspect
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from textwrap import dedent

import samestep

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "samestep"
FILES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
EVERYWHERE = [
    *FILES,
    *(path for part in ("tests", "examples", "benchmarks") for path in (ROOT / part).rglob("*.py")),
]

PURE = {"errors", "text", "files", "rundir", "failure", "steptimes", "hang", "tracebacks"}
BELOW_TRAIN = PURE | {"placement", "rendezvous", "state"}
SPINE = BELOW_TRAIN | {"train.group", "train.script", "train"}
OUTSIDE = PURE | {"placement", "rendezvous", "start"}
MAY_IMPORT = {
    "errors": set(),
    "text": set(),
    "files": set(),
    "rundir": PURE - {"failure", "hang", "tracebacks"},
    "hang": PURE,
    "failure": PURE - {"tracebacks"},
    "tracebacks": PURE,
    "steptimes": {"files", "text"},
    "state": PURE,
    "placement": PURE,
    "rendezvous": PURE | {"placement"},
    "train.group": BELOW_TRAIN,
    "train.script": PURE,
    "train": SPINE - {"train"},
    "train.batch": SPINE,
    "train.draws": SPINE | {"train.batch"},
    "train.data": SPINE | {"train.draws"},
    "train.model": SPINE | {"train.batch", "train.draws"},
    "train.checkpoint": SPINE | {"train.data", "train.draws", "train.model"},
    "start": OUTSIDE,
    "compare": PURE | {"state"},
    "convert": PURE | {"start"},
    "measure": OUTSIDE | {"compare", "state"},
    "verify": OUTSIDE | {"measure"},
    "verify.record": SPINE | {"verify", "train.data", "train.draws", "train.model"},
    "cli": OUTSIDE | {"compare", "convert", "measure", "verify", "state", "data", "train.checkpoint"},
    "data": set(),
}
NEVER_TORCH = PURE | {"convert", "placement", "rendezvous", "state", "start"}
LAZY = {"compare", "measure", "verify", "cli", "data"}

COLLECTIVE = {"init", "replicate", "loader", "steps", "sum", "mean", "gather", "first", "save"}
LOCAL = {"no_sync", "load", "launch"}
TYPES = {
    "World",
    "Checkpoint",
    "SamestepError",
    "UsageError",
    "PlacementError",
    "RanksDiffer",
    "RankMissing",
    "WorkerFailed",
    "CheckpointError",
}
PUBLIC = sorted(COLLECTIVE | LOCAL | TYPES)

NO_NAME_FOR_A_FILE = {"utils", "util", "core", "helpers", "common", "manager", "misc"}
UNUSED_WORDS = {"accelerator", "prepare", "strategy", "connector", "engine", "handler", "context", "session"}
UNUSED_WORDS |= {"master", "slave", "auto"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


def floor_of(module: str) -> str:
    """The most specific part of the plan that a module belongs to."""
    parts = module.split(".")[1:]
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in MAY_IMPORT), "cli")


MODULES = {name_of(path): tree for path, tree in FILES.items()}


def imports(tree: ast.AST, *, inside: bool = False) -> Iterator[tuple[str, bool]]:
    """Every module that is imported, and whether a function hides it; what only type checkers see is not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from ((name if name in MODULES else str(node.module), inside) for name in whole)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        else:
            yield from imports(node, inside=inside or isinstance(node, ast.FunctionDef | ast.Lambda))


IMPORTS = {module: sorted(set(imports(tree))) for module, tree in MODULES.items()}


def definitions(tree: ast.AST) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef))


def test_every_floor_imports_only_what_lies_below_it():
    assert [
        f"{module} imports {imported}"
        for module, all_of_it in IMPORTS.items()
        for imported, _ in all_of_it
        if imported.startswith("samestep.")
        and floor_of(imported) not in MAY_IMPORT[floor_of(module)] | {floor_of(module)}
    ] == []


def test_torch_is_not_imported_by_what_launches_nor_at_once_by_a_command():
    assert [
        module
        for module, all_of_it in IMPORTS.items()
        for imported, hidden in all_of_it
        if imported.partition(".")[0] == "torch"
        and (floor_of(module) in NEVER_TORCH or (floor_of(module) == "cli" and not hidden))
    ] == []


def test_an_import_is_hidden_in_a_function_only_to_load_another_floor_late():
    assert [
        f"{module} hides {imported}"
        for module, all_of_it in IMPORTS.items()
        for imported, hidden in all_of_it
        if hidden
        and (floor_of(module) not in LAZY or (imported in MODULES and floor_of(imported) == floor_of(module)))
    ] == []


def test_no_files_import_each_other_in_a_circle():
    try:
        TopologicalSorter({module: dict(all_of_it) for module, all_of_it in IMPORTS.items()}).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(error.args[1])) from None


def test_the_public_names_are_those_of_the_design_and_typed():
    typed = next(node for node in MODULES["samestep"].body if isinstance(node, ast.If))
    assert sorted(alias.asname for node in typed.body for alias in node.names) == PUBLIC
    assert sorted(samestep.__all__) == PUBLIC


def test_every_public_function_says_first_whether_it_is_collective_or_local():
    for name in PUBLIC:
        home = definitions(MODULES[f"samestep.{samestep._HOMES[name]}"])
        word = next(ast.get_docstring(node) for node in home if node.name == name).partition(" ")[0]
        assert (word == "Collective.", word == "Local.") == (name in COLLECTIVE, name in LOCAL), name


def test_the_docstring_of_every_public_function_and_of_checkpoint_names_each_argument():
    for name in [*sorted(COLLECTIVE | LOCAL), "Checkpoint"]:
        said = inspect.getdoc(getattr(samestep, name)) or ""
        inherited = "those of `loader`" if name == "steps" else None
        arguments = inspect.signature(getattr(samestep, name)).parameters
        # what stands for arguments without a name is there to say that there are none
        named = [
            argument
            for argument in arguments
            if arguments[argument].kind is not inspect.Parameter.VAR_POSITIONAL
        ]
        missing = [argument for argument in named if not re.search(rf"\b{argument}\b", said)]
        assert missing == [] or (inherited and inherited in said), f"{name} does not explain {missing}"


def test_every_module_begins_with_a_sentence():
    first = {module: (ast.get_docstring(tree) or "").partition("\n\n")[0] for module, tree in MODULES.items()}
    assert [module for module, sentence in first.items() if not sentence.endswith((".", ":", "?"))] == []


def test_the_one_state_of_a_module_in_train_is_the_group():
    """Names that are rebound, and collections that could be filled, belong to the group, which can be closed."""
    kept = []
    for module, tree in MODULES.items():
        if not module.startswith("samestep.train"):
            continue
        kept += [
            f"{module}: {name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Global)
            for name in node.names
        ]
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                is_constant = isinstance(target, ast.Name) and re.fullmatch(
                    r"_?[A-Z][A-Za-z_0-9]*", target.id
                )
                if not is_constant and ast.unparse(target) != "_all_gather":
                    kept.append(f"{module}: {ast.unparse(target)}")
    assert set(kept) == {"samestep.train.group.world: _group"}


def test_no_file_is_longer_than_400_lines():
    assert [f"{path}" for path in EVERYWHERE if len(path.read_text().splitlines()) > 400] == []


def test_no_file_is_named_for_anything_that_fits_nowhere():
    assert [path for path in EVERYWHERE if path.stem in NO_NAME_FOR_A_FILE] == []


def test_names_use_the_words_of_the_house():
    names = {(path, node.name) for path, tree in FILES.items() for node in definitions(tree)}
    assert [
        f"{path.relative_to(ROOT)}: {name}"
        for path, name in sorted(names | {(path, path.stem) for path in FILES})
        if UNUSED_WORDS.intersection(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name))
    ] == []


def parsed(text: str) -> ast.AST:
    try:
        return ast.parse(dedent(text))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def with_scripts(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a file and of the scripts that are strings in it."""
    for node in ast.walk(tree):
        yield node
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
            yield from with_scripts(parsed(node.value))


def test_nothing_is_named_one():
    """A loop over workers has a `worker`; `one` does not say what it is."""
    fields = ("id", "arg", "attr", "name", "asname")
    texts = {path: path.read_text() for path in EVERYWHERE}
    assert [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, text in texts.items()
        if re.search(r"\bone\b", text)
        for node in with_scripts(parsed(text))
        if "one" in [getattr(node, field, None) for field in fields]
    ] == []


def test_nothing_is_left_for_later():
    later = re.compile(r"#.*\b(?:TO" r"DO|FIX" r"ME)\b")
    assert [f"{path}" for path in EVERYWHERE if later.search(path.read_text())] == []


def test_contributing_is_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 45
