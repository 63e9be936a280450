"""What the machine has, against what the system says of itself."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time

import pytest
import torch

from lmsmith.models import doctor, open_model


def test_hardware_is_what_models_are_opened_with(tiny_gguf):
    found = doctor.hardware()
    assert json.loads(json.dumps(found)) == found
    lm = open_model(tiny_gguf)
    assert (found["device"], f"torch.{found['dtype']}") == (str(lm.device), str(lm.dtype))
    assert len(found["accelerators"]) == torch.cuda.device_count()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert doctor.hardware()["threads"] == threads + 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system cannot bind")
def test_cores_are_those_the_process_may_use():
    code = (
        "import os; from lmsmith.models.doctor import usable_cores\n"
        "all = os.sched_getaffinity(0); assert usable_cores() == len(all)\n"
        "os.sched_setaffinity(0, {min(all)}); assert usable_cores() == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(platform.system() != "Linux", reason="the system does not tell elsewhere")
def test_memory():
    found = doctor.memory()
    assert found["total"] == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < found["available"] <= found["total"]


def test_a_cache_that_is_not_there_yet_is_not_made(tmp_path, monkeypatch):
    folder = tmp_path / "not" / "yet"
    monkeypatch.setenv("LMSMITH_CACHE", str(folder))
    found = doctor.cache()
    assert (found["folder"], found["writable"]) == (str(folder), True)
    assert abs(found["free"] - shutil.disk_usage(tmp_path).free) < 1e9
    assert not (tmp_path / "not").exists()


def test_a_cache_with_a_file_in_its_way_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "cache"):
        monkeypatch.setenv("LMSMITH_CACHE", str(folder))
        assert not doctor.cache()["writable"]


def test_whether_the_registry_answers(registry, monkeypatch):
    started = time.monotonic()
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    assert not doctor.registry_answers()
    assert time.monotonic() - started < doctor.REGISTRY_PATIENCE + 5


def test_importing_the_room_or_listing_models_costs_no_torch():
    code = (
        "import sys, lmsmith.models, lmsmith.models.doctor, lmsmith.models.known as known\n"
        "known.status()\n"
        "assert not {'torch', 'transformers', 'httpx'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
