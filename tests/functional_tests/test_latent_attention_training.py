"""Whole runs with multi-latent attention: they resume bit for bit, and continue in any layout."""

import numpy as np

from tests.test_utils.gpt_runs import losses, train_with_errors

LATENT = (
    "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 20 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6"
    " --qk-layernorm --position-embedding-type rope --rotary-scaling-factor 4 --mscale-all-dim 1"
    " --yarn-original-max-position-embeddings 16 --num-layers 4 --split 80,10,10 --save-interval 4"
)


def train(pool, world_size, dataset, save, *flags):
    argv = [*LATENT.split(), "--data-path", str(dataset), "--save", str(save), *map(str, flags)]
    return pool.run(train_with_errors, world_size, argv, True)


def test_a_run_resumes_bit_for_bit_and_goes_on_in_any_layout(gloo_pool, dataset, tmp_path):
    full, parts, other = (tmp_path / name for name in ("whole", "parts", "other"))
    sizes = ["--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2]
    layout = [*sizes, "--sequence-parallel", "--use-distributed-optimizer", "--ckpt-step", 4]
    runs = [
        train(gloo_pool, 1, dataset, full),
        train(gloo_pool, 1, dataset, parts, "--exit-interval", 4),
        train(gloo_pool, 1, dataset, parts, "--load", parts),
        train(gloo_pool, 4, dataset, other, "--load", full, *layout),
    ]
    assert [code for run in runs for code, _ in run] == [0] * 7, runs
    assert (parts / "metrics.jsonl").read_bytes() == (full / "metrics.jsonl").read_bytes()
    np.testing.assert_allclose(losses(other), losses(full)[4:], rtol=1e-11)
    (refused,) = train(gloo_pool, 1, dataset, tmp_path / "changed", "--load", full, "--mscale-all-dim", 0.5)
    assert refused[0] and "mscale_all_dim is 0.5, the checkpoint has 1.0" in refused[1]
