"""Greedy text after images equals ``generate`` of ``transformers``."""

import functools
import random

import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.inference.engine import Engine
from megatron.core.inference.images import PromptImages
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from tests.functional_tests.test_image_models import IMAGE, KINDS, VISION, VOCAB, local_model, peer

LENGTH, NEW = 96, 6
PATCH = 3 * 2 * VISION["patch_size"] ** 2
LAYOUTS = {"whole": {}, "parts": {"max_tokens": 5}, "preempted": {"max_tokens": 9, "num_pages": 16}}
IMAGES = [[(4, 6)], [], [(2, 2), (6, 4)], [(8, 2)], [], [(4, 4), (2, 4), (4, 2)], [(4, 6)]]
"""Height and width of the images of each prompt, in patches."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """kind -> (model of transformers, local model)."""

    @functools.cache
    def build(kind):
        folder = tmp_path_factory.mktemp(kind) / "hf"
        foreign = peer(kind).eval()
        foreign.save_pretrained(folder)
        return foreign, local_model(folder)

    return build


def prompts():
    """Requests with text before, between and after images; the first and the last differ in their pixels only."""
    rng, generator = random.Random(3), torch.Generator().manual_seed(4)
    requests = []
    for sizes in IMAGES:
        ids = [rng.randrange(11, VOCAB) for _ in range(rng.randrange(1, 9))]
        for height, width in sizes:
            ids += [IMAGE] * (height * width // 4) + [rng.randrange(11, VOCAB) for _ in range(rng.randrange(1, 9))]
        count = sum(height * width for height, width in sizes)
        patches = torch.randn(count, PATCH, generator=generator).numpy()
        requests.append((ids, PromptImages(patches, sizes) if sizes else None))
    requests[-1] = requests[0][0], requests[-1][1]
    return requests


def request(ids, images, **more):
    return Request(prompt=ids, images=images, max_new_tokens=NEW, sampling=Sampling(temperature=0), **more)


def foreign_inputs(ids, images):
    if images is None:
        return {}
    grids, kinds = torch.tensor([(1, *size) for size in images.sizes]), (torch.tensor([ids]) == IMAGE).int()
    return {"pixel_values": torch.from_numpy(images.patches), "image_grid_thw": grids, "mm_token_type_ids": kinds}


def expected_tokens(foreign, ids, images):
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    output = foreign.generate(input_ids=torch.tensor([ids]), **options, **foreign_inputs(ids, images))
    return output[0, len(ids) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_equals_that_of_transformers(models, kind):
    foreign, native = models(kind)
    expected = [expected_tokens(foreign, *prompt) for prompt in prompts()]
    assert expected[0] != expected[-1]
    for name, options in LAYOUTS.items():
        limits = Limits(max_length=LENGTH, max_tokens=options.get("max_tokens", 512), max_sequences=5)
        engine = Engine(native, limits, num_pages=options.get("num_pages", 200), page_size=4)
        for _ in range(2):  # the second time from cached pages
            finished = engine.generate([request(*prompt) for prompt in prompts()])
            assert [completion.tokens for completion in finished] == expected, name
        assert (engine.scheduler.num_preemptions > 0) == (name == "preempted")


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_vl"])
def test_scores_of_a_prompt_equal_a_forward_pass(models, kind):
    foreign, native = models(kind)
    ids, images = prompts()[2]
    engine = Engine(native, Limits(max_length=LENGTH, max_tokens=7), num_pages=200, page_size=4)
    (completion,) = engine.generate([request(ids, images, prompt_logprobs=True)])
    with torch.no_grad():
        logits = foreign(input_ids=torch.tensor([ids]), **foreign_inputs(ids, images)).logits[0]
    expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    actual = torch.tensor([score.logprob for score in completion.prompt_scores[1:]])
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=0)


def test_wrong_image_tokens_are_rejected(models):
    _, native = models("qwen3_vl")
    engine = Engine(native, Limits(max_length=LENGTH), num_pages=200, page_size=4)
    ids, images = prompts()[0]
    place = ids.index(IMAGE)
    for wrong, reason in (
        (ids[:place] + ids[place + 1 :], "has 5 image tokens, its images have 6"),
        ([*ids[: place + 1], 12, *ids[place + 1 :]], "not consecutive"),
    ):
        with pytest.raises(UserError, match=reason):
            engine.add(request(wrong, images))
    assert not engine.has_work


FLAGS = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 96 --micro-batch-size 1"
    " --max-position-embeddings 96 --train-iters 1 --lr 1e-3 --swiglu --normalization RMSNorm --seed 5 --vocab-size 64"
    " --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights"
    " --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.1 --tokenizer-type NullTokenizer"
    " --vision-model-type qwen --image-token-id 7 --vision-num-layers 2 --vision-hidden-size 24 --patch-dim 4"
    " --vision-num-attention-heads 2 --vision-ffn-hidden-size 24 --vision-num-positions 25 --mrope-section 2 1 1"
    " --vision-deepstack-layers 0 1"
)
RANKS = {
    "tp, sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tp": "--tensor-model-parallel-size 2",
    "pp": "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 2",
}


def scores(rank, world_size, more):
    """Return the tokens and log-probabilities of all prompts; ranks other than 0 return nothing."""
    from megatron.core.groups.process_groups import SINGLE_PROCESS
    from megatron.core.tokenizers import build_tokenizer
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.initialize import initialize_megatron
    from megatron.training.tasks.images import ImageTask

    cfg = parse_args([*FLAGS.split(), *more.split()], needs_data=False, model_family="vlm")
    cfg = validate_args(cfg, world_size, announce=False)
    groups = initialize_megatron(cfg) if world_size > 1 else SINGLE_PROCESS
    model = ImageTask(cfg, build_tokenizer(cfg.tokenizer)).model_provider(groups.pp.is_first, groups.pp.is_last)
    engine = Engine(model, Limits(max_length=LENGTH, max_tokens=9), num_pages=40, page_size=4)
    finished = engine.generate([request(*prompt, prompt_logprobs=True) for prompt in prompts()])
    values = [x.logprob for item in finished for x in (*item.prompt_scores, *item.scores) if x is not None]
    return [item.tokens for item in finished], torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", RANKS)
def test_ranks_generate_what_one_rank_does(gloo_pool, name):
    ((tokens, logprobs),) = gloo_pool.run(scores, 1, "")
    (first, values), *rest = gloo_pool.run(scores, 2, RANKS[name])
    assert len(tokens) == len(IMAGES) and first == tokens and all(other[0] == [] for other in rest)
    torch.testing.assert_close(values, logprobs, atol=2e-5, rtol=0)
