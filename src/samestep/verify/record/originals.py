"""Imports the modules of a project as they were before `convert --write` changed them."""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType


class Originals(MetaPathFinder):
    """Finds `NAME_serial.py`, where `convert --write` keeps the original, instead of the module `NAME` beside it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path, target)
        if found is None or found.origin is None or not found.has_location:
            return None
        file = Path(found.origin)
        original = file.with_name(f"{file.stem}_serial{file.suffix}")
        if not original.is_file():
            return None
        places = found.submodule_search_locations
        return spec_from_file_location(name, original, submodule_search_locations=places)


def import_originals(script: str) -> None:
    """From now on import originals, if this script, a file or a module, is one itself."""
    if script.removesuffix(".py").endswith("_serial"):
        sys.meta_path.insert(0, Originals())
