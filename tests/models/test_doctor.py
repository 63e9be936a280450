"""What the machine has, against what the system says of itself."""

import json
import platform
import subprocess
import sys
import time

import pytest
import torch
import transformers

from lmsmith.models import doctor, known


@pytest.fixture
def found(tmp_path, monkeypatch):
    monkeypatch.setenv("LMSMITH_CACHE", str(tmp_path / "not" / "yet"))
    return doctor.facts()


def test_facts_are_json_and_true(found, tmp_path):
    assert json.loads(json.dumps(found)) == found
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["transformers"] == transformers.__version__
    assert found["hardware"]["threads"] == torch.get_num_threads()
    assert found["hardware"]["cores"] >= 1
    assert found["hardware"]["dtype"] in ("float32", "bfloat16")
    assert found["cache"]["folder"] == str(tmp_path / "not" / "yet")
    assert found["cache"]["writable"]
    assert found["cache"]["free"] > 0
    assert [row["name"] for row in found["models"]] == list(known.KNOWN)
    assert not any(row["on_disk"] for row in found["models"])
    assert "registry" not in found
    assert not (tmp_path / "not").exists()


@pytest.mark.skipif(platform.system() != "Linux", reason="the system does not tell elsewhere")
def test_memory(found):
    assert 0 < found["memory"]["available"] <= found["memory"]["total"]


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
