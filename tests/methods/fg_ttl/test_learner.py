"""Oracles of an update: reductions, steps of a fresh optimizer, the relatives' own updates."""

import math

import pytest
import torch
from torch.nn import functional

from lmsmith.methods.fg_ttl.config import FGTTLConfig, official_code
from lmsmith.methods.fg_ttl.forward import Text, over_positions, read
from lmsmith.methods.fg_ttl.learner import Learner, new_adapter
from lmsmith.methods.fg_ttl.objectives import entropy, sar_margin
from lmsmith.methods.fg_ttl.selection import select
from lmsmith.models.adapter import Adapter
from lmsmith.models.head import head_logits
from lmsmith.testing import tiny_lm

RANDOM = torch.Generator().manual_seed(0)
TEXTS = [
    Text(tuple(torch.randint(5, 380, (length,), generator=RANDOM).tolist()), start)
    for length, start in [(40, 6), (33, 12), (25, 1)]
]


@pytest.fixture(scope="module")
def lm():
    return tiny_lm()


def learner(lm, *, source=(), trained=True, **settings):
    """A learner whose adapter already does something, so that both its factors have gradients."""
    config = FGTTLConfig(**{"learning_rate": 1e-3, **settings})
    adapter = new_adapter(lm, config)
    if trained:
        adapter = Adapter.random(lm.model, config.targets, config.rank, 1, config.lora_alpha)
    lm.load_adapter(adapter)
    return Learner(lm, config, source)


def gradient(learner, texts, seed=0):
    """Loss and gradient of one step, `[all parameters]`."""
    for parameter in learner.parameters.values():
        parameter.grad = None
    loss, positions = learner.backward(texts, torch.Generator().manual_seed(seed))
    grads = [p.grad.flatten() for p in learner.parameters.values() if p.grad is not None]
    return loss, torch.cat(grads) if grads else None, positions


def whole_logits(lm, text):
    """Logits of a text by transformers' own forward, `[positions, vocabulary]`."""
    with lm.adapter.at(1.0):
        return lm.model(torch.tensor([text.ids]), use_cache=False).logits[0]


def by_hand(learner, loss):
    found = torch.autograd.grad(loss, list(learner.parameters.values()))
    return torch.cat([g.flatten() for g in found])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_the_head_is_the_models_own(family):
    lm = tiny_lm(family)
    mine = learner(lm)
    rows = read(lm, TEXTS)
    for row, text in enumerate(TEXTS):
        logits = head_logits(lm.model, rows.hidden[row, : len(text.ids)])
        torch.testing.assert_close(logits, whole_logits(lm, text), rtol=1e-4, atol=1e-4)
    found = mine.entropies(rows)
    wanted = entropy(whole_logits(lm, TEXTS[1]))
    torch.testing.assert_close(found[1, : len(wanted)], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunked_equals_whole(lm, chunk):
    one = learner(lm, objective="temperature", whole_windows=False, logits_chunk=chunk)
    loss, grad, _ = gradient(one, TEXTS[:1])
    z = whole_logits(lm, TEXTS[0])[TEXTS[0].start :]
    wanted = entropy(z, 1 + 0.5 * entropy(z).detach()).mean()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(grad, by_hand(one, wanted), rtol=1e-4, atol=1e-7)


def test_no_more_logits_than_a_chunk_at_a_time(lm):
    hidden = torch.randn(50, lm.width, requires_grad=True)
    seen = []

    def measure(logits):
        seen.append(len(logits))
        return entropy(logits)

    over_positions(lm, hidden, measure, chunk=8).sum().backward()
    assert max(seen) == 8 and sum(seen) == 100  # once forward, once again backward


def test_tent_is_the_mean_entropy_of_the_answer(lm):
    one = learner(lm, objective="tent")
    loss, grad, positions = gradient(one, TEXTS[:1])
    wanted = entropy(whole_logits(lm, TEXTS[0]))[TEXTS[0].start :].mean()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(grad, by_hand(one, wanted), rtol=1e-4, atol=1e-7)
    assert positions == (tuple(range(6, 40)),)


@pytest.mark.parametrize(
    "reduced",
    [
        {"objective": "fg-ttl", "alpha": 0.0, "tau": 1e9},
        {"objective": "selection"},
        {"objective": "temperature", "alpha": 0.0},
        {"objective": "high-entropy"},
        {"objective": "random"},
    ],
)
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_everything_reduces_to_tent(lm, reduced, micro_batch):
    texts = TEXTS[:micro_batch]
    tent = gradient(learner(lm, objective="tent"), texts)
    settings = {"top_p": 1.0, "entropy_threshold": -1.0, "whole_windows": False}
    other = gradient(learner(lm, **settings, **reduced), texts)
    assert other[0] == pytest.approx(tent[0], abs=1e-6)
    assert (other[1] - tent[1]).abs().max() < 1e-6
    assert other[2] == tent[2]


def test_fg_ttl_is_its_definition(lm):
    one = learner(lm, tau=0.7, alpha=0.3)
    text = TEXTS[0]
    loss, grad, positions = gradient(one, [text])
    z = whole_logits(lm, text)
    h = entropy(z).detach()
    chosen = select(h[None], torch.tensor([6]), torch.tensor([40]))
    at = chosen.mask[0].nonzero()[:, 0]
    assert positions == (tuple(at.tolist()),) and len(at) > 1
    weights = torch.softmax(chosen.gain[0, at] / 0.7, 0)
    wanted = (weights * entropy(z[at] / (1 + 0.3 * h[at])[:, None])).sum()
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(grad, by_hand(one, wanted), rtol=1e-4, atol=1e-7)


def test_gain_weights_are_shared_within_a_micro_batch(lm):
    loss, _, positions = gradient(learner(lm), TEXTS)
    alone = [gradient(learner(lm), [text]) for text in TEXTS]
    assert positions == tuple(p for _, _, (p,) in alone)
    # Weights sum to one over all texts, so the loss is a mean of the three, not their sum.
    values = [loss for loss, _, _ in alone if loss is not None]
    assert min(values) <= loss <= max(values)


def test_alignment_moves_what_is_trained_by_one(lm):
    text = TEXTS[0]
    after = learner(lm, objective="tent")
    before = learner(lm, objective="tent", align="before")
    h = entropy(whole_logits(lm, text))
    assert gradient(after, [text])[0] == pytest.approx(h[6:40].mean().item(), rel=1e-5)
    # The distribution that produced the answer's first token is the one after the prompt.
    assert gradient(before, [text])[0] == pytest.approx(h[5:39].mean().item(), rel=1e-5)
    rows = read(lm, [text])
    moved = before.entropies(rows)[0]
    torch.testing.assert_close(moved[1:], after.entropies(rows)[0, :-1])


def test_every_setting_of_the_selector_acts(lm):
    shape = {"gamma": 0.6}
    plain = gradient(learner(lm, **shape), TEXTS[:1])
    for setting, value in {
        "top_p": 0.5,
        "top_k": 3,
        "entropy_threshold": 5.3,
        "n_min": 6,
        "n_max": 2,
        "gamma": 0.1,
        "local_window": 2,
        "whole_windows": False,
        "align": "before",
    }.items():
        changed = gradient(learner(lm, **{**shape, setting: value}), TEXTS[:1])
        assert changed[2] != plain[2], setting
    for setting, value in {"alpha": 0.1, "tau": 0.1}.items():
        changed = gradient(learner(lm, **{**shape, setting: value}), TEXTS[:1])
        assert changed[2] == plain[2] and changed[0] != plain[0], setting


def test_the_presets_are_used(lm):
    config = official_code("phi-4-14b", "gsm8k")
    assert (config.learning_rate, config.tau, config.alpha) == (1e-5, 1.2, 1.0)
    assert official_code() == FGTTLConfig(guard=False, too_long="cut", step_on_nothing=True)
    lm.load_adapter(new_adapter(lm, config))
    mine = Learner(lm, config)
    [done] = mine.learn(TEXTS[:1], 0)
    z = whole_logits(lm, TEXTS[0]).detach()
    assert (
        len(done.positions[0])
        == select(entropy(z)[None], torch.tensor([6]), torch.tensor([40])).mask.sum()
    )
    # From B = 0 the first step of AdamW moves every entry of B by the rate.
    moved = [p.detach() for name, p in mine.parameters.items() if name.endswith("up")]
    assert torch.cat([p.flatten() for p in moved]).abs().max().item() == pytest.approx(
        1e-5, rel=1e-2
    )


def test_nothing_selected_skips_the_step_or_steps_by_momentum(lm):
    short = Text((5, 6, 7), 2)
    skips = learner(lm)
    [done] = skips.learn([short], 0)
    assert (done.loss, done.stepped, done.positions) == (None, False, ((),))
    assert all(torch.equal(skips.initial[n], p) for n, p in skips.parameters.items())

    steps = learner(lm, step_on_nothing=True, shuffle=False)
    first = steps.learn([TEXTS[0]], 0)
    assert first[0].stepped
    both = learner(lm, step_on_nothing=True, shuffle=False)
    done = both.learn([TEXTS[0], short], 0)
    assert done[1].stepped and done[1].loss is None
    assert any(not torch.equal(steps.parameters[n], p) for n, p in both.parameters.items())


def test_a_fresh_adamw_steps_by_its_rate_whatever_the_loss(lm):
    def moved(scale, monkeypatch):
        mine = learner(lm, objective="tent", clip=None, shuffle=False)
        whole = mine._loss
        monkeypatch.setattr(mine, "_loss", lambda rows, target: whole(rows, target) * scale)
        mine.learn([TEXTS[0]], 0)
        return torch.cat(
            [(p.detach() - mine.initial[n]).flatten() for n, p in mine.parameters.items()]
        )

    with pytest.MonkeyPatch.context() as patch:
        one, thousand = moved(1.0, patch), moved(1000.0, patch)
    large = one.abs() > 0.99e-3
    assert large.float().mean() > 0.9 and one.abs().max() <= 1e-3 + 1e-6
    torch.testing.assert_close(one[large], thousand[large], rtol=1e-2, atol=1e-6)


def test_a_persistent_optimizer_differs(lm):
    def after(persistent):
        mine = learner(lm, objective="tent", persistent_optimizer=persistent)
        mine.learn([TEXTS[0]], 0)
        first = mine.weights()
        mine.learn([TEXTS[1]], 1)
        return first, mine.weights()

    fresh, kept = after(False), after(True)
    assert all(torch.equal(fresh[0][n], kept[0][n]) for n in fresh[0])
    assert any(not torch.equal(fresh[1][n], kept[1][n]) for n in fresh[1])


def test_sgd_steps_along_the_gradient(lm):
    mine = learner(lm, objective="tent", optimizer="sgd", clip=None)
    _, grad, _ = gradient(mine, TEXTS[:1])
    mine.learn(TEXTS[:1], 0)
    moved = torch.cat([(p - mine.initial[n]).flatten() for n, p in mine.parameters.items()])
    torch.testing.assert_close(moved, -1e-3 * grad, rtol=1e-3, atol=1e-7)


def test_the_order_is_the_seeds(lm):
    mine = learner(lm)
    orders = [[s.texts[0] for s in mine.learn(TEXTS, seed)] for seed in range(6)]
    assert orders[0] == [s.texts[0] for s in mine.learn(TEXTS, 0)]
    assert len({tuple(order) for order in orders}) > 1
    straight = learner(lm, shuffle=False, epochs=2).learn(TEXTS, 3)
    assert [s.texts[0] for s in straight] == [0, 1, 2, 0, 1, 2]


# The relatives


def test_come_on_a_text(lm):
    one = learner(lm, objective="come", come_mass=1000.0)
    loss, grad, _ = gradient(one, TEXTS[:1])
    x = whole_logits(lm, TEXTS[0])[6:]
    x = x / x.norm(dim=-1, keepdim=True) * x.norm(dim=-1, keepdim=True).detach()
    total = torch.exp(x).sum(1, keepdim=True) + 1000
    p = torch.cat([torch.exp(x) / total, 1000 / total], dim=1) + 1e-7
    wanted = -(p * p.log()).sum(1).mean(0)
    assert loss == pytest.approx(wanted.item(), rel=1e-5)
    torch.testing.assert_close(grad, by_hand(one, wanted), rtol=1e-3, atol=1e-7)


def test_eata_over_two_steps(lm):
    """Entropy filter, redundancy filter, weights, running mean: as the official code has them."""
    margin, redundancy = 5.3, 0.5
    one = learner(
        lm, objective="eata", eata_margin=margin, eata_redundancy=redundancy, logits_chunk=5
    )
    mean = None
    for text in TEXTS[:2]:
        loss, grad, positions = gradient(one, [text])
        outputs = whole_logits(lm, text)
        entropys = entropy(outputs)
        reliable = torch.where(entropys[text.start :] < margin)[0] + text.start
        probs = outputs[reliable].softmax(1).detach()
        if mean is not None:
            cosine = functional.cosine_similarity(mean.unsqueeze(0), probs, dim=1)
            new = torch.where(cosine.abs() < redundancy)[0]
            assert 0 < len(new) < len(reliable), cosine
            reliable, probs = reliable[new], probs[new]
        mean = probs.mean(0) if mean is None else 0.9 * mean + 0.1 * probs.mean(0)
        kept = entropys[reliable]
        wanted = (kept * (1 / torch.exp(kept.detach() - margin))).mean(0)
        assert positions == (tuple(reliable.tolist()),)
        assert loss == pytest.approx(wanted.item(), rel=1e-4)
        torch.testing.assert_close(grad, by_hand(one, wanted), rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(one.probabilities, mean, rtol=1e-4, atol=1e-7)


def test_eatas_penalty_holds_what_mattered_before(lm):
    source = [Text(text.ids[:12], 12) for text in TEXTS]
    one = learner(lm, objective="eata", eata_margin=6.0, source=source)
    squares = 0
    for text in source:
        z = whole_logits(lm, text)
        grads = torch.autograd.grad(
            functional.cross_entropy(z, z.argmax(-1)), list(one.parameters.values())
        )
        squares = squares + torch.cat([g.flatten() for g in grads]) ** 2 / len(source)
    mine = torch.cat([f.flatten() for f in one.fisher.values()])
    torch.testing.assert_close(mine, squares, rtol=1e-3, atol=1e-9)

    with torch.no_grad():
        for parameter in one.parameters.values():
            parameter.add_(0.01)
    h = entropy(whole_logits(lm, TEXTS[0]))[TEXTS[0].start :].detach()
    plain = (h * torch.exp(6.0 - h)).mean()
    penalty = 2000 * (squares * 0.01**2).sum()
    rows = read(lm, TEXTS[:1])
    loss = one._loss(rows, one._target(rows, torch.Generator()))
    assert penalty > 0
    assert loss.item() - plain.item() == pytest.approx(penalty.item(), abs=plain.item() * 1e-6)


def test_sar_takes_the_gradient_at_the_sharpest_point(lm):
    margin = 5.3
    one = learner(lm, objective="sar", sar_margin=margin, sar_rho=0.1, sar_reset=0.0)
    loss, grad, _ = gradient(one, TEXTS[:1])
    here = one.weights()

    h = entropy(whole_logits(lm, TEXTS[0]))[6:]
    first = torch.where(h < margin)[0]
    grads = torch.autograd.grad(h[first].mean(), list(one.parameters.values()))
    norm = torch.stack([g.norm(p=2) for g in grads]).norm(p=2)
    with torch.no_grad():
        for p, g in zip(one.parameters.values(), grads, strict=True):
            p.add_(g * (0.1 / (norm + 1e-12)))
    again = entropy(whole_logits(lm, TEXTS[0]))[6:][first]
    wanted = again[again < margin].mean()
    assert (again < margin).any() and len(first) < len(h)
    expected = by_hand(one, wanted)
    one.set_weights(here)
    assert loss == pytest.approx(wanted.item(), rel=1e-4)
    torch.testing.assert_close(grad, expected, rtol=1e-3, atol=1e-6)
    assert one.loss_mean == pytest.approx(wanted.item(), rel=1e-4)
    assert sar_margin(1000) == 0.4 * math.log(1000)


def test_sar_starts_over_when_its_running_loss_is_low(lm):
    settings = {"objective": "sar", "sar_margin": 50.0, "shuffle": False}
    goes_on = learner(lm, **settings, sar_reset=0.0)
    goes_on.learn(TEXTS, 0)
    assert goes_on.resets == 0
    level = goes_on.loss_mean
    assert any(not torch.equal(goes_on.initial[n], p) for n, p in goes_on.parameters.items())

    starts_over = learner(lm, **settings, sar_reset=level + 5)
    starts_over.learn(TEXTS, 0)
    assert starts_over.resets == len(TEXTS) and starts_over.loss_mean is None
    assert all(torch.equal(starts_over.initial[n], p) for n, p in starts_over.parameters.items())


@pytest.mark.parametrize("threshold", [3.0, 6.2])
def test_tlm_on_prompts(lm, threshold):
    one = learner(lm, objective="tlm", tlm_threshold=threshold)
    loss, grad, positions = gradient(one, TEXTS)
    surprises = torch.stack(
        [
            functional.cross_entropy(
                whole_logits(lm, t)[: t.start - 1], torch.tensor(t.ids[1 : t.start])
            )
            for t in TEXTS[:2]  # the third prompt is one token, which nothing predicts
        ]
    )
    kept = surprises[surprises > threshold]
    wanted = (0.1 * torch.exp(kept.detach() - threshold) * kept).sum() / len(kept)
    assert loss == pytest.approx(wanted.item(), rel=1e-4)
    torch.testing.assert_close(grad, by_hand(one, wanted), rtol=1e-3, atol=1e-6)
    assert [bool(p) for p in positions] == [*(surprises > threshold).tolist(), False]


def test_a_loss_that_is_no_number_does_not_step(lm, monkeypatch):
    mine = learner(lm, objective="tent")
    whole = mine._loss
    monkeypatch.setattr(mine, "_loss", lambda rows, target: whole(rows, target) * math.nan)
    [done] = mine.learn(TEXTS[:1], 0)
    assert not done.stepped
    assert all(torch.equal(mine.initial[n], p) for n, p in mine.parameters.items())
