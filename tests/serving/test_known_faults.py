"""What other servers and the libraries under them were found to do wrong, and the test that would show it.

Numbers are of public threads. A fault that cannot arise here has no line: services that speak no gRPC or were
abandoned (BentoML#5607, serve#3396), a pin of another project (client#54), what another server adds to ONNX
Runtime (onnxruntime_backend#265), and lists on a GPU, where all vectors are compared (faiss#2338, #4222). Nor
has one that only the memory of a GPU shows, the arena of CUDA (onnxruntime#14474, immich#31675); no batch is
larger here than those that the model was tried with.
"""

import re
from pathlib import Path

import pytest

TESTS = re.findall(
    r"^def (test_\w+)",
    "".join(each.read_text() for each in Path(__file__).parent.glob("test_*.py")),
    re.MULTILINE,
)

FAULTS = {
    "mistral-common#330, ollama#18418, llama.cpp#20870, AdaFace#163: the camera's orientation is ignored":
        "test_1_exif_orientation_is_applied",
    "imageio#1158, #1159: an orientation that is none ends the decoder":
        "test_2_invalid_exif_orientation_counts_as_upright",
    "Pillow#3011, #2574, #5991: grey of 16 bits is clipped to white":
        "test_3_16_bit_grey_is_scaled_not_clipped",
    "unsloth#10094: grey in the other order of bytes": "test_4_grey_tiffs_of_every_type_and_byte_order",
    "Pillow#4860, Ladybird#6486: CMYK is inverted": "test_5_cmyk_jpeg_is_not_inverted",
    "tracefinity#178: a limit of bytes bounds no pixels": "test_6_bytes_and_pixels_are_bounded",
    "Pillow#6781, #4414, edge-endpoint#26: what is cut off is black, or never ends":
        "test_7_truncated_image_is_refused_at_once",
    "infinity#367: an image of one pixel": "test_9_extreme_shapes_work",
    "infinity#609: one bad image hangs all later requests": "test_each_image_has_exactly_one_outcome_its_own",
    "onnxruntime#23372, #17801, trusty-tools#695: the CPU in place of a GPU, without a word":
        "test_a_provider_that_is_not_offered_or_does_not_start_is_an_error",
    "onnxruntime#26996, #7748, onnxruntime-extensions#404: of two packages the one for CPUs wins":
        "test_a_provider_that_is_not_offered_or_does_not_start_is_an_error",
    "onnxruntime#709, #6978, #17443, #19838, PaddleX#5057: a search for kernels at each new batch size":
        "test_a_provider_that_is_not_offered_or_does_not_start_is_an_error",
    "onnxruntime#8313, #10113, #10166: threads that are counted wrongly in a container":
        "test_session_is_set_up_for_a_server",
    "onnxruntime#17011, #19384, #26847: threads that spin while they wait":
        "test_session_is_set_up_for_a_server",
    "onnxruntime#9800, #31961: sessions across a fork": "test_no_engine_is_forked",
    "faiss#2892: a FAISS that knows no GPU": "test_gpu_that_is_not_there_is_an_error",
    "faiss#321, #1014, #2175, #1777: a GPU used by several threads":
        "test_gpu_is_used_by_one_at_a_time_and_is_exact",
    "faiss#1781, #861, #1116: a search while items are added":
        "test_search_sees_old_or_new_state_never_a_mixture",
    "faiss#3339, #1784, #3128, #1991: types from which nothing can be removed":
        "test_k_is_filled_though_the_500_nearest_are_deleted",
    "faiss#1021: a removal that looks at every vector":
        "test_replaced_item_gets_a_new_seq_and_leaves_a_removal",
    "faiss#2424: ids are others after a removal": "test_gallery_is_a_dictionary_with_exact_search",
    "faissdb#12: killed while it wrote, it served nothing from then on":
        "test_killed_writer_loses_nothing_acknowledged",
    "mem0#7117: another item is found, with a score of 1":
        "test_item_that_the_index_names_and_the_store_lacks_is_damage",
    "knowledge-base-mcp-server#57: a damaged index blocks the start":
        "test_damaged_index_is_made_anew_and_logged",
    "faiss#422, #1035, #458, #2502, #1108, #3020: a team of threads for each thread":
        "test_a_search_uses_only_the_cores_it_may",
    "faiss#563, #1808, #5285: scores differ with the number of queries": "test_search_equals_brute_force",
    "faiss#3830: an empty index finds item 0 from 20 queries on": "test_empty_gallery_answers_and_rebuilds",
    "faiss#2103: no more than 2048 from a GPU": "test_gpu_is_used_by_one_at_a_time_and_is_exact",
    "faiss-wheels#73, #40, faiss#471, #4292: two runtimes of OpenMP in one process":
        "test_the_server_embeds_with_torch_blocked",
    "MLServer#290, grpc#15738, model_server#310: an image above 4 MB":
        "test_a_photograph_past_grpcs_own_limit_arrives_and_past_ours_not",
    "grpc#7052, #8616, #19895: a queue without a bound": "test_refusals_are_quick_and_tell_when_to_return",
    "grpc#10755, #19773, #16920: two servers on one port": "test_a_port_is_shared_by_our_own_workers_only",
    "grpc#25364, #42357, weaviate-python-client#1180: several loops flood the log":
        "test_several_loops_share_a_client_without_a_flood_of_errors",
    "grpc#40834: Ctrl-C does not end a server with a call":
        "test_ctrl_c_drains_a_server_whose_log_holds_our_lines_alone",
    "grpc#22036, #22644, #27399: workers that are idle, as clients keep their connection":
        "test_new_connections_go_to_every_worker_and_each_line_of_the_log_tells_which",
    "server#7532, #6920: what a client gave up is executed":
        "test_what_nobody_waits_for_gives_up_its_places_and_is_not_computed",
    "server#7512: late requests are noticed after the batch that runs":
        "test_what_expires_while_it_is_decoded_reaches_no_model",
    "server#5348: UNAVAILABLE in place of DEADLINE_EXCEEDED":
        "test_failures_are_tried_again_and_end_with_the_deadline",
    "server#5721: batches are never formed": "test_what_waits_is_shared_among_the_instances_that_are_free",
    "infinity#546: expired requests are inferred": "test_what_expires_while_it_is_decoded_reaches_no_model",
    "infinity#517: memory grows without end": "test_growth_is_that_after_the_first_quarter",
    "text-embeddings-inference#662: a batch passes by the limit of single inputs":
        "test_a_batch_cannot_pass_by_the_limit_that_single_inputs_meet",
    "text-embeddings-inference#470: a queue that dies leaves callers waiting":
        "test_when_an_instance_dies_nobody_hangs",
    "ray#43109: options for large messages do not reach every process":
        "test_messages_above_4_mib_pass_in_both_directions",
    "qdrant#1735, #3090, #3822: a log that cannot be read after a power cut":
        "test_killed_writer_loses_nothing_acknowledged",
    "qdrant#5983: a restore that failed stops every start": "test_breaking_off_leaves_nothing",
    "qdrant#2953: one bad collection blocks all": "test_damaged_gallery_hurts_no_other",
    "milvus#33015, #25512, #42927, #37725: deleted items come back":
        "test_gallery_is_a_dictionary_with_exact_search",
    "qdrant: open to everybody unless told otherwise": "test_the_server_is_secure_by_default",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_its_test_is_there(fault: str) -> None:
    """Whether it would show the fault is for who writes it to see."""
    assert FAULTS[fault] in TESTS
