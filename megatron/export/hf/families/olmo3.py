"""OLMo 3 (``olmo3``): OLMo 2 with a sliding window in three of four layers."""

from __future__ import annotations

from megatron.export.hf.attention_settings import FULL, SLIDING, Rope, Window, rotary_base, unstretched_base
from megatron.export.hf.families import llama
from megatron.export.hf.family import Family
from megatron.export.hf.settings import Table, get, refuse

BASE = 500000.0
WINDOW = Window(4096, every=4)


class FullRope(Rope):
    """Rotary scaling in layers without a window only, as tables (``transformers`` 5) and as single keys (4.57)."""

    def __init__(self) -> None:
        super().__init__(BASE)
        self.settings = (*self.settings, "rotary_base_local")

    def load(self, config: Table) -> dict[str, object]:
        """Add ``rotary_base_local`` of layers with a window (never scaled; None without windows)."""
        tables = get(config, ("rope_parameters",), None)
        if tables is None:
            base = get(config, (self.base_key,), BASE)
            if base != BASE:
                raise refuse(
                    self.base_key,
                    base,
                    f"which versions of transformers read differently; say it in "
                    f"rope_parameters for {FULL} and {SLIDING}",
                )
            settings, local = super().load(config), rotary_base(self.base_key, BASE)
        else:
            if not isinstance(tables, dict) or not all(isinstance(tables.get(kind), dict) for kind in (FULL, SLIDING)):
                raise refuse("rope_parameters", tables, f"but must be a table each for {FULL} and {SLIDING}")
            if unknown := tables.keys() - {FULL, SLIDING}:
                raise refuse("rope_parameters", sorted(unknown), f"next to {FULL} and {SLIDING}")
            local = unstretched_base(SLIDING, tables, self.base_key, BASE)
            settings = super().load(
                {"max_position_embeddings": config.get("max_position_embeddings"), "rope_parameters": tables[FULL]}
            )
        has_windows = WINDOW.load(config)["window_size"] is not None
        return {**settings, "rotary_base_local": local if has_windows else None}

    def save(self, settings: Table) -> dict[str, object]:
        """Write a table per layer type; only full layers may be scaled."""
        config, local = super().save(settings), settings["rotary_base_local"]
        scaling, base = config["rope_scaling"] or {"rope_type": "default"}, config[self.base_key]
        if settings["window_size"] is not None and local is None:
            if config["rope_scaling"]:
                raise refuse("rotary_base_local", local, "the family does not scale it")
            local = base
        return {
            **config,
            "rope_parameters": {
                FULL: {**scaling, self.base_key: base},
                SLIDING: {"rope_type": "default", self.base_key: float(local or base)},
            },
        }


OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    models="OLMo 3",
    config=(*(rule for rule in llama.OLMO2.config if not isinstance(rule, Rope)), FullRope(), WINDOW),
    weights=llama.POST_NORMS,
)
