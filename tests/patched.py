"""Libraries are patched on their first import, so that tests that need none of them do not wait for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from megatron_collab import patches


class PatchOnImport(MetaPathFinder):
    """Calls patches.apply of a library before its first import, as an entry point of the package does."""

    def __init__(self, *libraries: str) -> None:
        self._pending = set(libraries)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._pending:
            return None
        self._pending.remove(fullname)  # the patches import it themselves
        patches.apply(fullname)
        if fullname not in sys.modules:
            return None
        return ModuleSpec(fullname, _Imported(sys.modules.pop(fullname)))


class _Imported(Loader):
    """Hands the module that the patches imported to the pending import."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec
