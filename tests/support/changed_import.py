"""Change of a module as it is imported, in processes that a test cannot reach otherwise.

Imports nothing but the standard library: `sitecustomize` modules use it as a process starts.
"""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class ChangedImport(MetaPathFinder):
    """Finder of one module, which it changes once it is loaded."""

    def __init__(self, module: str, change: Callable[[Any], None]) -> None:
        self.module = module
        self._change = change

    def install(self) -> None:
        """Raises `RuntimeError` if the module is imported already."""
        if self.module in sys.modules:
            raise RuntimeError(f"{self.module} is imported before it can be changed")
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        spec = PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            self._change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def is_changed(module: str) -> bool:
    """Returns whether imports of a module are changed in this process."""
    return any(isinstance(each, ChangedImport) and each.module == module for each in sys.meta_path)
