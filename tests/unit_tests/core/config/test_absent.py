"""The table of flags without a field: every row is well formed; command lines and programs get its answers."""

import dataclasses
import functools
import logging

import pytest

from megatron.core.config import absent
from megatron.core.config.cli import ConfigError, flag_table, normalize
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.transformer import TransformerConfig
from megatron.training.arguments import flag_specs, parse_args

TINY = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --tokenizer-type NullTokenizer --vocab-size 100 "
)
SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
FLAGS = flag_table(flag_specs())


def problems_of(text, **options):
    with pytest.raises(ConfigError) as caught:
        parse_args((TINY + text).split(), **options)
    return [str(problem) for problem in caught.value.problems]


def test_rows_are_well_formed():
    statuses = {"not yet", "no effect", "means", "retired", "other", "foreign", "removed"}
    for row in absent.rows():
        assert row.status in statuses and (row.names or row.settings), row
        assert row.answer or row.status in ("foreign", "removed"), row
        assert row.status != "not yet" or row.answer.endswith((" is", " are")), row
        assert row.status != "other" or ": " in row.answer, row


def test_spellings_are_unique_and_differ_from_fields():
    names = [name for row in absent.rows() for name in row.names]
    assert len(names) == len(set(names))
    assert not {name for name in names if "=" not in name} & set(FLAGS)
    assert {name.partition("=")[0] for name in names if "=" in name} <= {*FLAGS, *names}
    settings = [name for row in absent.rows() for name in row.settings]
    assert len(settings) == len(set(settings))
    assert not set(settings) & {spec.field for spec in flag_specs()}


def test_older_spellings_lead_to_flags_that_are_answered():
    targets = {token for row in absent.rows() if row.status == "means" for token in row.answer.split()}
    read = {*FLAGS, *flag_table(absent.specs())}
    assert {normalize(token) for token in targets if token.startswith("--")} <= read


def text_of(spec, value):
    return f"{spec.names[0]} {' '.join(map(str, value)) if isinstance(value, list) else value}"


@pytest.mark.parametrize("spec", [item for item in absent.specs() if not item.is_bool], ids=lambda spec: spec.names[0])
def test_a_flag_at_its_default_passes_and_another_value_is_answered(spec, caplog):
    row = absent.by_name()[spec.names[0]]
    if spec.default is not None:
        assert parse_args((TINY + text_of(spec, spec.default)).split()) is not None
        assert not caplog.records
    if row.status == "not yet":
        assert problems_of(text_of(spec, "77")) == [f"{spec.names[0]} 77: {row.answer} not available yet; remove it"]
        return
    with caplog.at_level(logging.WARNING):
        cfg = parse_args((TINY + text_of(spec, "77")).split())
        assert spec.field not in row.settings or getattr(cfg.flat, spec.field) in (77, [77])
    assert [record.message for record in caplog.records] == [f"{spec.names[0]} {row.meaning}"]


@pytest.mark.parametrize("spec", [item for item in absent.specs() if item.is_bool], ids=lambda spec: spec.names[0])
def test_a_switch_is_answered(spec, caplog):
    row = absent.by_name()[spec.names[0]]
    if row.status == "not yet":
        assert problems_of(spec.names[0]) == [f"{spec.names[0]}: {row.answer} not available yet; remove it"]
    else:
        with caplog.at_level(logging.WARNING):
            assert getattr(parse_args((TINY + spec.names[0]).split()).flat, spec.field) is not spec.default
        assert [record.message for record in caplog.records] == [f"{spec.names[0]} {row.meaning}"]


def test_a_configuration_takes_settings_at_the_defaults_of_megatron_lm():
    """Programs copy complete configurations: defaults are accepted, a request for a missing capability is rejected."""
    rest = {"cuda_graph_impl": "none", "cuda_graph_warmup_steps": 3, "barrier_with_L1_time": True, "no_sync_func": None}
    quiet = {"use_kitchen": False, "cpu_offloading": False, "mamba_state_dim": 128, "fp4_recipe": "nvfp4"}
    config = TransformerConfig(
        **SIZES, **rest, **quiet, expert_tensor_parallel_size=1, microbatch_group_size_per_vp_stage=2
    )
    assert config.use_kitchen is False and config.microbatch_group_size_per_virtual_pipeline_stage == 2
    with pytest.raises(ConfigError, match="cpu_offloading True: offloading of full layers .* is not available yet"):
        TransformerConfig(**SIZES, cpu_offloading=True)


def test_a_value_that_is_not_available_is_rejected_and_the_others_pass():
    assert problems_of("--optimizer soap") == ["--optimizer soap: this optimizer is not available yet; remove it"]
    assert "is not available yet" in problems_of("--rerun-mode report_stats")[0]
    assert parse_args((TINY + "--rerun-mode disabled --spec local --fp8-margin 0").split())


def test_yaml_and_script_defaults_report_unsupported_flags_like_the_command_line(tmp_path, caplog):
    path = tmp_path / "settings.yaml"
    path.write_text("ckpt_convert_format: torch\nuse_persistent_ckpt_worker: true\nmoe_router_topk: 2\n")
    conversion = "conversion by a training job (tools/checkpoint/convert.py needs none)"
    expected = [f"--ckpt-convert-format torch: {conversion} is not available yet; remove it"]
    assert problems_of(f"--yaml-cfg {path}") == expected
    assert problems_of("", args_defaults={"ckpt_convert_format": "torch"}) == expected
    path.write_text("use_persistent_ckpt_worker: true\n")
    with caplog.at_level(logging.WARNING):
        assert parse_args(f"{TINY} --yaml-cfg {path}".split()).flat.use_persistent_ckpt_worker
    [record] = caplog.records
    assert record.message.startswith("--use-persistent-ckpt-worker accepted without effect")


def test_a_value_has_the_same_answer_wherever_it_stands(caplog):
    refused = ["--rerun-mode report_stats: gathering statistics by rerunning steps is not available yet; remove it"]
    assert problems_of("", args_defaults={"rerun_mode": "report_stats"}) == refused
    with caplog.at_level(logging.WARNING):
        assert parse_args(TINY.split(), args_defaults={"moe_per_layer_logging": True})
    assert [record.message for record in caplog.records] == [
        "--moe-per-layer-logging accepted without effect: the statistics of every layer are always logged"
    ]
    assert TransformerConfig(**SIZES, moe_per_layer_logging=True).moe_per_layer_logging is True
    with pytest.raises(ConfigError, match="fp8_multi_head_attention True: fp8 attention is not available yet"):
        TransformerConfig(**SIZES, fp8_multi_head_attention=True)


def test_flag_added_by_a_script_has_the_scripts_meaning(caplog):
    def own_flags(parser):
        parser.add_argument("--rerun-mode", choices=["disabled", "report_stats"])

    with caplog.at_level(logging.WARNING):
        for value in ("disabled", "report_stats"):
            cfg = parse_args(f"{TINY} --rerun-mode {value}".split(), extra_args_provider=own_flags)
            assert cfg.flat.rerun_mode == value
    assert not caplog.records


def test_a_value_that_no_expression_of_python_makes_is_a_text():
    flag = "--ckpt-convert-format {[]:1}"
    assert problems_of(flag)[0].startswith(f"{flag}: conversion by a training job")


def test_the_positive_spelling_of_a_switch_is_not_the_switch(caplog):
    with caplog.at_level(logging.WARNING):
        assert not parse_args(f"{TINY} --no-bias-gelu-fusion".split()).model.bias_gelu_fusion
        assert not caplog.records
        assert parse_args(f"{TINY} --bias-gelu-fusion --use-flash-attn".split()).model.bias_gelu_fusion
    assert len(caplog.records) == 2


def test_typing_mistakes_differ_from_absent_flags():
    assert problems_of("--num-expert 3")[0] == "--num-expert: unknown flag; did you mean --num-experts?"
    assert "did you mean --hidden-size or" in problems_of("--hiden-size 3")[0]
    assert problems_of("--mtp-standalone")[0].startswith("--mtp-standalone: exists in Megatron-LM, is not available")


def test_absent_features_may_be_named_while_disabled():
    config = TransformerConfig(**SIZES, num_moe_experts=None, moe_router_topk=2, fp8=None, batch_p2p_comm=True,
                               deallocate_pipeline_outputs=True, mtp_standalone=None)  # fmt: skip
    assert config.num_moe_experts is None and config.moe_grouped_gemm is False and config.deallocate_pipeline_outputs
    assert OptimizerConfig(use_torch_optimizer_for_cpu_offload=False).use_torch_optimizer_for_cpu_offload is False
    assert DistributedDataParallelConfig(average_in_collective=True).average_in_collective is True
    with pytest.raises(ConfigError) as caught:
        TransformerConfig(
            **SIZES, num_moe_experts=8, fp8_dot_product_attention=True, fp8_multi_head_attention=True,
            mtp_standalone=True,
        )  # fmt: skip
    assert sorted(str(problem) for problem in caught.value.problems) == [
        "fp8_dot_product_attention True: fp8 attention is not available yet; remove it",
        "fp8_multi_head_attention True: fp8 attention is not available yet; remove it",
        "mtp_standalone True: exists in Megatron-LM, is not available here; remove it",
    ]
    with pytest.raises(ConfigError, match="enable_autocast True: computing in another format"):
        TransformerConfig(**SIZES, enable_autocast=True)
    with pytest.raises(TypeError, match="hiden_size"):
        TransformerConfig(**SIZES, hiden_size=3)


def silu(x):
    return x


def test_programs_may_use_the_words_of_megatron():
    config = TransformerConfig(**SIZES, activation_func=silu, gated_linear_unit=True, bias_activation_fusion=False,
                               layernorm_zero_centered_gamma=True, num_layers_in_first_pipeline_stage=1)  # fmt: skip
    assert config.swiglu and config.gated_linear_unit and not config.bias_swiglu_fusion and config.apply_layernorm_1p
    assert config.decoder_first_pipeline_num_layers == 1
    assert dataclasses.replace(config, layernorm_epsilon=1e-3).norm_epsilon == 1e-3
    with pytest.raises(ConfigError, match="plain silu is not available; gelu, relu and squared_relu"):
        TransformerConfig(**SIZES, activation_func=silu)
    with pytest.raises(ConfigError, match="plain partial is not available"):  # a callable without a name is no gelu
        TransformerConfig(**SIZES, activation_func=functools.partial(silu))


def test_a_derived_configuration_takes_them_too():
    import dataclasses

    @dataclasses.dataclass
    class Derived(TransformerConfig):
        mine: int = 1

    config = Derived(**SIZES, mine=2, layernorm_epsilon=1e-6, num_moe_experts=None)
    assert (config.mine, config.norm_epsilon) == (2, 1e-6)
    assert dataclasses.replace(config, mine=3).norm_epsilon == 1e-6
