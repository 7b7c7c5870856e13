//! Which operations our own graphs may have, and what each of them demands of its sources.
//!
//! The list is closed: it holds what an expert FFN is made of. The demands are those of ggml's own constructors and CPU
//! kernels, most of which do not check anything themselves.

use super::sys;
use crate::{Error, Result};

/// An operation's parameters, copied verbatim.
pub type OpParams = [i32; (sys::GGML_MAX_OP_PARAMS as usize) / size_of::<i32>()];

/// Most sources that our operations have.
pub const MAX_SOURCES: usize = 3;

/// Largest size of a dimension, and largest number of rows: kernels count both in 32 bits.
const MAX_COUNT: i64 = i32::MAX as i64;

/// What a tensor of a graph is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Ids and rows as one range of bytes.
    Inputs,
    /// The ids at the start of the inputs.
    Ids,
    /// The rows behind the ids.
    InputRows,
    /// A tensor without an operation that is read only.
    Leaf,
    /// The result of an operation.
    Result,
    /// A part of every row of a result.
    View,
}

/// What the checks need to know of a tensor.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub(super) kind: sys::ggml_type,
    pub(super) ne: [i64; 4],
    pub(super) role: Role,
    /// Whether elements lie without gaps.
    pub(super) contiguous: bool,
}

impl Facts {
    fn is_rows(&self) -> bool {
        self.kind == sys::GGML_TYPE_F32 && self.role != Role::Inputs && self.role != Role::Ids
    }
}

/// Fails unless ggml can make a tensor of this type and shape.
pub(super) fn check_shape(kind: sys::ggml_type, ne: [i64; 4]) -> Result<()> {
    const WRONG: Error = Error::Contract("a tensor of an impossible type or shape");
    if kind >= sys::GGML_TYPE_COUNT || ne.iter().any(|n| !(1..=MAX_COUNT).contains(n)) {
        return Err(WRONG);
    }
    // SAFETY: the type is in ggml's table.
    let (block, bytes) = unsafe { (sys::ggml_blck_size(kind), sys::ggml_type_size(kind)) };
    // Types that ggml has given up have blocks of 0 elements.
    if block <= 0 || bytes == 0 || ne[0] % block != 0 {
        return Err(WRONG);
    }
    let rows = ne[1..].iter().try_fold(1i64, |rows, &n| rows.checked_mul(n).filter(|&rows| rows <= MAX_COUNT));
    let row_bytes = i64::try_from(bytes).ok().and_then(|bytes| bytes.checked_mul(ne[0] / block));
    let all = rows.and_then(|rows| rows.checked_mul(row_bytes?.max(ne[0])));
    all.map(|_| ()).ok_or(WRONG)
}

/// Fails unless `op` can be computed from `sources` and gives f32 in shape `ne`. Returns below what the ids must stay.
pub(super) fn check_operation(
    op: sys::ggml_op,
    params: &OpParams,
    ne: [i64; 4],
    sources: [Option<Facts>; MAX_SOURCES],
) -> Result<i64> {
    let is_right = match (op, sources) {
        (sys::GGML_OP_MUL_MAT_ID, [Some(experts), Some(rows), Some(ids)]) => is_mul_mat_id(ne, experts, rows, ids),
        (sys::GGML_OP_ADD_ID, [Some(rows), Some(biases), Some(ids)]) => {
            let one_for_each = biases.is_rows() && biases.contiguous && biases.ne[2..] == [1, 1];
            let fits = biases.ne[0] == rows.ne[0] && is_flat(&ids) && rows.ne[1..] == [ids.ne[0], ids.ne[1], 1];
            rows.is_rows() && one_for_each && fits && ne == rows.ne
        }
        (sys::GGML_OP_GET_ROWS, [Some(from), Some(ids), None]) => {
            let fits = is_flat(&ids) && from.ne[2..] == [ids.ne[1], 1];
            from.is_rows() && fits && ne == [from.ne[0], ids.ne[0], ids.ne[1], 1]
        }
        (sys::GGML_OP_REPEAT, [Some(from), None, None]) => from.is_rows() && can_repeat(from.ne, ne),
        (sys::GGML_OP_GLU, [Some(a), b, None]) => is_glu(params, ne, a, b),
        (sys::GGML_OP_UNARY, [Some(a), None, None]) => {
            let is_known = u32::try_from(params[0]).is_ok_and(|op| op < sys::GGML_UNARY_OP_COUNT);
            is_known && a.is_rows() && ne == a.ne
        }
        (sys::GGML_OP_SCALE, [Some(a), None, None]) => a.is_rows() && a.contiguous && ne == a.ne,
        (sys::GGML_OP_SQR | sys::GGML_OP_CLAMP, [Some(a), None, None]) => a.is_rows() && ne == a.ne,
        (sys::GGML_OP_ADD | sys::GGML_OP_MUL, [Some(a), Some(b), None]) => {
            a.is_rows() && b.is_rows() && can_repeat(b.ne, a.ne) && ne == a.ne
        }
        _ => return Err(Error::Contract("an operation that no expert FFN has")),
    };
    if !is_right {
        return Err(Error::Contract("an operation whose sources do not fit it"));
    }
    let n_experts = match (op, sources) {
        (sys::GGML_OP_MUL_MAT_ID, [Some(experts), ..]) => experts.ne[2],
        (sys::GGML_OP_ADD_ID, [_, Some(biases), _]) => biases.ne[1],
        (sys::GGML_OP_GET_ROWS, [Some(from), ..]) => from.ne[1],
        _ => MAX_COUNT,
    };
    Ok(n_experts)
}

fn is_mul_mat_id(ne: [i64; 4], experts: Facts, rows: Facts, ids: Facts) -> bool {
    // Kernels make a table of every request for every expert.
    let n_places = ids.ne[0].checked_mul(ids.ne[1]).and_then(|n| n.checked_mul(experts.ne[2]));
    let is_small = n_places.is_some_and(|n| n <= MAX_COUNT);
    let is_weights = is_small && experts.role == Role::Leaf && has_dot_product(experts.kind) && experts.ne[3] == 1;
    let fits = is_flat(&ids)
        && rows.ne[3] == 1
        && rows.ne[2] == ids.ne[1]
        && ids.ne[0] % rows.ne[1] == 0
        && experts.ne[0] == rows.ne[0];
    is_weights && rows.is_rows() && fits && ne == [experts.ne[1], ids.ne[0], ids.ne[1], 1]
}

fn is_glu(params: &OpParams, ne: [i64; 4], a: Facts, b: Option<Facts>) -> bool {
    let is_known = u32::try_from(params[0]).is_ok_and(|op| op < sys::GGML_GLU_OP_COUNT);
    let fits = match b {
        Some(b) => b.is_rows() && b.ne == a.ne && ne == a.ne,
        // The kernels take the one half of a row by the other.
        None => a.ne[0] % 2 == 0 && ne == [a.ne[0] / 2, a.ne[1], a.ne[2], a.ne[3]],
    };
    is_known && a.is_rows() && fits
}

/// Whether a matrix of this type can be multiplied on the CPU: it has no product for the types below.
fn has_dot_product(kind: sys::ggml_type) -> bool {
    match kind {
        sys::GGML_TYPE_Q8_1 | sys::GGML_TYPE_Q8_K => false,
        sys::GGML_TYPE_F32 | sys::GGML_TYPE_F16 | sys::GGML_TYPE_BF16 => true,
        // SAFETY: the type is that of a tensor, so it is in ggml's table.
        _ => unsafe { sys::ggml_is_quantized(kind) },
    }
}

/// Whether it is the graph's ids: one row for each token.
fn is_flat(ids: &Facts) -> bool {
    ids.role == Role::Ids && ids.ne[2..] == [1, 1]
}

fn can_repeat(from: [i64; 4], to: [i64; 4]) -> bool {
    (0..4).all(|dim| to[dim] % from[dim] == 0)
}
