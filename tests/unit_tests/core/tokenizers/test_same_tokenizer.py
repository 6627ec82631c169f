"""Tokenizers are the same if their ids are, also after transformers has rewritten their files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.core.config.tokenizer import TokenizerConfig
from megatron.core.tokenizers import build_tokenizer
from megatron.data.sidecar import check_sidecar, same_tokenizer, sidecar_info, sidecar_path, write_sidecar
from megatron.tools.merge_datasets import common_sidecar
from megatron.training.checkpoint.run_tokenizer import find_run_tokenizer
from megatron.training.stored_settings import other_tokenizer
from tests.test_utils.tiny_tokenizers import byte_fallback_bpe, byte_level_bpe, flags

transformers = pytest.importorskip("transformers")


def build(path, **values):
    return build_tokenizer(flags("HuggingFaceTokenizer", tokenizer_model=str(path), **values))


def rewrite(folder, target):
    """The files of ``folder`` as ``save_pretrained`` writes them to ``target``."""
    transformers.PreTrainedTokenizerFast.from_pretrained(folder).save_pretrained(target)
    return target


@pytest.fixture(scope="module", params=[byte_level_bpe, byte_fallback_bpe])
def pair(request, tmp_path_factory):
    """Folders of a tokenizer and of its rewritten form, whose tokenizer.json has other bytes."""
    folder = tmp_path_factory.mktemp("original")
    if request.param is byte_level_bpe:
        byte_level_bpe(folder / "tokenizer.json")
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    else:
        byte_fallback_bpe(folder, eos_token="</s>")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]  # as older versions wrote
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder, rewrite(folder, tmp_path_factory.mktemp("rewritten"))


def test_rewritten_files_are_the_same_tokenizer(pair, tmp_path):
    before, after = map(build, pair)
    files = [(Path(folder) / "tokenizer.json").read_bytes() for folder in pair]
    assert files[0] != files[1]
    assert before.fingerprint.split("+")[0] != after.fingerprint.split("+")[0]
    assert same_tokenizer(before.fingerprint, after.fingerprint)
    info = sidecar_info(before, True)
    write_sidecar(str(tmp_path / "a"), info)
    assert check_sidecar(str(tmp_path / "a"), after) == info
    write_sidecar(str(tmp_path / "b"), sidecar_info(after, True))
    assert common_sidecar([str(tmp_path / "a"), str(tmp_path / "b")]) == info
    assert other_tokenizer(before.fingerprint, after.fingerprint, "run") == []
    cfg = TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(pair[1]))
    assert find_run_tokenizer(cfg, tmp_path, before.fingerprint)[1].fingerprint == after.fingerprint


def test_records_of_earlier_versions_name_files_only(pair, tmp_path):
    before, after = map(build, pair)
    old = before.fingerprint.split("+")[0]
    assert len(old) == 64 and same_tokenizer(old, before.fingerprint) and not same_tokenizer(old, after.fingerprint)
    for name, fingerprint in (("a", old), ("b", before.fingerprint), ("c", after.fingerprint)):
        write_sidecar(str(tmp_path / name), replace(sidecar_info(before, True), fingerprint=fingerprint))
    assert check_sidecar(str(tmp_path / "a"), before).fingerprint == old
    with pytest.raises(ValueError, match="made with another tokenizer"):
        check_sidecar(str(tmp_path / "a"), after)
    assert common_sidecar([str(tmp_path / name) for name in "ab"]).fingerprint == before.fingerprint


CHANGES = {
    "merges in another order": lambda content: content["model"]["merges"].reverse(),
    "renamed token": lambda content: content["added_tokens"][0].update(content="<|end_of_text|>"),
    "lower case": lambda content: content.update(normalizer={"type": "Lowercase"}),
    "digits": lambda content: content.update(
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, content["pre_tokenizer"]],
        }
    ),
    "prefix space": lambda content: content["pre_tokenizer"].update(add_prefix_space=True),
    "white space before a special token": lambda content: content["added_tokens"][0].update(lstrip=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_ids_are_another_tokenizer(tmp_path, change):
    """Equal vocabulary size, also after ``save_pretrained``."""

    def edit(content):
        CHANGES[change](content)
        if change == "renamed token":
            index = content["model"]["vocab"].pop("<|endoftext|>")
            content["model"]["vocab"]["<|end_of_text|>"] = index

    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    byte_level_bpe(tmp_path / "one" / "tokenizer.json")
    byte_level_bpe(tmp_path / "two" / "tokenizer.json", edit=edit)
    other = build(rewrite(tmp_path / "two", tmp_path / "three"))
    tokenizer = build(tmp_path / "one")
    assert other.vocab_size == tokenizer.vocab_size
    assert not same_tokenizer(tokenizer.fingerprint, other.fingerprint)
    write_sidecar(str(tmp_path / "data"), sidecar_info(tokenizer, True))
    with pytest.raises(ValueError, match="made with another tokenizer"):
        check_sidecar(str(tmp_path / "data"), other)
    assert Path(sidecar_path(str(tmp_path / "data"))).is_file()
    assert len(other_tokenizer(tokenizer.fingerprint, other.fingerprint, "run")) == 1


def test_another_end_of_document_is_another_tokenizer(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        byte_level_bpe(tmp_path / name / "tokenizer.json", special=("<|endoftext|>", "<|stop|>"))
    (tmp_path / "two" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|stop|>"}))
    one, two = build(tmp_path / "one"), build(rewrite(tmp_path / "two", tmp_path / "three"))
    assert (one.eod, two.eod) == (0, 1)
    assert not same_tokenizer(one.fingerprint, two.fingerprint)
