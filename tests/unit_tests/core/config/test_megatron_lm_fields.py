"""Library configurations have Megatron-LM's fields and defaults: ``megatron_lm_fields.tsv`` holds its fields, DIFFERENT
the fields whose default is another one here, with the reason."""

import csv
from abc import ABC
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron.core.config import absent
from megatron.core.config.cli import ConfigError, flags_of
from megatron.core.config.model_settings import ModelSettings
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.enums import AttnBackend
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
CLASSES = {
    "TransformerConfig": (TransformerConfig, SIZES),
    "MLATransformerConfig": (MLATransformerConfig, SIZES),
    "OptimizerConfig": (OptimizerConfig, {}),
    "DistributedDataParallelConfig": (DistributedDataParallelConfig, {}),
}
LOOP = "a setting of the training loop, which no layer reads"
SPEED = "changes speed only"
DERIVED = "derived from the other sizes when the object is made"
LIST = "a list with one value"
DTYPE = "a name or None, which are read as the dtype"
DIFFERENT = {
    "TransformerConfig": {
        **dict.fromkeys(["num_layers", "hidden_size", "num_attention_heads"], "required"),
        **dict.fromkeys(["num_query_groups", "ffn_hidden_size", "kv_channels", "embedding_init_method_std"], DERIVED),
        "pipeline_dtype": "follows params_dtype",
        **dict.fromkeys(["gradient_accumulation_fusion", "overlap_p2p_comm", "masked_softmax_fusion"], SPEED),
        **dict.fromkeys(["persist_layer_norm", "bias_dropout_fusion", "apply_rope_fusion"], SPEED),
        **dict.fromkeys(["moe_router_load_balancing_type", "moe_aux_loss_coeff", "cp_comm_type"], LIST),
        **dict.fromkeys(["enable_cuda_graph", "cuda_graph_warmup_steps"], LOOP),
        **dict.fromkeys(["cuda_graph_modules", "inference_cuda_graph_scope", "barrier_with_L1_time"], LOOP),
        "config_logger_dir": "None, as on the command line",
        "transformer_impl": "the library's own layers need no package",
        "offload_modules": "None in place of an empty list",
    },
    "MLATransformerConfig": {},
    "OptimizerConfig": {
        **dict.fromkeys(["params_dtype", "main_grads_dtype", "main_params_dtype"], DTYPE),
        **dict.fromkeys(["exp_avg_dtype", "exp_avg_sq_dtype"], DTYPE),
        "optimizer_offload_fraction": "1.0, as on the command line: all state moves with optimizer_cpu_offload",
        "barrier_with_L1_time": LOOP,
        "config_logger_dir": "None, as on the command line",
    },
    "DistributedDataParallelConfig": {
        "align_param_gather": "True, as on the command line; without effect",
        "data_parallel_sharding_strategy": "as on the command line; without effect",
        **dict.fromkeys(["megatron_fsdp_main_params_dtype", "megatron_fsdp_main_grads_dtype"], DTYPE),
        "megatron_fsdp_grad_comm_dtype": DTYPE,
    },
}
NAMES = {"torch": torch, "F": F, "AttnBackend": AttnBackend, "float": float}


def facts():
    with open(Path(__file__).with_name("megatron_lm_fields.tsv"), encoding="utf-8") as file:
        rows = csv.reader((line for line in file if not line.startswith("#")), delimiter="\t", quoting=csv.QUOTE_NONE)
        return [(owner, name, eval(default, dict(NAMES))) for owner, name, _, default in rows]


@pytest.mark.parametrize("owner", CLASSES)
def test_defaults_are_those_of_megatron_lm(owner):
    kind, sizes = CLASSES[owner]
    config, defaults = kind(**sizes), {name: value for row, name, value in facts() if row == owner}
    different = {name for name, value in defaults.items() if getattr(config, name, "missing") != value}
    assert len(defaults) > 8 and different == set(DIFFERENT[owner])


@pytest.mark.parametrize("owner", CLASSES)
def test_the_default_of_megatron_lm_is_accepted_for_every_field(owner):
    kind, sizes = CLASSES[owner]
    values = {name: value for row, name, value in facts() if row == owner and name not in sizes}
    values |= {"transformer_impl": "local"} if "transformer_impl" in values else {}
    config = kind(**sizes, **values)
    assert type(config) is kind
    for name in values.keys() - set(DIFFERENT[owner]):
        assert getattr(config, name) == values[name], name


FOREIGN = [name for name, row in absent.settings().items() if row.status in ("foreign", "not yet")]


@pytest.mark.parametrize("name", FOREIGN)
def test_another_value_of_a_missing_capability_is_rejected(name):
    with pytest.raises(ConfigError, match=rf"^{name} 77: .*(not available here|not available yet); "):
        TransformerConfig(**SIZES, **{name: 77})


def test_the_fields_that_change_results_are_those_of_the_library():
    """Its command line has other defaults."""
    latent = MLATransformerConfig(**SIZES)
    assert (latent.normalization, latent.rope_type, latent.rotary_base, latent.rotary_percent) == (
        "RMSNorm", "yarn", 10000, 1.0)  # fmt: skip
    assert OptimizerConfig().muon_momentum == 0.95
    dense = TransformerConfig(**SIZES)
    assert dense.attention_softmax_in_fp32 and not dense.bias_gelu_fusion and not dense.bias_activation_fusion


def test_older_names_read_and_write_the_field():
    config = TransformerConfig(**SIZES, layernorm_zero_centered_gamma=True, persist_layer_norm=False)
    assert config.apply_layernorm_1p and config.layernorm_zero_centered_gamma and not config.persist_layer_norm
    config.layernorm_epsilon = 0.25
    assert config.norm_epsilon == 0.25 and config.beta_fast == config.yarn_beta_fast == 32


@pytest.mark.parametrize("function, gated", [(F.gelu, False), (F.relu, False), (F.silu, True)])
def test_activation_func_is_the_function_that_was_passed(function, gated):
    assert TransformerConfig(**SIZES, activation_func=function, gated_linear_unit=gated).activation_func is function


class Deferring(TransformerConfig, ABC):
    """A configuration that is checked after programs have set fields, as Megatron Bridge does it."""

    def __post_init__(self):
        pass

    def finalize(self):
        TransformerConfig.__post_init__(self)


def test_names_of_megatron_lm_can_be_set_before_the_configuration_is_checked():
    config = Deferring(**SIZES, activation_func=F.silu, bias_activation_fusion=False)
    assert not config.swiglu and not config.bias_swiglu_fusion
    with pytest.raises(ConfigError, match="activation_func: plain silu is not available"):
        config.finalize()
    config.gated_linear_unit, config.bias_activation_fusion, config.persist_layer_norm = True, True, False
    config.finalize()
    assert config.swiglu and config.bias_swiglu_fusion and config.no_persist_layer_norm
    assert config.activation_func is F.silu
    config.activation_func = F.relu
    with pytest.raises(ConfigError, match="activation_func: gated relu is not available"):
        config.finalize()
    config.gated_linear_unit = False
    assert config.relu and not config.swiglu and config.activation_func is F.relu


def test_missing_capabilities_are_rejected_when_set_before_the_check():
    config = Deferring(**SIZES)
    config.cpu_offloading_num_layers = 1
    with pytest.raises(ConfigError, match="cpu_offloading_num_layers 1: offloading of full layers"):
        config.finalize()


@pytest.mark.parametrize("settings", [{"squared_relu": True}, {"quick_geglu": True}, {"geglu": True}])
def test_activation_func_computes_the_formula(settings):
    x = torch.linspace(-3, 3, 13, dtype=torch.float64)
    formulas = {
        "squared_relu": torch.where(x > 0, x * x, 0),
        "quick_geglu": x / (1 + torch.exp(-1.702 * x)),
        "geglu": x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    }
    [name] = settings
    torch.testing.assert_close(TransformerConfig(**SIZES, **settings).activation_func(x), formulas[name])


@pytest.mark.parametrize("name, value", [
    ("activation_func_clamp_value", 0), ("activation_func_clamp_value", -1),
    ("activation_func_clamp_value", float("nan")), ("mtp_num_layers", -1), ("init_method_std", -1),
    ("moe_aux_loss_coeff", -1), ("softmax_scale", 0.0), ("window_size", (-5, 0)), ("window_size", (1, 2, 3)),
    ("window_size", 5), ("moe_layer_freq", 0), ("moe_layer_freq", [0, 2]), ("no_rope_freq", -1),
    ("window_attn_skip_freq", []), ("cp_comm_type", "ring"), ("context_parallel_size", 0), ("hidden_dropout", 1.0),
    ("normalization", "BatchNorm"), ("norm_epsilon", float("inf")), ("rotary_base_local", "x"),
])  # fmt: skip
def test_values_that_flags_reject_are_rejected(name, value):
    with pytest.raises(ConfigError) as caught:
        TransformerConfig(**SIZES, swiglu=True, **{name: value})
    assert str(caught.value).startswith(f"{name} ")


def test_every_range_of_a_flag_holds_for_the_library():
    """Seventy-odd numeric fields: a number below the range, one above it and NaN."""
    checked = 0
    for spec in flags_of(ModelSettings):
        if spec.range is None or spec.type_name not in ("int", "float"):
            continue
        below = [spec.range.low - 1] if spec.range.low > -1e30 and spec.field != "mtp_num_layers" else []
        above = [2 * spec.range.high] if spec.range.high < 1e30 else []
        for value in (*below, float("nan"), *above):
            with pytest.raises(ConfigError, match=spec.field):
                TransformerConfig(**SIZES | {spec.field: [value] if spec.nargs else value})
            checked += 1
    assert checked > 150


def test_no_multi_token_prediction_may_be_zero():
    assert TransformerConfig(**SIZES, mtp_num_layers=0).mtp_num_layers is None


def test_one_exchange_of_context_parallelism_is_not_a_list_there():
    assert TransformerConfig(**SIZES, cp_comm_type="a2a").cp_comm_type == ["a2a"]


def test_model_chunks_require_a_pipeline():
    with pytest.raises(ConfigError, match="virtual_pipeline_model_parallel_size 2: requires pipeline_model_parallel"):
        TransformerConfig(**SIZES, virtual_pipeline_model_parallel_size=2)
