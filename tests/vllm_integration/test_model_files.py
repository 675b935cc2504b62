# SPDX-License-Identifier: Apache-2.0
"""Weights on disk: all their bytes count, each file is read once on a machine, and files that change meanwhile are of no known model."""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import kvbm_cxl
import numpy
import pytest
from kvbm_cxl.options import ConfigError
from kvbm_cxl.vllm_integration import file_digests, identity, model_files
from kvbm_cxl.vllm_integration.file_digests import FileChangedError, FileDigests, state_folder
from safetensors.numpy import load_file, save_file


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch, caplog):
    """A state directory of the test's own; files count as old enough to be kept."""
    caplog.set_level(logging.INFO, logger="vllm.kvbm_cxl")
    monkeypatch.setenv("CXL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(file_digests, "_FRESH_NS", -1)
    monkeypatch.setattr(model_files, "_digests", FileDigests())
    monkeypatch.setattr(model_files, "_readings", {})
    return tmp_path / "state"


def _model(folder: Path, seed: int) -> Path:
    folder.mkdir()
    random = numpy.random.default_rng(seed)
    for part in range(2):
        save_file({"w": random.standard_normal((300, 1000), numpy.float32)}, folder / f"model-{part}.safetensors")
    return folder


def _digest(place: Path) -> str:
    """What an engine that starts now finds."""
    model_files._readings.clear()
    return identity.fingerprint(SimpleNamespace(model=str(place), revision=None))


def test_a_model_is_known_by_its_weights(tmp_path):
    first, second = _model(tmp_path / "first", 1), _model(tmp_path / "second", 2)
    digest = _digest(first)
    assert digest == _digest(_model(tmp_path / "again", 1)) and digest != _digest(second)
    copy = tmp_path / "copy"
    shutil.copytree(first, copy)
    assert _digest(copy) == digest
    (copy / "model-1.safetensors").unlink()
    assert _digest(copy) != digest


@pytest.mark.parametrize("name", ("model-1.safetensors", "pytorch_model.bin", "weights.pt", "one.gguf"))
def test_every_byte_counts(tmp_path, name):
    folder = _model(tmp_path / "model", 1)
    (folder / name).write_bytes(numpy.random.default_rng(3).bytes(1_234_567))
    seen, data = {_digest(folder)}, bytearray((folder / name).read_bytes())
    for place in (0, 1, 5000, 617_283, 1_000_001, len(data) - 1):
        data[place] ^= 1
        (folder / name).write_bytes(data)
        seen.add(_digest(folder))
        data[place] ^= 1
    (folder / name).write_bytes(data + b"\0")
    assert len(seen | {_digest(folder)}) == 8


def test_files_longer_than_a_piece_are_read_to_their_end(tmp_path, monkeypatch):
    monkeypatch.setattr(file_digests, "_READ_BYTES", 1000)
    path = tmp_path / "file"
    path.write_bytes(data := os.urandom(12_345))
    assert FileDigests().of_file(path) == hashlib.sha256(data).digest()


def test_digests_come_in_the_order_of_the_files(tmp_path):
    paths = [tmp_path / str(number) for number in range(5)]
    for path, size in zip(paths, (3, 500, 7, 90_000, 1)):
        path.write_bytes(os.urandom(size))
    assert FileDigests().of_files(paths) == [hashlib.sha256(path.read_bytes()).digest() for path in paths]


def test_names_of_files_count(tmp_path):
    """Whatever a loader makes of them, which reads the last one of two tensors of a name, say."""
    folder = _model(tmp_path / "model", 1)
    first = _digest(folder)
    (folder / "model-0.safetensors").rename(folder / "model-2.safetensors")
    second = _digest(folder)
    (folder / "model-2.safetensors").rename(folder / "model-7.safetensors")
    assert len({first, second, _digest(folder)}) == 3


def test_a_folder_called_like_weights_is_none(tmp_path):
    folder = _model(tmp_path / "model", 1)
    first = _digest(folder)
    (folder / "old.bin").mkdir()
    assert _digest(folder) == first


def test_a_model_may_be_one_file(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"1" * 100_000)
    first = _digest(path)
    path.write_bytes(b"1" * 50_000 + b"2" + b"1" * 49_999)
    assert _digest(path) != first


def test_one_number_of_one_tensor_makes_another_model(tmp_path):
    folder = _model(tmp_path / "model", 1)
    first, tensors = _digest(folder), load_file(folder / "model-0.safetensors")
    tensors["w"][177, 411] *= 1.001
    save_file(tensors, folder / "model-0.safetensors")
    assert _digest(folder) != first


def test_files_of_training_are_no_weights(tmp_path):
    folder = _model(tmp_path / "model", 1)
    first = _digest(folder)
    (folder / "training_args.bin").write_bytes(b"x")
    (folder / "optimizer.pt").write_bytes(b"x")
    assert _digest(folder) == first


def test_a_model_without_weights_at_hand_needs_a_name(tmp_path):
    with pytest.raises(ConfigError, match="no weights.*model_id"):
        model_files.weights_digest(tmp_path)
    with pytest.raises(ConfigError, match="cannot tell which weights.*model_id"):
        identity.fingerprint(SimpleNamespace(model="no-owner/has-this-model", revision=None))
    # By such a format weights come from anywhere, whatever lies in the folder.
    with pytest.raises(ConfigError, match="tensorizer.*model_id"):
        place = str(_model(tmp_path / "model", 1))
        identity.fingerprint(SimpleNamespace(model=place, revision=None), SimpleNamespace(load_format="tensorizer"))


def _count_reads(monkeypatch) -> list[str]:
    read, real = [], FileDigests._read
    monkeypatch.setattr(FileDigests, "_read", lambda self, path, *rest: read.append(path.name) or real(self, path, *rest))
    return read


def test_a_file_is_read_once_on_a_machine(tmp_path, monkeypatch):
    folder, read = _model(tmp_path / "model", 1), _count_reads(monkeypatch)
    first = _digest(folder)
    for _ in range(3):  # Other processes.
        monkeypatch.setattr(model_files, "_digests", FileDigests())
        assert _digest(folder) == first
    assert sorted(read) == ["model-0.safetensors", "model-1.safetensors"]
    os.utime(folder / "model-0.safetensors")
    assert _digest(folder) == first and sorted(read)[1:] == ["model-0.safetensors", "model-1.safetensors"]


def test_a_change_of_one_byte_in_place_is_seen_although_size_and_time_are_as_before(tmp_path):
    folder = _model(tmp_path / "model", 1)
    first, path = _digest(folder), folder / "model-0.safetensors"
    before, data = path.stat(), bytearray(path.read_bytes())
    data[-1] ^= 1
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns and _digest(folder) != first


def test_a_file_that_was_just_written_is_read_again(tmp_path, monkeypatch, state):
    monkeypatch.setattr(file_digests, "_FRESH_NS", 3_600_000_000_000)
    folder, read = _model(tmp_path / "model", 1), _count_reads(monkeypatch)
    for path in folder.iterdir():  # As a copy that keeps the times of its source.
        os.utime(path, ns=(10**18, 10**18))
    assert _digest(folder) == _digest(folder) and len(read) == 4
    assert all(not path.read_bytes() for path in (state / "file-digests").iterdir())


def test_a_file_with_a_time_to_come_is_read_again(tmp_path, monkeypatch):
    monkeypatch.setattr(file_digests, "_FRESH_NS", 1)
    folder, read = _model(tmp_path / "model", 1), _count_reads(monkeypatch)
    for path in folder.iterdir():
        os.utime(path, ns=(1 << 62, 1 << 62))
    assert _digest(folder) == _digest(folder) and len(read) == 4


def test_what_is_kept_is_believed_only_if_it_is_whole(tmp_path, monkeypatch, state):
    folder = _model(tmp_path / "model", 1)
    first = _digest(folder)
    longer = lambda text: text.replace(b'"sha256": "', b'"sha256": "00')  # noqa: E731
    def another(text):
        return text.replace(b".safetensors", b".safetensorz").replace(b'"sha256": "', b'"sha256": "00')[:-4] + b'"}'

    for damage in (lambda text: text[:-9], lambda text: b"", lambda text: b"[]", longer, another):
        monkeypatch.setattr(model_files, "_digests", FileDigests())
        for path in (state / "file-digests").iterdir():
            path.write_bytes(damage(path.read_bytes()))
        assert _digest(folder) == first


def test_a_state_directory_that_others_may_write_keeps_nothing(tmp_path, state):
    state.mkdir()
    state.chmod(0o777)
    assert state_folder() is None and _digest(_model(tmp_path / "model", 1)).startswith("weights:") and not list(state.iterdir())


def test_a_state_directory_elsewhere_keeps_nothing(tmp_path, monkeypatch, state):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXL_STATE_DIR", "state")
    assert state_folder() is None and not state.exists(), "not an absolute path"
    monkeypatch.setenv("CXL_STATE_DIR", str(state))
    (tmp_path / "target").mkdir()
    state.symlink_to(tmp_path / "target")
    assert state_folder() is None, "a link in the place of the folder"
    state.unlink()
    state.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda mine=os.geteuid(): mine + 1)
    assert state_folder() is None, "another user's"


def test_a_link_in_the_place_of_a_result_is_not_followed(tmp_path):
    path, target = tmp_path / "file", tmp_path / "target"
    path.write_bytes(b"1" * 1000)
    entry = state_folder() / hashlib.sha256(os.fsencode(path)).hexdigest()[:32]
    entry.symlink_to(target)
    assert FileDigests().of_file(path) == hashlib.sha256(b"1" * 1000).digest() and not target.exists()


def test_results_are_this_users_alone(tmp_path, state):
    (tmp_path / "file").write_bytes(b"1")
    FileDigests().of_file(tmp_path / "file")
    assert [path.stat().st_mode & 0o777 for path in (state / "file-digests").iterdir()] == [0o600]


def test_results_are_kept_where_the_pool_has_its_state(tmp_path, state):
    path = tmp_path / "pool"
    kvbm_cxl.format_pool(f"{path},size=16M", cells="64K:50%")
    kvbm_cxl.Pool(f"{path},size=16M").close()
    assert any(each.name != "file-digests" for each in state.iterdir()), "the pool's"
    assert state_folder().parent == state


def test_too_many_results_are_dropped(tmp_path, monkeypatch, state):
    monkeypatch.setattr(file_digests, "MAX_REMEMBERED", 8)
    digests = FileDigests()
    for number in range(30):
        (tmp_path / str(number)).write_bytes(bytes([number]))
        assert digests.of_file(tmp_path / str(number)) == hashlib.sha256(bytes([number])).digest()
    assert len(list((state / "file-digests").iterdir())) <= 9 and len(digests._known) <= 8


def test_processes_share_the_work(tmp_path, monkeypatch, state):
    """Of files that another process is reading this one takes the result; while that one holds a lock it takes other files first."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.bin").write_bytes(os.urandom(100_000))
    held = folder / "0.bin"
    program = (
        "import fcntl, os, sys; from pathlib import Path; from kvbm_cxl.vllm_integration import file_digests as f\n"
        "f._FRESH_NS = -1; path = Path(sys.argv[1]).resolve()\n"
        "with f._entry(path, f.state_of(path), True) as entry:\n"
        "    print('held', flush=True); sys.stdin.readline(); FileDigests = f.FileDigests()._read(path, f.state_of(path), entry)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    other = subprocess.Popen([sys.executable, "-c", program, held], env=environment, **pipes)
    try:
        assert other.stdout.readline() == "held\n"
        read, real = [], FileDigests._read

        def reads(self, path, *rest):
            read.append(path.name)
            if len(read) == 3:  # All that are free: now the other one goes on.
                other.stdin.write("\n")
                other.stdin.flush()
            return real(self, path, *rest)

        monkeypatch.setattr(FileDigests, "_read", reads)
        found = FileDigests().of_files(sorted(folder.iterdir()))
        assert found == [hashlib.sha256(path.read_bytes()).digest() for path in sorted(folder.iterdir())]
        assert sorted(read) == ["1.bin", "2.bin", "3.bin"]
    finally:
        other.kill()
        other.communicate()


def test_files_of_the_hubs_cache_are_not_read(tmp_path, monkeypatch):
    plain = _model(tmp_path / "plain", 1)
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "0123abc"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in plain.iterdir():
        blob = blobs / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    read = _count_reads(monkeypatch)
    from_hub = _digest(snapshot)
    assert not read and from_hub == _digest(plain), "a copy elsewhere is the same model"
    # Links to other places, and names that are no digests, are read.
    for number, place in enumerate(("models--owner--name/files/NAME", "owner--name/blobs/NAME", "models--owner--name/blobs/NAME.part")):
        blob = tmp_path / "elsewhere" / place.replace("NAME", "ab" * 32)
        blob.parent.mkdir(parents=True)
        blob.write_bytes(place.encode())
        (tmp_path / f"link{number}").symlink_to(blob)
        assert FileDigests().of_file(tmp_path / f"link{number}") == hashlib.sha256(place.encode()).digest()
    shutil.copytree(snapshot, tmp_path / "links", symlinks=True)
    for path in list((tmp_path / "links").iterdir()):
        path.unlink()
        path.symlink_to(plain / path.name)
    read.clear()
    model_files._digests = FileDigests()
    shutil.rmtree(file_digests.state_folder())
    assert _digest(tmp_path / "links") == from_hub and len(read) == 2


def test_files_that_change_while_an_engine_loads_them_are_of_no_model(tmp_path, caplog):
    folder = _model(tmp_path / "model", 1)
    config = SimpleNamespace(speculative_config=None, model_config=SimpleNamespace(model=str(folder), revision=None))
    model_files.begin(config)
    first = model_files.weights_digest(folder)
    assert first == model_files.weights_digest(folder)
    save_file({"w": numpy.zeros(3, numpy.float32)}, folder / "model-1.safetensors")
    unknown = [model_files.weights_digest(folder) for _ in range(2)]
    assert len({first, *unknown}) == 3 and "shares blocks with itself alone" in caplog.text
    model_files.begin(config)
    assert model_files.weights_digest(folder) == model_files.weights_digest(folder) != first, "the next start"
    (folder / "model-0.safetensors").unlink()
    assert "unknown" in model_files.weights_digest(folder)


def test_the_files_of_a_draft_model_are_watched_from_the_start_too(tmp_path):
    folder, draft = _model(tmp_path / "model", 1), _model(tmp_path / "draft", 2)
    models = [SimpleNamespace(model=str(each), revision=None) for each in (folder, draft)]
    model_files.begin(SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=models[1]), model_config=models[0]))
    os.utime(draft / "model-0.safetensors", ns=(1, 1))
    assert "unknown" in model_files.weights_digest(draft) and "unknown" not in model_files.weights_digest(folder)


def test_files_are_watched_from_the_first_question_on(tmp_path):
    folder = _model(tmp_path / "model", 1)
    assert "unknown" not in model_files.weights_digest(folder)
    os.utime(folder / "model-0.safetensors", ns=(1, 1))
    assert "unknown" in model_files.weights_digest(folder)


def test_weights_that_are_fetched_while_an_engine_starts_are_read_then(tmp_path):
    """As those of a model of the hub, whose configuration comes first."""
    folder = tmp_path / "model"
    folder.mkdir()
    model_files.begin(SimpleNamespace(speculative_config=None, model_config=SimpleNamespace(model=str(folder), revision=None)))
    (folder / "model.safetensors").write_bytes(b"1" * 1000)
    assert "unknown" not in model_files.weights_digest(folder)
    (folder / "more.safetensors").write_bytes(b"1" * 1000)
    assert "unknown" in model_files.weights_digest(folder), "one that came later"


def test_files_that_can_no_longer_be_looked_at_are_of_no_model(tmp_path, monkeypatch):
    def fail(path: Path):
        raise OSError("the disk is gone")

    folder = _model(tmp_path / "model", 1)
    assert "unknown" not in model_files.weights_digest(folder)
    monkeypatch.setattr(model_files, "state_of", fail)
    assert "unknown" in model_files.weights_digest(folder)


def test_a_wait_for_a_digest_is_logged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(model_files, "_NOTICE_S", 0.01)
    read, notice, seen = FileDigests.of_files, "waiting for the digest of the weights", []

    def late(self, paths):
        deadline = time.monotonic() + 60
        while notice not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        seen.append(notice in caplog.text)
        return read(self, paths)

    monkeypatch.setattr(FileDigests, "of_files", late)
    folder = _model(tmp_path / "model", 1)
    assert "unknown" not in model_files.weights_digest(folder) and seen == [True]
    assert f"{folder}: {sum(path.stat().st_size for path in folder.iterdir())} bytes" in caplog.text


def test_any_error_of_reading_is_raised(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("a defect")

    monkeypatch.setattr(FileDigests, "of_files", fail)
    with pytest.raises(ValueError, match="a defect"):
        model_files.weights_digest(_model(tmp_path / "model", 1))


def test_a_snapshot_of_the_hub_is_found_by_its_revision(tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    snapshot = tmp_path / "snapshots" / "0123abc"
    found = {"v2": str(snapshot / "config.json"), "gone": object()}
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda *names, revision: asked.append(names) or found.get(revision)
    )
    places = [model_files.place_of(SimpleNamespace(model="owner/name", revision=each)) for each in ("v2", "gone", None)]
    assert places == [snapshot, None, None] and set(asked) == {("owner/name", "config.json")}
    # Without files at hand the commit tells.
    assert identity.fingerprint(SimpleNamespace(model="owner/name", revision="v2")) == "hub:owner/name@0123abc"


def test_a_name_that_the_hub_cannot_have_is_no_place():
    assert model_files.place_of(SimpleNamespace(model="no folder/of/this name", revision=None)) is None


def test_a_folder_without_weights_needs_a_name(tmp_path):
    with pytest.raises(ConfigError, match="no weights"):
        identity.fingerprint(SimpleNamespace(model=str(tmp_path), revision=None))


def test_a_file_that_is_written_while_it_is_read_has_no_digest(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"1" * 1000)
    real = Path.open

    def opened(self, *arguments):
        if self.name == "file":
            os.utime(self, ns=(1, 1))
        return real(self, *arguments)

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(FileChangedError):
        FileDigests().of_file(path)
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.move(path, folder / "file.bin")
    monkeypatch.setattr(Path, "open", lambda self, *arguments: (_ for _ in ()).throw(OSError("the disk is gone")))
    assert "unknown" in _digest(folder)
