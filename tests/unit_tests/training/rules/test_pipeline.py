"""Impossible pipelines are rejected before the start, with the reason and a fix."""

import pytest

from tests.unit_tests.training.rules.test_run_all import problems

PP2 = "--pipeline-model-parallel-size 2 --num-layers 8 "
PP4 = "--pipeline-model-parallel-size 4 --num-layers 8 "


@pytest.mark.parametrize(
    "text",
    [
        PP2, PP2 + "--num-layers 7", PP4 + "--num-virtual-stages-per-pipeline-rank 2", PP2 + "--delay-wgrad-compute",
        PP2 + "--num-layers-per-virtual-pipeline-stage 3", PP2 + "--pipeline-schedule zero-bubble",
        PP2 + "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 5",
        PP2 + "--pipeline-model-parallel-layout Et*3|t*5L", PP2 + "--pipeline-model-parallel-layout Et*4a|ft*3L",
        PP2 + "--whole-layers-in-pipeline-split --pipeline-model-parallel-layout Et*3|t*5L",
        PP2 + "--whole-layers-in-pipeline-split", PP2 + "--account-for-loss-in-pipeline-split",
        PP2 + "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 3 "
        "--global-batch-size 16",
    ],
)  # fmt: skip
def test_a_possible_pipeline_is_accepted(text):
    assert problems(text, 4) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("--pipeline-schedule zero-bubble", "--pipeline-schedule zero-bubble: requires --pipeline-model-par"),
        ("--num-virtual-stages-per-pipeline-rank 2", "--num-virtual-stages-per-pipeline-rank 2: requires"),
        (PP4 + "--num-layers 3", "--num-layers 3: 3 layers cannot fill 4 pipeline stages; at least 4 layers"),
        (PP4 + "--num-virtual-stages-per-pipeline-rank 3",
         "--num-layers 8: 8 layers cannot fill 12 pipeline stages; at least 12 layers for 4 x 3 = 12 stages"),
        (PP2 + "--num-virtual-stages-per-pipeline-rank 2 --num-layers-per-virtual-pipeline-stage 2",
         "--num-layers-per-virtual-pipeline-stage 2: contradicts --num-virtual-stages-per-pipeline-rank"),
        (PP2 + "--pipeline-model-parallel-layout Et*8|L --account-for-loss-in-pipeline-split",
         "--account-for-loss-in-pipeline-split: contradicts --pipeline-model-parallel-layout"),
        (PP2 + "--decoder-first-pipeline-num-layers 3 --account-for-loss-in-pipeline-split",
         "--account-for-loss-in-pipeline-split: contradicts --decoder-first-pipeline-num-layers"),
        (PP2 + "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4",
         "--num-layers 8: 1 layers remain for 0 pipeline ranks"),
        (PP2 + "--decoder-first-pipeline-num-layers 0", "--decoder-first-pipeline-num-layers 0: must be at least 1"),
        (PP2 + "--pipeline-model-parallel-layout Et*8|tL", "--pipeline-model-parallel-layout Et*8|tL: has 9 layers"),
        (PP2 + "--pipeline-model-parallel-layout Et*4|t*4|L",
         "--pipeline-model-parallel-layout Et*4|t*4|L: has 3 stages, not a multiple of --pipeline-model-parallel-size "
         "2; nearest: 2 or 4 stages"),
        (PP2 + "--pipeline-model-parallel-layout Et*4|t*4xL", "--pipeline-model-parallel-layout Et*4|t*4xL: 'x' means"),
        (PP2 + "--pipeline-model-parallel-layout Et*4a|t*4L",
         "--pipeline-model-parallel-layout Et*4a|t*4L: 't' comes between the branches of a layer, a and f, at"),
        (PP2 + "--pipeline-model-parallel-layout Et*4|ft*4L",
         "--pipeline-model-parallel-layout Et*4|ft*4L: 'f' (the last branch of a layer) does not follow an a"),
        (PP2 + "--pipeline-model-parallel-layout Et*4a|fL",
         "--pipeline-model-parallel-layout Et*4a|fL: has 5 layers for --num-layers 8"),
        (PP2 + "--pipeline-model-parallel-layout Et*4a|ft*3L --whole-layers-in-pipeline-split",
         "--whole-layers-in-pipeline-split: contradicts the half layers (a, f) in 'Et*4a|ft*3L'; remove it"),
        ("--whole-layers-in-pipeline-split", "--whole-layers-in-pipeline-split: requires --pipeline-model-par"),
        (PP2 + "--pipeline-model-parallel-layout Et*4|t*4mL",
         "--pipeline-model-parallel-layout Et*4|t*4mL: has 1 m for --mtp-num-layers 0; give 0 m before the L"),
        (PP2 + "--pipeline-model-parallel-layout Et*4|t*4L --mtp-num-layers 2",
         "--pipeline-model-parallel-layout Et*4|t*4L: has 0 m for --mtp-num-layers 2; give 2 m before the L"),
        (PP4 + "--pipeline-model-parallel-layout Et*4|t*4|mm|L --mtp-num-layers 2",
         "--pipeline-model-parallel-layout Et*4|t*4|mm|L: has an m in a stage without the loss; m layers need "
         "the output layer, which is in the stage of L; write all m in the last stage, before the L"),
        (PP4 + "--pipeline-model-parallel-layout Et*8|||L",
         "--pipeline-model-parallel-layout Et*8|||L: leaves pipeline rank 1 without layers"),
        (PP2 + "--num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule 1f1b",
         "--pipeline-schedule 1f1b: requires one model chunk per rank, not 2"),
        (PP2 + "--pipeline-schedule interleaved", "--pipeline-schedule interleaved: requires several model chunks"),
        (PP2 + "--pipeline-schedule 1f1b --delay-wgrad-compute",
         "--delay-wgrad-compute: contradicts --pipeline-schedule 1f1b"),
        (PP2 + "--microbatch-group-size-per-virtual-pipeline-stage 2",
         "--microbatch-group-size-per-virtual-pipeline-stage 2: requires several model chunks"),
        (PP4 + "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 3",
         "--microbatch-group-size-per-virtual-pipeline-stage 3: is smaller than --pipeline-model-parallel-size 4"),
        (PP2 + "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 9",
         "--microbatch-group-size-per-virtual-pipeline-stage 9: is larger than the"),
    ],
)  # fmt: skip
def test_an_impossible_pipeline_is_named(text, problem):
    result = problems(text, 4)
    assert any(item.startswith(problem) for item in result), result


def test_all_problems_of_a_pipeline_come_at_once():
    text = "--pipeline-model-parallel-layout Et*4|t*4xL --decoder-last-pipeline-num-layers 3 --num-layers 0"
    assert len(problems(PP2 + text, 4)) >= 3
