#!/bin/sh
# compute-sanitizer over small cases of every mode: memory errors, races in shared memory, reads of unwritten memory, barriers.
# Usage: [TOOLS="memcheck …"] tests/gpu/sanitize.sh, on a machine with a GPU and compute-sanitizer on the PATH.
set -eu
cd "$(dirname "$0")/../.."
failed=""
for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
    echo "== $tool"
    # initcheck has to see torch's kernels as well, which write what ours read.
    filter="--kernel-regex kns=trtconvert"
    [ "$tool" = initcheck ] && filter=""
    # Keys beyond the length are NaN on purpose and only zeroed after they are loaded; the allocator's pool would hide
    # overruns from memcheck.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$tool" --error-exitcode 1 $filter \
        python3 -m pytest -q -p no:cacheprovider "$@" \
        tests/gpu/test_int8_attention.py tests/gpu/test_int8_attention_layers.py \
        tests/gpu/test_int8_attention_sparse.py tests/gpu/test_linear.py \
        tests/gpu/test_residual_norm.py tests/gpu/test_group_norm.py tests/gpu/test_channels_last_add.py \
        tests/gpu/test_int8_conv.py tests/gpu/test_quantise.py tests/gpu/test_quantise_change.py \
        tests/gpu/test_int8_linear.py \
        -k "(every_mode and (128-77 or 40-65)) or (norm_and_rotation and 40-127-both-0) or (norm_across_heads and 40-127-BNHD-both-0) or (norms_of_two_parts and 40-77-packed-both-0) or (few_keys and (64-77-65 or 40-17-15 or 128-120-1000)) or (of_few_tokens and (64-193-129 or 128-65-300)) or (test_gathered_keys and -40-) or (key_lengths and -64-shape3-) or each_batch_element or (task_to_task and 128-200-77) or (products and 129- and (200 or not (best or mma))) or (geglu and 2048- and 320) or (sums_and_norms and 3-) or (test_norms and (3-7-40 or 1-3001-64)) or (test_sums and 3-40) or (own_scale and (3-48 or 3-20480)) or (mode_and_scale and 48) or (of_the_norm and 3-640) or (test_geglu and -129- and 320) or (test_residuals and -300- and 200) or (16bit_rows and (-9- or -129-) and 200) or (geglu_of and (-13- or -130-) and 200) or (of_the_result and -130- and 208) or (which_kernel and 260) or (test_convolutions and 48 and bfloat16 and no) or (test_residuals and 48 and bfloat16 and True) or (norms_in_int8 and 4-7-48 and bfloat16) or (changes_of_samples and (130-10-48 or 3-3-640 or 3-3-4608)) or (not_finite_have and 256) or (test_changes and -129- and 200) or (steps_of_changes and 130)" ||
        failed="$failed $tool"
done
[ -z "$failed" ] || { echo "reports by:$failed" >&2; exit 1; }
