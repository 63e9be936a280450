"""What a Session promises besides its law: counts, order, independence, errors, no copies."""

import copy
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from session_reference import TARGETS, Reference

from lmsmith.errors import CapabilityError, UsageError
from lmsmith.models.adapter import Adapter
from lmsmith.models.lm import LM
from lmsmith.models.session import Session, Tree
from lmsmith.testing import FAMILIES, tiny_model

VOCABULARY = 64


def lm_of(model):
    return LM(model, None, name="tiny")


@pytest.fixture(scope="module")
def lm():
    return lm_of(tiny_model("llama", vocabulary=VOCABULARY))


@pytest.fixture(scope="module")
def reference(lm):
    return Reference(lm.model)


@pytest.fixture(scope="module")
def adapted():
    model = tiny_model("llama", seed=3, vocabulary=VOCABULARY)
    lm = lm_of(model)
    adapter = Adapter.random(model, TARGETS["llama"], rank=2, seed=0, scale=0.3)
    lm.load_adapter(adapter)
    return lm, Reference(model, adapter)


def ids(count, seed=0):
    return torch.randint(0, VOCABULARY, (count,), generator=torch.manual_seed(seed)).tolist()


def gap(one, other):
    return (one - other).abs().max().item()


# -------------------------------------------------------------------- reading


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_whole_models(family):
    """The head is applied as the model applies it: softcaps, scales and all."""
    model = tiny_model(family, vocabulary=VOCABULARY)
    session = Session(lm_of(model))
    row = session.add(ids(20))
    step = session.feed({row: []})
    assert gap(step.all_logits(row), Reference(model).logits(ids(20))) < 1e-4


def test_a_divided_head():
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, logits_scaling=4.0, pad_token_id=0,
        initializer_range=0.2, max_position_embeddings=64,
    )  # fmt: skip
    model = GraniteForCausalLM(config).eval()
    session = Session(lm_of(model))
    row = session.add(ids(9))
    step = session.feed({row: []})
    assert gap(step.all_logits(row), Reference(model).logits(ids(9))) < 1e-4


def test_step_reads_any_place_in_the_order_asked(lm, reference):
    session = Session(lm)
    first, second = session.add(ids(3, 1)), session.add(ids(5, 2))
    step = session.feed({second: [7, 8], first: [9]})
    assert step.rows == [second, first]
    assert step.new_tokens == {first: 4, second: 7}
    assert step.caught_up == {first: 3, second: 5}
    assert step.logits.shape == (2, VOCABULARY)
    one, two = reference.logits([*ids(3, 1), 9]), reference.logits([*ids(5, 2), 7, 8])
    assert gap(step.logits, torch.stack([two[-1], one[-1]])) < 1e-4
    places = [(first, 0), (second, -2), (second, 0), (first, -1)]
    expected = torch.stack([one[0], two[5], two[0], one[3]])
    assert gap(step.logits_at(places), expected) < 1e-4
    assert gap(step.all_logits(first), one) < 1e-4


def test_no_places_give_no_logits_in_one_forward_or_several(lm):
    session = Session(lm)
    short = session.add([1])
    assert session.feed({short: []}).logits_at([]).shape == (0, VOCABULARY)
    step = session.feed({short: [2], session.add(ids(150)): []})
    assert session.forward_calls == 3
    assert step.logits_at([]).shape == (0, VOCABULARY)


def test_logits_may_be_changed_in_place(lm):
    session = Session(lm)
    row = session.add([1, 2])
    logits = session.feed({row: []}).logits
    logits /= 2  # an inference tensor would refuse
    assert not logits.requires_grad


def test_bfloat16_keeps_its_dtype():
    model = tiny_model("gemma3", dtype=torch.bfloat16, vocabulary=VOCABULARY)
    session = Session(lm_of(model))
    rows = [session.add(ids(n, n)) for n in (3, 15, 9)]
    session.feed({row: [1] for row in rows})
    logits = session.feed({row: [2] for row in rows}).logits
    assert logits.dtype == torch.bfloat16
    for row, found in zip(rows, logits, strict=True):
        expected = Reference(model).logits(session.tokens(row))[-1]
        assert gap(found.float(), expected.float()) < 0.5


# ---------------------------------------------------------------------- costs


def test_one_forward_call_for_rows_of_like_work(lm):
    session = Session(lm)
    rows = [session.add(ids(n, n)) for n in (4, 9, 6)]
    session.feed({row: [1] for row in rows})
    session.feed({rows[0]: [1], rows[1]: Tree([1, 2, 3], [-1, -2, -1])})
    assert session.forward_calls == 2
    assert session.tokens_computed == (4 + 9 + 6 + 3) + (1 + 3)
    assert session.forward_seconds > 0


def test_a_long_prompt_does_not_pad_its_neighbours(lm, reference):
    """A row that joins with a long prompt gets a forward call of its own."""
    session = Session(lm)
    rows = [session.add(ids(5, n)) for n in range(4)]
    session.feed({row: [] for row in rows})
    late = session.add(ids(100))
    calls = session.forward_calls
    step = session.feed({rows[0]: [1], late: [], rows[1]: [2], rows[2]: [3], rows[3]: [4]})
    assert session.forward_calls == calls + 2
    assert step.rows == [rows[0], late, *rows[1:]]
    for row, found in zip(step.rows, step.logits, strict=True):
        assert gap(found, reference.logits(session.tokens(row))[-1]) < 1e-4
    step = session.feed({row: [5] for row in session.rows})
    for row, found in zip(step.rows, step.logits, strict=True):
        assert gap(found, reference.logits(session.tokens(row))[-1]) < 1e-4


def test_undo_and_branch_compute_nothing(lm, reference):
    session = Session(lm)
    row = session.add(ids(20))
    session.feed({row: []})
    session.crop(row, 12)
    twin = session.fork(row)
    assert (session.tokens_computed, session.forward_calls) == (20, 1)
    step = session.feed({row: [1], twin: [2]})
    assert session.tokens_computed == 22
    assert gap(step.logits[0], reference.logits([*ids(20)[:12], 1])[-1]) < 1e-4
    assert gap(step.logits[1], reference.logits([*ids(20)[:12], 2])[-1]) < 1e-4
    assert session.tokens(twin)[-1] == 2


def test_a_crop_among_kept_nodes_computes_nothing(lm, reference):
    session = Session(lm)
    row = session.add(ids(4))
    tree = Tree([1, 2, 3, 4, 5, 6], [-1, -1, -3, -1, -4, -6])  # 2, 3, 5, 6 are one branch
    nodes = session.feed({row: tree}).nodes[row]
    session.keep(row, [nodes[1], nodes[2], nodes[4], nodes[5]])
    session.crop(row, 6)
    step = session.feed({row: [7]})
    assert step.new_tokens[row] == 1
    assert gap(step.logits[0], reference.logits([*ids(4), 2, 3, 7])[-1]) < 1e-4


def test_a_strength_visited_again_lacks_only_what_came_since(adapted):
    lm, reference = adapted
    session = Session(lm)
    row = session.add(ids(10), strength=0.0)
    session.feed({row: [1]})
    session.set_strength(row, 1.0)
    step = session.feed({row: [2]})
    assert step.new_tokens[row] == 12  # nothing was cached under this strength
    session.feed({row: [3]})
    session.set_strength(row, 0.0)
    step = session.feed({row: [4]})
    assert (step.new_tokens[row], step.caught_up[row]) == (3, 2)
    session.crop(row, 5)
    session.set_strength(row, 1.0)
    step = session.feed({row: [6]})
    assert step.new_tokens[row] == 1
    assert gap(step.logits[0], reference.logits([*ids(10)[:5], 6], 1.0)[-1]) < 1e-4


def test_an_adapter_is_on_unless_a_row_says_else(adapted):
    lm, _ = adapted
    session = Session(lm)
    assert session.strength(session.add([1])) == 1.0
    assert session.strength(session.add([1], strength=0.25)) == 0.25


def test_one_batch_mixes_strengths_and_base_rows_are_untouched(adapted):
    lm, reference = adapted
    session = Session(lm)
    rows = [session.add(ids(8), strength=s) for s in (0.0, 1.0, 0.5, 2.0)]
    step = session.feed({row: [5] for row in rows})
    assert session.forward_calls == 1
    for found, strength in zip(step.logits, (0.0, 1.0, 0.5, 2.0), strict=True):
        assert gap(found, reference.logits([*ids(8), 5], strength)[-1]) < 1e-4


def test_steady_decoding_copies_no_cache(lm):
    session = Session(lm, capacity=200)
    rows = [session.add(ids(n, seed)) for seed, n in enumerate((5, 5, 7))]
    session.feed({row: [] for row in rows})
    store = session._store
    held, place = store._buffer, store._buffer.data_ptr()
    # One new token a row, in each layer once: all that may be written to the store.
    written = held.shape[0] * 2 * len(rows) * held.shape[3] * held.shape[5]
    for token in range(50):
        before = held.clone()
        session.feed({row: [token] for row in rows})
        assert store._buffer is held and held.data_ptr() == place
        assert (before != held).sum() <= written
        keys, _ = store._views[0]
        assert keys.data_ptr() == held[0, 0, 0].data_ptr()


def test_sessions_in_two_threads_equal_sessions_one_after_the_other(adapted):
    """Strengths, captures and the attention itself are set on the model that they share."""
    lm, reference = adapted
    own = lm.model.config._attn_implementation
    prompts = [[ids(5 + row, number) for row in range(1 + number)] for number in range(3)]

    def play(number, meet=lambda: None):
        session = Session(lm)
        strengths = (0.0, 1.0, 0.5)
        rows = [session.add(*row) for row in zip(prompts[number], strengths, strict=False)]
        meet()
        found = []
        for token in range(40):
            with session.capture([f"layers.{number}.resid_out"]):
                step = session.feed({row: [token] for row in rows})
            found += [step.logits, *step.sites.values()]
        kept = [(session.tokens(row), session.strength(row)) for row in rows]
        return found, list(zip(kept, step.logits, strict=True))

    alone = [play(number) for number in range(3)]
    barrier = threading.Barrier(3)
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(play, range(3), [barrier.wait] * 3))
    for (one, _), (other, lasts) in zip(alone, together, strict=True):
        assert max(gap(*pair) for pair in zip(one, other, strict=True)) < 1e-5
        for (tokens, strength), last in lasts:
            assert gap(last, reference.logits(tokens, strength)[-1]) < 1e-4
    assert lm.model.config._attn_implementation == own != "lmsmith_session"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_seconds_are_those_of_the_work_not_of_its_launch():
    model = tiny_model("llama", vocabulary=VOCABULARY, hidden_size=1024, intermediate_size=8192)
    session = Session(lm_of(model.to("cuda")))
    row = session.add(ids(200))
    torch.cuda.synchronize()
    began = time.perf_counter()
    session.feed({row: []}).all_logits(row).sum().item()
    assert session.forward_seconds > 0.5 * (time.perf_counter() - began)


def test_attention_reads_views_of_the_store(lm, monkeypatch):
    """Keys handed to the kernel are the store's memory, not a gathered or repeated copy."""
    session = Session(lm)
    rows = [session.add(ids(n, n)) for n in (5, 9)]
    session.feed({row: [] for row in rows})
    kernel, seen = torch.nn.functional.scaled_dot_product_attention, []

    def spy(query, key, value, **kwargs):
        seen.append((key.untyped_storage().data_ptr(), key.shape))
        return kernel(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    session.feed({row: [1] for row in rows})
    store = session._store._buffer.untyped_storage().data_ptr()
    assert len(seen) == 3
    assert all(place == store and shape == (2, 2, 10, 8) for place, shape in seen)


# --------------------------------------------------------------- independence


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_does_not_depend_on_its_neighbours(family):
    model = tiny_model(family, vocabulary=VOCABULARY)
    alone, crowd = Session(lm_of(model)), Session(lm_of(model))
    crowd.feed({crowd.add(ids(30, 9)): []})
    one, many = alone.add(ids(7)), crowd.add(ids(7))
    noise = [crowd.add(ids(n, n)) for n in (1, 13, 8)]
    for token in (3, 1, 4):
        apart = alone.feed({one: [token]})
        work = {noise[0]: [1], many: [token], noise[1]: Tree([1, 2], [-1, -1]), noise[2]: [9, 9]}
        crowded = crowd.feed(work)
        crowd.keep(noise[1], crowded.nodes[noise[1]][:1])
        assert gap(apart.all_logits(one)[-1], crowded.logits[1]) < 1e-5


def test_a_freed_row_leaves_the_others_alone(lm, reference):
    session = Session(lm)
    rows = [session.add(ids(4 + n, n)) for n in range(5)]
    session.feed({row: [1] for row in rows})
    session.free(rows[1])
    session.free(rows[4])
    assert session.rows == [rows[0], rows[2], rows[3]]
    step = session.feed({row: [2] for row in session.rows})
    for row, found in zip(step.rows, step.logits, strict=True):
        assert gap(found, reference.logits(session.tokens(row))[-1]) < 1e-4
    assert len(session._store.lanes) == 3
    assert session.add([1]) == 5  # ids are not used twice


def test_the_model_itself_is_as_before(lm):
    """Between and after feeds, the user's own forwards and generate are transformers' own."""
    prompt = torch.tensor([ids(6)])
    fresh = copy.deepcopy(lm.model)
    session = Session(lm)
    row = session.add(ids(4))
    session.feed({row: []})
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert lm.model.config._attn_implementation == fresh.config._attn_implementation
    assert torch.equal(lm.model(prompt).logits, fresh(prompt).logits)
    assert torch.equal(lm.model.generate(prompt, **options), fresh.generate(prompt, **options))
    weights = zip(lm.model.state_dict().values(), fresh.state_dict().values(), strict=True)
    assert all(torch.equal(one, other) for one, other in weights)


def test_a_feed_that_fails_changes_nothing(lm, reference):
    session = Session(lm)
    row = session.add(ids(6))
    session.feed({row: []})

    def broken(activation):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), session.edit({"layers.1.mlp_out": broken}):
        session.feed({row: [1, 2]})
    assert session.tokens(row) == ids(6)
    assert lm.model.config._attn_implementation != "lmsmith_session"
    step = session.feed({row: [3]})
    assert gap(step.logits[0], reference.logits([*ids(6), 3])[-1]) < 1e-4


def test_a_feed_that_fails_in_its_second_forward_call_changes_nothing(lm, reference, monkeypatch):
    session = Session(lm)
    rows = [session.add(ids(5, n)) for n in range(3)]
    session.feed({row: [] for row in rows})
    long = session.add(ids(100))
    run, calls = session._run, []

    def fails_second(plans, step):
        calls.append([plan.feed.row for plan in plans])
        if len(calls) == 2:
            raise MemoryError
        run(plans, step)

    monkeypatch.setattr(session, "_run", fails_second)
    with pytest.raises(MemoryError):
        session.feed({rows[0]: [1], rows[1]: Tree([2], [-1]), rows[2]: [3], long: []})
    assert calls == [rows, [long]]
    assert [session.length(row) for row in session.rows] == [5, 5, 5, 100]
    assert session.live(rows[1]) == []
    monkeypatch.undo()
    step = session.feed({rows[0]: [1], rows[1]: Tree([4], [-1]), rows[2]: [3], long: []})
    expected = [[*ids(5, 0), 1], [*ids(5, 1), 4], [*ids(5, 2), 3], ids(100)]
    for found, tokens in zip(step.logits, expected, strict=True):
        assert gap(found, reference.logits(tokens)[-1]) < 1e-4


# ------------------------------------------------------------- other families


def test_a_window_in_every_layer():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=5, initializer_range=0.2,
        max_position_embeddings=128,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    reference, session = Reference(model), Session(lm_of(model))
    rows = [session.add(ids(17)), session.add(ids(9, 1))]
    session.feed({rows[0]: []})
    session.feed({row: [1, 2] for row in rows})
    step = session.feed({rows[0]: Tree([3, 4], [-1, -2]), rows[1]: [5]})
    expected = reference.logits([*ids(17), 1, 2, 3, 4])[-2:]
    assert gap(step.all_logits(rows[0]), expected) < 1e-4
    assert gap(step.logits[1], reference.logits([*ids(9, 1), 1, 2, 5])[-1]) < 1e-4


def test_capped_attention_scores():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, query_pre_attn_scalar=8,
        sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=5.0,
        initializer_range=0.3, max_position_embeddings=64,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    session = Session(lm_of(model))
    row = session.add(ids(9))
    session.feed({row: []})
    step = session.feed({row: Tree([1, 2, 3], [-1, -2, -1])})
    reference = Reference(model)
    assert gap(step.all_logits(row)[1], reference.logits([*ids(9), 1, 2])[-1]) < 1e-4
    assert gap(step.all_logits(row)[2], reference.logits([*ids(9), 3])[-1]) < 1e-4


def unlike_models():
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        BertLMHeadModel,
        BloomConfig,
        BloomForCausalLM,
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        MambaConfig,
        MambaForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )  # fmt: skip

    small = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1}
    bert = BertConfig(**small, intermediate_size=32, num_attention_heads=2)
    t5 = T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    latent = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "num_attention_heads": 4}
    widths = {"intermediate_size": 32, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    return {
        "decoder": [
            MambaForCausalLM(MambaConfig(**small, state_size=4)),
            BertForMaskedLM(bert),
            T5ForConditionalGeneration(t5),
        ],
        "attention that can be replaced": [
            BloomForCausalLM(
                BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)
            )
        ],
        "a head of one linear layer": [BertLMHeadModel(bert)],
        "keys and values of one width": [
            DeepseekV3ForCausalLM(
                DeepseekV3Config(**small, **latent, **widths, qk_rope_head_dim=4, v_head_dim=width)
            )
            for width in (4, 8)
        ],
    }


def test_models_without_plain_attention_are_refused():
    for words, models in unlike_models().items():
        for model in models:
            lm = lm_of(model)
            with pytest.raises(CapabilityError, match=f"Session needs .*{words}") as caught:
                Session(lm)
            assert "\n" not in str(caught.value)


def rope_model(kind, **settings):
    from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM

    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "pad_token_id": 0, "initializer_range": 0.2, "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings},
    }  # fmt: skip
    if kind == "longrope":
        config = Phi3Config(**sizes, original_max_position_embeddings=16)
        return Phi3ForCausalLM(config).eval()
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


@pytest.mark.parametrize(
    ("kind", "settings", "limit", "words"),
    [
        ("longrope", {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}, 16, "longrope"),
        ("dynamic", {"factor": 4.0}, 64, "context of 64"),
    ],
)
def test_positions_that_change_with_length_are_used_up_to_there(kind, settings, limit, words):
    """Past it the angles of all positions change, and keys cached before would be wrong."""
    model = rope_model(kind, **settings)
    lm, reference = lm_of(model), Reference(model)
    assert lm.context == limit
    session = Session(lm)
    row, short = session.add(ids(limit - 4)), session.add(ids(2, 1))
    session.feed({row: [], short: []})
    # The short row's padding would lie far past the limit.
    step = session.feed({row: [1, 2, 3, 4], short: [5]})
    assert gap(step.all_logits(row), reference.logits(session.tokens(row))[-4:]) < 1e-4
    assert gap(step.logits[1], reference.logits(session.tokens(short))[-1]) < 1e-4
    for wrong in (
        lambda: session.feed({row: [6]}),
        lambda: session.feed({row: Tree([6], [-1])}),
        lambda: session.add([1] * (limit + 1)),
    ):
        with pytest.raises(UsageError, match=f"{limit + 1} tokens do not fit.*{words}"):
            wrong()
    straight, turned = (reference.logits([*ids(limit), *more])[:limit] for more in ([], [1]))
    assert gap(turned, straight) > 0.01


# --------------------------------------------------------------------- errors


def test_errors_say_what_is_wrong(lm):
    session = Session(lm)
    row, other = session.add([1, 2, 3]), session.add([4])
    step = session.feed({row: [], other: []})
    for wrong, words in (
        (lambda: session.feed({}), "nothing to feed"),
        (lambda: session.feed({7: [1]}), "no row 7"),
        (lambda: session.feed({row: []}), "lacks none"),
        (lambda: session.feed({row: [1], other: [64]}), "64 is outside the vocabulary of 64"),
        (lambda: session.feed({row: [-1]}), "-1 is outside the vocabulary"),
        (lambda: session.add([99]), "99 is outside"),
        (lambda: session.feed({row: [1] * 254}), "257 tokens do not fit into .* context of 256"),
        (lambda: session.add([1] * 257), "257 tokens do not fit"),
        (lambda: session.feed({row: Tree([1], [0])}), "no live node 0"),
        (lambda: session.feed({row: Tree([1, 2], [-3, -1])}), "does not come before"),
        (lambda: session.feed({row: Tree([1, 2], [-1])}), "2 tokens and 1 parents"),
        (lambda: session.feed({row: Tree([], [])}), "at least one token"),
        (lambda: session.crop(row, 4), "has 3 tokens; it cannot be cropped to 4"),
        (lambda: session.crop(row, -1), "cropped to -1"),
        (lambda: session.keep(row, [0]), "no live node 0"),
        (lambda: session.free(9), "no row 9"),
        (lambda: session.set_strength(row, float("nan")), "finite"),
        (lambda: step.logits_at([(row, 3)]), "has 3 new tokens"),
        (lambda: step.all_logits(9), "row 9 was not fed"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            wrong()
        assert "\n" not in str(caught.value)
    assert session.tokens(row) == [1, 2, 3] and session.tokens(other) == [4]
    assert session.live(row) == []


def test_nodes_must_be_kept_along_their_branch(lm):
    session = Session(lm)
    row = session.add([1])
    nodes = session.feed({row: Tree([2, 3, 4, 5], [-1, -2, -1, -4])}).nodes[row]
    for wrong, words in (
        (lambda: session.feed({row: [1]}), "4 live nodes; keep some or crop"),
        (lambda: session.keep(row, [nodes[1]]), "does not follow the trunk"),
        (lambda: session.keep(row, [nodes[0], nodes[3]]), "does not follow node 0"),
        (lambda: session.keep(row, [nodes[0]], nodes=[nodes[2]]), "node 2 of row 0 cannot stay"),
        (lambda: session.keep(row, [nodes[0]], nodes=[nodes[0]]), "cannot stay"),
    ):
        with pytest.raises(UsageError, match=words):
            wrong()
    assert session.live(row) == nodes
    session.keep(row, [nodes[0]], nodes=[nodes[1]])
    assert (session.tokens(row), session.live(row)) == ([1, 2], [nodes[1]])
    session.keep(row, [])
    assert (session.tokens(row), session.live(row)) == ([1, 2], [])


def test_a_strength_needs_an_adapter(lm):
    session = Session(lm)
    row = session.add([1])
    session.set_strength(row, 0)
    with pytest.raises(CapabilityError, match="needs an adapter"):
        session.set_strength(row, 1.0)
    with pytest.raises(CapabilityError, match="needs an adapter"):
        session.add([1], strength=0.5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_context_can_be_filled_to_the_last_token(family):
    """Padding past the last learned position must not reach the table's end."""
    model = tiny_model(family, vocabulary=VOCABULARY)
    session = Session(lm_of(model))
    long, short = session.add(ids(254)), session.add(ids(3))
    session.feed({long: []})
    step = session.feed({long: [1, 2], short: Tree([1, 2, 3, 4, 5], [-1] * 5)})
    expected = Reference(model).logits([*ids(254), 1, 2])[-1]
    assert gap(step.logits[0], expected) < 1e-4
    with pytest.raises(UsageError, match="257 tokens do not fit"):
        session.feed({long: [1]})
    assert not torch.isnan(step.all_logits(short)).any()


def test_a_stand_in_for_an_lm_needs_only_a_model(lm):
    session = Session(types.SimpleNamespace(model=lm.model))
    assert session.feed({session.add([1]): []}).logits.shape == (1, VOCABULARY)
