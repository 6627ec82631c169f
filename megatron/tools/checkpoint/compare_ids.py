"""Comparison of the token ids of ``transformers`` and this project for a Hugging Face folder.

``transformers`` 5 replaces parts of tokenizer.json for some tokenizer classes, so that ids differ from those that the
model was trained with (huggingface/transformers, issues 45812 and 45920: Granite 4, OLMo 2, Yi). This project follows
tokenizer.json, as ``transformers`` 4 did."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron.core.tokenizers.huggingface import BackendTokenizer, build_huggingface

NUMBERS = [str(number) for number in range(0, 1000, 7)]
PROBE = " Isn't it  3-12-31,\n\n or 0.5 %?\tdef f(x):  nai\u0308ve ﬁ 中文😀. "
PROBE += " ".join(NUMBERS) + "  " + "".join(NUMBERS)
"""Blanks, punctuation, letters with a composed form, and numbers, which tokenizers split differently."""
PARTS = ("normalizer", "pre_tokenizer", "post_processor")


def compare_ids(folder: str) -> str:
    """Return a line that says whether ``AutoTokenizer`` gives the ids of tokenizer.json for a text, without and with
    special tokens in it, and else which parts of the file it replaces; '' without tokenizer.json."""
    if not (Path(folder) / "tokenizer.json").is_file():
        return ""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    what = f"token ids against transformers {transformers.__version__}"
    try:
        local = build_huggingface(folder)
        foreign: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return f"{what}: {_difference(local, foreign) or 'equal'}"
    except Exception as error:  # a folder may hold what one of the two rejects
        return f"{what}: not compared ({type(error).__name__}: {error!s:.200})"


def _difference(local: BackendTokenizer, foreign: Any) -> str:
    specials = [local.inv_vocab[index] for index in sorted(local.all_special_ids)[:8]]
    for text in (PROBE, PROBE[1:] + "".join(f"{token}the {token} end" for token in specials)):
        ids, foreign_ids = local.tokenize(text), foreign.encode(text)
        if ids == foreign_ids:
            ids, foreign_ids = local.tokenize_chat(text), foreign.encode(text, add_special_tokens=False)
        if ids != foreign_ids:
            files = [json.loads(x) for x in (local.definition, foreign.backend_tokenizer.to_str())]
            parts = [name for name in PARTS if files[0][name] != files[1][name]]
            pairs = zip(ids, foreign_ids)
            place = next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(ids), len(foreign_ids)))
            tokens, foreign_tokens = (
                [local.inv_vocab.get(index, index) for index in x[place : place + 4]] for x in (ids, foreign_ids)
            )
            return (
                f"DIFFERENT: its {type(foreign).__name__} replaces {', '.join(parts) or 'a part'} of tokenizer.json, "
                f"which is used here: {foreign_tokens} instead of {tokens}. To get the same ids there, set "
                "tokenizer_class in tokenizer_config.json to PreTrainedTokenizerFast"
            )
    return ""
