"""What is known of JAX's primitives: which cost little, and which keep blocks apart."""

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj "
    "convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 "
    "floor ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg "
    "nextafter not optimization_barrier or pow real reduce_precision rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sharding_constraint sign sin sinh sqrt "
    "square stop_gradient sub tan tanh xor".split()
)
# These move or sum whole axes. Whether an axis of blocks survives shows in the shapes.
BY_SHAPE = frozenset(
    "broadcast_in_dim dot_general reduce_and reduce_max reduce_min reduce_or "
    "reduce_prod reduce_sum reshard squeeze transpose".split()
)
# These act along the axes that a parameter of theirs names.
ALONG = {
    "argmax": "axes",
    "argmin": "axes",
    "concatenate": "dimension",
    "cumlogsumexp": "axis",
    "cummax": "axis",
    "cummin": "axis",
    "cumprod": "axis",
    "cumsum": "axis",
    "rev": "dimensions",
    "sort": "dimension",
    "split": "axis",
}
# These act on matrices, the last two axes.
OF_MATRICES = frozenset(
    "cholesky eigh geqrf householder_product lu qr svd triangular_solve".split()
)
# Calls of a function that add nothing to what it computes.
CALLS = frozenset("checkpoint closed_call jit pjit remat2".split())
# Calls of a function whose derivative is not that of its body.
WITH_DERIVATIVES = frozenset("custom_jvp_call custom_vjp_call".split())
# In these the devices of `shard_map` wait for each other. Most have effects as well.
COLLECTIVES = frozenset(
    "all_gather all_gather_invariant all_gather_reduced all_to_all pgather pmax pmin ppermute "
    "psum psum_invariant ragged_all_to_all reduce_scatter unreduced_psum "
    "unreduced_reduce_scatter".split()
)
# Parameters that say how large a result is: whether they fit shows in the shapes.
SIZES = frozenset({"new_sizes", "shape"})

# A direction of nothing but these costs less than a branch around it.
CHEAP = (ELEMENTWISE | BY_SHAPE | {"iota", "reshape"}) - {"dot_general"}
# With one array and numbers, these are that array times a number.
SCALING = frozenset("broadcast_in_dim convert_element_type copy copy_p div mul neg reshape".split())
