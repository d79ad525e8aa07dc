"""Faults that users of DeepSpeed, Accelerate and FSDP have reported, and the tests that show each of them gone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

HERE = Path(__file__).parent

FAULTS = {
    "The global batch is not per device x accumulation x processes, or the launched world is another": (
        "plan/test_make_plan.py::test_a_batch_that_does_not_come_out",
        "plan/test_make_plan.py::test_two_of_the_batch_and_the_world_give_the_rest",
        "recipe/wrong/batch-contradiction.json",
        "recipe/wrong/batch-unknown.json",
        "train/test_world.py::test_a_difference_is_named_with_both_values",
    ),
    "Precision is said in two places, or a shell or a file at home says another one": (
        "recipe/wrong/precision-twice.json",
        "plan/test_strategy.py::test_the_gpu_computes_in_the_precision",
        "compile/test_readback.py::test_the_precision_of_the_shell_does_not_win",
        "compile/test_artifacts.py::test_what_the_shell_holds_of_another_job_does_not_reach_a_launcher",
        "launch/test_starts.py::test_launch_with_another_launcher",
        "end_to_end/test_four_ways.py::test_compiled_script",
        "end_to_end/test_four_ways.py::test_accelerate_launch",
    ),
    "Offload with an optimizer that DeepSpeed refuses, without effect, or said twice": (
        "plan/test_strategy.py::test_parameters_are_offloaded_from_stage_3_only",
        "recipe/wrong/offload-stage.json",
        "recipe/wrong/deepspeed-said-twice.json",
        "train/test_equivalence.py::test_offload_and_hybrid_follow_one_process",
        "train/test_equivalence.py::test_clipping_means_the_same_everywhere",
    ),
    "Names of layers or LoRA targets that the model does not have": (
        "plan/test_model.py::test_targets_that_the_model_has_not",
        "train/test_build_model.py::test_a_target_that_no_module_has_is_refused_though_another_is_found",
        "recipe/wrong/fsdp-other-names.json",
        "train/test_decoder_layers.py::test_the_layers_are_those_that_transformers_would_not_split",
    ),
    "A key that is misspelt, misplaced or said twice is passed over": (
        "recipe/wrong/misspelt-key.json",
        "recipe/wrong/misplaced-key.json",
        "recipe/wrong/key-twice.json",
        "recipe/wrong/deepspeed-top-level.json",
        "recipe/wrong/deepspeed-misplaced.json",
        "recipe/test_deepspeed_keys.py::test_every_key_that_deepspeed_reads_is_allowed_or_refused",
    ),
    "A line of the hostfile is read otherwise than it is meant": (
        "plan/test_hostfile.py::test_read",
        "plan/test_hostfile.py::test_refused",
        "compile/test_artifacts.py::test_a_user_belongs_to_ssh_and_not_to_the_address",
    ),
    "Slots, selected machines and visible GPUs disagree": (
        "plan/test_selection.py::test_selected",
        "plan/test_selection.py::test_refused",
        "plan/test_selection.py::test_the_world_is_the_sum_of_the_selected_slots",
        "compile/test_artifacts.py::test_selected_gpus_are_the_only_ones_that_a_process_sees",
        "launch/test_starts.py::test_gpus_chosen_in_the_shell_are_not_passed_over",
        "train/test_world.py::test_more_processes_than_gpus_are_refused",
    ),
    "The chat template is missing, or not saved with the result": (
        "plan/test_model.py::test_a_model_without_a_chat_template",
        "train/test_result.py::test_a_tokenizer_without_a_template_for_chats_is_refused",
        "train/test_result.py::test_a_template_of_the_recipe_is_saved_with_the_result",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_tests_of_a_fault_are_there(fault):
    for name in FAULTS[fault]:
        file, _, function = name.partition("::")
        assert (HERE / file).is_file(), file
        if function:
            defined = {
                node.name for node in ast.parse((HERE / file).read_text()).body if isinstance(node, ast.FunctionDef)
            }
            assert function in defined, name
