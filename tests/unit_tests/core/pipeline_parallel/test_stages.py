"""Stage contents: every layer once, the slowest stage as fast as can be, the user's own layouts exactly."""

import itertools
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.config.transformer_config import TransformerConfig
from megatron.core.models.gpt.description import describe_gpt
from megatron.core.pipeline_parallel.balance import ModelCosts, balanced_counts, slowest
from megatron.core.pipeline_parallel.stages import (
    DECODER_LAYER,
    LayoutError,
    parse_layout,
    pipeline_stages,
    virtual_pipeline_size,
)


def shape(num_layers, ranks, **fields):
    defaults = {
        "num_layers": num_layers, "pipeline_model_parallel_size": ranks, "hidden_size": 64, "ffn_hidden_size": 256,
        "num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 16, "swiglu": False, "quick_geglu": False,
        "geglu": False,
        "num_layers_per_virtual_pipeline_stage": None, "num_virtual_stages_per_pipeline_rank": None,
        "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False,
        "pipeline_model_parallel_layout": None, "whole_layers_in_pipeline_split": False,
        "mtp_num_layers": None,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **fields})


def counts(config, costs=None, **options):
    return [stage.num_layers for stage in pipeline_stages(config, costs, **options)]


def alike(num_layers, attention=1 / 3, head=0.0):
    """Return equal layers; ``attention`` is the share of attention in their cost."""
    return ModelCosts((DECODER_LAYER,) * num_layers, ((attention, 1 - attention),) * num_layers, head)


SPLITS = [
    {}, {"num_virtual_stages_per_pipeline_rank": 2}, {"num_layers_per_virtual_pipeline_stage": 3},
    {"decoder_first_pipeline_num_layers": 3}, {"decoder_last_pipeline_num_layers": 2},
    {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 4},
    {"account_for_embedding_in_pipeline_split": True}, {"account_for_loss_in_pipeline_split": True},
    {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
     "num_virtual_stages_per_pipeline_rank": 2},
]  # fmt: skip


@given(st.integers(1, 100), st.integers(1, 9), st.sampled_from(SPLITS), st.sampled_from([None, 0.1, 4.0]))
@settings(max_examples=300, deadline=None)
def test_every_layer_is_on_exactly_one_stage(num_layers, ranks, split, head):
    config = shape(num_layers, ranks, **split)
    try:
        stages = pipeline_stages(config, None if head is None else alike(num_layers, head=head))
    except ValueError as error:
        assert "layers" in str(error)
        return
    assert len(stages) == ranks * virtual_pipeline_size(config)
    assert list(itertools.chain(*(stage.branches for stage in stages))) == list(range(2 * num_layers))
    assert [stage.embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.loss for stage in stages] == [False] * (len(stages) - 1) + [True]


@pytest.mark.parametrize(("num_layers", "num_stages", "back"), [(30, 4, 0.0), (12, 4, 2.4), (9, 3, 1.5), (10, 5, 7.0)])
@pytest.mark.parametrize("halves", [None, (0.35, 0.65), (0.5, 0.5), (0.8, 0.2)])
def test_no_other_split_has_a_cheaper_slowest_stage(num_layers, num_stages, back, halves):
    costs = [1.0] * num_layers if halves is None else list(halves) * min(num_layers, 9)
    result = balanced_counts(costs, [1] * num_stages, 0.0, back)
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    splits = ([b - a for a, b in zip((0, *cut), (*cut, len(costs)))] for cut in cuts)
    assert slowest(costs, result, 0.0, back) <= min(slowest(costs, split, 0.0, back) for split in splits) + 1e-12


def test_thirty_layers_on_four_ranks_are_thirty_layers():
    assert sum(counts(shape(30, 4))) == 30
    assert sum(counts(shape(80, 16, num_virtual_stages_per_pipeline_rank=4))) == 80


def llama(ranks=4, **fields):
    return shape(
        32, ranks, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
        kv_channels=128, swiglu=True, **fields,
    )  # fmt: skip


LLAMA = describe_gpt(
    TransformerConfig(num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32,
                      num_query_groups=8, swiglu=True),
    vocab_size=128_256, seq_length=8192, max_sequence_length=8192,
).costs  # fmt: skip


def test_costs_of_model_parts_are_their_times():
    """LLaMA-3-8B, million multiplications per token: 41.9 in the projections, 33.6 slower between them, 176, 525."""
    attention, mlp = 41.943 + 33.554 / 0.65, 176.161
    layer = attention + mlp
    assert LLAMA.layers[0] == pytest.approx((attention / layer, mlp / layer), rel=1e-4)
    assert LLAMA.layers[0] == pytest.approx((0.347, 0.653), abs=1e-3)
    assert LLAMA.head == pytest.approx(525.337 / layer, rel=1e-4)


def test_layers_that_see_a_window_only_cost_less():
    """Every second layer has a window; the stage with more of the others gets fewer layers."""
    config = TransformerConfig(num_layers=6, hidden_size=64, num_attention_heads=4, window_size=(15, 0),
                               window_attn_skip_freq=2)  # fmt: skip
    costs = describe_gpt(config, vocab_size=100, seq_length=4096, max_sequence_length=4096).costs
    windowed, full = 16 * 4096 * 64 / 0.65, 4096**2 * 64 / 0.65  # multiplications: the band, half of all pairs
    projections = 4 * 64**2 * 4096
    ratio = (projections + full) / (projections + 2 * windowed)
    assert [attention / costs.layers[0][0] for attention, _ in costs.layers] == pytest.approx([1, ratio] * 3, rel=0.02)


def test_the_output_layer_weighs_as_much_as_the_layers_that_take_as_long():
    """The last of four ranks has the loss, and about two layers less."""
    assert counts(llama(whole_layers_in_pipeline_split=True), LLAMA) == [8, 8, 9, 7]
    assert counts(llama()) == [8, 8, 8, 8]


def test_layers_are_cut_where_that_makes_the_slowest_stage_faster():
    stages = pipeline_stages(llama(), LLAMA)
    assert [stage.num_layers for stage in stages] == [8.5, 8.5, 8.5, 6.5]
    stored = [[name for part in stage.parts for name in map(part.names.__getitem__, part.branches)] for stage in stages]
    assert [tuple(map(local.count, DECODER_LAYER)) for local in stored] == [(9, 8), (8, 9), (9, 8), (6, 7)]
    assert list(map(str, stages)) == [
        "embedding + layers 1-8 + attention of layer 9", "feed-forward of layer 9 + layers 10-17",
        "layers 18-25 + attention of layer 26", "feed-forward of layer 26 + layers 27-32 + loss",
    ]  # fmt: skip
    one_piece = ModelCosts((("layer",),) * 32, tuple((sum(local),) for local in LLAMA.layers), LLAMA.head)
    assert counts(llama(), one_piece) == counts(llama(whole_layers_in_pipeline_split=True), LLAMA) == [8, 8, 9, 7]
    chunks = counts(llama(num_virtual_stages_per_pipeline_rank=2), LLAMA)
    assert chunks == [4, 4, 4, 4, 4.5, 4.5, 4.5, 2.5]


@pytest.mark.parametrize(
    ("output", "found"), [(0, [2, 2]), (2, [3, 1]), (0.34, [2, 2]), (0.36, [2.5, 1.5]), (2 / 3, [2.5, 1.5])]
)
def test_layers_stay_uncut_where_a_cut_gains_next_to_nothing(output, found):
    """Four layers, a third of them attention, and an output layer that costs ``output`` layers: 2.333 is no gain over
    2.34, but over 2.36."""
    assert counts(shape(4, 2), alike(4, head=output)) == found


def test_counting_embedding_and_loss_as_layers_gives_the_usual_even_split():
    both = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert counts(shape(30, 4, **both), alike(30, head=50.0)) == [7, 8, 8, 7]
    assert counts(shape(6, 4, **both)) == [1, 2, 2, 1]
    assert counts(shape(2, 4, **both)) == [0, 1, 1, 0]


def test_given_ends_count_for_the_full_rank():
    ends = {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 4}
    assert counts(shape(14, 4, **ends)) == [2, 4, 4, 4]
    assert counts(shape(14, 4, num_virtual_stages_per_pipeline_rank=2, **ends)) == [1, 2, 2, 2, 1, 2, 2, 2]
    with pytest.raises(ValueError, match="1 layers remain for 2 pipeline ranks"):
        counts(shape(7, 4, **ends))
    with pytest.raises(ValueError, match="1 layers remain for 0 pipeline ranks"):
        counts(shape(7, 2, **ends))


def test_layout_strings_define_the_layers_of_every_stage():
    stages = parse_layout("Et*3|(tt|)*29,m|L")
    assert len(stages) == 32
    assert [stage.num_layers for stage in stages] == [3, *[2] * 29, 0, 0]
    assert stages[0].embedding and stages[-1].loss and stages[30].num_mtp == 1
    assert [str(stage) for stage in (stages[0], stages[1], stages[-1])] == [
        "embedding + layers 1-3", "layers 4-5", "loss",
    ]  # fmt: skip
    cut = parse_layout("Eta|f|aft*2a||fL")
    both, first, second = [0, 1], [0], [1]
    assert [[(part.layer, list(part.branches)) for part in stage.parts] for stage in cut] == [
        [(0, both), (1, first)], [(1, second)], [(2, both), (3, both), (4, both), (5, first)], [], [(5, second)],
    ]  # fmt: skip
    assert [(stage.num_layers, stage.cuts_layers) for stage in cut] == [
        (1.5, True), (0.5, True), (3.5, True), (0, False), (0.5, True),
    ]  # fmt: skip
    assert [str(stage) for stage in (cut[0], cut[1], cut[3])] == [
        "embedding + layer 1 + attention of layer 2", "feed-forward of layer 2", "nothing",
    ]  # fmt: skip
    assert parse_layout("Eaf|(af)*2L") == parse_layout("Et|ttL")
    nested = parse_layout("E | ((t)*2|)*2 t L")
    assert [stage.num_layers for stage in nested] == [0, 2, 2, 1]
    assert str(parse_layout("Et||tL")[1]) == "nothing"
    config = shape(5, 2, pipeline_model_parallel_layout="E|((t)*2|)*2tL")
    assert virtual_pipeline_size(config) == 2 and counts(config) == [0, 2, 2, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("EEt|L", "there is a second E at position 2"),
        ("tE|L", "E must be the first entry: at position 2"),
        ("Et|LL", "there is a second L at position 5"),
        ("EtL|t", "'t' comes after L, the last entry, at position 5"),
        ("Et|mtL", "'t' comes after m at position 5"),
        ("Et|tx|L", "'x' means nothing; E, t, a, f, m, L, | and parentheses do at position 5"),
        ("Et|(tt|L", "a parenthesis is not closed at position 9"),
        ("Et*|L", "a number must follow * at position 4"),
        ("Et|t", "has no L"),
        ("t|L", "has no E"),
        ("|Et|L", "E belongs to the first stage"),
        ("Ef|aL", "'f' (the last branch of a layer) does not follow an a at position 2"),
        ("Eaff|L", "'f' (the last branch of a layer) does not follow an a at position 4"),
        ("Ea|tf|L", "'t' comes between the branches of a layer, a and f, at position 4"),
        ("Ea|a|ffL", "'a' comes between the branches of a layer, a and f, at position 4"),
        ("Eta|L", "'L' comes between the branches of a layer, a and f, at position 5"),
        ("Et|mafL", "'a' comes after m at position 5"),
        ("Et|L|", "L to the last"),
        ("Et*999999|L", "more than 10000 entries at position 2"),
        ("", "has no E"),
    ],
)
def test_a_wrong_layout_string_is_located(text, message):
    with pytest.raises(LayoutError) as error:
        parse_layout(text)
    assert message in str(error.value)


def test_a_layout_that_does_not_fit_the_model_is_rejected():
    with pytest.raises(ValueError, match="3 stages, not a multiple of 2"):
        pipeline_stages(shape(2, 2, pipeline_model_parallel_layout="Et|t|L"))
    with pytest.raises(ValueError, match="2 layers, the model 3"):
        pipeline_stages(shape(3, 3, pipeline_model_parallel_layout="Et|t|L"))
    names = (DECODER_LAYER, ("layer",))
    with pytest.raises(ValueError, match="'a' cuts layer 2, which is built as one piece, at position 3"):
        pipeline_stages(shape(2, 2, pipeline_model_parallel_layout="Eta|fL"), ModelCosts(names, None))


THREE = ("recurrence", "attention", "feed-forward")
MIXED = ModelCosts((DECODER_LAYER, THREE, ("layer",)), None)


def test_a_layer_of_three_branches_may_end_a_stage_after_each():
    def stages(text):
        return pipeline_stages(shape(3, text.count("|") + 1, pipeline_model_parallel_layout=text), MIXED)

    assert list(map(str, stages("Eta|a|ftL"))) == [
        "embedding + layer 1 + recurrence of layer 2", "attention of layer 2",
        "feed-forward of layer 2 + layer 3 + loss",
    ]  # fmt: skip
    assert str(stages("Eta|aftL")[1]) == "attention and feed-forward of layer 2 + layer 3 + loss"
    assert [stage.num_layers for stage in stages("Etaa|f|tL")] == pytest.approx([5 / 3, 1 / 3, 1])
    for text, reason in (("Eta|ftL", "is not the last branch of layer 2"), ("Eaaf|ttL", "'a' comes between")):
        with pytest.raises(LayoutError, match=reason):
            stages(text)


def test_layers_that_are_cut_in_three_add_up_to_full_layers():
    """In floating point 7/3 + 2/3 + ... are not six."""
    names = (DECODER_LAYER, DECODER_LAYER, THREE) * 2
    for text in ("Etta|aftta|afL", "Etta|a|fttaa|fL", "Ettaa|fttaa|fL"):
        config = shape(6, text.count("|") + 1, pipeline_model_parallel_layout=text)
        stages = pipeline_stages(config, ModelCosts(names, None))
        assert stages[-1].branches.stop == 14
    six = ModelCosts((tuple("abcdef"),), None)
    assert len(pipeline_stages(shape(1, 6, pipeline_model_parallel_layout="Ea|a|a|a|a|fL"), six)) == 6


def test_layers_of_three_branches_are_balanced_by_branch_costs():
    costs = ModelCosts((THREE,) * 2, ((0.5, 0.25, 0.25),) * 2, 1.0)
    assert list(map(str, pipeline_stages(shape(2, 2), costs))) == [
        "embedding + layer 1 + recurrence of layer 2", "attention and feed-forward of layer 2 + loss",
    ]  # fmt: skip
    assert counts(shape(2, 2), ModelCosts((THREE,) * 2, None)) == [1, 1]


def test_further_tokens_are_predicted_on_the_last_stage_which_gets_fewer_layers_for_it():
    sizes = {"num_layers": 8, "hidden_size": 64, "num_attention_heads": 4, "pipeline_model_parallel_size": 2}
    stored = []
    for depths in (None, 2):
        config = TransformerConfig(**sizes, mtp_num_layers=depths)
        costs = describe_gpt(config, vocab_size=64, seq_length=64, max_sequence_length=64).costs
        stages = pipeline_stages(config, costs)
        assert [stage.num_mtp for stage in stages] == [0, depths or 0]
        stored.append(stages[-1].num_layers)
    assert stored[1] <= stored[0] - 0.5 and str(stages[-1]).endswith("loss + multi-token prediction")
