"""What other trainers were found to do wrong, and the test here that would show it.

Numbers are of public threads or, where there is none, name the code in which the fault was read. A fault that
cannot arise here (no FAISS in training, no loader that downloads) has no line.
"""

import pytest

from tests.known_faults import Fault, check_test

FAULTS: dict[str, Fault] = {
    "pytorch-metric-learning#353: MAP@R of many images out of memory": (
        "training/test_metrics.py", "test_memory_is_bounded_by_blocks",
    ),
    "pytorch-metric-learning#566: few big classes out of memory": (
        "training/test_metrics.py", "test_few_big_classes",
    ),
    "pytorch-metric-learning#240, #290, #362: a k below the class's size, or cut at 1023": (
        "training/test_metrics.py",
        "test_classes_larger_than_what_a_gpu_index_returns_are_ranked_to_their_end",
    ),
    "pytorch-metric-learning#74: not a number for classes of one image": (
        "training/test_metrics.py", "test_classes_of_one_image_are_left_out_and_counted",
    ),
    "pytorch-metric-learning#525: MAP divided by what was found": (
        "training/test_metrics.py", "test_map_divides_by_r_not_by_what_was_found",
    ),
    "pytorch-metric-learning, labels cast to float32": (
        "training/test_metrics.py", "test_labels_beyond_float32_stay_apart",
    ),
    "Proxy-Anchor, LIBC: the first column is taken for the query itself": (
        "training/test_metrics.py", "test_the_self_is_removed_by_index_and_copies_stay",
    ),
    "open-metric-learning#243, #283, #348, #506, #562: validation keeps N x N": (
        "training/test_pair_search.py", "test_each_pair_is_multiplied_once",
    ),
    "pytorch-metric-learning#684, #725: classes and images that no batch holds": (
        "training/test_sampler.py", "test_an_epoch_uses_every_image_in_batches_of_p_classes_by_k",
    ),
    "pytorch-metric-learning#611, #612: no batch sampler": (
        "training/test_sampler.py", "test_labels_may_be_any_numbers_and_feed_a_loader",
    ),
    "powerful-benchmarker#79: one image a class": (
        "training/test_sampler.py", "test_an_epoch_uses_every_image_in_batches_of_p_classes_by_k",
    ),
    "pytorch-metric-learning#237: thousands of labels": (
        "training/test_sampler.py", "test_thousands_of_classes",
    ),
    "pytorch-metric-learning#546, open-metric-learning#27: processes that share nothing out": (
        "training/test_processes.py", "test_a_batch_is_cut_in_the_order_of_ranks",
    ),
    "pytorch-metric-learning#363, #302, #380: gathered gradients of another size": (
        "training/test_processes.py", "test_gradients_of_two_processes_are_those_of_one_on_the_whole_batch",
    ),
    "pytorch-metric-learning#639, sentence-transformers#3453: another order on each rank": (
        "training/test_processes.py", "test_every_process_gathers_in_the_order_of_ranks",
    ),
    "pytorch-metric-learning#710: proxies drift apart": (
        "training/test_processes.py", "test_gradients_of_two_processes_are_those_of_one_on_the_whole_batch",
    ),
    "pytorch-metric-learning#371, #542: a world of one process": (
        "training/test_processes.py", "test_torchrun_of_one_process_is_plain_training",
    ),
    "pytorch#25162, #22584: padded duplicates are free hits": (
        "training/test_processes.py", "test_evaluation_holds_each_image_once",
    ),
    "sentence-transformers#2648, #1808: a resume without the loss": (
        "training/test_resume.py", "test_whatever_a_run_remembers_it_resumes_bit_for_bit",
    ),
    "pytorch-metric-learning#340: resumed logs begin anew": (
        "training/test_resume.py", "test_a_cut_run_resumed_equals_an_uncut_one",
    ),
    "pytorch-metric-learning, position of the memory not saved": (
        "training/test_pairwise.py", "test_a_checkpoint_restores_it_bit_by_bit",
    ),
    "research-xbm#13: the memory's loss before it is of use": (
        "training/test_objective.py",
        "test_the_memory_counts_from_its_start_and_never_holds_the_batch_itself",
    ),
    "pytorch-metric-learning#228, #233: half precision": (
        "training/test_loss.py", "test_half_precision_is_widened_under_autocast_and_without",
    ),
    "pytorch-metric-learning#107, SupContrast#50: no active triplet": (
        "training/test_loss.py", "test_without_a_pair_a_loss_on_pairs_is_zero_with_a_zero_gradient",
    ),
    "pytorch#40427, #17413: no solver for halves": (
        "training/test_prototypes.py", "test_the_solve_leaves_autocast",
    ),
    "pytorch#134905, #31546: inaccurate or singular systems": (
        "training/test_prototypes.py", "test_float32_is_accurate_at_the_sizes_of_training",
    ),
    "generalized-sum-pooling: halves by row cut a class, and must be equal": (
        "training/test_cross_batch.py", "test_the_split_is_by_class_and_covers_the_batch",
    ),
    "pytorch#157621, #133653, #148886: a batch of one is a constant": (
        "training/test_export.py", "test_every_form_of_backbone_and_pooling_is_exported_for_any_batch",
    ),
    "pytorch#42653, #64806, #109370: pooling that cannot be exported": (
        "training/test_export.py", "test_every_form_of_backbone_and_pooling_is_exported_for_any_batch",
    ),
    "open-metric-learning#399, #491, #592: an export that nobody checked": (
        "training/test_export.py", "test_file_of_other_numbers_is_not_left_and_the_previous_one_survives",
    ),
    "Proxy-Anchor#1: a pooling that is not told": (
        "training/test_export.py", "test_every_form_of_backbone_and_pooling_is_exported_for_any_batch",
    ),
    "pretrained-models.pytorch#44, #27, #87, #55: momentum 0.9 of BatchNorm": (
        "training/test_backbone.py", "test_running_statistics_are_no_copy_of_the_last_batch",
    ),
    "pretrained-models.pytorch: pixels of another order and scale": (
        "training/test_backbone.py", "test_pixels_go_in_as_the_published_weights_want_them",
    ),
    "fast-reid#363, parseq#162, pytorch#34204: another resize where it is served": (
        "training/test_evaluate.py", "test_a_model_file_measures_as_its_run",
    ),
    "torchvision#2950, #6506: resizing without antialiasing": (
        "serving/test_preprocess.py", "test_one_step_equals_resize_then_crop",
    ),
    "torchvision#7977, fastai#3565: the camera's orientation is ignored": (
        "serving/test_image_faults.py", "test_1_exif_orientation_is_applied",
    ),
    "datasets of several trainers: images of other modes than RGB": (
        "serving/test_preprocess.py", "test_any_size_and_mode_gives_pixels",
    ),
    "Revisiting_Deep_Metric_Learning#4: R is the size of the class": (
        "training/test_metrics.py", "test_metrics_are_the_loop",
    ),
    "intra_batch, Proxy-Anchor: the best epoch is chosen on the test": (
        "training/test_train.py", "test_test_images_are_never_opened",
    ),
    "intra_batch#1, Proxy-Anchor#7, #13: settings that cannot be found out": (
        "training/test_recipes.py", "test_the_head_states_paper_command_hardware_time_and_score",
    ),
    "LabelRelaxation#2: `._` files of a Mac counted as images": (
        "serving/test_catalog.py", "test_hidden_and_macos_files_are_left_out",
    ),
    "MLRC: classes that no fold validates": (
        "training/test_partition.py", "test_wrapped_folds_are_those_of_the_original_protocol",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_its_test_is_there(fault: str) -> None:
    check_test(FAULTS[fault])
