from pathlib import Path

from toolgap import hardware


def test_the_cpu_is_described_without_ornaments(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Intel(R) Xeon(R)  CPU @ 2.80GHz\nflags : fpu\n")
    assert hardware.describe_cpu(cpuinfo).startswith("Intel Xeon CPU @ 2.80GHz, ")
    assert hardware.describe_cpu(tmp_path / "missing").startswith("CPU, ")
