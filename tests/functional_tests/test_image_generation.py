"""Greedy text after images equals ``generate`` of ``transformers``."""

import base64
import functools
import json
import random
import zlib

import numpy as np
import pytest
import torch

from megatron.core.config.errors import UserError
from megatron.core.inference.engine import Engine
from megatron.core.inference.images import PromptImages
from megatron.core.inference.requests import Request
from megatron.core.inference.sampling import Sampling
from megatron.core.inference.scheduler import Limits
from tests.functional_tests import test_llava_models
from tests.functional_tests.test_image_models import IMAGE, KINDS, VISION, VOCAB, local_model, peer, save

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
        save(foreign, folder)
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
        requests.append((ids, PromptImages(patches, sizes, [(h // 2, w // 2) for h, w in sizes]) if sizes else None))
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


@pytest.mark.parametrize("kind, tokens", [("clip-class-token", (1, 10)), ("siglip-mistral", (3, 3))])
def test_greedy_text_of_llava_equals_that_of_transformers(kind, tokens, tmp_path):
    foreign = test_llava_models.peer(kind).eval()
    foreign.save_pretrained(tmp_path)
    rng, generator = random.Random(3), torch.Generator().manual_seed(4)
    requests, expected = [], []
    for count in (1, 0, 2):
        ids = [rng.randrange(11, VOCAB) for _ in range(5)]
        for _ in range(count):
            ids += [IMAGE] * tokens[0] * tokens[1] + [rng.randrange(11, VOCAB) for _ in range(3)]
        pixels = torch.randn(count, 3, 12, 12, generator=generator)
        patches = torch.nn.functional.unfold(pixels, 4, stride=4).transpose(1, 2).flatten(0, 1).numpy()
        requests.append(request(ids, PromptImages(patches, [(3, 3)] * count, [tokens] * count) if count else None))
        more = {"pixel_values": pixels} if count else {}
        options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, **more}
        expected.append(foreign.generate(input_ids=torch.tensor([ids]), **options)[0, len(ids) :].tolist())
    engine = Engine(local_model(tmp_path), Limits(max_length=LENGTH, max_tokens=7), num_pages=99, page_size=4)
    assert [completion.tokens for completion in engine.generate(requests)] == expected


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
def test_ranks_generate_the_same_text_as_one_rank(gloo_pool, name):
    ((tokens, logprobs),) = gloo_pool.run(scores, 1, "")
    (first, values), *rest = gloo_pool.run(scores, 2, RANKS[name])
    assert len(tokens) == len(IMAGES) and first == tokens and all(other[0] == [] for other in rest)
    torch.testing.assert_close(values, logprobs, atol=2e-5, rtol=0)


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}[<|image|>]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "<assistant>"
)
PROCESSOR = {
    "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.2, 0.25], "size": {"shortest_edge": 64, "longest_edge": 1024},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder with tokenizer, chat template and processor; (path, model of transformers)."""
    from tests.test_utils.tiny_tokenizers import byte_level_bpe

    path = tmp_path_factory.mktemp("folder") / "hf"
    model = peer("qwen3_vl", vocab_size=400, image_token_id=1, max_position_embeddings=256).eval()
    model.save_pretrained(path)
    byte_level_bpe(path / "tokenizer.json", 400, special=("<|endoftext|>", "<|image|>"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template": CHAT}))
    (path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return path, model


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Paths of two images, of other sizes than the model reads."""
    from PIL import Image

    path, generator = tmp_path_factory.mktemp("pictures"), np.random.default_rng(1)
    for name, size in (("a.png", (20, 13)), ("b.bmp", (90, 41))):
        Image.fromarray(generator.integers(0, 255, (*size, 3), dtype=np.uint8)).save(path / name)
    return [path / "a.png", path / "b.bmp"]


def expected_text(folder, paths, text, count):
    """Greedy text of transformers' model and image processor after a rendered conversation."""
    from PIL import Image
    from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessor

    path, model = folder
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    inputs = Qwen2VLImageProcessor(**PROCESSOR)([Image.open(path) for path in paths], return_tensors="pt")
    ids, grids = [], iter(inputs["image_grid_thw"].prod(1) // 4)
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        ids += [token] * int(next(grids) if token == 1 else 1)
    kinds = (torch.tensor([ids]) == 1).int()
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None}
    output = model.generate(input_ids=torch.tensor([ids]), mm_token_type_ids=kinds, **options, **inputs)
    return tokenizer.decode(output[0, len(ids) :]), len(ids)


def test_the_command_line_answers_questions_about_files(folder, pictures, capsys):
    from megatron.console import run_tool

    command = ["--load", str(folder[0]), "--chat", "--prompt", "What?", "--max-new-tokens", "5", "--temperature", "0"]
    images = [word for path in pictures for word in ("--image", str(path))]
    assert run_tool("generate", [*command, *images]) == 0
    text, _ = expected_text(folder, pictures, "<user>[<|image|>][<|image|>]What?<assistant>", 5)
    assert capsys.readouterr().out == f"<user>[<|image|>][<|image|>]What?<assistant>{text}\n"
    for words, reason in (
        (["--image", str(folder[0] / "config.json")], "is no readable image"),
        (["--image", "missing.png"], "image missing.png: cannot be read"),
        ([*images, "--chat-template-kwargs", "{}", "--prompt", "<|image|>"], "3 image tokens for 2 images"),
    ):
        assert run_tool("generate", [*command, *words]) == 2
        assert reason in capsys.readouterr().err
    assert run_tool("generate", ["--load", str(folder[0]), *images]) == 2
    assert "requires --chat" in capsys.readouterr().err


@pytest.fixture(scope="module")
def ask(folder, pictures):
    """Sends image parts and a text to a server of the folder; returns its answer."""
    httpx = pytest.importorskip("httpx")
    pytest.importorskip("uvicorn")
    from megatron.tools.serve import image_parts
    from megatron.training.trained_model import load_trained_model
    from tests.test_utils.model_server import running_server

    trained = load_trained_model(str(folder[0]), None, "tools/generate.py", images=True)
    images = image_parts(trained, str(pictures[0].parent))
    with running_server(trained.tokenizer, model=trained.model, max_bytes=2**20, images=images) as (url, _):

        def send(urls, text="What?", **values):
            parts = [{"type": "image_url", "image_url": {"url": item}} for item in urls]
            content = [*parts, {"type": "text", "text": text}]
            form = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 5, **values}
            return httpx.post(f"{url}/v1/chat/completions", json=form, timeout=60)

        send.url = url
        yield send
    assert images._num_bytes == 0


def data_url(data):
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def test_the_server_answers_questions_about_data_and_files(ask, folder, pictures):
    text, count = expected_text(folder, pictures, "<user>[<|image|>][<|image|>]What?<assistant>", 5)
    other, _ = expected_text(folder, pictures[::-1], "<user>[<|image|>][<|image|>]What?<assistant>", 5)
    for urls, expected in (
        ([data_url(path.read_bytes()) for path in pictures], text),
        ([f"file://{path}" for path in pictures], text),
        ([f"file://{path}" for path in pictures[::-1]], other),
    ):
        answer = ask(urls, ignore_eos=True).json()
        assert answer["choices"][0]["message"]["content"] == expected
        assert answer["usage"]["prompt_tokens"] == count


def test_the_server_rejects_hostile_images(ask, pictures, tmp_path):
    below = pictures[0].parent
    (tmp_path / "secret.png").write_bytes(pictures[0].read_bytes())
    (below / "link.png").symlink_to(tmp_path / "secret.png")
    header = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + (60_000).to_bytes(4, "big") * 2 + b"\x08\x02\x00\x00\x00"
    bomb = header + zlib.crc32(header[12:]).to_bytes(4, "big") + b"\x00\x00\x00\x00IDAT" + b"\x35\xaf\x06\x1e"
    good = data_url(pictures[0].read_bytes())
    for urls, reason in (
        (["http://127.0.0.1/a.png"], "is not loaded; send a data URL"),
        (["/etc/passwd"], "is not loaded; send a data URL"),
        (["data:image/png,abc"], "must be data:image/...;base64"),
        (["data:image/png;base64,????"], "is not base64"),
        ([good, data_url(b"no image")], "image 2: is no readable image"),
        ([data_url(pictures[0].read_bytes()[:200])], "image 1: cannot be read (image file is truncated)"),
        ([data_url(bomb)], "image 1: has"),
        ([f"file://{tmp_path}/secret.png"], "is not below --allowed-image-folder"),
        ([f"file://{below}/../{tmp_path.name}/secret.png"], "is not below --allowed-image-folder"),
        ([f"file://{below}/%2e%2e/secret.png"], "is not below --allowed-image-folder"),
        ([f"file://{below}/link.png"], "is not below --allowed-image-folder"),
        ([f"file://elsewhere{below}/a.png"], "is not below --allowed-image-folder"),
        (["file://[::1/a.png"], "is no URL"),
        ([f"file://{below}/none.png"], "cannot be read"),
        ([f"file://{below}"], "cannot be read"),
        ([good] * 40, "the model takes 96"),
    ):
        answer = ask(urls)
        assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text
        assert answer.json()["error"]["param"] == "messages" and answer.json()["error"]["type"]
    assert "3 image tokens for 1 image" in ask([good], "<|image|> <|image|>").json()["error"]["message"]
    assert ask([good]).status_code == 200


@pytest.mark.parametrize("prompt", ["What is <|image|>?", [5, 1, 6]])
def test_image_tokens_of_prompts_without_images_are_rejected(ask, prompt):
    import httpx

    answers = [httpx.post(f"{ask.url}/v1/completions", json={"prompt": prompt, "max_tokens": 2})]
    if isinstance(prompt, str):
        answers.append(httpx.put(f"{ask.url}/api", json={"prompts": [prompt], "tokens_to_generate": 2}))
    for answer in answers:
        assert answer.status_code == 400 and "has image token 1, and no image; send images to" in answer.text
    text = httpx.post(f"{ask.url}/v1/completions", json={"prompt": "What is it?", "max_tokens": 2, "ignore_eos": True})
    assert text.json()["usage"]["completion_tokens"] == 2
