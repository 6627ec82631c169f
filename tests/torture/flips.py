"""Damage to every file that a run reads: single bits, truncations, zeroed and duplicated blocks, files of another run.

A case takes the files of a run that stopped half-way (data sets with their tokenizer and sidecars, of sentences where
``--kind`` is BERT or T5; the index cache, three checkpoints, the tracker), damages one of them (with a new or the old
modification time) and resumes the run to its end. Verdicts:

* noticed: it ends with a message that names the file, without a traceback
* noticed, went on: a line about the file (rebuilt, fell back), and results equal to the last bit
* harmless: not a word, results equal to the last bit
* token changed: another token in the .bin, which holds no checksum: counted apart (``docs/guides/failures.md``)
* a silent difference, a traceback, a message without the file, or a hang is a failure
"""

import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.torture import common
from tests.torture.common import Cases, Failure

HALF, ITERATIONS = 4, 8
PER_CASE = 10
LIMIT = 60.0

FAMILIES = {
    # name: (glob patterns, how often)
    "bin": (["data/*.bin"], 2),
    "idx": (["data/*.idx"], 4),
    "sidecar": (["data/*.tokenizer.json"], 2),
    "tokenizer": (["data/vocab.*", "data/merges.txt"], 2),
    "index cache": (["cache/*.npy"], 5),
    "description of the index cache": (["cache/*-description.txt"], 1),
    "shard": ([f"save/iter_{HALF:07d}/*.safetensors"], 5),
    "manifest": ([f"save/iter_{HALF:07d}/metadata.json"], 3),
    "copy of the tokenizer": ([f"save/iter_{HALF:07d}/tokenizer/*"], 1),
    "older checkpoint": ([f"save/iter_{HALF - 2:07d}/*.*"], 1),
    "tracker": (["save/" + common.TRACKER], 3),
}
UNREAD = {"stacks", "metrics.jsonl", "timing.jsonl", ".lock"}
"""Files that are only written; no result is computed from them."""


def station_argv(folder, world_size, *, stops=False):
    layout = ["--tensor-model-parallel-size", "2"] if world_size == 2 else []
    return [
        *common.MODEL_FLAGS, "--micro-batch-size", "4", "--global-batch-size", "8",
        *tokenizer_flags(folder / "data"), "--data-path", "0.4", str(folder / "data" / "a"),
        "0.6", str(folder / "data" / "b"), "--data-cache-path", str(folder / "cache"),
        "--save", str(folder / "save"), "--load", str(folder / "save"), "--train-iters", str(ITERATIONS),
        "--save-interval", "2", "--eval-interval", "4", *layout, *(["--exit-interval", str(HALF)] if stops else []),
    ]  # fmt: skip


def tokenizer_flags(folder):
    if Cases.kind != "gpt":
        return common.data_flags(folder)
    return ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(folder / "vocab.json"), "--merge-file",
            str(folder / "merges.txt")]  # fmt: skip


def write_data(folder):
    """Two data sets with sidecars, and the tokenizer's files."""
    from megatron.core.tokenizers import build_tokenizer
    from megatron.data.sidecar import sidecar_info, write_sidecar
    from megatron.training.arguments import parse_args
    from tests.test_utils import tiny_tokenizers

    folder.mkdir(parents=True)
    if Cases.kind == "gpt":
        tiny_tokenizers.gpt2_files(folder, vocab_size=300)
    else:
        common.write_data(folder)
        for unread in folder.glob("c.*"):
            unread.unlink()
    tokenizer = build_tokenizer(parse_args(tokenizer_flags(folder)).tokenizer)
    for seed, name in enumerate("ab"):
        if Cases.kind == "gpt":
            common.write_dataset(folder / name, tokenizer.vocab_size, num_documents=10, seed=seed)
        write_sidecar(str(folder / name), sidecar_info(tokenizer, append_eod=False))


def make_station(work, world_size):
    """A run that stopped half-way, at a place of this worker's own, and what it comes to: ``(place, copy, end)``."""
    place = work / f"worker{Cases.worker}-{world_size}"
    copy, end = place.with_name(f"{place.name}-copy"), place.with_name(f"{place.name}-end")
    if not end.exists():
        shutil.rmtree(place, ignore_errors=True)
        write_data(place / "data")
        for retained in (copy, end):
            argv = station_argv(place, world_size, stops=retained == copy)
            code, output = common.train(argv, world_size, place / "log")
            if code:
                raise Failure(f"the undamaged run ended with {code}:\n{output[-3000:]}")
            shutil.copytree(place, retained)
            shutil.rmtree(place / "log")
    return place, copy, end


def restore(place, copy):
    """The files of ``copy``, modification times included, at ``place``."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(copy, place, ignore=shutil.ignore_patterns("log"))


# ---- damage


def flip_bit(data, random):
    where = random.randrange(8 * len(data))
    changed = bytearray(data)
    changed[where // 8] ^= 1 << where % 8
    return bytes(changed), f"bit {where % 8} of byte {where // 8}"


def truncate(data, random):
    length = random.choice([0, random.randrange(len(data)), len(data) - 1])
    return data[:length], f"cut to {length} bytes of {len(data)}"


def zero_block(data, random):
    size = random.choice([1, 8, 64, 512])
    where = random.randrange(max(len(data) - size, 1))
    end = min(where + size, len(data))
    return data[:where] + bytes(end - where) + data[end:], f"zeros from {where} to {end}"


def duplicate_block(data, random):
    size = min(random.choice([2, 8, 64, 512]), len(data))
    source, target = (random.randrange(len(data) - size + 1) for _ in range(2))
    return data[:target] + data[source : source + size] + data[target + size :], f"{size} bytes of {source} at {target}"


def append(data, random):
    extra = random.randbytes(random.choice([1, 8, 100]))
    return data + extra, f"{len(extra)} bytes more"


DAMAGES = {flip_bit: 14, truncate: 2, zero_block: 2, duplicate_block: 2, append: 1}


def damage(path, place, random):
    """Changes one file; what was done, or "" where it came out the same."""
    data, stamp = path.read_bytes(), path.stat()
    siblings = [other for other in sorted(place.rglob(f"*{path.suffix}"))
                if other != path and other.is_file() and other.read_bytes() != data]  # fmt: skip
    if siblings and random.random() < 0.06:
        other = random.choice(siblings)
        changed, what = other.read_bytes(), f"content of {other.relative_to(place)}"
    elif random.random() < 0.02:
        path.unlink()
        return "removed"
    else:
        changed, what = random.choices(list(DAMAGES), list(DAMAGES.values()))[0](data, random)
    if changed == data:
        return ""
    path.write_bytes(changed)
    if random.random() < 0.5:
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        what += ", its time kept"
    return what


# ---- verdict


def names_file(line, path):
    """Return whether a line names the file: by name, by the data set's prefix, or by the checkpoint's folder."""
    return path.name in line or path.parent.name in line and path.parent.name.startswith("iter_") or (
        path.parent.name == "data" and str(path.with_suffix("").with_suffix("")) in line
    ) or path.parent.name == "cache" and path.name[:32] in line  # fmt: skip


def verdict(code, output, path, stations):
    """Return the verdict for a damaged file; raise :class:`Failure` for a forbidden outcome."""
    place, end = stations
    if code is None:
        raise Failure(f"no end within {LIMIT:g} s:\n{output[-3000:]}")
    if "Traceback" in output:
        raise Failure(f"a traceback:\n{output[-3000:]}")
    usual = set((end / "log" / "rank0").read_text().splitlines())
    news = [line for line in output.splitlines() if line not in usual]
    if code:
        errors = [line for line in news if line.startswith(("error", "  "))]  # several problems are an indented list
        reported = "another tokenizer" if path.name in ("vocab.json", "merges.txt", "vocab.txt") else path.name
        if not any(names_file(line, path) or reported in line for line in errors):
            raise Failure(f"ended with {code}, no message names {path.name}:\n" + "\n".join(news)[-3000:])
        return "noticed"
    different = common.compare_runs(place / "save", end / "save", ITERATIONS)
    if different and path.suffix == ".bin":
        return "token changed"
    if different:
        raise Failure(f"silent difference: {different}\nnew lines:\n" + "\n".join(news)[-2000:])
    return "noticed, went on" if any(names_file(line, path) for line in news) else "harmless"


def case(number, random, folder, tally):
    """Ten damaged files, one at a time."""
    world_size = 2 if random.random() < 0.1 else 1
    place, copy, end = make_station(folder.parent, world_size)
    for _ in range(PER_CASE):
        restore(place, copy)
        family = random.choices(list(FAMILIES), [often for _, often in FAMILIES.values()])[0]
        result = sorted(path for pattern in FAMILIES[family][0] for path in place.glob(pattern) if path.stat().st_size)
        path = random.choice(result)
        what = damage(path, place, random)
        if not what:
            continue
        code, output = common.train(station_argv(place, world_size), world_size, place / "log", limit=LIMIT)
        try:
            outcome = verdict(code, output, path, (place, end))
        except Failure as failure:
            shutil.move(place, folder / f"{family} {tally.counts.total()}")
            shutil.copytree(copy, place)
            tally.add(family, "FAILED")
            tally.fail(f"{family}: {path.relative_to(place)}, {what}: {failure}")
            continue
        tally.add(family, outcome)


def main():
    cases = Cases(__doc__, count=2000, kind=common.KIND)
    common.import_everything()
    return cases.run(case)


if __name__ == "__main__":
    sys.exit(main())
