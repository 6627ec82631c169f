"""Tokens that files next to tokenizer.json add: ids, texts and roles equal AutoTokenizer, or an error names them."""

import json
import random

import pytest

from megatron.core.config.errors import UserError
from megatron.core.tokenizers.huggingface import build_huggingface
from tests.test_utils.scripted_model import byte_tokenizer
from tests.test_utils.tiny_tokenizers import byte_fallback_bpe

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
NEW = ["<|n|>", "<|m|>", "[new]", "word", "<|sp ace|>", "éé"]
PIECES = [*NEW, "<s>", "</s>", "<|im_end|>", "A", " ", "  ", "\n", "wordy", "ÉÉa", " .", "don't", "中", "😀", "."]


@pytest.fixture(scope="module")
def auto():
    transformers = pytest.importorskip("transformers", reason="pip install transformers: it is what is compared with")
    return lambda folder: transformers.AutoTokenizer.from_pretrained(str(folder))


def word_pieces(folder):
    """A WordPiece tokenizer, whose texts transformers cleans up."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    letters = [chr(code) for code in range(33, 127)] + ["é", "中"]
    tokens = ["[UNK]", "<s>", "</s>", *letters, *(f"##{letter}" for letter in letters), "don"]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[UNK]", "<s>", "</s>"])
    tokenizer.save(f"{folder}/tokenizer.json")


def random_token(rng, text, plain_type=False):
    """``text``, or its fields."""
    if rng.random() < 0.5:
        return text
    flags = {name: rng.random() < 0.4 for name in ("lstrip", "rstrip", "normalized", "single_word")}
    return {"content": text, **flags, **({} if plain_type else {"__type": "AddedToken"})}


def random_files(rng, size):
    """tokenizer_config.json, special_tokens_map.json, added_tokens.json in a random form of transformers."""
    names = rng.sample(NEW, rng.randrange(len(NEW) + 1))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    config |= {"clean_up_tokenization_spaces": True} if rng.random() < 0.5 else {}
    config |= {"split_special_tokens": True} if rng.random() < 0.2 else {}
    config |= {name: rng.random() < 0.5 for name in ("add_prefix_space", "add_bos_token", "add_eos_token")}
    special_map, added = None, None
    form = rng.choice(("decoder", "added", "none"))
    if form == "decoder":
        listed = names[: rng.randrange(len(names) + 1)]
        flags = ("lstrip", "rstrip", "normalized", "single_word", "special")
        config["added_tokens_decoder"] = {
            str(size + index): {"content": text, **{name: rng.random() < 0.4 for name in flags}}
            for index, text in enumerate(listed)
        }
    elif form == "added":
        added = {text: size + index for index, text in enumerate(names)}
    where = config
    if rng.random() < 0.5 and form != "decoder":
        special_map = where = {}
    for key in rng.sample(ROLES, rng.randrange(4)):
        text = rng.choice([*NEW, "<s>", "</s>", "A", "."])
        # next to added_tokens.json, transformers overlooks that a token with fields is special
        is_text = form == "added" and where is config
        where[key] = text if is_text else random_token(rng, text, plain_type=where is special_map)
    if rng.random() < 0.5:
        extra = rng.sample([*NEW, "<s>"], rng.randrange(1, 4))
        config[rng.choice(("additional_special_tokens", "extra_special_tokens"))] = extra
    if rng.random() < 0.3:
        config["image_token"] = rng.choice(NEW)
    return config, special_map, added


@pytest.mark.parametrize("kind", ["bytes", "byte_fallback", "word_pieces"])
def test_ids_texts_and_roles_equal_autotokenizer(auto, tmp_path, kind):
    rng, added_something = random.Random(kind), 0
    for number in range(80):
        folder = tmp_path / str(number)
        folder.mkdir()
        if kind == "bytes":
            byte_tokenizer(folder, post=rng.choice((None, "<s> $A", "$A </s>")))
        else:
            (byte_fallback_bpe if kind == "byte_fallback" else word_pieces)(folder)
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            (folder / name).unlink(missing_ok=True)
        size = 1 + max(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"].values())
        size = 260 if kind == "bytes" else size
        files = random_files(rng, size)
        for name, content in zip(("tokenizer_config", "special_tokens_map", "added_tokens"), files):
            if content is not None:
                (folder / f"{name}.json").write_text(json.dumps(content))
        foreign, local = auto(folder), build_huggingface(str(folder))
        assert local.vocab == foreign.get_vocab(), files
        added_something += local.vocab_size > size
        for role in ROLES:
            text = foreign.special_tokens_map.get(role)
            if text is not None:
                assert local.special_ids[role.removesuffix("_token")] == foreign.convert_tokens_to_ids(text), files
        assert local.eod == foreign.eos_token_id
        for _ in range(20):
            text = "".join(rng.choices(PIECES, k=rng.randrange(12)))
            ids = foreign.encode(text)
            assert local.tokenize(text) == ids, json.dumps([files, text])
            plain = foreign.encode(text, add_special_tokens=False)
            assert local.tokenize_chat(text) == plain, json.dumps([files, text])
            assert local.detokenize(ids) == foreign.decode(ids), (files, text)
    assert added_something > 40


@pytest.mark.parametrize(("config", "eos"), [
    ({"added_tokens_decoder": {"260": {"content": "<|n|>", "special": True}}}, 257),
    ({"additional_special_tokens": ["<|n|>"]}, 257), ({"extra_special_tokens": {"image_token": "<|n|>"}}, 257),
    ({"eos_token": "<|n|>"}, 260), ({"eos_token": {"content": "<|n|>", "lstrip": False}}, 260),
])  # fmt: skip
def test_a_token_that_only_the_configuration_names_is_one_id(tmp_path, config, eos):
    byte_tokenizer(tmp_path, **config)
    tokenizer = build_huggingface(str(tmp_path))
    assert tokenizer.tokenize("A<|n|>B") == [32, 260, 33]
    assert (tokenizer.eod, tokenizer.special_ids["eos"], tokenizer.vocab_size) == (eos, eos, 261)
    plain = tmp_path / "plain"
    byte_tokenizer(plain)
    assert build_huggingface(str(plain)).fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize(("name", "content", "message"), [
    ("tokenizer_config", {"added_tokens_decoder": {"300": {"content": "<|n|>"}}}, "'<|n|>' claims id 300.*gets .260."),
    ("tokenizer_config", {"added_tokens_decoder": {"3": {"content": "</s>"}}}, "'</s>' claims id 3.*gets .257."),
    ("added_tokens", {"<|n|>": 261}, "'<|n|>' claims id 261"),
    ("added_tokens", {"<|n|>": "x"}, "'x' of an added token"),
    ("tokenizer_config", {"added_tokens_decoder": []}, "added_tokens_decoder is .*it must be a table"),
    ("tokenizer_config", {"added_tokens_decoder": {"260": {}}}, "260 is {}; it must be a token"),
    ("tokenizer_config", {"added_tokens_decoder": {"260": {"content": "a", "lstrip": 1}}}, "must be true or false"),
    ("tokenizer_config", {"eos_token": 3}, "eos_token is 3; it must be a token"),
    ("tokenizer_config", {"eos_token": "\\ud800"}, "eos_token is .*; it must be a token"),
    ("tokenizer_config", {"eos_token": ""}, "eos_token is ''; it must be a token"),
    ("special_tokens_map", {"pad_token": [1]}, "special_tokens_map.json: pad_token is"),
    ("tokenizer_config", {"extra_special_tokens": "x"}, "extra_special_tokens is 'x'; it must be a list of tokens"),
])  # fmt: skip
def test_invalid_added_token_is_rejected_by_name(tmp_path, name, content, message):
    byte_tokenizer(tmp_path)
    (tmp_path / f"{name}.json").write_text(json.dumps(content).replace("\\\\ud800", "\\ud800"))
    with pytest.raises(UserError, match=message.replace("|", r"\|")):
        build_huggingface(str(tmp_path))
