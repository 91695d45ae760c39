import os
import subprocess
import sys
from importlib.resources import files

import pytest

from toolgap.cpu.launch import cpu_environment


def run(code: str) -> "subprocess.CompletedProcess[str]":
    """Run code as a CPU server's process would: with the stand-in on the path."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=cpu_environment(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    "code",
    [
        "import sgl_kernel",
        "from sgl_kernel import silu_and_mul, transfer_kv_all_layer",
        "from sgl_kernel.kvcacheio import transfer_kv_per_layer",
        "import sgl_kernel.a.b.c as deep; from sgl_kernel.a.b import d",
        "from sgl_kernel import scalar_types; scalar_types.uint4b8",
        "from sgl_kernel.scalar_type import ScalarType; ScalarType.uint.x",
    ],
)
def test_imports_and_attributes_resolve(code: str) -> None:
    done = run(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import sgl_kernel; sgl_kernel.rmsnorm(1, eps=2)", "sgl_kernel.rmsnorm"),
        (
            "from sgl_kernel.kvcacheio import transfer_kv_direct as t; t()",
            "sgl_kernel.kvcacheio.transfer_kv_direct",
        ),
        (
            "from sgl_kernel import scalar_types; scalar_types.uint4b8.max()",
            "sgl_kernel.scalar_types.uint4b8.max",
        ),
    ],
)
def test_a_call_names_the_op(code: str, name: str) -> None:
    done = run(code)
    assert done.returncode == 1
    assert f"NotImplementedError: {name} is a GPU kernel" in done.stderr


def test_protocols_are_not_pretended() -> None:
    done = run(
        "import sgl_kernel\n"
        "for thing in (sgl_kernel, sgl_kernel.op):\n"
        "    assert not hasattr(thing, '__torch_function__')\n"
        "    assert not hasattr(thing, '__iter__')\n"
        "assert repr(sgl_kernel.op) == '<missing kernel sgl_kernel.op>'\n"
    )
    assert done.returncode == 0, done.stderr


def test_other_imports_still_fail() -> None:
    done = run("import sgl_kernel, sgl_kernel_npu")
    assert "No module named 'sgl_kernel_npu'" in done.stderr


def test_it_is_off_the_path_unless_asked_for() -> None:
    assert files("toolgap.cpu").joinpath("stand_in/sgl_kernel/__init__.py").is_file()
    assert not any(path.endswith("stand_in") for path in sys.path)
