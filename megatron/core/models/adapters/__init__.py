"""Low-rank adapters: module, model transform, rules of their flags."""
