"""Images as patches, and conversations with images, against the processor and the model of transformers."""

import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from megatron.core.config.errors import UserError
from megatron.core.datasets.conversations.images import item_paths, with_parts
from megatron.core.datasets.image_dataset import ImageDataset, ImageDatasetConfig
from megatron.core.datasets.image_files import ImageError, image_size
from megatron.core.datasets.image_positions import axes
from megatron.core.datasets.images import FixedImages, ImageSettings
from megatron.core.tokenizers.huggingface import build_huggingface
from megatron.data.blend import Split
from tests.test_utils.chats import SPECIAL, assistant, tokenizer_folder, user, write_lines

PATCH, MERGE = 4, 2
SETTINGS = ImageSettings(PATCH, MERGE, 2, 200, 2000, (0.4, 0.5, 0.6), (0.2, 0.3, 0.5))
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
TEMPLATE = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.content is string %}{{- m.content }}
    {%- else %}
        {%- for part in m.content %}
            {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{- part.text }}{%- endif %}
        {%- endfor %}
    {%- endif %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def picture(height, width, mode="RGB", seed=0):
    channels = {"RGB": (3,), "RGBA": (4,), "L": (), "CMYK": (4,)}[mode]
    values = np.random.default_rng(seed).integers(0, 256, (height, width, *channels), dtype=np.uint8)
    return Image.fromarray(values, mode)


def processor():
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, image_mean=SETTINGS.mean, image_std=SETTINGS.std,
        size={"shortest_edge": SETTINGS.min_pixels, "longest_edge": SETTINGS.max_pixels},
    )  # fmt: skip


SIZES = [(16, 16), (3, 5), (1, 1), (7, 150), (90, 41), (100, 100), (44, 36)]


@pytest.mark.parametrize("height, width", SIZES)
@pytest.mark.parametrize(
    "mode, name", [("RGB", "a.png"), ("RGBA", "a.png"), ("L", "a.jpg"), ("CMYK", "a.jpg"), ("L", "a.gif")]
)
def test_patches_equal_those_of_the_processor(tmp_path, height, width, mode, name):
    picture(height, width, mode).save(tmp_path / name)
    expected = processor()(str(tmp_path / name), return_tensors="np")
    size = SETTINGS.file_size(tmp_path / name)
    assert (1, *size) == tuple(expected["image_grid_thw"][0])
    np.testing.assert_allclose(SETTINGS.patches(tmp_path / name, size), expected["pixel_values"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("height, width", [(41, 47), (15, 17)])
def test_sizes_at_the_limits_equal_those_of_the_processor(height, width):
    settings = replace(SETTINGS, min_pixels=4 * 64, max_pixels=30 * 64)
    expected = smart_resize(height, width, PATCH * MERGE, settings.min_pixels, settings.max_pixels)
    assert tuple(PATCH * side for side in settings.size(height, width)) == expected


SIDE = 20
SHORTEST = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
FITS = {
    "crop": lambda **more: CLIPImageProcessorPil(**SHORTEST, **more),
    "pad": lambda **more: LlavaImageProcessorPil(**SHORTEST, do_pad=True, **more),
    "stretch": lambda **more: SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, **more),
}


@pytest.mark.parametrize("height, width", SIZES)
@pytest.mark.parametrize("fit", FITS)
def test_images_of_one_size_equal_those_of_the_processors(tmp_path, fit, height, width):
    picture(height, width).save(tmp_path / "a.png")
    images = FixedImages(PATCH, (SIDE // PATCH,) * 2, fit, 1, SETTINGS.mean, SETTINGS.std)
    peer = FITS[fit](image_mean=SETTINGS.mean, image_std=SETTINGS.std)
    expected = torch.from_numpy(peer(Image.open(tmp_path / "a.png"), return_tensors="np")["pixel_values"])
    columns = torch.nn.functional.unfold(expected, PATCH, stride=PATCH)[0].T  # rows of patches of the image
    size = images.file_size(tmp_path / "a.png")
    assert size == (5, 5)
    assert images.tokens(size) == (1, 26)
    np.testing.assert_allclose(images.patches(tmp_path / "a.png", size), columns, rtol=0, atol=2e-6)


def test_images_are_cut_to_another_ratio_of_sides(tmp_path):
    picture(30, 40).save(tmp_path / "a.png")
    images = FixedImages(PATCH, (5, 3), "crop", 0, (0.0,) * 3, (1.0,) * 3)
    assert images.tokens(images.file_size(tmp_path / "a.png")) == (5, 3)
    resized = Image.open(tmp_path / "a.png").resize((26, 20), Image.Resampling.BICUBIC)
    expected = np.asarray(resized)[:, 7:19] / 255
    pixels = images.patches(tmp_path / "a.png", (5, 3)).reshape(5, 3, 3, PATCH, PATCH).transpose(0, 3, 1, 4, 2)
    np.testing.assert_allclose(pixels.reshape(20, 12, 3), expected, atol=1e-6)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_photograph_is_upright(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(24, 40).save(tmp_path / "a.jpg", exif=exif)
    expected = processor()(str(tmp_path / "a.jpg"), return_tensors="np")
    size = SETTINGS.file_size(tmp_path / "a.jpg")
    assert (1, *size) == tuple(expected["image_grid_thw"][0])
    np.testing.assert_allclose(SETTINGS.patches(tmp_path / "a.jpg", size), expected["pixel_values"], rtol=0, atol=2e-6)


def test_an_animation_gives_its_first_frame(tmp_path):
    frames = [picture(20, 20, "L", seed) for seed in range(3)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "b.png")
    assert np.array_equal(SETTINGS.patches(tmp_path / "a.gif", (6, 6)), SETTINGS.patches(tmp_path / "b.png", (6, 6)))


def keyed(path, mode):
    image = picture(20, 30, "L").quantize(16).convert(mode)
    image.save(path, transparency={"P": 3, "L": 99, "RGB": image.convert("RGB").getpixel((0, 0))}[mode])


@pytest.mark.parametrize("name, write", [
    ("color.png", lambda path: keyed(path, "P")),
    ("color.gif", lambda path: keyed(path, "P")),
    ("level.png", lambda path: keyed(path, "RGB")),
    ("levels.png", lambda path: picture(20, 30, "RGB").quantize(16).save(path, transparency=bytes(range(16)))),
    ("bits.png", lambda path: picture(20, 30, "RGB").convert("1").save(path)),
    ("other_name.gif", lambda path: picture(20, 30).save(path, "PNG")),
    ("photo.jpg", lambda path: picture(20, 30).save(path, "MPO", save_all=True, append_images=[picture(9, 9)])),
    ("frames.webp",
     lambda path: picture(20, 30).save(path, save_all=True, append_images=[picture(20, 30, seed=1)], lossless=True)),
    ("pages.tif", lambda path: picture(20, 30).save(path, save_all=True, append_images=[picture(9, 9)])),
])  # fmt: skip
def test_unusual_images_have_the_pixels_of_the_processor(tmp_path, name, write):
    write(tmp_path / name)
    expected = processor()(str(tmp_path / name), return_tensors="np")["pixel_values"]
    size = SETTINGS.file_size(tmp_path / name)
    np.testing.assert_allclose(SETTINGS.patches(tmp_path / name, size), expected, rtol=0, atol=2e-6)


def bomb(path, side=100_000):
    """A PNG of a few hundred bytes that claims many pixels."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def deep(path):
    Image.fromarray(np.full((9, 9), 40_000, dtype=np.uint16)).save(path)


def eps(path):
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")


@pytest.mark.parametrize("name, write, reason", [
    ("bomb.png", bomb, "more than 134217728 pixels"),
    ("large.png", lambda path: bomb(path, 12_000), "more than 134217728 pixels"),
    ("deep.png", deep, "of the form I;16, not 8 bits"),
    ("text.jpg", lambda path: path.write_text("no image"), "is no readable image"),
    ("empty.jpg", lambda path: path.write_bytes(b""), "is no readable image"),
    ("program.eps", eps, "is no readable image"),
    ("missing.jpg", lambda path: None, "No such file"),
    ("folder.jpg", lambda path: path.mkdir(), "a folder"),
    ("line.png", lambda path: picture(2, 1000).save(path), "more than 200 times"),
])  # fmt: skip
def test_an_unusual_file_ends_with_its_reason(tmp_path, name, write, reason):
    write(tmp_path / name)
    with pytest.raises(ImageError, match=reason):
        SETTINGS.file_size(tmp_path / name)


def test_damaged_pixels_end_with_a_reason(tmp_path):
    picture(50, 50).save(tmp_path / "a.jpg")
    (tmp_path / "a.jpg").write_bytes((tmp_path / "a.jpg").read_bytes()[:1500])
    assert image_size(tmp_path / "a.jpg") == (50, 50)
    with pytest.raises(ImageError, match="cannot be read|is damaged"):
        SETTINGS.patches(tmp_path / "a.jpg", (6, 6))


def test_positions_equal_those_of_transformers():
    config = Qwen3_5Config(
        text_config={
            "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
            "intermediate_size": 8, "vocab_size": 10,
        },
        vision_config={"depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8, "out_hidden_size": 8},
    )  # fmt: skip
    model, draw = Qwen3_5Model(config), np.random.default_rng(3)
    for _ in range(20):
        kinds, squares = [], []
        for _ in range(draw.integers(1, 5)):
            kinds += [0] * int(draw.integers(1, 5))
            squares.append(tuple(draw.integers(1, 6, 2).tolist()))
            kinds += [1] * (squares[-1][0] * squares[-1][1])
        kinds += [0] * int(draw.integers(0, 4))
        grids = torch.tensor([(1, rows * 2, columns * 2) for rows, columns in squares])
        expected, _ = model.get_rope_index(torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([kinds]), grids)
        assert np.array_equal(axes(np.array(kinds) == 1, squares), expected[:, 0].T.numpy())


@pytest.fixture
def tokenizer(tmp_path):
    folder = tokenizer_folder(tmp_path / "tokenizer", TEMPLATE, (*SPECIAL, *VISION))
    return build_huggingface(folder), AutoTokenizer.from_pretrained(folder)


def part(path):
    return {"type": "image", "image": path}


def text(words):
    return {"type": "text", "text": words}


def dataset(path, tokenizer, length=64, path_to_cache=None, **settings):
    config = ImageDatasetConfig(
        random_seed=1, sequence_length=length, tokenizer=tokenizer, split="1", images=SETTINGS,
        image_token=tokenizer.tokenize("<|image_pad|>")[0], path_to_cache=path_to_cache, **settings,
    )  # fmt: skip
    source = ImageDataset.build_low_level_dataset(path, config)
    lines = np.arange(ImageDataset.numel_low_level_dataset(source))
    return ImageDataset(source, path, lines, None, Split.train, config)


def expected_ids(peer, messages, paths):
    """Ids as the processor of transformers makes them: each image token of the text is repeated, then tokenized."""
    rendered = peer.apply_chat_template(messages, tokenize=False)
    pieces = rendered.split("<|image_pad|>")
    assert len(pieces) == len(paths) + 1
    result = pieces[0]
    for path, piece in zip(paths, pieces[1:]):
        grid = processor()(path, return_tensors="np")["image_grid_thw"][0]
        result += "<|image_pad|>" * int(grid.prod() // MERGE**2) + piece
    return peer(result, add_special_tokens=False)["input_ids"]


def as_sharegpt(messages, paths):
    """The line of LLaVA's form."""
    turns = []
    for message in messages:
        content = message["content"]
        if not isinstance(content, str):
            content = "\n".join("<image>" if p["type"] == "image" else p["text"] for p in content)
        turns.append({"from": "human" if message["role"] == "user" else "gpt", "value": content})
    return {"conversations": turns, **({"image": paths} if paths else {})}


@pytest.mark.parametrize("sizes", [((24, 40), (24, 40)), ((24, 40), (40, 24)), ((24, 40), (48, 40))])
def test_images_stay_with_their_conversation_of_a_line(tmp_path, tokenizer, sizes):
    """A system message begins another conversation. The two images have equal sizes, swapped height and width, or
    different numbers of tokens."""
    paths = [str(tmp_path / name) for name in ("a.png", "b.png")]
    for seed, (path, size) in enumerate(zip(paths, sizes)):
        picture(*size, seed=seed).save(path)
    answers = ("One.", "Two.")
    first, second = ([user([part(path), text("?")]), assistant(words)] for path, words in zip(paths, answers))
    line = {"messages": [*first, {"role": "system", "content": "Be brief"}, *second]}
    rows = dataset(write_lines(tmp_path / "chats.jsonl", [line]), tokenizer[0], 128)
    description, row = "".join(rows.describe(0)), rows[0]
    order = sorted((0, 1), key=lambda number: description.index(answers[number]))  # sequences of a row are shuffled
    expected = [processor()(paths[number], return_tensors="np") for number in order]
    assert np.array_equal(row["sizes"].values, [item["image_grid_thw"][0, 1:] for item in expected])
    pixels = np.concatenate([item["pixel_values"] for item in expected])
    assert np.allclose(row["patches"].values, pixels, atol=1e-6)


@pytest.mark.parametrize("form", ["messages", "ShareGPT"])
def test_rows_have_the_ids_images_and_positions_of_transformers(tmp_path, tokenizer, form):
    ours, peer = tokenizer
    files = [str(tmp_path / f"{number}.png") for number in range(4)]
    for number, path in enumerate(files):
        picture(20 + 9 * number, 50 - 7 * number, seed=number).save(path)
    conversations = [
        ([user([part(files[0]), text("What?")]), assistant("One."), user([text("And"), part(files[1]), text("?")]),
          assistant("Two.")], files[:2]),
        ([user([text("Compare"), part(files[2]), part(files[3])]), assistant("Same.")], files[2:]),
        ([user("No image?"), assistant("None.")], []),
        ([user("Draw"), assistant([text("Here"), part(files[0])])], files[:1]),
    ]  # fmt: skip
    lines = [
        {"messages": messages} if form == "messages" else as_sharegpt(*c) for c in conversations for messages in c[:1]
    ]
    rows = dataset(write_lines(tmp_path / "chats.jsonl", lines), ours, 128)
    all_ids = [expected_ids(peer, *conversation) for conversation in conversations]
    met = set()
    for row in (rows[index] for index in range(len(rows))):
        patches, sizes = row["patches"].values, row["sizes"].values
        place = image = 0
        for start, stop in zip(row["cu_seqlens"], row["cu_seqlens"][1:]):
            if not row["loss_mask"][start:stop].any():
                continue  # padding
            ids = [*row["tokens"][start:stop], row["labels"][stop - 1]]
            (number,) = [number for number, expected in enumerate(all_ids) if expected[: len(ids)] == ids]
            assert len(all_ids[number]) - len(ids) <= 1  # the line feed after the last answer
            met.add(number)
            paths = conversations[number][1]
            for path in paths:
                expected = processor()(path, return_tensors="np")
                assert (1, *sizes[image]) == tuple(expected["image_grid_thw"][0])
                count = int(sizes[image].prod())
                np.testing.assert_allclose(patches[place : place + count], expected["pixel_values"], atol=2e-6)
                image, place = image + 1, place + count
            is_image = row["tokens"][start:stop] == rows.config.image_token
            assert not row["loss_mask"][start:stop][np.append(is_image[1:], False)].any()
            squares = [tuple(size // MERGE) for size in sizes[image - len(paths) : image]]
            assert np.array_equal(row["axes"][start:stop], axes(is_image, squares))
        assert place == len(patches) and image == len(sizes)
    assert met == {0, 1, 2, 3}


def test_a_cut_is_before_an_image(tmp_path, tokenizer):
    ours, _ = tokenizer
    picture(40, 40).save(tmp_path / "a.png")
    turn = [user([text("x" * 9), part("a.png")]), assistant("y")]
    first = [user([text("x" * 30), part("a.png")]), assistant("y")] * 4
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": first}, {"messages": turn * 4}])
    lengths = set()
    for length in range(70, 200, 3):
        rows = dataset(path, ours, length, str(tmp_path / "cache"))
        cuts = [int(rows.dataset.cut_lengths(np.array([number]), length)[0]) for number in (0, 1)]
        assert rows.dataset.cut_lengths(np.array([0, 1]), length).tolist() == cuts
        for row in (rows[number] for number in range(len(rows))):
            is_image = row["tokens"] == ours.tokenize("<|image_pad|>")[0]
            assert is_image.sum() == 25 * len(row["sizes"].values), length
            assert len(row["patches"].values) == 100 * len(row["sizes"].values)
            lengths.add(len(row["sizes"].values))
    assert {1, 2, 3} <= lengths
    assert (tmp_path / "cache").is_dir() and not (tmp_path / "chats.jsonl.cache").exists()


@pytest.mark.parametrize("keys", [
    {"type": "image", "path": "a.png"}, {"type": "image", "url": "file://a.png"}, {"type": "image", "image": "a.png"},
    {"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "image", "image": None, "path": "a.png"},
])  # fmt: skip
def test_a_path_has_one_of_four_keys(keys):
    from megatron.core.datasets.conversations.formats import Conversation

    assert item_paths(Conversation([user([text("x"), keys]), assistant("y")])) == ["a.png"]


def test_images_of_a_changed_file_are_read_from_its_new_lines(tmp_path, tokenizer):
    for name in ("a.png", "b.png"):
        picture(20, 20).save(tmp_path / name)
    for words, name in (("x", "a.png"), ("a longer question", "b.png")):
        lines = [{"messages": [user(words), assistant("y")]}, {"messages": [user([part(name)]), assistant("y")]}]
        rows = dataset(write_lines(tmp_path / "chats.jsonl", lines), tokenizer[0])
        assert rows.dataset.paths(1) == [name]


def marks(value):
    return {"image": "a.png", "conversations": [{"from": "human", "value": value}, {"from": "gpt", "value": "x"}]}


def test_other_keys_of_a_line_with_marks_stay():
    line = {**marks("<image>"), "system": "Be brief.", "id": "7"}
    turns = [{"from": "human", "value": [part("a.png")]}, {"from": "gpt", "value": "x"}]
    assert with_parts(line) == {"system": "Be brief.", "id": "7", "conversations": turns}


@pytest.mark.parametrize("line, reason", [
    ({"messages": [user([part("none.png")]), assistant("x")]}, "line 2: image none.png: cannot be read"),
    ({"messages": [user([text("<|image_pad|>"), part("a.png")]), assistant("x")]},
     r"line 2: messages\[0\]: the text has the image token"),
    (marks("?"), "line 2: has fewer marks <image> than images"),
    (marks("<image><image>"), "line 2: has more marks <image> than images"),
    ({"messages": [user([part("https://a/a.png")]), assistant("x")]}, "line 2: image https://a/a.png: is no file"),
    ({"messages": [user([part({"bytes": "x"})]), assistant("x")]}, "line 2: an image part has no path"),
    ({"messages": [user([{"type": "video", "video": "a.mp4"}]), assistant("x")]}, "line 2: has a video, which is not"),
])  # fmt: skip
def test_wrong_lines_are_named(tmp_path, tokenizer, line, reason):
    picture(20, 20).save(tmp_path / "a.png")
    first = {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "x"}]}
    lines = [first if "conversations" in line else {"messages": [user("?"), assistant("x")]}, line]
    with pytest.raises(UserError, match=reason):
        dataset(write_lines(tmp_path / "chats.jsonl", lines), tokenizer[0])


def test_a_data_set_of_energon_is_named(tmp_path, tokenizer):
    (tmp_path / "vqa" / ".nv-meta").mkdir(parents=True)
    with pytest.raises(UserError, match="vqa: is a data set of megatron-energon; convert it with tools/energon"):
        dataset(str(tmp_path / "vqa"), tokenizer[0])


TEXT_ONLY = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "")


@pytest.mark.parametrize("messages, numbers", [
    ([user([part("a.png"), text("x")]), assistant("x")], "0 image tokens for 1 image;"),
    ([user("?"), assistant("x"), user([part("a.png")]), assistant("y"), user([part("a.png")])],
     "0 image tokens for 1 image;"),
    ([user([part("a.png")]), assistant("x"), user([part("a.png")]), assistant("y")], "0 image tokens for 2 images"),
])  # fmt: skip
def test_a_template_that_leaves_images_out_is_named(tmp_path, tokenizer, messages, numbers):
    """Images after the last answer are in no sequence."""
    picture(20, 20).save(tmp_path / "a.png")
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": messages}])
    dataset(path, tokenizer[0])
    text_only = build_huggingface(tokenizer_folder(tmp_path / "text_only", TEXT_ONLY, (*SPECIAL, *VISION)))
    with pytest.raises(UserError, match=f"line 1: the chat template writes {numbers}"):
        dataset(path, text_only)


def test_unreadable_images_are_skipped_on_request(tmp_path, tokenizer):
    picture(20, 20).save(tmp_path / "a.png")
    picture(20, 20).save(tmp_path / "b.jpg")
    names = ["none.png", "a.png", "b.jpg"]
    lines = [{"messages": [user([part(name)]), assistant(name)]} for name in names]
    path = write_lines(tmp_path / "chats.jsonl", lines)
    rows = dataset(path, tokenizer[0], skip_images=True)
    assert rows.dataset.report.counts["unreadable_image"] == 1 and len(rows.sequences) == 2
    (tmp_path / "b.jpg").write_bytes((tmp_path / "b.jpg").read_bytes()[:700])
    masks = [row["loss_mask"].sum() for row in (rows[index] for index in range(len(rows)))]
    assert len(masks) == 1 or 0 in masks
    rows = dataset(write_lines(tmp_path / "other.jsonl", lines[1:]), tokenizer[0])
    with pytest.raises(UserError, match="line 2: image b.jpg: .*--image-errors skip"):
        [rows[index] for index in range(len(rows))]


def test_one_side_may_be_200_times_the_other():
    assert SETTINGS.size(1, 200) and SETTINGS.size(200, 1)
    with pytest.raises(ImageError, match="201 pixels"):
        SETTINGS.size(1, 201)
