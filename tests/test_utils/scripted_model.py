"""A Hugging Face folder whose model writes a given text: a byte tokenizer, and a LLaMA that maps tokens to the next."""

import json
from pathlib import Path

SPECIALS = ("<s>", "</s>", "<|im_end|>", "<|im_start|>")
LENGTH = 64


def byte_tokenizer(folder, template=None, post=None, specials=SPECIALS, **config):
    """Write tokenizer.json (ids 0 to 255: bytes, then ``specials``) and tokenizer_config.json with ``config``.
    ``post``: pattern of the post-processor, such as ``<s> $A``. Return the `tokenizers` object."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    if post:
        named = [(token, tokenizer.token_to_id(token)) for token in specials]
        tokenizer.post_processor = processors.TemplateProcessing(single=post, pair=post + " $B", special_tokens=named)
    Path(folder).mkdir(exist_ok=True)
    tokenizer.save(f"{folder}/tokenizer.json")
    config = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast", **config}
    config |= {"chat_template": template} if template else {}
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tokenizer


def scripted_folder(folder, text, generation=None, settings=None, **options):
    """Write a model whose greedy continuation of each token of ``text`` (all different) is the next one, and its
    tokenizer with ``options``. ``generation``, ``settings``: content of generation_config.json, keys of config.json."""
    tokenizer = byte_tokenizer(folder, **options)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    write_scripted_model(folder, ids, tokenizer.get_vocab_size(), **(settings or {}))
    if generation is not None:
        (Path(folder) / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def write_scripted_model(folder, ids, vocab_size, **settings):
    """Write config.json, with ``settings``, and the weights of a model whose greedy successor of each of ``ids`` (all
    different) is the next one."""
    import torch
    from safetensors.torch import save_file

    assert len(set(ids)) == len(ids)
    Path(folder).mkdir(exist_ok=True)
    hidden = -(-vocab_size // 32) * 32
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size, "hidden_size": hidden,
        "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": LENGTH, "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "float32",
        "tie_word_embeddings": False, "rope_theta": 10000.0, **settings,
    }  # fmt: skip
    head = torch.zeros(vocab_size, hidden)
    for token, successor in zip(ids, ids[1:]):
        head[successor, token] = 2.0
    layer, square = "model.layers.0", torch.zeros(hidden, hidden)
    weights = {"model.embed_tokens.weight": torch.eye(vocab_size, hidden), "lm_head.weight": head}
    weights |= {f"{layer}.self_attn.{name}_proj.weight": square.clone() for name in "qkvo"}
    weights |= {f"{layer}.mlp.{name}_proj.weight": torch.zeros(32, hidden) for name in ("gate", "up")}
    weights[f"{layer}.mlp.down_proj.weight"] = torch.zeros(hidden, 32)
    for name in ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"):
        weights[f"{name}.weight"] = torch.ones(hidden)
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
    (Path(folder) / "config.json").write_text(json.dumps(config))
