"""The loop: the gradient is that of the mean over the step's tokens, however it is computed."""

import copy

import pytest
import torch
from training_examples import SUMS, Recurrent, ids_of, same, sgd, weights

from lmsmith.errors import CapabilityError, TrainingError, UsageError
from lmsmith.testing import FAMILIES, tiny_lm
from lmsmith.training import Loss, NextTokenLoss, train
from lmsmith.training.loop import Loop
from lmsmith.training.settings import TrainSettings

LENGTHS = (5, 12, 2, 9, 12, 3, 7)


def losses(result):
    return [row["loss"] for row in result.log]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tune", ["full", "lora"])
def test_it_learns(family, tune):
    lm = tiny_lm(family)
    before = weights(lm.model)
    settings = {"tune": tune, "steps": 12, "learning_rate": 5e-3}
    result = train(lm, SUMS, settings, held_out=SUMS[:5])
    found = losses(result)
    assert sum(found[-3:]) < 0.85 * sum(found[:3])
    assert result.steps == 12 and result.held_out < found[0]
    # The model is left as it was found, but for what was trained.
    assert not lm.model.training and not any(p.requires_grad for p in lm.model.parameters())
    assert same(before, weights(lm.model)) == (tune == "lora")
    assert (lm.adapter is not None) == (tune == "lora")


def test_a_step_is_plain_gradient_descent_on_the_mean_over_its_tokens():
    model, reference = Recurrent(), Recurrent()
    examples = ids_of(LENGTHS)
    settings = {"steps": 1, "batch_size": 7, "schedule": "constant", "learning_rate": 0.5}
    train(model, examples, {**settings, "clip": None}, optimizer=sgd)
    total, count = 0, 0
    for example in examples:
        ids, counted = torch.tensor(example["input_ids"]), torch.tensor(example["loss_mask"])
        logp = reference(ids[None])[0, :-1].log_softmax(-1)
        total = total - (logp.gather(1, ids[1:, None])[:, 0] * counted[1:]).sum()
        count += int(counted[1:].sum())
    (total / count).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs - 0.5 * theirs.grad, atol=1e-6)


@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize("tune", ["full", "lora"])
def test_accumulation_equals_one_large_batch(tune, micro):
    found = []
    for size in (None, micro):
        lm = tiny_lm()
        settings = {"tune": tune, "steps": 3, "batch_size": 7, "learning_rate": 0.05}
        result = train(lm, ids_of(LENGTHS), {**settings, "micro_batch_size": size}, optimizer=sgd)
        found.append((losses(result), weights(lm.adapter or lm.model)))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    for name, tensor in found[0][1].items():
        assert torch.allclose(tensor, found[1][1][name], atol=1e-5), name


def test_packing_changes_which_examples_share_a_step_and_nothing_else():
    found = []
    for packing in (False, True):
        lm = tiny_lm()
        # Seven examples, or three pieces of up to 24 tokens: one step takes them all.
        settings = {"epochs": 2.0, "batch_size": 3 if packing else 7, "max_length": 24}
        settings |= {"packing": packing, "learning_rate": 0.05}
        result = train(lm, ids_of(LENGTHS), settings, optimizer=sgd)
        found.append((losses(result), result.tokens))
    assert found[0][0] == pytest.approx(found[1][0], abs=1e-5)
    assert found[0][1] == found[1][1] == 2 * sum(LENGTHS)


def test_clipping_bounds_the_gradient():
    model = Recurrent()
    before = [p.detach().clone() for p in model.parameters()]
    settings = {"steps": 1, "clip": 0.01, "learning_rate": 1.0, "schedule": "constant"}
    result = train(model, ids_of(LENGTHS), settings, optimizer=sgd)
    assert result.log[0]["gradient_norm"] > 0.01
    pairs = zip(before, model.parameters(), strict=True)
    moved = torch.cat([(old - new.detach()).flatten() for old, new in pairs])
    assert moved.norm() == pytest.approx(0.01, rel=1e-4)


def test_gradient_checkpointing_changes_nothing():
    found = []
    for recompute in (False, True):
        lm = tiny_lm()
        settings = {"steps": 2, "learning_rate": 0.05, "gradient_checkpointing": recompute}
        found.append((losses(train(lm, ids_of(LENGTHS), settings, optimizer=sgd)), lm))
    assert found[0][0] == found[1][0]
    for mine, theirs in zip(
        found[0][1].model.parameters(), found[1][1].model.parameters(), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-6)
    assert not any(getattr(m, "gradient_checkpointing", 0) for m in found[1][1].model.modules())
    with pytest.raises(CapabilityError, match="gradient_checkpointing"):
        train(Recurrent(), ids_of(LENGTHS), {"gradient_checkpointing": True})


def test_bfloat16_is_near_float32_and_keeps_small_updates():
    found = []
    for precision in ("float32", "bfloat16"):
        settings = {"steps": 4, "learning_rate": 1e-3, "precision": precision}
        found.append(losses(train(tiny_lm(), SUMS, settings)))
    assert found[0] == pytest.approx(found[1], rel=0.03) and found[0] != found[1]
    # Steps of 1e-4 times a weight are far below bfloat16's resolution; their sum is not.
    lm = tiny_lm(dtype=torch.bfloat16)
    before = weights(lm.model)
    train(lm, SUMS, {"steps": 40, "learning_rate": 2e-4, "schedule": "constant"})
    assert lm.dtype == torch.bfloat16
    moved = [(a != before[name]).float().mean() for name, a in lm.model.state_dict().items()]
    assert sum(moved) / len(moved) > 0.5


def test_adapter_weights_are_float32_over_a_half_precision_base():
    lm = tiny_lm(dtype=torch.bfloat16)
    before = weights(lm.model)
    result = train(lm, SUMS, {"tune": "lora", "steps": 3, "learning_rate": 1e-3})
    assert {p.dtype for p in lm.adapter.parameters()} == {torch.float32}
    assert same(before, weights(lm.model)) and lm.dtype == torch.bfloat16
    assert all(row["loss"] > 0 for row in result.log)


def test_lora_gradient_is_peft_s():
    import peft

    lm = tiny_lm(dtype=torch.float32)
    base = copy.deepcopy(lm.model)
    settings = {"tune": "lora", "steps": 2, "batch_size": 7, "learning_rate": 0.5, "clip": None}
    settings |= {"lora_rank": 3, "lora_alpha": 5.0, "lora_targets": ("q_proj", "down_proj")}
    settings["schedule"] = "constant"
    examples = ids_of(LENGTHS)
    train(lm, examples, settings, optimizer=sgd)

    config = peft.LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "down_proj"])
    theirs = peft.get_peft_model(base, config)
    start = tiny_lm()
    start = train(start, examples, {**settings, "steps": 1, "learning_rate": 1e-30}).adapter
    parameters = dict(theirs.named_parameters())
    pairs = []
    for name, update in start.updates.items():
        for letter, tensor in (("A", update.down), ("B", update.up)):
            parameter = parameters[f"base_model.model.{name}.lora_{letter}.default.weight"]
            parameter.data.copy_(tensor)
            mine = lm.adapter.updates[name]
            pairs.append((parameter, mine.down if letter == "A" else mine.up))
    optimizer = torch.optim.SGD([p for p in theirs.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        total, count = 0, 0
        for example in examples:
            ids, counted = torch.tensor([example["input_ids"]]), torch.tensor(example["loss_mask"])
            counted[0] = False
            labels = torch.where(counted, ids, -100)
            total = total + theirs(input_ids=ids, labels=labels).loss * counted.sum()
            count += counted.sum()
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
    for parameter, mine in pairs:
        assert torch.allclose(parameter, mine, atol=1e-5)


def test_an_attached_adapter_is_trained_on():
    lm = tiny_lm()
    settings = {"tune": "lora", "steps": 2, "learning_rate": 1e-2}
    first = train(lm, SUMS, settings).adapter
    before = weights(first)
    assert train(lm, SUMS, settings).adapter is first
    assert not same(before, weights(first))


def test_a_loss_of_ones_own_decides_what_counts():
    model = Recurrent()

    def squares(model, batch):
        logits = model(batch.padded())
        return Loss((logits**2).sum(), float(logits.numel()))

    settings = {"steps": 30, "batch_size": 7, "learning_rate": 1e-2}
    result = train(model, ids_of(LENGTHS), settings, loss=squares)
    assert losses(result)[-1] < 0.5 * losses(result)[0]
    assert result.log[0]["weight"] == 12 * 7 * 60


def test_a_loop_alone_takes_batches_as_they_come():
    from training_examples import batch_of

    model = Recurrent()
    loop = Loop(model, TrainSettings(learning_rate=1e-2, schedule="constant"), 5)
    batch = batch_of(ids_of(LENGTHS))
    first = [loop.step([batch]).loss for _ in range(5)]
    assert first == sorted(first, reverse=True) and loop.done == 5
    assert loop.mean_loss([batch]) < first[-1]


def test_nothing_that_counts_is_no_step():
    from training_examples import batch_of

    model = Recurrent()
    before = weights(model)
    batch = batch_of(ids_of(LENGTHS))
    batch.counted[:] = False
    loop = Loop(model, TrainSettings(weight_decay=0.1), 1)
    loop.step([batch])
    after = weights(model)
    assert all(torch.equal(before[k], after[k]) for k in before if k != "calls")


def test_a_loss_that_is_no_number_stops_before_the_update():
    lm = tiny_lm()
    calls = []

    def bad(model, batch):
        calls.append(batch.examples)
        loss = NextTokenLoss(model)(model, batch)
        return loss if len(calls) < 3 else Loss(loss.total * float("nan"), loss.weight)

    with pytest.raises(TrainingError, match=r"loss is nan at step 3 \(examples") as error:
        train(lm, SUMS, {"steps": 5, "batch_size": 2}, loss=bad)
    assert all(str(example) in str(error.value) for example in calls[2])
    assert all(torch.isfinite(p).all() for p in lm.model.parameters())


def test_the_caller_s_random_numbers_are_left_alone():
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    train(Recurrent(), ids_of(LENGTHS), {"steps": 1})
    assert torch.rand(1) == wanted


def test_wrong_requests_are_one_line():
    with pytest.raises(UsageError, match="max_length is 999, but tiny-llama reads at most 256"):
        train(tiny_lm(), SUMS, {"max_length": 999})
    with pytest.raises(UsageError, match="no linear module"):
        train(tiny_lm(), SUMS, {"tune": "lora", "lora_targets": ("query",)})
    with pytest.raises(UsageError, match="empty"):
        train(tiny_lm(), [], {})


def test_the_last_step_takes_what_is_left():
    result = train(Recurrent(), ids_of(LENGTHS), {"batch_size": 3, "epochs": 1.0})
    assert result.steps == 3
    assert result.tokens == sum(LENGTHS)
