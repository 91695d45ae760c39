"""What the doctor says of SGLang's arguments."""

import pytest
from doctor_samples import HICACHE, named, problems

from toolgap.doctor.arguments import check_arguments
from toolgap.doctor.findings import Level


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (HICACHE, set()),
        (["--enable-hicache", "--hicache-storage-backend=file"], set()),
        (["--enable-hier", "--hicache-storage-backend=file", "--attn-cp-si", "2"], {"parallelism"}),
        ([], {"hierarchical-cache", "storage-backend"}),
        (["--enable-hierarchical-cache"], {"storage-backend"}),
        ([*HICACHE, "--hicache-host-memory-mode", "buffer_only"], {"host-memory-mode"}),
        ([*HICACHE, "--tokenizer-worker-num", "2"], set()),
        ([*HICACHE, "--disable-radix-cache"], {"radix-cache"}),
        ([*HICACHE, "--data-parallel-size=2", "--pp-size", "2", "--tp", "2"], set()),
        ([*HICACHE, "--attn-dp-size", "2", "--tp", "2"], set()),
        ([*HICACHE, "--attn-cp-size", "2", "--tp", "2"], {"parallelism"}),
        ([*HICACHE, "--decode-context-parallel-size=2", "--tp", "2"], {"parallelism"}),
        ([*HICACHE, "--disaggregation-mode", "prefill"], set()),
        ([*HICACHE, "--disaggregation-mode", "decode"], {"disaggregation"}),
        ([*HICACHE, "--disaggregation-mode=prefill", "--enable-pd-role-switch"], {"disaggregation"}),
        ([*HICACHE, "--speculative-algorithm", "EAGLE3"], {"speculation"}),
        ([*HICACHE, "--speculative-algorithm", "NGRAM"], set()),
        ([*HICACHE, "--enable-lmcache"], {"cache"}),
        ([*HICACHE, "--grpc-mode"], {"http-server"}),
        ([*HICACHE, "--use-ray"], {"schedulers"}),
        ([*HICACHE, "--tp-size", "two"], {"arguments"}),
        ([*HICACHE, "--hicache-storage-backend"], {"arguments"}),
        ([*HICACHE, "--hicache-storage-backend-extra-config", "{"], {"arguments"}),
        ([*HICACHE, "--hicache-storage-backend-extra-config", "[]"], {"arguments"}),
        ([*HICACHE, "--hicache-storage-backend-extra-config", "@/no/such.json"], {"arguments"}),
        ([*HICACHE, "--model-path", "m", "--port", "1", "--unknown", "--tp-like"], set()),
    ],
)
def test_arguments(arguments: list[str], expected: set[str]) -> None:
    found = check_arguments(arguments)
    assert problems(found) == expected
    assert all(finding.mend for finding in found if finding.level is not Level.OK)


def test_without_the_hierarchical_cache_its_other_arguments_are_not_judged() -> None:
    names = {finding.name for finding in check_arguments(["--hicache-write-policy", "write_back"])}
    assert names.isdisjoint({"host-memory-mode", "write-policy"})


def test_a_late_write_policy_is_noted() -> None:
    found = check_arguments([*HICACHE, "--hicache-write-policy", "write_back"])
    assert named(found, "write-policy").level is Level.NOTE


def test_what_several_tokenizer_workers_leave_open_is_noted() -> None:
    note = named(check_arguments([*HICACHE, "--tokenizer-worker-num", "2"]), "tokenizer-workers")
    assert note.level is Level.NOTE
    assert "2 tokenizer workers" in note.meaning


def test_a_config_file_is_not_read_and_that_is_said() -> None:
    found = check_arguments([*HICACHE, "--config", "server.yaml"])
    assert "server.yaml" in named(found, "arguments").meaning
