"""Outside the workers: starting, watching and ending them; the package itself can be called as `launch`."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any


class _Launch(ModuleType):
    # Importing any file of this package binds samestep.launch to the package, over the function of that name.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return import_module("samestep.launch.spawn").launch(*args, **kwargs)

    def __reduce__(self) -> Any:
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Launch
