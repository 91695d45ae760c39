import base64
import hashlib
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from toolgap.bench import machine
from toolgap.sglang.internals import targets

needs_sglang = pytest.mark.skipif(
    importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"
)

NvidiaSmi = Callable[[str], None]


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NvidiaSmi:
    """Makes a shell script the machine's only nvidia-smi."""

    def install(script: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        command = folder / "nvidia-smi"
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return install


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that packages are found in before all others; to be filled before it is asked."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def install(site: Path, name: str, files: dict[str, str], record: str | None = None, **info: str) -> None:
    """Put a distribution into a folder as a wheel's installer would; ``info`` is more of its metadata."""
    dist_info = site / f"{name}-1.5.dist-info"
    files = {
        **files,
        f"{dist_info.name}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n",
        **{f"{dist_info.name}/{key}.txt": text for key, text in info.items()},
    }
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    if record is None:
        rows = [f'"{path}",{recorded(text.encode())},{len(text)}' for path, text in files.items()]
        record = "\n".join([*rows, f"{dist_info.name}/RECORD,,"]) + "\n"
    (dist_info / "RECORD").write_text(record)


def recorded(content: bytes, algorithm: str = "sha256") -> str:
    digest = hashlib.new(algorithm, content).digest()
    return f"{algorithm}={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()}"


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from (*strings(key), *strings(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)
    elif isinstance(value, str):
        yield value


# ---- hardware ----


def test_the_machine_is_described_in_numbers_and_words() -> None:
    facts = machine.hardware()
    total_kib = Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]
    assert facts["memory_bytes"] == int(total_kib) * 1024
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert facts["kernel"] == Path("/proc/sys/kernel/osrelease").read_text().strip()
    assert facts["cpu"]
    assert not facts["cpu"].endswith(("core", "cores", ","))
    assert "storage" not in facts


def test_the_gpus_are_those_that_the_driver_tells_of(nvidia_smi: NvidiaSmi) -> None:
    nvidia_smi(
        'test "$*" = "--query-gpu=name,memory.total,driver_version --format=csv,noheader" || exit 3\n'
        'echo "NVIDIA H200, 143771 MiB, 570.86.15"\n'
        'echo "NVIDIA GB10, [N/A] MiB, 570.86.15"'
    )
    assert machine.hardware()["gpus"] == [
        {"name": "NVIDIA H200", "memory_bytes": 143771 * 2**20, "driver": "570.86.15"},
        {"name": "NVIDIA GB10", "memory_bytes": None, "driver": "570.86.15"},
    ]


@pytest.mark.parametrize(
    "script",
    [
        "echo 'NVIDIA-SMI has failed, because it could not reach the driver, at all'; exit 9",
        "echo 'No devices were found'",
        "printf '\\377\\n'",
        "sleep 60",
    ],
    ids=["fails", "finds none", "prints garbage", "hangs"],
)
def test_a_driver_that_tells_nothing_is_no_failure(
    script: str, nvidia_smi: NvidiaSmi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "NVIDIA_SMI_TIMEOUT_S", 0.5)
    nvidia_smi(f"exec {script}" if script.startswith("sleep") else script)
    assert machine.hardware()["gpus"] == []


def test_a_command_that_cannot_be_run_is_no_failure(
    nvidia_smi: NvidiaSmi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi("")
    (tmp_path / "bin/nvidia-smi").write_bytes(b"\x7fELF")
    assert machine.hardware()["gpus"] == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.hardware()["gpus"] == []


MOUNTINFO = """\
27 1 254:0 / / rw,relatime - ext4 /dev/root rw
40 27 259:3 / /data rw,relatime shared:1 - xfs /dev/mapper/alice--laptop-data rw
41 40 0:44 / /data/memory rw - tmpfs tmpfs rw
42 27 0:45 /export /home rw shared:2 master:3 - nfs4 alice-laptop:/home/alice rw,addr=10.0.0.1
43 27 259:4 / /with\\040space rw - ext4 /dev/nvme1n1 rw
44 27 0:46 / /covered rw - tmpfs tmpfs rw
45 27 259:4 / /covered rw - ext4 /dev/nvme1n1 rw
46 27 259:3 / /next\x85line rw - xfs /dev/mapper/alice--laptop-data rw
not a mount
"""


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with these mounts, and three block devices."""
    devices = tmp_path / "block"
    devices.mkdir()
    for number, name in {"254:0": "vda1", "259:3": "dm-0", "259:4": "nvme1n1"}.items():
        (tmp_path / name).mkdir()
        (devices / number).symlink_to(tmp_path / name)
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(MOUNTINFO)
    monkeypatch.setattr(machine, "MOUNTINFO", mountinfo)
    monkeypatch.setattr(machine, "BLOCK_DEVICES", devices)
    return mountinfo


@pytest.mark.parametrize(
    ("folder", "filesystem", "device"),
    [
        ("/", "ext4", "vda1"),
        ("/database/kv", "ext4", "vda1"),
        ("/data", "xfs", "dm-0"),
        ("/data/kv/pages", "xfs", "dm-0"),
        ("/data/memory/kv", "tmpfs", None),
        ("/home/alice/kv", "nfs4", None),
        ("/with space/kv", "ext4", "nvme1n1"),
        ("/covered/kv", "ext4", "nvme1n1"),
        ("/next\x85line/kv", "xfs", "dm-0"),
    ],
)
@pytest.mark.usefixtures("mounts")
def test_a_storage_folder_is_told_by_filesystem_and_block_device(
    folder: str, filesystem: str, device: str | None
) -> None:
    facts = machine.hardware(Path(folder))
    assert facts["storage"] == {"filesystem": filesystem, "device": device}
    assert "alice" not in json.dumps(facts)


def test_a_mount_with_a_number_of_its_own_has_its_sources_device(mounts: Path) -> None:
    source = next((path for path in Path("/dev").iterdir() if path.is_block_device()), None)
    if source is None:
        pytest.skip("this machine has no block device in /dev")
    number = source.stat().st_rdev
    device = machine.BLOCK_DEVICES / f"{os.major(number)}:{os.minor(number)}"
    mounts.write_text(f"50 1 0:99 / / rw - btrfs {source} rw\n")
    device.unlink(missing_ok=True)
    assert machine.hardware(Path("/kv"))["storage"] == {"filesystem": "btrfs", "device": None}
    device.symlink_to(mounts.parent / "nvme1n1")
    assert machine.hardware(Path("/kv"))["storage"] == {"filesystem": "btrfs", "device": "nvme1n1"}


def test_a_machine_that_tells_no_mounts_is_no_failure(mounts: Path) -> None:
    mounts.unlink()
    assert machine.hardware(Path("/kv"))["storage"] == {"filesystem": None, "device": None}


def test_a_linked_folder_is_told_by_where_it_leads(mounts: Path, tmp_path: Path) -> None:
    (tmp_path / "kv").symlink_to("/data/memory/kv")
    assert machine.hardware(tmp_path / "kv")["storage"]["filesystem"] == "tmpfs"


def test_nothing_names_this_machine_or_its_folders(tmp_path: Path) -> None:
    facts = machine.hardware(tmp_path)
    assert facts["storage"]["filesystem"]
    for text in strings(facts):
        assert not text.startswith("/")
        assert str(tmp_path) not in text
        assert text != platform.node()


# ---- software ----


def test_versions_are_those_of_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("msgspec", "toolgap-is-not-called-this", "httpx"))
    assert machine.software() == {
        "python": sys.version.split()[0],
        "msgspec": metadata.version("msgspec"),
        "httpx": metadata.version("httpx"),
    }


def test_toolgap_and_sglang_are_among_the_versions() -> None:
    assert {"toolgap", "sglang", "torch", "triton", "transformers", "sglang-kernel"} <= {*machine.PACKAGES}
    assert machine.software()["toolgap"] == metadata.version("toolgap")


def test_plugins_are_told_with_the_distribution_that_brings_them(site: Path) -> None:
    entry_points = (
        "[sglang.srt.plugins]\nspeed = speedy.plugin:register\nbrake = speedy.plugin:brake\n"
        "[other]\nnothing = speedy:no\n"
    )
    install(site, "speedy", {}, entry_points=entry_points)
    found = machine.plugins()
    assert found == sorted(found)
    assert "speed (speedy 1.5)" in found
    assert f"toolgap (toolgap {metadata.version('toolgap')})" in found
    assert not [plugin for plugin in found if plugin.startswith("nothing")]


# ---- code ----


def test_every_file_of_a_package_has_a_digest_but_bytecode(tmp_path: Path) -> None:
    package = tmp_path / "site" / "toolgap"
    for name in (
        "z.py",
        "a.py",
        "inner/py.typed",
        "inner/__pycache__/x.cpython-311.pyc",
        "__pycache__/note",
        "b.pyc",
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    expected = {
        f"toolgap/{name}": hashlib.sha256(name.encode()).hexdigest()
        for name in ("a.py", "inner/py.typed", "z.py")
    }
    assert machine.toolgap_digests(package) == expected
    assert list(machine.toolgap_digests(package)) == list(expected)


def test_the_digests_are_of_the_running_toolgap() -> None:
    digests = machine.toolgap_digests()
    content = Path(machine.__file__).read_bytes()
    assert digests["toolgap/bench/machine.py"] == hashlib.sha256(content).hexdigest()
    assert {"toolgap/__init__.py", "toolgap/py.typed", "toolgap/sglang/plugin.py"} <= digests.keys()


def test_a_name_is_looked_up_in_its_own_module(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = ("__init__", "a/__init__", "a/one", "a/two/__init__", "a/three")
    install(site, "sglang", {f"sglang/{name}.py": f"raise AssertionError({name!r})" for name in modules})
    touched = [
        "sglang.a.one.function",
        "sglang.a.one.Class.method",
        "sglang.a.two.Class.method",
        "sglang.a.function",
    ]
    monkeypatch.setattr(targets, "touched", lambda: tuple(touched))
    expected = {
        f"sglang/{name}.py": hashlib.sha256(f"raise AssertionError({name!r})".encode()).hexdigest()
        for name in ("a/__init__", "a/one", "a/two/__init__")
    }
    assert machine.sglang_digests() == expected
    assert list(machine.sglang_digests()) == sorted(expected)
    touched.append("sglang.a.gone.Class.method")
    with pytest.raises(ValueError, match=r"no module that could hold sglang\.a\.gone\.Class\.method"):
        machine.sglang_digests()


@needs_sglang
def test_the_installed_sglang_has_a_digest_of_every_touched_module() -> None:
    digests = machine.sglang_digests()
    distribution = metadata.distribution("sglang")
    for name, digest in digests.items():
        assert hashlib.sha256(Path(str(distribution.locate_file(name))).read_bytes()).hexdigest() == digest
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in digests}
    for target in targets.touched():
        assert modules & {target.rsplit(".", 1)[0], target.rsplit(".", 2)[0]}, target
    assert {
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.scheduler",
        "sglang.srt.mem_cache.unified_radix_cache",
    } <= modules


def test_everything_hooked_is_touched() -> None:
    touched = targets.touched()
    assert {targets.INIT_COMMUNICATORS, targets.POLL_TIMEOUTS, *targets.UPDATE_WEIGHTS} <= set(touched)
    assert len(touched) == len(set(touched))
    assert all(target.startswith("sglang.") for target in touched)


def test_neither_torch_nor_sglang_is_imported() -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from toolgap.bench import machine\n"
        "machine.hardware(Path.cwd()), machine.software(), machine.plugins(), machine.toolgap_digests()\n"
        "if 'sglang' in machine.software():\n"
        "    machine.sglang_digests()\n"
        "print([name for name in sys.modules if name.partition('.')[0] in ('torch', 'sglang', 'sgl_kernel')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- changed files ----

FILES = {"handmade/__init__.py": "one = 1\n", "handmade/sub/two.py": "two = 2\n", "handmade/a, b.txt": "c\n"}


def test_files_as_in_the_wheel_are_not_changed(site: Path) -> None:
    install(site, "handmade", FILES)
    assert machine.changed_files("handmade") == []


def test_edited_and_missing_files_are_changed(site: Path) -> None:
    install(site, "handmade", FILES)
    (site / "handmade/sub/two.py").unlink()
    (site / "handmade/__init__.py").write_text("one = 2\n")
    (site / "handmade/a, b.txt").write_text("C\n")
    assert machine.changed_files("handmade") == [
        "handmade/__init__.py",
        "handmade/a, b.txt",
        "handmade/sub/two.py",
    ]


def test_bytecode_is_never_changed(site: Path) -> None:
    record = "a/__pycache__/b.pyc,,\na/c.pyc,sha256=stale,1\na/gone.py,,\na/d.py,sha256=stale,1\n"
    install(site, "handmade", {"a/c.pyc": "x", "a/d.py": "x"}, record)
    assert machine.changed_files("handmade") == ["a/d.py", "a/gone.py"]


def test_a_record_may_use_another_hash(site: Path) -> None:
    record = f"a.py,{recorded(b'x', 'sha512')},1\nb.py,{recorded(b'x', 'sha384')},1\n"
    install(site, "handmade", {"a.py": "x", "b.py": "y"}, record)
    assert machine.changed_files("handmade") == ["b.py"]


def test_what_has_no_record_cannot_be_compared(site: Path) -> None:
    install(site, "handmade", FILES)
    (site / "handmade-1.5.dist-info/RECORD").unlink()
    with pytest.raises(ValueError, match="handmade has no RECORD"):
        machine.changed_files("handmade")
    with pytest.raises(ValueError, match="toolgap-is-not-called-this is not installed"):
        machine.changed_files("toolgap-is-not-called-this")


def test_an_installed_wheel_is_as_its_record_says() -> None:
    assert machine.changed_files("msgspec") == []
