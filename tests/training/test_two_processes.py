"""Two processes and one take the same course with the same global batch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import two_processes

HERE = Path(__file__).parent


def test_two_processes_take_the_course_of_one(tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu"]
    launch += ["--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    launch += ["--dynamo_backend", "no", "--main_process_port", "0"]
    # With --cpu the launcher leaves it to MPI to start processes; this starts them itself.
    on_cpu = {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    path = os.pathsep.join([str(HERE), *sys.path])
    done = subprocess.run(
        [*launch, str(HERE / "two_processes.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **on_cpu},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "logs.json").read_text())
    assert found["processes"] == 2
    alone = two_processes.main(tmp_path / "alone")
    for tune, log in alone.items():
        pairs = list(zip(found["logs"][tune], log, strict=True))
        assert len(pairs) == 7
        for two, one in pairs:
            assert two["loss"] == pytest.approx(one["loss"], abs=1e-5)
            assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-4)
            assert two["weight"] == one["weight"]
        assert pairs[-1][0]["held_out"] == pytest.approx(pairs[-1][1]["held_out"], abs=1e-5)
