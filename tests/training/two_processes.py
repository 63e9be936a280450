"""Run by `test_two_processes`: train under whatever launched this, and write the log."""

import json
import sys

import torch
from training_examples import SUMS, ids_of

from lmsmith.testing import tiny_lm
from lmsmith.training import train

torch.set_num_threads(1)
# 13 examples in steps of 4: the last step has one, and one process nothing of it.
SETTINGS = {"epochs": 2.0, "batch_size": 4, "learning_rate": 1e-2, "checkpoint_every": 3}


def main(out):
    logs = {}
    for tune, micro in (("full", 1), ("lora", None)):
        lm = tiny_lm()
        settings = {**SETTINGS, "tune": tune, "micro_batch_size": micro}
        examples = ids_of((5, 12, 2, 9, 12, 3, 7, 4, 4, 15, 6, 3, 8))
        result = train(lm, examples, settings, held_out=SUMS[:5], out=f"{out}/{tune}")
        logs[tune] = result.log
    return logs


if __name__ == "__main__":
    logs = main(sys.argv[1])
    from accelerate import PartialState

    if PartialState().is_main_process:
        with open(f"{sys.argv[1]}/logs.json", "w") as file:
            json.dump({"processes": PartialState().num_processes, "logs": logs}, file)
