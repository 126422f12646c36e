"""The primitives of JAX, one row for each.

A primitive that has no row is opaque: nothing is known of it but what its equation shows. It counts one
operation for each number of its result, is computed apart and in full precision, is linear in nothing, and
what it reads is read exactly as written. So has a row without traits; it says that somebody looked.

A release of JAX that brings new primitives shows up in ``tests/core/test_primitives.py``, which lists those
without a row.

>>> of("cumsum").along, of("scan").runs, of("made_up").work
('axis', <Runs.SCAN: 4>, <Work.EACH: 2>)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from onward.core.primitives.traits import (
    Exchanges,
    Index,
    Linear,
    Moves,
    OnCpu,
    Precision,
    Primitive,
    Reduces,
    Runs,
    Work,
)

FIRST, TOGETHER, EACH = Linear.FIRST, Linear.TOGETHER, Linear.EACH
FOLLOWS, LOW = Precision.FOLLOWS, Precision.LOW
STAYS, ENDS = Index.STAYS, Index.ENDS
AGAIN, ONCE = OnCpu.AGAIN, OnCpu.ONCE

_number = partial(Primitive, is_elementwise=True, on_cpu=AGAIN)
_root = partial(Primitive, is_elementwise=True, on_cpu=ONCE, work=Work.ROOT)
_series = partial(Primitive, is_elementwise=True, work=Work.SERIES)
_moved = partial(Primitive, work=Work.NOTHING, keeps_sign=True)
_laid = partial(_moved, on_cpu=AGAIN, linear=FIRST, index=STAYS, precision=FOLLOWS)
_kept = partial(_moved, moves=Moves.KEEPS, spreads_nonfinite=True)
_reduced = partial(Primitive, work=Work.REDUCTION, on_cpu=ONCE)
_window = partial(Primitive, work=Work.WINDOW)
_update = partial(Primitive, work=Work.UPDATE, update=2, index=ENDS)
_cube = partial(Primitive, work=Work.CUBE, on_last=2)
_matrix = partial(Primitive, on_last=2)
_key = partial(Primitive, makes_keys=True, on_last=0)
_drawn = partial(Primitive, draws=True, on_last=0)
_free = partial(Primitive, work=Work.NOTHING)

_ARITHMETIC = (
    _number("abs", power=1, precision=FOLLOWS, spreads_nonfinite=True, keeps_positive=True),
    _number(
        "add",
        commutes=True,
        linear=TOGETHER,
        index=STAYS,
        precision=FOLLOWS,
        spreads_nonfinite=True,
        keeps_sign=True,
    ),
    _number("add_any", commutes=True, linear=TOGETHER, spreads_nonfinite=True, keeps_sign=True),
    _number("and", commutes=True, conjoins=True),
    _number("ceil", spreads_nonfinite=True, keeps_sign=True),
    _number("clamp", chooses=True, precision=FOLLOWS, keeps_sign=True),
    _number("clz"),
    _number("complex", work=Work.NOTHING),
    _number("conj", linear=FIRST),
    _number("div", divides=True, on_cpu=ONCE, precision=FOLLOWS, leaves_float16=True, fails_at_zero=True),
    _number("eq", compares=True, commutes=True),
    _number("eq_to", compares=True),
    _number("floor", spreads_nonfinite=True, keeps_sign=True),
    _number("ge", compares=True),
    _number("gt", compares=True),
    _number("imag", work=Work.NOTHING, linear=FIRST),
    _number(
        "integer_pow",
        multiplies=True,
        work=Work.POWER,
        precision=FOLLOWS,
        leaves_float16=True,
        fails_at_zero=True,
    ),
    _number("is_finite", power=0, tells_finite=True),
    _number("le", compares=True),
    _number("le_to", compares=True),
    _number("lt", compares=True, index=ENDS),
    _number("lt_to", compares=True),
    _number("max", commutes=True, chooses=True, precision=FOLLOWS, keeps_sign=True),
    _number("min", commutes=True, chooses=True, precision=FOLLOWS, keeps_sign=True),
    _number("mul", multiplies=True, commutes=True, linear=EACH, precision=FOLLOWS, spreads_nonfinite=True),
    _number("mulhi"),
    _number("ne", compares=True, commutes=True),
    _number("neg", linear=FIRST, precision=FOLLOWS, spreads_nonfinite=True),
    _number("nextafter"),
    _number("not"),
    _number("one_minus_square", spreads_nonfinite=True),
    _number("or", commutes=True, disjoins=True),
    _number("population_count"),
    _number("real", work=Work.NOTHING, linear=FIRST),
    _number("rem", on_cpu=ONCE),
    _number("round", spreads_nonfinite=True, keeps_sign=True),
    _number("select_n", linear=TOGETHER, chooses=True, index=STAYS, precision=FOLLOWS, keeps_sign=True),
    _number("shift_left"),
    _number("shift_right_arithmetic"),
    _number("shift_right_logical"),
    _number("sign", power=0, precision=FOLLOWS),
    _number(
        "square", power=2, multiplies=True, precision=FOLLOWS, leaves_float16=True, spreads_nonfinite=True
    ),
    _number("sub", linear=TOGETHER, precision=FOLLOWS, spreads_nonfinite=True),
    _number("xor", commutes=True),
)

_FUNCTIONS = (
    _root("acos", spreads_nonfinite=True),
    _root("acosh", spreads_nonfinite=True),
    _root("asin", spreads_nonfinite=True),
    _root("asinh", spreads_nonfinite=True, keeps_sign=True),
    _root("atan"),
    _root("atan2", fails_at_zero=True),
    _root("atanh", spreads_nonfinite=True),
    _root("cbrt", power=1 / 3, spreads_nonfinite=True, keeps_sign=True),
    _root("cos", spreads_nonfinite=True),
    _root("cosh", spreads_nonfinite=True),
    _root("digamma"),
    _root("erf"),
    _root("erf_inv", functions=2),
    _root("erfc"),
    _root("exp", keeps_sign=True, exponential=True),
    _root("exp2", keeps_sign=True),
    _root("expm1", keeps_sign=True),
    _root("lgamma"),
    _root("log", spreads_nonfinite=True, keeps_sign=True, fails_at_zero=True, logarithm=True),
    _root("log1p", spreads_nonfinite=True, keeps_sign=True),
    _root("log2", spreads_nonfinite=True, keeps_sign=True, fails_at_zero=True),
    _root("logistic", precision=FOLLOWS, keeps_sign=True),
    _root("pow", fails_at_zero=True),
    _root("rsqrt", power=-0.5, fails_at_zero=True),
    _root("sin", spreads_nonfinite=True),
    _root("sinh", spreads_nonfinite=True, keeps_sign=True),
    _root("sqrt", power=0.5, spreads_nonfinite=True, keeps_sign=True, fails_at_zero=True),
    _root("tan", spreads_nonfinite=True),
    _root("tanh", precision=FOLLOWS, keeps_sign=True),
    _series("bessel_i0e"),
    _series("bessel_i1e"),
    _series("igamma"),
    _series("igamma_grad_a"),
    _series("igammac"),
    _series("polygamma"),
    _series("polynomial"),
    _series("regularized_incomplete_beta"),
    _series("zeta"),
)

_MOVED = (
    _moved("bitcast_convert_type", moves=Moves.READS_BITS, on_last=0, keeps_sign=False),
    _laid("broadcast_in_dim", moves=Moves.REPEATS, spreads_nonfinite=True, transposes="reduce_sum"),
    _moved("concatenate", moves=Moves.JOINS, on_cpu=AGAIN, linear=TOGETHER, index=STAYS, precision=FOLLOWS),
    _laid(
        "convert_element_type",
        moves=Moves.ROUNDS,
        work=Work.EACH,
        is_elementwise=True,
        spreads_nonfinite=True,
    ),
    _kept("copy", on_cpu=AGAIN, linear=FIRST, precision=FOLLOWS),
    _kept("device_put"),
    _laid("dynamic_slice", moves=Moves.CUTS_AT, on_cpu=OnCpu.APART),
    _moved(
        "dynamic_update_slice", moves=Moves.JOINS, update=1, precision=FOLLOWS, transposes="dynamic_slice"
    ),
    _moved("empty", moves=Moves.MAKES),
    _moved("empty2", moves=Moves.MAKES),
    _moved("gather", moves=Moves.LOOKS_UP, work=Work.LOOKUP, linear=FIRST, index=ENDS, precision=FOLLOWS),
    _moved("iota", moves=Moves.MAKES, on_cpu=AGAIN),
    _kept("layout_constraint"),
    _kept("name", names=True, on_cpu=AGAIN, linear=FIRST, precision=FOLLOWS),
    _moved("optimization_barrier", moves=Moves.HOLDS, on_cpu=AGAIN),
    _moved("pad", moves=Moves.PADS, on_cpu=AGAIN, linear=TOGETHER, precision=FOLLOWS, transposes="slice"),
    _kept("preduced"),
    _kept("pvary"),
    _moved(
        "reduce_precision",
        moves=Moves.ROUNDS,
        is_elementwise=True,
        on_cpu=AGAIN,
        linear=FIRST,
        spreads_nonfinite=True,
    ),
    _kept("reduced_vary_cast"),
    _kept("reduced_vary_cast_p"),
    _laid("reshape", moves=Moves.RESHAPES, spreads_nonfinite=True),
    _laid("rev", moves=Moves.PERMUTES, along="dimensions"),
    _kept("sharding_constraint", on_mesh=True),
    _laid("slice", moves=Moves.CUTS),
    _laid("split", moves=Moves.CUTS, on_cpu=OnCpu.APART),
    _laid("squeeze", moves=Moves.RESHAPES, spreads_nonfinite=True),
    _moved("stack", moves=Moves.JOINS),
    _kept("stop_gradient", on_cpu=AGAIN, linear=FIRST, precision=FOLLOWS, stops_gradient=True),
    _moved("tile", moves=Moves.REPEATS),
    _laid("transpose", moves=Moves.PERMUTES),
    _moved("unstack", moves=Moves.CUTS),
    _kept("vary_unreduced_cast"),
    _kept("vary_unreduced_cast_p"),
)

_SUMS_AND_PRODUCTS = (
    Primitive(
        "conv_general_dilated", linear=EACH, work=Work.CONVOLUTION, precision=LOW, is_slow_in_loop=True
    ),
    Primitive("dot_general", linear=EACH, work=Work.PRODUCT, precision=LOW),
    Primitive("ragged_dot_general", work=Work.RAGGED_PRODUCT),
    Primitive("scaled_dot"),
    _reduced("argmax", reduces=Reduces.PLACE),
    _reduced("argmin", reduces=Reduces.PLACE),
    _reduced("reduce", reduces=Reduces.OTHER, on_cpu=OnCpu.APART),
    _reduced("reduce_and", reduces=Reduces.ALL),
    _reduced("reduce_max", reduces=Reduces.LARGEST, precision=FOLLOWS, keeps_sign=True),
    _reduced("reduce_min", reduces=Reduces.SMALLEST, precision=FOLLOWS, keeps_sign=True),
    _reduced("reduce_or", reduces=Reduces.ANY),
    _reduced("reduce_prod", reduces=Reduces.PRODUCT),
    _reduced("reduce_sum", reduces=Reduces.SUM, linear=FIRST, keeps_sign=True, transposes="broadcast_in_dim"),
    _reduced("reduce_xor", reduces=Reduces.ODD),
    _window("reduce_window"),
    _window("reduce_window_max", precision=FOLLOWS, keeps_sign=True),
    _window("reduce_window_min", keeps_sign=True),
    _window("reduce_window_sum", keeps_sign=True),
    Primitive("select_and_gather_add", work=Work.WINDOW_CHOICE),
    Primitive("select_and_scatter"),
    Primitive("select_and_scatter_add", work=Work.WINDOW_SPREAD),
    Primitive("cumlogsumexp", along="axis", keeps_sign=True),
    Primitive("cummax", along="axis", keeps_sign=True),
    Primitive("cummin", along="axis", keeps_sign=True),
    Primitive("cumprod", along="axis"),
    Primitive("cumsum", along="axis", linear=FIRST, keeps_sign=True),
    Primitive("approx_top_k", along="reduction_dimension"),
    Primitive("sort", along="dimension", work=Work.SORT, keeps_sign=True),
    Primitive("top_k", along="axis", work=Work.NOTHING),
    _update("scatter", work=Work.NOTHING),
    _update("scatter-add", transposes="gather"),
    _update("scatter-max"),
    _update("scatter-min"),
    _update("scatter-mul"),
    _update("scatter-sub"),
)

_BETWEEN_DEVICES = (
    _free("all_gather", exchanges=Exchanges.GATHER),
    _free("all_gather_invariant", exchanges=Exchanges.GATHER),
    _free("all_gather_reduced", exchanges=Exchanges.GATHER),
    _free("all_gather_reduced_start", exchanges=Exchanges.GATHER),
    _free("all_gather_start", exchanges=Exchanges.GATHER),
    _free("all_to_all", exchanges=Exchanges.SWAP),
    _free("all_to_all_start", exchanges=Exchanges.SWAP),
    _free("axis_index", knows_device=True),
    _free("pbroadcast", exchanges=Exchanges.COPY),
    _free("pbroadcast_dynamic", exchanges=Exchanges.COPY),
    _free("pbroadcast_start", exchanges=Exchanges.COPY),
    _free("pmax", exchanges=Exchanges.EXTREME, work=Work.OPERAND),
    _free("pmin", exchanges=Exchanges.EXTREME, work=Work.OPERAND),
    _free("ppermute", exchanges=Exchanges.SHIFT),
    _free("ppermute_start", exchanges=Exchanges.SHIFT),
    _free("precv", exchanges=Exchanges.SHIFT),
    _free("psend", exchanges=Exchanges.SHIFT),
    _free("psum", exchanges=Exchanges.SUM, work=Work.OPERAND, linear=FIRST, keeps_sign=True),
    _free("psum_invariant", exchanges=Exchanges.SUM, work=Work.OPERAND, linear=FIRST, keeps_sign=True),
    _free("psum_invariant_start", exchanges=Exchanges.SUM, work=Work.OPERAND),
    _free("psum_start", exchanges=Exchanges.SUM, work=Work.OPERAND),
    _free("ragged_all_to_all", exchanges=Exchanges.SWAP),
    _free("reduce_scatter", exchanges=Exchanges.SCATTER, work=Work.OPERAND),
    _free("reduce_scatter_start", exchanges=Exchanges.SCATTER, work=Work.OPERAND),
    _free("unreduced_pmax", exchanges=Exchanges.EXTREME, work=Work.OPERAND),
    _free("unreduced_pmin", exchanges=Exchanges.EXTREME, work=Work.OPERAND),
    _free("unreduced_psum", exchanges=Exchanges.SUM, work=Work.OPERAND),
    _free("unreduced_psum_start", exchanges=Exchanges.SUM, work=Work.OPERAND),
    _free("unreduced_reduce_scatter", exchanges=Exchanges.SCATTER, work=Work.OPERAND),
    _free("unreduced_reduce_scatter_start", exchanges=Exchanges.SCATTER, work=Work.OPERAND),
    _free("all_gather_done"),
    _free("all_to_all_done"),
    _free("pbroadcast_done"),
    _free("ppermute_done"),
    _free("psum_done"),
    _free("reduce_scatter_done"),
    Primitive("reshard", on_mesh=True),
    Primitive("relayout"),
    Primitive("inspect_sharding"),
    Primitive("global_array_to_host_local_array"),
    Primitive("host_local_array_to_global_array"),
)

_RUNNING = (
    Primitive("closed_call", runs=Runs.CALL),
    Primitive("cond", runs=Runs.BRANCH),
    Primitive("custom_jvp_call", runs=Runs.RULE),
    Primitive("custom_linear_solve", runs=Runs.SOLVE),
    Primitive("custom_vjp_call", runs=Runs.RULE),
    Primitive("jit", runs=Runs.CALL),
    Primitive("remat2", runs=Runs.AGAIN),
    Primitive("scan", runs=Runs.SCAN),
    Primitive("shard_map", runs=Runs.DEVICES, on_mesh=True),
    Primitive("while", runs=Runs.WHILE),
)

_RANDOM = (
    Primitive("iota_2x32_shape"),
    Primitive("philox2x32"),
    Primitive("philox4x32"),
    _drawn("random_bits", work=Work.RANDOM),
    _key("random_clone"),
    _key("random_fold_in", work=Work.RANDOM),
    _drawn("random_gamma"),
    _key("random_seed", work=Work.NOTHING),
    _key("random_split", work=Work.RANDOM),
    _key("random_unwrap", work=Work.NOTHING),
    _key("random_wrap", work=Work.NOTHING, on_last=1),
    Primitive("rng_bit_generator", draws=True),
    Primitive("rng_uniform", draws=True),
    Primitive("threefry2x32", on_last=0, work=Work.RANDOM),
    Primitive("threefry4x32"),
)

_MATRICES = (
    _cube("cholesky", share=1 / 3),
    Primitive("cholesky_update"),
    _cube("eig", share=25),
    _cube("eigh", share=9),
    Primitive("fft", on_last="fft_lengths", work=Work.FOURIER),
    _cube("geqp3", share=4 / 3),
    _cube("geqrf", share=4 / 3),
    _cube("hessenberg", share=10 / 3),
    _cube("householder_product", share=4 / 3),
    _cube("lu", share=2 / 3),
    Primitive("lu_pivots_to_permutation", on_last=1),
    _matrix("ormqr"),
    _cube("qr", share=4 / 3),
    _cube("schur", share=25),
    _cube("svd", share=20),
    _matrix("symmetric_product"),
    _matrix("triangular_solve", work=Work.TRIANGULAR),
    _cube("tridiagonal", share=4 / 3),
    Primitive("tridiagonal_solve"),
)

_CALLBACKS_AND_TOKENS = """
    after_all create_token dimension_size debug_callback debug_print io_callback pure_callback
    shape_assertion
"""

# Opaque. Looked at, and left so: they run jaxprs in ways of their own, change arrays in place, stand in
# kernels only, or compute with more than arrays of numbers.
_OPAQUE = """
    call call_exported call_hi_primitive call_hi_primitive_linearized check composite core_map
    custom_jvp_call_jaxpr custom_lin custom_partitioning custom_vmap_call dce_sink eval_jaxpr ffi_call
    jaxpr_call linear_call mpmd_map pallas_call platform_index remat_opt run_scoped run_state stage
    unreachable xla_metadata_call xla_metadata_value zeros_like

    accum_grad_in_ref addupdate box_get box_set empty_ref free_ref freeze get log_extend log_read new_box
    new_log new_ref swap

    broadcast_to create_linear delay get_global masked_load masked_swap multiple_of num_programs pin
    program_id reciprocal semaphore_read semaphore_signal semaphore_wait unpin with_memory_space_constraint

    cudnn_fusion dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fwd
    dot_product_attention_fwd_wrapper dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
    dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper scaled_matmul scaled_matmul_wrapper

    bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices
    bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general bcsr_extract
    bcsr_fromdense bcsr_todense coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense
    csr_fromdense csr_matmat csr_matvec csr_spmm csr_spmv csr_todense spsolve todense

    from_edtype tie to_edtype
"""

ROWS = (
    *(*_ARITHMETIC, *_FUNCTIONS, *_MOVED, *_SUMS_AND_PRODUCTS, *_BETWEEN_DEVICES, *_RUNNING, *_RANDOM),
    *(*_MATRICES, _free("dim_as_value", tells_length=True)),
    *(*map(_free, _CALLBACKS_AND_TOKENS.split()), *map(Primitive, _OPAQUE.split())),
)
_TABLE: Mapping[str, Primitive] = {row.name: row for row in ROWS}
_UNKNOWN = Primitive("")


def of(name: str) -> Primitive:
    """The row of the primitive of this name; that of an opaque primitive if it has none."""
    return _TABLE.get(name, _UNKNOWN)
