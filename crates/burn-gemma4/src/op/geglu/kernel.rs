//! GeGLU, `gelu(gate) · through`, and its gradients. The tensor `through` is the output of the up projection.
//!
//! Budget: registers hold one vector of each tensor. Bound: memory bandwidth.

use cubecl::prelude::*;

/// Two constants of GELU's tanh approximation: √(2 / π), and the coefficient of x³.
const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044715;

/// A range of columns in a tensor: the first column of the range, and the distance between consecutive rows of the
/// tensor. Both are in units of vectors.
#[derive(CubeLaunch, CubeType, Clone, Copy)]
#[expand(derive(Clone, Copy))]
pub(super) struct GateUpColumns {
    pub start: u32,
    pub stride: u32,
}

#[cube]
fn place(row: u32, column: u32, columns: GateUpColumns) -> usize {
    row as usize * columns.stride as usize + (columns.start + column) as usize
}

/// Returns the tanh term of GELU's approximation, `tanh(√(2 / π) (x + 0.044715 x³))`.
#[cube]
fn bent<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let inner = (x + x * x * x * Vector::cast_from(CUBIC)) * Vector::cast_from(SQRT_2_OVER_PI);
    // Clamp the argument of tanh to ±15, because drivers may compute tanh through exponentials that overflow.
    inner
        .clamp(Vector::cast_from(-15.0f32), Vector::cast_from(15.0f32))
        .tanh()
}

/// Multiplies elements in f32, so that devices without arithmetic in the elements' dtype can run this function too.
/// Rounds each product once.
#[cube]
fn product<E: Float, N: Size>(lhs: Vector<E, N>, rhs: Vector<E, N>) -> Vector<E, N> {
    Vector::cast_from(Vector::<f32, N>::cast_from(lhs) * Vector::<f32, N>::cast_from(rhs))
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn gate<E: Float, N: Size>(
    gate: &Tensor<Vector<E, N>>,
    through: &Tensor<Vector<E, N>>,
    output: &mut Tensor<Vector<E, N>>,
    vectors: u32,
    of_row: u32,
    gate_columns: GateUpColumns,
    through_columns: GateUpColumns,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    if ABSOLUTE_POS < vectors as usize {
        let (row, column) = (ABSOLUTE_POS as u32 / of_row, ABSOLUTE_POS as u32 % of_row);
        let x = Vector::<f32, N>::cast_from(gate[place(row, column, gate_columns)]);
        let one = Vector::<f32, N>::cast_from(1.0f32);
        let open = x * (bent(x) + one) * Vector::cast_from(0.5f32);
        let passes = through[place(row, column, through_columns)];
        output[ABSOLUTE_POS] = product(Vector::cast_from(open), passes);
    }
}

/// Computes the gradients with respect to `gate` and `through`. Let `x` be an element of `gate`, and `t` the tanh term
/// of `x`. The derivative of GELU is `½ (1 + t) + ½ x (1 - t²) √(2 / π) (1 + 3 · 0.044715 x²)`.
#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn gate_gradients<E: Float, N: Size>(
    gate: &Tensor<Vector<E, N>>,
    through: &Tensor<Vector<E, N>>,
    gradient: &Tensor<Vector<E, N>>,
    of_gate: &mut Tensor<Vector<E, N>>,
    of_through: &mut Tensor<Vector<E, N>>,
    vectors: u32,
    #[define(E)] _element: ElemType,
    #[define(N)] _vector: usize,
) {
    if ABSOLUTE_POS < vectors as usize {
        let x = Vector::<f32, N>::cast_from(gate[ABSOLUTE_POS]);
        let one = Vector::<f32, N>::cast_from(1.0f32);
        let half = Vector::<f32, N>::cast_from(0.5f32);
        let t = bent(x);
        let open = x * (t + one) * half;
        // Clamp x to ±16, because squares of large x may overflow. The clamp does not change the gradient, because the
        // factor 1 - t² is 0 beyond ±16.
        let near = x.clamp(Vector::cast_from(-16.0f32), Vector::cast_from(16.0f32));
        let inner = (one + near * near * Vector::cast_from(3.0f32 * CUBIC))
            * Vector::cast_from(SQRT_2_OVER_PI);
        let slope = half * (one + t) + half * near * (one - t * t) * inner;
        let given = gradient[ABSOLUTE_POS];
        of_through[ABSOLUTE_POS] = product(Vector::cast_from(open), given);
        let of_open = Vector::<f32, N>::cast_from(product(through[ABSOLUTE_POS], given));
        of_gate[ABSOLUTE_POS] = Vector::cast_from(of_open * slope);
    }
}
