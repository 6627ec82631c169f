"""tools/generate.py and tools/fill_mask.py: several prompts, what transformers says, clear answers to mistakes."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from megatron.console import run_tool
from tests.test_utils.foreign_masked_models import FAMILIES, build
from tests.test_utils.gpt_runs import train
from tests.test_utils.tiny_tokenizers import bert_vocab

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tool():
    """Calls ``main`` of a tool with a command line."""

    def call(name, *arguments):
        return run_tool(name, list(map(str, arguments)))

    return call


def test_several_prompts_give_the_texts_of_single_prompts(tool, gloo_pool, tmp_path, capsys):
    assert gloo_pool.run(train, 1, ["--mock-data", "--train-iters", "3", "--save", str(tmp_path / "run")]) == [0]
    (tmp_path / "prompts").write_text("\ufeff7 8\n9 10 11\n")  # editors of Windows begin files with this character
    common = ["generate", "--load", tmp_path / "run", "--max-new-tokens", 4]
    texts = []
    for prompt in ("1 2", "7 8", "9 10 11"):
        assert tool(*common, "--prompt", prompt) == 0
        texts.append(capsys.readouterr().out)
    assert tool(*common, "--prompt", "1 2", "--prompt-file", tmp_path / "prompts") == 0
    assert capsys.readouterr().out.split("-" * 40 + "\n") == texts
    assert all(text.startswith(prompt) for text, prompt in zip(texts, ("1 2", "7 8", "9 10 11")))
    assert tool(*common, "--prompt", "") == 0 and capsys.readouterr().out.strip()
    assert tool(*common, "--prompt", "1", "--chat") == 2
    assert "--chat: the NullTokenizer has no chat template" in capsys.readouterr().err
    assert tool("fill-mask", "--load", tmp_path / "run", "--text", "1") == 2
    assert "contains a 'gpt' model; use tools/generate.py" in capsys.readouterr().err


def test_the_cache_and_full_forward_passes_write_the_same_text(gloo_pool, tmp_path):
    from megatron.core.inference.sampling import Sampling, generate
    from megatron.training.trained_model import load_trained_model

    assert gloo_pool.run(train, 1, ["--mock-data", "--train-iters", "3", "--save", str(tmp_path)]) == [0]
    trained = load_trained_model(str(tmp_path), None, "tools/generate.py")
    sampling = Sampling(seed=3)
    shared = {"max_new_tokens": 40, "sampling": sampling}  # beyond the 32 tokens of the context
    texts = trained.cfg.family.generate(trained, ["1 2", "7 8 " * 20, "9"], *shared.values())
    for prompt, text in zip(("1 2", "7 8 " * 20, "9"), texts, strict=True):
        ids = trained.tokenizer.tokenize(prompt)
        expected = generate(trained.model, ids, **shared, max_sequence_length=32, stop_tokens=trained.tokenizer.end_ids)
        assert text == prompt + trained.tokenizer.detokenize(list(expected))


LONGROPE = {"rope_type": "longrope", "short_factor": [1, 2, 3, 4], "long_factor": [4, 8, 16, 32],
            "original_max_position_embeddings": 24, "attention_factor": 1.5}  # fmt: skip


def test_folders_with_longrope_generate_with_short_factors_up_to_the_original_length(tmp_path):
    from megatron.core import parallel_state
    from megatron.core.inference.sampling import Sampling, generate
    from megatron.export.hf import save_hf
    from megatron.training.trained_model import load_trained_model
    from tests.test_utils.hf_folders import LLAMA, random_model

    save_hf(random_model([*LLAMA, "--rope-parameters", json.dumps(LONGROPE)], 64), tmp_path, family="llama")
    numbers = {"tokenizer_type": "NullTokenizer", "vocab_size": "64"}
    trained = load_trained_model(str(tmp_path), None, "tools/generate.py", tokenizer=numbers)
    assert trained.cfg.data.seq_length == 24
    greedy = {"max_new_tokens": 12, "sampling": Sampling(temperature=0)}
    (text,) = trained.cfg.family.generate(trained, ["1 2 3 4 5 6"], *greedy.values())
    # rows of at most 24 tokens in full forward passes, which transformers computes with short factors too
    expected = generate(trained.model, [1, 2, 3, 4, 5, 6], **greedy, max_sequence_length=24, stop_tokens=())
    assert text == "1 2 3 4 5 6" + trained.tokenizer.detokenize(list(expected))
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("flags", [
    "--num-experts 4 --moe-ffn-hidden-size 16 --moe-router-load-balancing-type quantile_balancing",
    "--window-size 8,0 --softmax-type learnable", "--mtp-num-layers 2 --mtp-use-repeated-layer",
])  # fmt: skip
def test_a_model_computes_as_it_did_in_training(tool, gloo_pool, tmp_path, capsys, flags):
    argv = [*flags.split(), "--mock-data", "--train-iters", "3", "--save", str(tmp_path)]
    assert gloo_pool.run(train, 1, argv) == [0]
    assert tool("generate", "--load", tmp_path, "--prompt", "1 2", "--max-new-tokens", 2) == 0, capsys.readouterr().err


@pytest.mark.parametrize("name", ["generate", "fill-mask"])
def test_a_folder_without_a_checkpoint_is_named_by_the_flag_that_was_given(tool, tmp_path, capsys, name):
    assert tool(name, "--load", tmp_path / "nope", *(["--text", "a"] if name == "fill-mask" else [])) == 2
    error = capsys.readouterr().err
    assert "--load" in error and "nope" in error and "--use-checkpoint-args" not in error


@pytest.mark.parametrize(("flag", "values"), [
    ("--temperature", ("nan", "-1", "inf", "-0.001", "1e-300", "1e9")), ("--top-p", ("nan", "-0.1", "1.01", "inf")),
    ("--top-k", ("-1", str(2**31), str(2**70))), ("--max-new-tokens", ("-1", str(10**9))),
    ("--seed", ("-1", str(2**63), str(2**64))), ("--ckpt-step", ("-1",)),
])  # fmt: skip
def test_values_out_of_range_are_named_before_anything_is_loaded(tool, tmp_path, capsys, flag, values):
    (tmp_path / "iter_0000001").mkdir()
    for value in values:
        assert tool("generate", "--load", tmp_path, f"{flag}={value}") == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: {flag} ") and ": must " in error and "--load" not in error, error


def test_a_missing_folder_is_the_one_problem_named_with_a_wrong_value(tool, tmp_path, capsys):
    missing = tmp_path / "nope"
    assert tool("generate", "--load", missing, "--temperature", "nan") == 2
    assert capsys.readouterr().err == f"error: --load {missing}: there is no such folder; check the path\n"


def test_all_values_out_of_range_are_named_at_once(tool, tmp_path, capsys):
    (tmp_path / "iter_0000001").mkdir()
    assert tool("generate", "--load", tmp_path, "--temperature", "nan", "--top-k=-1", "--top-p", 2, "--seed=-1") == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(": must be between " in line for line in lines)


@pytest.mark.parametrize("plant", ["pipe", "bytes", "folder", "nothing"])
def test_a_prompt_file_that_is_no_text_is_named(tool, tmp_path, capsys, plant):
    path = tmp_path / "prompts"
    (tmp_path / "iter_0000001").mkdir()
    {"pipe": os.mkfifo, "folder": os.mkdir, "bytes": lambda path: path.write_bytes(b"\xff\xfe\0"),
     "nothing": lambda path: None}[plant](path)  # fmt: skip
    assert tool("generate", "--load", tmp_path, "--prompt-file", path) == 2
    error = capsys.readouterr().err
    assert f"--prompt-file {path}: cannot be read" in error and len(error.splitlines()) == 1


def run_of(pool, kind, folder, *flags):
    """A run of three iterations with a WordPiece tokenizer."""
    words = ["--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", bert_vocab(folder / "vocab.txt")]
    argv = [*words, "--vocab-extra-ids", "4", "--mock-data", "--train-iters", "3", "--save", str(folder / "run")]
    assert pool.run(train, 1, [*argv, *flags], False, kind) == [0]
    return folder / "run"


def test_bert_without_binary_head_lists_available_and_missing_tasks(tool, gloo_pool, tmp_path, capsys):
    run = run_of(gloo_pool, "bert", tmp_path, "--bert-no-binary-head")
    assert tool("fill-mask", "--load", run, "--text", "The [MASK] jumps. [MASK]", "--text", "[MASK]", "--top-k", 2) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line for line in out if not line.startswith("    ")] == [
        "The [MASK] jumps. [MASK]", "  mask 1", "  mask 2", "[MASK]", "  mask 1",
    ]  # fmt: skip
    for flags, words in (
        (["--text", "the fox"], "'the fox' has no [MASK]"),
        (["--text", "[MASK] " * 31], "the text has 33 tokens, the model takes 32"),
        (["--text", "[MASK]", "--text-pair", "fox"], "--bert-no-binary-head"),
    ):
        assert tool("fill-mask", "--load", run, *flags) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tool("fill-mask", "--load", run, "--text", "a", "--text", "b", "--text-pair", "c")
    assert "--text-pair: 1 for 2 of --text" in capsys.readouterr().err
    assert tool("generate", "--load", run, "--prompt", "the") == 2
    assert "contains a 'bert' model; use tools/fill_mask.py" in capsys.readouterr().err


def test_masks_of_a_family_outside_of_the_package_are_filled(tool, gloo_pool, tmp_path, capsys):
    family = "tests.test_utils.masked_family"
    requested = ["--load", run_of(gloo_pool, family, tmp_path), "--text", "The [MASK] jumps.", "--top-k", 1]
    assert tool("fill-mask", *requested) == 2 and family in capsys.readouterr().err
    assert tool("fill-mask", *requested, "--family", family) == 0
    assert capsys.readouterr().out.startswith("The [MASK] jumps.\n  mask 1\n    ")


def test_a_t5_of_two_depths_is_sampled_and_encodes_a_text_once(tool, gloo_pool, tmp_path, capsys, monkeypatch):
    from megatron.core.transformer.transformer_block import TransformerBlock

    flags = "--decoder-num-layers 1 --decoder-seq-length 16 --position-embedding-type relative --relu"
    more = "--relative-attention-num-buckets 8 --relative-attention-max-distance 20 --normalization RMSNorm"
    run = run_of(gloo_pool, "t5", tmp_path, *flags.split(), *more.split())
    calls, forward = [], TransformerBlock.forward
    monkeypatch.setattr(TransformerBlock, "forward", lambda self, *args: calls.append(self) or forward(self, *args))
    prompts = ["--prompt", "the <extra_id_0> jumps", "--prompt", "quick <extra_id_1> fox"]
    texts = []
    for seed in (1, 1, 2):
        assert tool("generate", "--load", run, *prompts, "--max-new-tokens", 8, "--top-p", 0, "--seed", seed) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("the <extra_id_0> jumps\n-> ")
    encoders = [block for block in calls if len(block.layers) == 2]
    assert len(encoders) == 6 and len(calls) > 20, "one pass of each encoder for each prompt"
    for prompt, words in (("the " * 33, "33 tokens, the model takes 32"), ("", "the text is empty")):
        assert tool("generate", "--load", run, "--prompt", prompt) == 2
        assert words in capsys.readouterr().err


# ---- beside transformers

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "fox", "##es", "jump", "##s", ".", "a", "dog"]


def converted(name, tokenizer, folder):
    """Saves a tiny random model of a family there with ``tokenizer``, converts it; (their model, our checkpoint)."""
    from megatron.tools.checkpoint import convert

    family = FAMILIES[name]
    settings = {**family.settings, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    foreign = build(dataclasses.replace(family, settings=settings))
    for x in (foreign, tokenizer):
        x.save_pretrained(folder / "theirs")
    line = ["--loader", "hf", "--saver", "native", "--load-dir", folder / "theirs", "--save-dir", folder / "ours"]
    assert convert.main([*map(str, line), "--no-checking"]) == 0
    return foreign, folder / "ours"


def test_masks_and_orders_of_pairs_are_those_of_transformers(tool, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    foreign, local = converted("bert", tokenizer, tmp_path)
    capsys.readouterr()
    texts = "the [MASK] jumps.", "a quick dog"
    assert tool("fill-mask", "--load", local, "--text", texts[0], "--text-pair", texts[1], "--top-k", 3) == 0
    lines = capsys.readouterr().out.splitlines()
    reference = foreign(**tokenizer(*texts, return_tensors="pt"))
    place = tokenizer(*texts)["input_ids"].index(WORDS.index("[MASK]"))
    best = reference.prediction_logits[0, place].softmax(-1).topk(3)
    expected = [f"{value:.4f}  {WORDS[index]}" for value, index in zip(best.values.tolist(), best.indices.tolist())]
    assert [line.strip() for line in lines[2:5]] == expected
    requested = ["--text", texts[0], "--text-pair", texts[1], "--top-k", 3]
    assert tool("fill-mask", "--load", tmp_path / "theirs", *requested) == 0
    assert capsys.readouterr().out.splitlines() == lines
    assert tool("generate", "--load", tmp_path / "theirs") == 2
    assert "contains a 'bert' model; use tools/fill_mask.py" in capsys.readouterr().err
    order = reference.seq_relationship_logits[0].softmax(-1).tolist()
    assert lines[5:] == [f"  in order  {order[0]:.4f}", f"  swapped   {order[1]:.4f}"]


def test_answers_of_a_t5_are_those_of_transformers(tool, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    sentinels = [f"<extra_id_{index}>" for index in range(4)]
    names = ["<pad>", "</s>", "<unk>", *WORDS[5:], *sentinels]
    backend = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    special = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **special, additional_special_tokens=sentinels
    )
    foreign, local = converted("t5-v1.1", tokenizer, tmp_path)
    capsys.readouterr()
    prompts = "the <extra_id_0> fox", "a quick dog <extra_id_1> the <extra_id_2>"
    flags = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert tool("generate", "--load", local, *flags, "--temperature", 0, "--max-new-tokens", 12) == 0
    result = capsys.readouterr().out.split("-" * 40 + "\n")
    for prompt, text in zip(prompts, result, strict=True):
        written = foreign.generate(
            **tokenizer(prompt, return_tensors="pt", return_token_type_ids=False), do_sample=False, max_new_tokens=12,
            use_cache=False,
        )[0, 1:].tolist()  # fmt: skip
        answer = written[: written.index(1)] if 1 in written else written
        assert text == f"{prompt}\n-> {tokenizer.decode(answer)}\n" and len(answer) > 2


def test_a_hugging_face_folder_generates_the_text_of_transformers(tool, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    import torch

    from megatron.core.tokenizers.training import train_byte_level_bpe

    folder = tmp_path / "hf"
    torch.manual_seed(1)
    settings = {"vocab_size": 300, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64,
                "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
    foreign = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    foreign.save_pretrained(folder)
    capsys.readouterr()
    requested = ["generate", "--load", folder, "--prompt", "the cat", "--max-new-tokens", 12, "--temperature", 0]
    assert tool(*requested) == 2
    assert f"--load {folder}: contains no tokenizer; add its tokenizer.json" in capsys.readouterr().err
    train_byte_level_bpe(["the cat sat on the mat"] * 9, 300, str(folder / "tokenizer.json"), asked_by="a test")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    prompt = torch.tensor([tokenizer.encode("the cat")])
    expected = foreign.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=0, pad_token_id=0)
    capsys.readouterr()
    assert tool(*requested) == 0
    assert capsys.readouterr().out.rstrip("\n") == tokenizer.decode(expected[0]).removesuffix("<|endoftext|>")
