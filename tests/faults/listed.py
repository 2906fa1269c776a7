"""The faults: what is replaced by what, which tests must then fail, and what a user would see of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault in one file."""

    name: str
    file: str  # from the root of the tree
    text: str  # occurs once in the file
    becomes: str
    tests: tuple[str, ...]  # node ids, of which one must fail
    would: str  # what it would do to a user
    render: bool = False  # tuned/kernels is rendered before the tests run


def faulty(fault: Fault, root: Path = ROOT) -> str:
    """The text of the file with the fault.

    Raises:
        ValueError: the text to replace does not occur exactly once.
    """
    text = (root / fault.file).read_text(encoding="utf-8")
    count = text.count(fault.text)
    if count != 1:
        raise ValueError(f"the text of fault {fault.name} must occur once in {fault.file}, found {count}")
    return text.replace(fault.text, fault.becomes)


T, G = "tests/tuned/", "tests/generator/"

KERNELS = (
    Fault(
        "gates_offset_32_bits",
        "templates/gru_gates.py.jinja",
        "i_batch = (i_program // hidden_tiles) * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH).to(tl.int64)",
        "i_batch = (i_program // hidden_tiles) * BLOCK_BATCH + tl.arange(0, BLOCK_BATCH)",
        ("tests/kernels/test_gru_far.py::test_the_gates_find_rows_that_lie_gigabytes_apart",),
        "Rows further than 2^31 elements into the products of a GRU step are read from somewhere else.",
        render=True,
    ),
    Fault(
        "token_offset_32_bits",
        "templates/gru_step.py.jinja",
        "t = tl.where(BACKWARD, seq - 1 - i_step, i_step).to(tl.int64)",
        "t = tl.where(BACKWARD, seq - 1 - i_step, i_step)",
        ("tests/kernels/test_gru_far.py::test_a_sequence_finds_tokens_that_lie_gigabytes_apart",),
        "Steps further than 2^31 elements into a long sequence are written somewhere else.",
        render=True,
    ),
    Fault(
        "counter_released_relaxed",
        "templates/gru_send.py.jinja",
        'tl.atomic_add(counter, 1, sem="release")',
        'tl.atomic_add(counter, 1, sem="relaxed")',
        (
            "tests/kernels/test_gru_order.py::test_a_step_is_stored_before_the_next_is_waited_for[sm_90-dense11-bfloat16-tf32-128-split16x8x4-counter-early]",
        ),
        "A program of a persistent GRU may count itself before its state can be seen: now and then a wrong sequence.",
        render=True,
    ),
    Fault(
        "gru_does_not_wait_for_the_last_step",
        "templates/gru_receive.py.jinja",
        "< unit_tiles * (i_step - t_begin):",
        "< unit_tiles * (i_step - t_begin - 1):",
        ("tests/kernels/test_gru_kernels.py::test_a_program_waits_for_another_that_never_writes[counter]",),
        "A program of a persistent GRU reads a state that others have not written yet.",
        render=True,
    ),
    Fault(
        "gru_state_rounded_each_step",
        "templates/gru_send.py.jinja",
        "own = after\n",
        "own = after.to(dtype).to(tl.float32)\n",
        ("tests/kernels/test_gru_kernels.py::test_the_state_of_a_program_is_not_rounded_between_its_steps",),
        "Long sequences in 16 bits drift from what torch.nn.GRU gives.",
        render=True,
    ),
    Fault(
        "cell_update_gate_turned",
        "templates/gru_cell.py.jinja",
        "after = n + z * (before.to(tl.float32) - n)",
        "after = before.to(tl.float32) + z * (n - before.to(tl.float32))",
        (
            "tests/kernels/test_gru_cell_kernels.py::test_every_form_takes_any_hidden_size_and_batch[split-20-7]",
            "tests/kernels/test_gru_cell_kernels.py::test_every_form_takes_any_hidden_size_and_batch[tile-20-7]",
        ),
        "The update gate of a GRU step keeps what it should forget.",
        render=True,
    ),
    Fault(
        "vector_cell_forgets_the_mask",
        "templates/gru_cell_vector.py.jinja",
        "a = tl.load(p + k + 0 * p_r, mask=m_batch & m_k, other=0).to(tl.float32)",
        "a = tl.load(p + k + 0 * p_r, mask=m_batch, other=0).to(tl.float32)",
        ("tests/kernels/test_gru_cell_kernels.py::test_every_form_takes_any_hidden_size_and_batch[vector-20-7]",),
        "A GRU step for a few rows reads past the end of its input.",
        render=True,
    ),
    Fault(
        "linear_cat_unmasked_segment",
        "templates/linear_cat.py.jinja",
        "a = tl.load(p, mask=m_row & (k < left)[None, :], other=0)",
        "a = tl.load(p, mask=m_row, other=0)",
        (
            "tests/kernels/test_linear_cat_kernels.py::test_every_form_takes_segments_of_any_width[tile-(33, 100)-float16]",
        ),
        "A linear over segments multiplies what lies behind a row by 0: a NaN there becomes NaN in the result.",
        render=True,
    ),
    Fault(
        "third_segment_by_the_weights_of_the_second",
        "templates/segments.py.jinja",
        "tl.where(later, WIDTH0 + WIDTH1, start)",
        "tl.where(later, WIDTH1, start)",
        (
            "tests/kernels/test_linear_cat_kernels.py::test_every_form_takes_segments_of_any_width[tile-(5, 1, 64)-float16]",
        ),
        "The third input of a GRU step or a linear is multiplied by the weights of another one.",
        render=True,
    ),
    Fault(
        "tf32_cut_off",
        "templates/segments.py.jinja",
        "bits = (a.to(tl.int32, bitcast=True) + 0x1000) & -0x2000",
        "bits = a.to(tl.int32, bitcast=True) & -0x2000",
        ("tests/kernels/test_gru_cell_kernels.py::test_tf32_operands_are_rounded_to_nearest",),
        "Products in TF32 are biased towards 0 and err twice as much as the library's.",
        render=True,
    ),
)

FAMILIES = (
    Fault(
        "fused_step_in_place",
        "tuned/families/gru_cell/variant.py",
        'if spec.inplace and variant.form != "library":',
        'if spec.inplace and variant.form == "vector":',
        ("tests/kernels/test_gru_cell_kernels.py::test_only_the_librarys_form_writes_over_h",),
        "A fused GRU step overwrites the state while other programs still read it: a race.",
    ),
    Fault(
        "stack_counts_one_set_of_weights",
        "tuned/families/gru/variant.py",
        "weights = 3 * variant.block_hidden * columns * spec.item * (2 if spec.stacked else 1)",
        "weights = 3 * variant.block_hidden * columns * spec.item",
        (
            "tests/kernels/test_gru_compile.py::test_shared_memory_is_what_the_rule_counts[sm_90-dense16-float32-256-persistent-split32x8x4-spin-early]",
        ),
        "A stack of GRU layers gets a variant that does not fit into shared memory, and fails at its launch.",
    ),
    Fault(
        "fit_asks_the_rules_of_hopper",
        "tuned/families/gru/variant.py",
        "while rejection(spec, None, variant, capability) is not None and",
        "while rejection(spec, None, variant) is not None and",
        (T + "families/test_fit.py::test_a_gru_that_fits_with_fewer_units_gets_them[80]",),
        "On an A100 a 16-bit GRU that polls loses its tile, and one of a larger GPU's shared memory is not made smaller.",
    ),
    Fault(
        "fit_knows_no_dtype",
        "tuned/families/gru/variant.py",
        "lacks = capability < SPIN_CAPABILITY[spec.item] or",
        "lacks = capability < max(SPIN_CAPABILITY.values()) or",
        (T + "families/test_fit.py::test_a_row_keeps_a_variant_that_its_card_can_run[gru-80]",),
        "A float32 GRU does not spin below sm_90, where nothing else is legal, and has a launch a step.",
    ),
    Fault(
        "waiting_grid_not_cooperative",
        "tuned/families/gru/launches.py",
        '| ({"launch_cooperative_grid": True} if waits else {})',
        '| ({"launch_cooperative_grid": True} if spec.stacked else {})',
        (G + "reporting/test_show_gru.py::test_programs_that_wait_are_launched_together",),
        "Programs that wait for each other may not be on the GPU at once: it hangs.",
    ),
    Fault(
        "rows_of_any_stride_launched",
        "tuned/families/launch.py",
        "tensor.stride(-1) != 1 and tensor.shape[-1] > 1",
        "tensor.stride(-1) == 0 and tensor.shape[-1] > 1",
        (T + "calls/test_gru_strides.py::test_a_launch_over_rows_that_are_not_side_by_side_is_refused",),
        "A kernel reads the elements between those of a transposed tensor without a word.",
    ),
    Fault(
        "bool_taken_for_a_number",
        "tuned/families/choices.py",
        "value == c and type(value) is type(c)",
        "value == c",
        (T + "families/test_choices.py::test_a_number_is_no_bool_and_a_bool_no_number",),
        "A record with true where 1 belongs is read, and names a variant that was never measured.",
    ),
    Fault(
        "distance_of_specs_signed",
        "tuned/families/gru/variant.py",
        "octaves = abs(next_power_of_2(a.hidden).bit_length() - next_power_of_2(b.hidden).bit_length())",
        "octaves = next_power_of_2(a.hidden).bit_length() - next_power_of_2(b.hidden).bit_length()",
        (T + "families/test_gru_variant.py::test_distance_is_symmetric_and_nothing_to_itself",),
        "A GRU without a row gets the variant of the smallest one measured, however far it is.",
    ),
)

LOOKUP = (
    Fault(
        "nearest_row_forgets_the_spec",
        "tuned/lookup/lookup.py",
        "away = one.away + abs(one.octave - octave), one.stale",
        "away = abs(one.octave - octave), one.stale",
        (T + "lookup/test_lookup.py::test_rows_that_are_left_out_would_never_have_been_nearest",),
        "A call without a row gets the variant of the nearest length, of whatever shape.",
    ),
    Fault(
        "rows_remembered_without_the_gpu",
        "tuned/lookup/lookup.py",
        "@functools.lru_cache(MAX_HERE)\ndef _here(",
        "def _here(family: Any, spec: Any, gpu: Any, table: Any, kept: Any = {}) -> Any:\n"
        "    return kept.setdefault((family.name, spec, table), _found(family, spec, gpu, table))\n\n\n"
        "def _found(",
        (T + "lookup/test_lookup.py::test_a_row_measured_on_other_multiprocessors_is_a_neighbour",),
        "A second GPU of another size gets what was decided for the first.",
    ),
    Fault(
        "stale_row_preferred",
        "tuned/lookup/lookup.py",
        "first = (other.stale, i) < (one.stale, k)  # who wins a tie",
        "first = i < k",
        (T + "lookup/test_lookup.py::test_of_equally_near_rows_the_fresh_one_comes_before_the_stale_one",),
        "Of two equally near rows the one of an older kernel serves.",
    ),
    Fault(
        "another_timing_method_counts",
        "tuned/lookup/table.py",
        '*differences(measured, {"method": METHOD}, HARD)]',
        "*differences(measured, {}, HARD)]",
        (T + "lookup/test_lookup.py::test_a_row_timed_another_way_is_stale",),
        "Rows that were timed wrongly go on to win.",
    ),
    Fault(
        "a_result_with_other_strides_is_written_directly",
        "tuned/calls/rope/plan.py",
        "alike = settings.inplace or made_alike(x, prepared.call)",
        "alike = True",
        (T + "calls/test_rope_plan.py::test_a_packed_qkv_of_any_strides_has_the_same_result_again",),
        "A packed qkv that is expanded over the batch is written elsewhere from its second call on.",
    ),
    Fault(
        "homes_of_one_name_meet",
        "tuned/families/outside.py",
        'name = f"_tuned_{_digest(folder)}"',
        'name = f"_tuned_{folder.name}"',
        (T + "families/test_outside.py::test_families_of_one_name_never_meet",),
        "Two packages with a family of one name: the second launches the kernels of the first.",
    ),
    Fault(
        "a_row_of_another_dtype_stands_in",
        "tuned/families/outside.py",
        "            return math.inf\n",
        "            away += 1.0\n",
        (T + "families/test_outside.py::test_octaves_count_numbers_and_part_all_else",),
        "A family of one's own gets the row of another dtype.",
    ),
    Fault(
        "two_arguments_over_one_memory_are_learned",
        "tuned/own.py",
        "if len(of) < len(given) or",
        "if",
        (T + "test_own.py::test_two_arguments_over_one_memory_are_looked_at_each_time",),
        "A later call of the same shapes reads one argument in place of the other.",
    ),
    Fault(
        "nan_in_a_record",
        "tuned/lookup/record.py",
        "if type(number) not in (int, float) or not 0 <= number <= MOST:  # NaN fails too",
        "if type(number) not in (int, float) or number < 0 or number > MOST:",
        (T + "lookup/test_record.py::test_a_malformed_row_is_refused_with_where_and_why",),
        "A record whose times are NaN is read as if it were measured.",
    ),
    Fault(
        "record_of_a_newer_variant_filled_up",
        "tuned/lookup/record.py",
        'variant = build(family.variant_type, values["variant"], f"{where}.variant")',
        'variant = build(family.variant_type, values["variant"], f"{where}.variant", may_lack=True)',
        (T + "lookup/test_record.py::test_a_spec_may_be_older_than_a_field_and_a_variant_may_not",),
        "A row that lacks a knob is taken for a variant that nobody measured.",
    ),
    Fault(
        "recorded_line_in_two_writes",
        "tuned/lookup/misses.py",
        "            os.write(file, line.encode())\n",
        '            os.write(file, line[:-1].encode())\n            os.write(file, b"\\n")\n',
        (T + "lookup/test_misses.py::test_a_line_is_one_short_append",),
        "Two processes that share a TUNED_RECORD mix their lines, and the file cannot be read.",
    ),
)

LAUNCHING = (
    Fault(
        "key_without_alignment",
        "tuned/launching/plan.py",
        "return type(t), t.dtype, t.shape, t.stride(), t.data_ptr() & 15, t.get_device()",
        "return type(t), t.dtype, t.shape, t.stride(), t.get_device()",
        (T + "calls/test_gru_plan.py::test_what_is_not_like_the_call_is_not_taken_for_it",),
        "A tensor that starts at an odd address is loaded 16 bytes at a time: a CUDA error.",
    ),
    Fault(
        "launcher_with_scratch_left_out",
        "tuned/launching/launcher.py",
        "if not inspect.isfunction(wrapper) or any(scratch):",
        "if not inspect.isfunction(wrapper):",
        (T + "launching/test_launcher.py::test_a_launcher_that_needs_scratch_is_not_left_out",),
        "A kernel that needs scratch memory is launched without, and writes over something else.",
    ),
    Fault(
        "part_of_a_gpu_forgotten",
        "tuned/launching/residents.py",
        "return bool(_SEEN) and allowed(device)",
        "return bool(_SEEN)",
        (T + "launching/test_residents.py::test_no_limit_is_looked_up_where_none_was_ever_met",),
        "A known GRU call on a part of the GPU is launched with more programs than fit there.",
    ),
    Fault(
        "view_of_a_leaf_overwritten",
        "tuned/launching/overwrite.py",
        "if x.is_leaf or (base is not None and base.is_leaf and base.requires_grad):",
        "if x.is_leaf:",
        (T + "calls/test_rope_autograd.py::test_what_autograd_cannot_follow_is_refused_before_any_write",),
        "A view of a parameter is overwritten, and its gradient belongs to a value that is gone.",
    ),
    Fault(
        "plans_without_end",
        "tuned/launching/plan.py",
        "    if len(plans) >= MAX_PLANS:\n        plans.clear()\n",
        "",
        (T + "launching/test_product_plans.py::test_what_is_remembered_is_bounded",),
        "A server that sees ever new lengths grows until it is out of memory.",
    ),
)

CALLS = (
    Fault(
        "gru_key_without_precision",
        "tuned/calls/gru/plan.py",
        "        precision,\n        traits(x),\n",
        "        traits(x),\n",
        (T + "calls/test_gru_plan.py::test_what_is_not_like_the_call_is_not_taken_for_it",),
        "After allow_tf32 is turned off, known GRU calls go on in TF32.",
    ),
    Fault(
        "gru_precision_of_gemms",
        "tuned/calls/gru/plan.py",
        'now = getattr(torch.backends.cudnn.rnn, "fp32_precision", None)',
        'now = getattr(torch.backends.cuda.matmul, "fp32_precision", None)',
        (T + "calls/test_gru_run.py::test_the_precision_is_that_of_torchs_setting",),
        "A GRU computes in another precision than torch.nn.GRU does under the same settings.",
    ),
    Fault(
        "launch_key_without_alignment",
        "tuned/launching/plan.py",
        "return value.dtype, False, not value.data_ptr() % ALIGNED_BYTES",
        "return value.dtype, False, False",
        (T + "launching/test_special.py::test_arguments_are_of_one_kind_where_triton_compiles_one_kernel",),
        "A kernel that was compiled for aligned tensors gets others: a CUDA error.",
    ),
    Fault(
        "lengths_beyond_the_call",
        "tuned/calls/gru/run.py",
        "starts.diff().clamp_(max=_steps(call))",
        "starts.diff()",
        (T + "calls/test_gru_run.py::test_lengths_by_bounds_are_their_differences_and_at_most_what_the_call_says",),
        "A sequence longer than max_seqlen makes programs wait for steps that nobody takes.",
    ),
    Fault(
        "lengths_given_back_too_early",
        "tuned/calls/gru/run.py",
        "            t.record_stream(stream)\n",
        "            del t\n",
        (T + "calls/test_gru_run.py::test_lengths_are_not_given_back_while_a_stream_reads_them",),
        "The lengths of a pack on a second stream are overwritten while a kernel reads them.",
    ),
    Fault(
        "weights_of_two_memories_taken_for_one",
        "tuned/calls/gru/run.py",
        "if len(apart) == len(together) == 1 and",
        "if len(apart) == 1 and",
        (T + "calls/test_gru_run.py::test_weights_of_two_memories_are_never_seen_as_one",),
        "A view over two storages outlives one of them: weights are read from freed memory.",
    ),
    Fault(
        "input_of_the_first_layer_dropped",
        "tuned/calls/gru/run.py",
        "if layer and call.dropout:",
        "if call.dropout:",
        (T + "calls/test_gru_run.py::test_what_is_between_layers_is_dropped_and_the_first_input_is_not",),
        "Training with dropout loses parts of the input that torch.nn.GRU keeps.",
    ),
    Fault(
        "packed_rows_not_put_back",
        "tuned/calls/gru/eager.py",
        "output.index_select(0, rows.argsort())",
        "output.index_select(0, rows)",
        (T + "calls/test_gru_arguments.py::test_sequences_by_their_bounds_are_what_each_gives_alone",),
        "Outputs of sequences given by cu_seqlens are those of other tokens.",
    ),
    Fault(
        "cell_key_without_strides",
        "tuned/calls/gru_cell/run.py",
        "type(h), h.dtype, h.shape, h.stride(), device,",
        "type(h), h.dtype, h.shape, device,",
        (T + "launching/test_product_plans.py::test_what_differs_is_not_taken_for_what_is_known[state in rows apart]",),
        "A state with other strides is read as if it were contiguous.",
    ),
    Fault(
        "copies_launched_as_given",
        "tuned/launching/plan.py",
        "    if addresses[0] != addresses[1]:\n",
        "    if len(addresses[0]) != len(addresses[1]):\n",
        (T + "launching/test_product_plans.py::test_tensors_that_must_be_copied_are_copied_every_time",),
        "The second call with a transposed weight reads it as if it were not transposed.",
    ),
    Fault(
        "wide_strides_of_a_weight",
        "tuned/calls/products.py",
        "return rows_of(t) if t.stride(0) * t.shape[0] < MAX_ELEMENTS else t.contiguous()",
        "return rows_of(t) if t.numel() < MAX_ELEMENTS else t.contiguous()",
        (T + "launching/test_product_plans.py::test_a_weight_whose_rows_lie_too_far_apart_for_32_bits_is_copied",),
        "Of a weight whose rows lie far apart, 32-bit offsets read other memory.",
    ),
    Fault(
        "linear_key_without_precision",
        "tuned/calls/linear_cat/run.py",
        "return mode, precision_of(weight.dtype), x, traits(weight), bias if bias is None else traits(bias)",
        "return mode, x, traits(weight), bias if bias is None else traits(bias)",
        (T + "launching/test_product_plans.py::test_what_was_known_in_another_precision_is_not_taken",),
        "After allow_tf32 is turned off, known calls of a linear go on in TF32.",
    ),
)

SURFACE = (
    Fault(
        "second_half_of_cos",
        "tuned/compat/liger.py",
        "if shared else angles[..., :half]\n",
        "if shared else angles[..., half:]\n",
        (T + "compat/test_compat_liger.py::test_only_the_first_half_of_cos_and_sin_is_read",),
        "Liger's callers whose tables have unequal halves get another rotation than from Liger.",
    ),
    Fault(
        "undone_while_another_needs_it",
        "tuned/compat/transformers.py",
        "                if one.users == 0:\n",
        "                if one.users <= 1:\n",
        (T + "compat/test_compat_transformers.py::test_two_models_of_a_file_and_nested_patches_need_as_many_undone",),
        "Leaving one block takes the kernels away from another model.",
    ),
    Fault(
        "values_rotated_with_the_keys",
        "tuned/compat/flash_attn.py",
        "qkv[:, :, num_heads_q:-kv_heads]",
        "qkv[:, :, num_heads_q:]",
        (T + "compat/test_compat_flash_attn.py::test_qkv",),
        "With a table of k's own, v is rotated too.",
    ),
    Fault(
        "inverse_ignored",
        "tuned/compat/vllm.py",
        "conjugate=inverse,",
        "conjugate=False,",
        (T + "compat/test_compat_serving.py::test_vllm",),
        "vLLM's inverse rotation rotates forwards.",
    ),
    Fault(
        "packed_state_left_sorted",
        "tuned/nn.py",
        "return rows, self.permute_hidden(h_n, unsorted_indices)",
        "return rows, h_n",
        (T + "test_nn.py::test_a_module_gives_what_pytorchs_gives_and_says_why_it_is_eager",),
        "The last states of a PackedSequence belong to other sequences.",
    ),
    Fault(
        "patch_of_others_lost",
        "tuned/nn.py",
        "                functions.update(_before)\n",
        "",
        (T + "test_nn.py::test_another_patch_is_put_back",),
        "Leaving tuned.nn.patched() undoes what a profiler had put there.",
    ),
    Fault(
        "module_trains_on_evaluation",
        "tuned/nn.py",
        '"training": module.training,',
        '"training": True,',
        (T + "test_nn.py::test_dropout_draws_pytorchs_numbers_and_only_in_training",),
        "A model in evaluation drops what is between its layers.",
    ),
    Fault(
        "overwritten_and_autograd_not_told",
        "tuned/dispatch.py",
        "    if inplace:\n        bump_versions(h)\n    return out\n",
        "    return out\n",
        (T + "launching/test_product_plans.py::test_the_first_step_in_place_tells_autograd_as_the_known_ones_do",),
        "A gradient is computed from a state that was overwritten, and nobody says so.",
    ),
    Fault(
        "known_call_without_its_dropout",
        "tuned/dispatch.py",
        "        and not (dropout and training)\n",
        "",
        (T + "calls/test_gru_plan.py::test_what_no_plan_does_is_asked_of_none",),
        "The second step of training a GRU with dropout drops nothing.",
    ),
)

MEASURING = (
    Fault(
        "backward_from_the_longest_end",
        "generator/families/gru/reference.py",
        "t = (last - step if direction else step)",
        "t = (call.seq - 1 - step if direction else step)",
        (G + "families/test_gru_family.py::test_the_reference_is_what_torch_computes_in_float64",),
        "Every right variant for packed sequences in both directions is thrown away as wrong.",
    ),
    Fault(
        "weights_of_a_stack_not_counted",
        "generator/families/gru/reference.py",
        "matrices = sets + spec.layers - 1",
        "matrices = sets",
        (G + "families/test_gru_family.py::test_the_bytes_counted_are_those_of_the_tensors",),
        "Reports say that a stack is nearer to the speed of memory than it is.",
    ),
    Fault(
        "digest_sees_docstrings",
        "generator/rendering/structures.py",
        "if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node) is not None:",
        "if isinstance(node, ast.Module) and ast.get_docstring(node) is not None:",
        (G + "rendering/test_generated.py::test_the_digest_sees_code_and_nothing_else",),
        "A reworded docstring makes every measured row stale.",
    ),
    Fault(
        "digest_of_the_names_only",
        "generator/rendering/structures.py",
        "return measured.items() <= digests().items()",
        "return measured.keys() <= digests().keys()",
        (G + "publishing/test_audit.py::test_landscapes_of_another_text_are_worth_recording_again",),
        "A variant of a kernel that has changed is the incumbent, and stays without being measured.",
    ),
    Fault(
        "nan_is_no_error",
        "generator/measuring/check.py",
        "ratio.nan_to_num(nan=torch.inf, posinf=torch.inf)",
        "ratio.nan_to_num(nan=0.0, posinf=torch.inf)",
        (
            G
            + "processes/test_isolation.py::test_a_broken_variant_has_its_reason_and_the_next_one_is_measured[gru_cell_dreamer_200_16-not a number]",
        ),
        "A variant that leaves elements unwritten is right, and the fastest.",
    ),
    Fault(
        "one_canary",
        "generator/measuring/check.py",
        "return torch.cat(_strips(tensor)).eq(",
        "return _strips(tensor)[1].eq(",
        (
            G
            + "processes/test_isolation.py::test_a_broken_variant_has_its_reason_and_the_next_one_is_measured[gru_cell_dreamer_200_16-before the start]",
        ),
        "A variant that writes before its output is a winner.",
    ),
    Fault(
        "half_a_record",
        "generator/disk.py",
        """        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)  # noqa: PTH101 - mkstemp makes 0600; what is committed must be readable
            os.replace(temporary, path)  # noqa: PTH105
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)  # noqa: PTH108
            raise
""",
        "        path.write_bytes(data)\n",
        (T + "lookup/test_record.py::test_a_write_that_fails_leaves_the_record_as_it_was",),
        "A full disk leaves half a record where a whole one was.",
    ),
    Fault(
        "gpu_that_waited_not_warmed",
        "generator/measuring/stage.py",
        "warm_us=WARM_US if waited else 0.0",
        "warm_us=0.0",
        (G + "measuring/test_stage.py::test_a_gpu_that_waited_is_warmed_and_one_that_did_not_is_not",),
        "What is measured after a wait for compilers seems up to 10 percent slower than it is.",
    ),
    Fault(
        "warming_does_nothing",
        "generator/measuring/bench.py",
        "for _ in range(1 + warming):",
        "for _ in range(1):",
        (G + "measuring/test_bench.py::test_a_gpu_that_waited_does_real_work_before_what_counts",),
        "As above.",
    ),
    Fault(
        "sets_counted_by_what_is_allocated",
        "generator/measuring/stage.py",
        "touched = min(held, moved // 2 if inplace else moved)",
        "touched = held",
        (G + "measuring/test_stage.py::test_what_is_touched_fills_the_l2_twice_or_the_l2_is_emptied",),
        "Small calls are tuned as if their inputs lay in the L2.",
    ),
    Fault(
        "emptying_counted_as_a_launch",
        "generator/measuring/bench.py",
        "* 1e3 / rounds - emptied.us)",
        "* 1e3 / rounds)",
        (G + "measuring/test_bench.py::test_the_l2_is_emptied_before_each_round_and_the_time_of_that_is_no_launchs",),
        "Rows of small calls are too slow, and variants look alike.",
    ),
    Fault(
        "eager_timed_in_the_l2",
        "generator/measuring/stage.py",
        "empties=self.empties or few, replays=3",
        "empties=self.empties, replays=3",
        (G + "measuring/test_stage.py::test_the_l2_is_emptied_for_what_is_timed_and_the_record_is_told",),
        "PyTorch's own operators serve small calls that kernels would serve faster.",
    ),
    Fault(
        "finalists_on_one_memory",
        "generator/measuring/stage.py",
        "            self.calls, self.fresh = calls, fresh\n            yield number\n",
        "            yield number\n",
        (G + "measuring/test_stage.py::test_finalists_are_timed_on_other_memory_and_the_median_over_memories_counts",),
        "A row depends on where its inputs happened to lie.",
    ),
    Fault(
        "stage_left_on_other_memory",
        "generator/measuring/stage.py",
        "        finally:\n            self.calls, self.fresh = first\n",
        "        finally:\n            pass\n",
        (G + "measuring/test_stage.py::test_a_finalist_that_is_wrong_on_other_memory_is_found",),
        "Inputs to restore are of other memory than what is timed, and memory is not given back.",
    ),
    Fault(
        "timed_result_not_judged",
        "generator/measuring/stage.py",
        "        self._judge(thunks[0], self.probe.out)\n",
        "",
        (G + "measuring/test_stage.py::test_what_was_right_before_and_wrong_while_timed_is_no_result",),
        "A kernel that is wrong only under load, or at other addresses, wins.",
    ),
    Fault(
        "finalist_not_judged",
        "generator/measuring/stage.py",
        "            self._judge(launches[0], right)\n",
        "",
        (G + "measuring/test_stage.py::test_a_finalist_that_is_wrong_on_other_memory_is_found",),
        "As above.",
    ),
    Fault(
        "output_not_poisoned_before_it_is_timed",
        "generator/measuring/bench.py",
        "            poison()\n",
        "            pass\n",
        (G + "measuring/test_bench.py::test_what_is_found_afterwards_the_replays_have_written",),
        "A kernel that writes nothing once it is captured passes with what it wrote before.",
    ),
    Fault(
        "wrong_finalist_not_kept",
        "generator/searching/search.py",
        "self._fail(together[0], why)",
        "pass",
        (G + "searching/test_search.py::test_a_finalist_that_is_wrong_after_it_was_timed_is_a_failure_that_is_kept",),
        "The next run believes the time of a kernel that was seen to be wrong.",
    ),
    Fault(
        "noise_that_was_seen_ignored",
        "generator/searching/search.py",
        "choose(times, incumbent, noise, alone)",
        "choose(times, incumbent, NO_MORE, alone)",
        (G + "searching/test_search.py::test_an_incumbent_stays_where_the_rounds_of_it_and_of_the_best_are_far_apart",),
        "Each run of the tuner changes unsteady rows of the table.",
    ),
    Fault(
        "drift_taken_for_noise",
        "generator/searching/search.py",
        "half_spread(_ratios(rounds, best))",
        "half_spread([us / best[0][0] for one in rounds for us in one])",
        (G + "searching/test_search.py::test_the_noise_of_two_is_how_their_ratio_spreads_and_a_drift_of_both_is_none",),
        "No new winner beats an incumbent on memory of two speeds.",
    ),
    Fault(
        "dependent_launch_counts_behind_its_like",
        "generator/searching/search.py",
        "c.behind if behind else c.rounds",
        "c.rounds",
        (
            G
            + "searching/test_search.py::test_dependent_launches_meet_others_in_the_final_and_lose_where_only_their_like_helps",
        ),
        "Kernels win by an overlap that they have in no model.",
    ),
    Fault(
        "dependent_launches_meet_no_others",
        "generator/searching/search.py",
        "best += [v for v in ranked if not dependent(v)][:FEW]",
        "pass",
        (
            G
            + "searching/test_search.py::test_dependent_launches_meet_others_in_the_final_and_lose_where_only_their_like_helps",
        ),
        "As above.",
    ),
    Fault(
        "rows_timed_before_are_as_new",
        "generator/publishing/audit.py",
        'row.environment.get("timing", row.environment["method"])) != TIMING:',
        "TIMING) != TIMING:",
        (G + "publishing/test_audit.py::test_a_row_that_was_timed_another_way_counts_and_is_worth_tuning_again",),
        "Nobody is told that rows are worth measuring again.",
    ),
    Fault(
        "another_timing_is_remembered",
        "generator/storage/journal.py",
        '"method", "timing")',
        '"method")',
        (G + "storage/test_journal.py::test_what_was_measured_with_something_else_does_not_count",),
        "Trials of an older way of timing decide a search beside new ones.",
    ),
)

PROCESSES = (
    Fault(
        "any_bytes_are_a_message",
        "generator/processes/channel.py",
        "if mark != MARK or length > MOST_BYTES:",
        "if length > MOST_BYTES:",
        (G + "processes/test_isolation.py::test_what_is_no_answer_is_garbled",),
        "What a broken variant writes into the pipe is unpickled.",
    ),
    Fault(
        "answer_to_another_question",
        "generator/processes/worker.py",
        'case (self._asked, "done", value) if fits(value):',
        'case (_, "done", value) if fits(value):',
        (G + "processes/test_isolation.py::test_an_answer_to_another_question_is_no_answer",),
        "The time of one variant is written down as that of another.",
    ),
    Fault(
        "another_method_is_remembered",
        "generator/storage/journal.py",
        'KEY = ("device", "driver", "triton", "method", "timing")',
        'KEY = ("device", "driver", "triton")',
        (G + "storage/test_journal.py::test_what_was_measured_with_something_else_does_not_count",),
        "Times of an older way of timing are compared with those of today's.",
    ),
    Fault(
        "record_written_without_a_lock",
        "generator/storage/record.py",
        "with folder_lock(path.parent):  # two tuners",
        "if True:  # two tuners",
        (T + "lookup/test_record.py::test_a_record_is_read_and_written_under_one_lock",),
        "Of two tuners on one record, one loses its rows.",
    ),
    Fault(
        "torn_line_stays",
        "generator/storage/backends.py",
        "                _cut_torn_line(file)\n",
        "",
        (G + "storage/test_storage.py::test_a_torn_last_line_costs_that_line_only",),
        "A tuner that was killed while it wrote spoils the next trial as well.",
    ),
    Fault(
        "hang_is_a_fact",
        "generator/failures.py",
        "        return LOADED\n",
        "        return 1\n",
        (G + "searching/test_search.py::test_how_often_a_failure_must_come_to_be_a_fact",),
        "A variant that timed out on a busy machine is never tried again.",
    ),
    Fault(
        "knobs_in_the_order_of_the_file",
        "generator/storage/landscape.py",
        "        knobs = {name: knobs[name] for name in choices(family.variant_type)}\n",
        "        knobs = dict(knobs)\n",
        (G + "evaluation/test_replay.py::test_a_rope_variant_keeps_its_place_in_a_file",),
        "Recorded times belong to other variants than those that were measured.",
    ),
)

SEARCHING = (
    Fault(
        "incumbent_within_the_noise_replaced",
        "generator/searching/search.py",
        "if incumbent in told and times[incumbent] <= best * (1 + apart[incumbent]):",
        "if incumbent in told and times[incumbent] <= best:",
        (G + "searching/test_search.py::test_inside_the_noise_the_incumbent_wins_and_else_the_simpler",),
        "Each run of the tuner changes the table by noise.",
    ),
    Fault(
        "passing_failure_of_the_same_code",
        "generator/searching/search.py",
        "        if not isinstance(result, str) or times_to_be_a_fact(result) == 1:\n            self.codes[code] = result\n",
        "        self.codes[code] = result\n",
        (G + "searching/test_search.py::test_a_lost_worker_is_started_again_and_the_search_goes_on",),
        "A variant that hung once rules out all others of the same machine code.",
    ),
    Fault(
        "trial_from_another_gpu_not_kept",
        "generator/searching/cluster.py",
        "                self._journal.add(seat.problem, self._environment, variant, result, digests)\n",
        "                pass\n",
        (G + "searching/test_driver.py::test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on",),
        "Ctrl-C loses what many GPUs have measured.",
    ),
    Fault(
        "held_trials_not_sent",
        "generator/searching/tuner.py",
        "        return self.sent.known, self.sent.failures\n",
        "        return {}, collections.Counter()\n",
        (G + "searching/test_driver.py::test_ctrl_c_keeps_what_was_measured_and_the_next_run_goes_on",),
        "What a lost node had measured of a problem is measured again.",
    ),
    Fault(
        "problem_of_a_lost_gpu_forgotten",
        "generator/searching/cluster.py",
        "            self._waiting.insert(0, problem)\n",
        "            pass\n",
        (G + "searching/test_driver.py::test_a_gpu_that_is_lost_leaves_its_problem_to_another",),
        "The problem that a node was at when it died gets no winner.",
    ),
    Fault(
        "gpus_of_two_kinds_in_one_table",
        "generator/searching/cluster.py",
        "        if first != this:\n",
        "        if not first:\n",
        (G + "searching/test_driver.py::test_a_gpu_unlike_the_first_is_left_out",),
        "A table has times of another driver or another GPU.",
    ),
    Fault(
        "registers_cost_nothing",
        "generator/estimating/targets.py",
        "return max(1, min(target.threads // threads, int(by_registers), by_shared, target.programs))",
        "return max(1, min(target.threads // threads, by_shared, target.programs))",
        (G + "estimating/test_estimate.py::test_many_registers_leave_few_programs_resident",),
        "The estimate for a GPU that is not there puts tiles first that leave it half empty.",
    ),
    Fault(
        "rule_is_shown_what_it_is_judged_on",
        "generator/evaluation/regret.py",
        "if o.problem.family == held.problem.family and not left_out(o.problem, held.problem)]",
        "if o.problem.family == held.problem.family]",
        (G + "evaluation/test_regret.py::test_leaving_a_shape_out_takes_all_that_share_it",),
        "The README says that untuned calls are as good as tuned ones.",
    ),
    Fault(
        "cover_forgets_what_it_has",
        "generator/evaluation/portfolio.py",
        "        left = after[best]\n",
        "",
        (G + "evaluation/test_portfolio.py::test_a_cover_takes_no_twin_of_what_it_has",),
        "A portfolio has many variants for one problem and none for another.",
    ),
)

PUBLISHING = (
    Fault(
        "verified_whatever_the_names",
        "generator/publishing/verified.py",
        'found.update(f"{name}\\0{meaning}\\0".encode())',
        'found.update(f"{meaning}\\0".encode())',
        (G + "publishing/test_verified.py::test_the_names_of_the_files_count",),
        "A table that was renamed to another GPU's counts as verified on it.",
    ),
    Fault(
        "rendering_without_a_lock",
        "generator/publishing/files.py",
        "with folder_lock(WINNERS):  # no record changes",
        "if True:  # no record changes",
        (G + "processes/test_isolation_locks.py::test_rendering_waits_for_whoever_writes_a_record",),
        "Tables are rendered from half of what two tuners found.",
    ),
    Fault(
        "rows_of_models_not_looked_at",
        "generator/publishing/audit.py",
        "        rows += [w for w in winners if not any(same_problem(w, p) for p in default)]\n",
        "        pass\n",
        (G + "publishing/test_audit.py::test_rows_of_no_default_problem_are_looked_at_with_all",),
        "tune.py --check says that stale rows of a model's own calls are up to date.",
    ),
    Fault(
        "page_takes_markup",
        "generator/reporting/html/page.py",
        "autoescape=True,",
        "autoescape=False,",
        (G + "reporting/test_report_html.py::test_text_from_a_journal_cannot_become_part_of_the_page",),
        "Text of a compiler's error runs as a script in the report.",
    ),
    Fault(
        "nine_of_ten_are_ten_of_ten",
        "generator/reporting/importance.py",
        "ninth = above[max(0, -(-9 * len(above) // 10) - 1)]",
        "ninth = above[-1]",
        (G + "reporting/test_report_html.py::test_a_spread_is_the_median_nine_of_ten_and_the_worst",),
        "The report calls the worst problem the one that nine of ten beat.",
    ),
    Fault(
        "release_of_what_was_not_verified",
        "generator/commands.py",
        'to_do = ("hard", "unverified") if release else ("hard",)',
        'to_do = ("hard",)',
        (G + "publishing/test_verified.py::test_check_warns_of_what_was_not_verified_and_a_release_fails",),
        "make release-check passes although no GPU has run the sources.",
    ),
    Fault(
        "two_tuners_on_one_gpu",
        "generator/commands.py",
        "    with gpu_lock(gpu_identity(index), waiting):\n",
        "    with contextlib.nullcontext():\n",
        (G + "processes/test_isolation_locks.py::test_tuning_holds_its_gpu",),
        "Two tuners measure on one GPU at once, and their times mean nothing.",
    ),
)

BESIDE = (
    Fault(
        "best_row_shown_as_the_worst",
        "benchmarks/bars.py",
        'reverse=bar.sign != ">=")',
        "reverse=True)",
        ("tests/benchmarks/test_benchmarks.py::test_a_speed_up_must_not_fall_below_its_bar",),
        "A bar on a speed-up shows its best row as the worst.",
    ),
    Fault(
        "emptying_the_cache_counted",
        "benchmarks/clock.py",
        "emptying_us = device_time([flush], warm_us=WARM_US).median_us",
        "emptying_us = 0.0",
        ("tests/benchmarks/test_rope.py::test_the_time_of_emptying_the_cache_is_taken_off",),
        "Small calls look as slow as the reading that empties the L2 before them.",
    ),
    Fault(
        "sources_that_changed_are_verified",
        "benchmarks/verify.py",
        "        if digest() != kernels:\n",
        "        if not kernels:\n",
        ("tests/benchmarks/test_verify.py::test_sources_that_change_meanwhile_were_not_verified",),
        "A suite that began before an edit vouches for what is there after it.",
    ),
    Fault(
        "release_of_edited_sources",
        "benchmarks/release.py",
        "            run(stage, journal, ends, lock)\n            refuse_other_sources(journal, plan)\n",
        "            run(stage, journal, ends, lock)\n",
        ("tests/benchmarks/test_release.py::test_sources_that_change_while_a_stage_runs_undo_it",),
        "Results of a release are measured with sources that its commit does not have.",
    ),
    Fault(
        "release_with_a_gap",
        "benchmarks/session.py",
        "    return 1 if options.whole and any(row.key in results.skipped for row in chosen) else 0\n",
        "    return 0\n",
        ("tests/benchmarks/test_benchmarks.py::test_a_whole_suite_takes_its_time_and_fails_where_a_row_is_skipped",),
        "A release goes out whose suites lack the rows that failed.",
    ),
    Fault(
        "lenient_formula",
        "tests/fuzz/formula.py",
        "stored = ulp(value.abs() + arithmetic, x.dtype) * (1.0 if truncates else 0.5)",
        "stored = ulp(value.abs() + arithmetic, x.dtype) * 64",
        ("tests/fuzz/test_fuzz.py::test_the_formula_is_the_oracles[bshd]",),
        "The fuzz takes a rotation that lost six bits for right.",
    ),
    Fault(
        "fuzz_does_not_look_around",
        "tests/fuzz/given.py",
        "(now != before).to(self.device))",
        "(now != now).to(self.device))",
        ("tests/fuzz/test_fuzz.py::test_a_write_into_an_input_or_around_it_is_wrong",),
        "The fuzz does not see that a call writes over its input or past its end.",
    ),
    Fault(
        "decoding_does_not_see_itself",
        "examples/decode.py",
        "device=x.device) <= state.position)[None]",
        "device=x.device) < state.position)[None]",
        ("tests/examples/test_examples_rope.py::test_steps_from_the_cache_give_what_the_whole_text_gives",),
        "Who starts from the example has a model that does not attend to its last token.",
    ),
    Fault(
        "swapped_segments",
        "examples/seq2seq.py",
        "return self.decoder((embedded, context), state)",
        "return self.decoder((context, embedded), state)",
        ("tests/examples/test_examples.py::test_a_user_sees_that_it_learns_and_that_the_swap_changes_nothing",),
        "The example's model with kernels writes other words than the one that was trained.",
    ),
)

# Of RoPE, whose kernels are written anew most often.
ROPE = (
    Fault(
        "sine_of_a_negative_angle",
        "templates/sincos.py.jinja",
        "sine = tl.where(turned != (x < 0), -sine, sine)",
        "sine = tl.where(turned, -sine, sine)",
        ("tests/kernels/test_sincos.py::test_every_magnitude_is_right",),
        "Negative angles turn the wrong way.",
        render=True,
    ),
    Fault(
        "cosine_of_the_next_quarter",
        "templates/sincos.py.jinja",
        "cosine = tl.where(turned != swapped, -cosine, cosine)",
        "cosine = tl.where(turned, -cosine, cosine)",
        ("tests/kernels/test_sincos.py::test_every_magnitude_is_right",),
        "Every second quarter turn has a cosine of the wrong sign.",
        render=True,
    ),
    Fault(
        "angles_reduced_in_32_bits",
        "templates/sincos.py.jinja",
        "window = (high << shift) | ((low >> 1) >> (63 - shift))",
        "window = high << shift",
        ("tests/kernels/test_sincos.py::test_every_magnitude_is_right",),
        "Positions beyond some thousands have wrong angles.",
        render=True,
    ),
    Fault(
        "backward_turns_back",
        "tuned/families/rope/eager.py",
        "pair_sin = (-pair_sin[1], -pair_sin[0])",
        "pair_sin = (-pair_sin[0], -pair_sin[1])",
        (T + "calls/test_rope_eager.py::test_the_formula_rotates_as_the_oracle_does",),
        "Gradients are wrong where the two entries of a pair differ.",
    ),
    Fault(
        "ranks_of_context_parallelism",
        "tuned/families/rope/eager.py",
        "later = (2 * cp_size - 2 - cp_rank) * chunk + tokens",
        "later = (2 * cp_size - 1 - cp_rank) * chunk + tokens",
        (T + "calls/test_rope_eager.py::test_the_formula_rotates_as_the_oracle_does",),
        "The second chunk of a rank is rotated by positions of the next one.",
    ),
    Fault(
        "padding_without_gradient",
        "tuned/families/rope/eager.py",
        "    if inside is not None:  # copied tokens",
        "    if inside is not None and not call.x.requires_grad:  # copied tokens",
        (T + "calls/test_rope_eager.py::test_padding_of_packed_sequences_is_copied_with_its_gradient",),
        "Gradients of padded tokens are NaN.",
    ),
    Fault(
        "sine_by_the_strides_of_cosine",
        "tuned/calls/rope/arguments.py",
        "if cos.stride() != sin.stride():  # the kernel has one set",
        "if cos.shape != sin.shape:  # the kernel has one set",
        (T + "test_dispatch.py::test_cos_and_sin_of_different_strides_are_right_every_time",),
        "Sines of other strides than the cosines are read from other places.",
    ),
    Fault(
        "overlap_of_interleaved_views",
        "tuned/calls/rope/arguments.py",
        "        alike &= s > reach\n",
        "        alike &= s >= 0\n",
        (T + "calls/test_rope_arguments.py::test_no_two_tensors_that_share_an_element_are_both_overwritten",),
        "A query and a key that share elements are both overwritten: a race.",
    ),
    Fault(
        "prepared_for_another_thread",
        "tuned/calls/rope/call.py",
        "        first = threading.local()\n",
        '        first = type("Shared", (), {})()\n',
        (T + "calls/test_rope_plan.py::test_a_call_of_another_thread_does_not_take_what_a_first_call_prepared",),
        "Two threads make the first call of a kind at once, and one gets the other's result.",
    ),
    Fault(
        "key_without_the_other_position",
        "tuned/calls/rope/call.py",
        "settings, source, positions is None, int_offset == 0,",
        "settings, source, positions is None,",
        (T + "calls/test_rope_plan.py::test_a_call_that_differs_in_one_thing_from_one_seen_before_is_right[plain]",),
        "The first call with an offset after one without is rotated from position 0.",
    ),
    Fault(
        "strides_said_to_be_multiples_of_more",
        "tuned/families/rope/launches.py",
        "common = math.gcd(*(step for steps",
        "common = max(*(step for steps",
        (T + "families/test_rope_variant.py::test_what_a_kernel_is_told_is_true_of_every_stride_that_counts",),
        "A view whose heads are an odd number of elements apart is read beside its elements.",
    ),
    Fault(
        "far_row_serves",
        "tuned/lookup/lookup.py",
        "if found is not None and found[0] > family.reach:",
        "if found is None:",
        (T + "lookup/test_lookup.py::test_a_row_that_is_far_serves_no_other_call",),
        "A rotation of 50,000 tokens gets the tile of a decode step, at 4.5 times the best.",
    ),
    Fault(
        "search_of_sequences_too_short",
        "tuned/families/rope/spec.py",
        "while SEARCH_FAN**steps <= sequences:",
        "while SEARCH_FAN**steps <= sequences // 2:",
        ("tests/kernels/test_rope_kernels.py::test_a_token_finds_its_sequence_among_any_number",),
        "With 64 to 127 packed sequences, tokens of the later ones get positions of an earlier one.",
    ),
)

FAULTS = (
    *KERNELS,
    *FAMILIES,
    *LOOKUP,
    *LAUNCHING,
    *CALLS,
    *SURFACE,
    *MEASURING,
    *PROCESSES,
    *SEARCHING,
    *PUBLISHING,
    *BESIDE,
    *ROPE,
)
