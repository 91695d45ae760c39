"""Stand-in for the CUDA-only ``sgl_kernel`` wheel, put first on ``PYTHONPATH`` in CPU mode only.

SGLang imports kernel names from ``sgl_kernel`` on every platform and reads some of them (such as
``scalar_types.uint4b8``) while it imports. Here every submodule and every name resolves, and
calling one raises :class:`NotImplementedError` with the op's full name: a kernel that a CPU run
really needs must fail where it is called, never compute something else.

This package is not imported as a part of ``toolgap``, so it depends on the standard library alone.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

# A version above any minimum that SGLang compares with; never shown as an installed distribution.
__version__ = "999.0+toolgap.standin"


class MissingOp:
    """A name in the stand-in: attributes resolve to further names, calls raise."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __getattr__(self, name: str) -> "MissingOp":
        # Dunder probes (__iter__, __torch_function__, ...) must say "absent": pretending to
        # implement a protocol would make torch, pickle and inspect call into the stand-in.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return MissingOp(f"{self._path}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Fail, naming the op."""
        raise NotImplementedError(
            f"{self._path} is a GPU kernel: this process runs toolgap's CPU stand-in for "
            "sgl_kernel, which has no kernels. Choose options that do not need it "
            "(for example --attention-backend torch_native --sampling-backend pytorch)."
        )

    def __repr__(self) -> str:
        return f"<missing kernel {self._path}>"


class _StandInModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return MissingOp(f"{self.__name__}.{name}")


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes ``import sgl_kernel.anything.at.all`` work."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(__name__ + "."):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: every name of the module is made on demand."""


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return MissingOp(f"{__name__}.{name}")


sys.meta_path.append(_SubmoduleFinder())
