# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters by content: what a worker digests and when, and what the scheduler's side does until it knows."""

import os
from types import SimpleNamespace

import pytest
from kvbm_cxl.vllm_integration import file_digests
from kvbm_cxl.vllm_integration.adapters import UNKNOWN, Digests, KnownAdapters, LoadedAdapters
from kvbm_cxl.vllm_integration.stats import Tally
from vllm.lora.request import LoRARequest


def _write(folder, content: bytes, config: bytes = b"{}"):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_bytes(config)
    return folder


class Models:
    """vLLM's manager of models, as far as it is used."""

    def __init__(self) -> None:
        self.loaded, self.activated = {}, []

    def add_adapter(self, adapter) -> bool:
        self.loaded[adapter.id] = adapter
        return True

    def activate_adapter(self, adapter_id: int) -> bool:
        self.activated.append(adapter_id)
        return True


class Manager:
    """vLLM's manager of a worker's adapters, as far as it is used."""

    def __init__(self) -> None:
        self._adapter_manager = Models()
        self.lora_config = SimpleNamespace(lora_dtype="float32")
        self.while_loading = lambda: None

    def _load_adapter(self, request):
        self.while_loading()
        if not os.path.exists(request.lora_path):
            raise FileNotFoundError(request.lora_path)
        return SimpleNamespace(id=request.lora_int_id)

    def add_adapter(self, request) -> bool:
        if request.lora_int_id not in self.list_adapters() or request.load_inplace:
            self._adapter_manager.add_adapter(self._load_adapter(request))
        self._adapter_manager.activate_adapter(request.lora_int_id)
        return True

    def list_adapters(self) -> set[int]:
        return set(self._adapter_manager.loaded)


@pytest.fixture
def manager() -> Manager:
    return Manager()


def _loaded(manager, folder, **options) -> bytes:
    """The digest of an adapter that a worker of its own loads."""
    seen = LoadedAdapters(manager)
    manager.add_adapter(LoRARequest("a", 1, str(folder), **options))
    return seen.take_changed()[1]


def test_an_adapter_is_known_by_its_files(tmp_path):
    one, two = _write(tmp_path / "one", b"1" * 99), _write(tmp_path / "two", b"2" * 99)
    digest = _loaded(Manager(), one)
    assert len(digest) == 16 and digest == _loaded(Manager(), _write(tmp_path / "copy", b"1" * 99)) != _loaded(Manager(), two)
    (one / "README.md").write_text("words")
    assert _loaded(Manager(), one) == digest
    _write(one, b"1" * 99, b'{"r": 8}')
    assert _loaded(Manager(), one) != digest, "its rank and scale"
    other_type = Manager()
    other_type.lora_config.lora_dtype = "bfloat16"
    _write(one, b"1" * 99)
    assert _loaded(other_type, one) != digest == _loaded(Manager(), one)
    assert _loaded(Manager(), one, is_3d_lora_weight=True) != digest


def test_files_are_read_again_only_when_they_changed(tmp_path, monkeypatch):
    # As if they had been written long ago.
    monkeypatch.setattr(file_digests, "_FRESH_NS", -1)
    folder, digests = _write(tmp_path / "a", b"1" * 99), Digests()
    first = digests.of_folder(folder)
    opened = []
    real = type(folder).open
    monkeypatch.setattr(type(folder), "open", lambda path, mode="r", *rest: opened.append((path.name, mode)) or real(path, mode, *rest))
    assert digests.of_folder(folder) == first and not opened
    for change in (lambda path: path.write_bytes(b"2" * 99), lambda path: (path.unlink(), path.write_bytes(b"1" * 99))):
        change(folder / "adapter_model.safetensors")
        opened.clear()
        digests.of_folder(folder)
        assert opened == [("adapter_model.safetensors", "rb")], "a changed file alone is read"
    opened.clear()
    assert digests.of_folder(folder) == first
    # The same size and time, another file in its place.
    path, state = folder / "adapter_model.safetensors", (folder / "adapter_model.safetensors").stat()
    (folder / "new").write_bytes(b"3" * 99)
    os.utime(folder / "new", ns=(state.st_atime_ns, state.st_mtime_ns))
    os.replace(folder / "new", path)
    assert digests.of_folder(folder) != first


def test_files_that_cannot_be_read_have_no_digest(tmp_path):
    assert Digests().of_folder(tmp_path / "nowhere") == UNKNOWN
    (tmp_path / "empty").mkdir()
    assert Digests().of_folder(tmp_path / "empty") == UNKNOWN


def test_what_is_loaded_counts_and_not_what_lies_there_now(tmp_path, manager):
    folder = _write(tmp_path / "a", b"1" * 99)
    seen, request = LoadedAdapters(manager), LoRARequest("a", 1, str(folder))
    manager.add_adapter(request)
    (first,) = seen.take_changed().values()
    _write(folder, b"2" * 99)
    seen.ensure(request)
    assert seen.take_changed() == {1: first} and seen.is_loaded(1, first), "the weights in memory are the first ones"
    manager.add_adapter(LoRARequest("a", 1, str(folder), load_inplace=True))
    (second,) = seen.take_changed().values()
    assert second != first and not seen.is_loaded(1, first) and seen.is_loaded(1, second)
    # vLLM dropped it, and loads it again by itself: others by now.
    manager._adapter_manager.loaded.clear()
    _write(folder, b"3" * 99)
    manager.add_adapter(request)
    assert not seen.is_loaded(1, second) and seen.take_changed()[1] not in (first, second)


def test_files_that_change_while_they_are_loaded_have_no_digest(tmp_path, manager, caplog):
    folder = _write(tmp_path / "a", b"1" * 99)
    manager.while_loading = lambda: _write(folder, b"2" * 99)
    assert _loaded(manager, folder) == UNKNOWN and "changed while vLLM loaded them" in caplog.text


def test_tensors_from_memory_have_no_digest(tmp_path, manager):
    folder = _write(tmp_path / "a", b"1" * 99)
    seen, request = LoadedAdapters(manager), LoRARequest("a", 1, str(folder))
    manager.add_adapter(request)
    (first,) = seen.take_changed().values()
    manager._adapter_manager.add_adapter(SimpleNamespace(id=1))
    assert seen.take_changed() == {1: UNKNOWN} and not seen.is_loaded(1, first) and not seen.is_loaded(1, UNKNOWN)
    if "tensorizer_config_dict" in LoRARequest.__struct_fields__:  # vLLM 0.31 alone.
        assert _loaded(Manager(), folder, tensorizer_config_dict={"tensorizer_dir": "s3://x"}) == UNKNOWN


def test_an_adapter_is_loaded_ahead_without_a_slot(tmp_path, manager):
    request = LoRARequest("a", 1, str(_write(tmp_path / "a", b"1" * 99)))
    seen = LoadedAdapters(manager)
    seen.ensure(request)
    assert manager.list_adapters() == {1} and manager._adapter_manager.activated == []
    assert seen.is_loaded(1, seen.take_changed()[1])
    manager.add_adapter(request)
    assert manager._adapter_manager.activated == [1], "vLLM gives it one as ever"


def test_an_adapter_that_cannot_be_loaded_has_no_digest(tmp_path, manager):
    seen = LoadedAdapters(manager)
    seen.ensure(LoRARequest("a", 1, str(tmp_path / "nowhere")))
    assert seen.take_changed() == {1: UNKNOWN}
    without = LoadedAdapters(None)
    without.ensure(LoRARequest("a", 1, str(tmp_path)))
    assert without.take_changed() == {1: UNKNOWN}


def test_adapters_that_vllm_warms_up_with_are_not_told(manager):
    seen = LoadedAdapters(manager)
    manager._adapter_manager.add_adapter(SimpleNamespace(id=1))
    manager._adapter_manager.loaded.clear()
    assert seen.take_changed() == {}


# The scheduler's side

A, B = b"a" * 16, b"b" * 16
REQUEST = LoRARequest("a", 1, "/somewhere")


def _known(ranks: int = 1) -> KnownAdapters:
    known = KnownAdapters(Tally())
    known.handshake(ranks)
    return known


def test_an_adapter_is_asked_for_until_every_rank_has_told():
    known = _known(ranks=2)
    assert known.content(REQUEST) is None and known.take_wanted() == [REQUEST] and known.take_wanted() == []
    assert known.learn({0: {1: A}}) == set() and known.content(REQUEST) is None
    assert known.learn({0: {1: A}, 1: {1: A}}) == set() and known.content(REQUEST) == A
    known.forget()
    assert known.content(REQUEST) is None, "it may have been loaded again"
    assert known.learn({0: {1: B}, 1: {1: B}}) == {1} and known.content(REQUEST) == B


def test_ranks_that_differ_share_nothing(caplog):
    known = _known(ranks=2)
    known.learn({0: {1: A}, 1: {1: B}})
    assert [known.content(REQUEST) for _ in range(3)] == [UNKNOWN] * 3
    known.learn({0: {1: A}, 1: {1: UNKNOWN}})
    assert known.content(REQUEST) == UNKNOWN
    assert caplog.text.count("known by name alone") == 1 and known.tally.take().data["counters"] == {"adapters/unknown": 1}
    known.learn({0: {1: B}, 1: {1: B}})
    assert known.content(REQUEST) == B


def test_a_rank_that_loads_another_one_alone_is_waited_for():
    known = _known(ranks=2)
    known.learn({0: {1: A}, 1: {1: A}})
    assert known.learn({1: {1: B}}) == {1} and known.content(REQUEST) is None


def test_nothing_is_published_upon_another_adapters_blocks_that_vllm_keeps(caplog):
    known = _known()
    assert known.may_publish(REQUEST, A) and known.may_publish(REQUEST, A)
    other_number = LoRARequest("a", 2, "/somewhere")
    assert not known.may_publish(other_number, B), "vLLM's hashes are those of the first"
    assert not known.may_publish(REQUEST, A) and caplog.text.count("replaced under its name") == 1
    assert known.may_publish(LoRARequest("a", 3, "/elsewhere"), B)
    known.local_reset()
    assert known.may_publish(REQUEST, B) and not known.may_publish(REQUEST, A)
