//! Tests that a GEMV with a fused residual addition gives the same results as two separate launches. The bits are the
//! same, unless the order of the additions differs. This order differs for rows with more vectors than a cube has
//! units, and for matrices that Hopper's batch kernel multiplies.

use super::{several_rows::surrounded, *};
use crate::op::residual::{Next, ResidualAdd, residual, residual_before};

/// Computes the expected results: the residual stream in one launch, and the GEMV in another launch.
fn apart(added: ResidualAdd, next: Option<Next>, factors: Factors) -> (Tensor<2>, Tensor<2>) {
    let (stream, input) = match next {
        None => {
            let stream = residual(added);
            (stream.clone(), stream)
        }
        Some(next) => {
            let (stream, normed) = residual_before(added, next);
            (stream, normed.expect("the kernels serve this dtype"))
        }
    };
    (stream, multiply(input, factors, Origin::Parameters))
}

/// Creates a random row with NaN in the memory around it, to detect a read beyond the row.
fn row(drawn: &Drawn<'_>, columns: usize) -> Tensor<2> {
    surrounded(&drawn.tensor([1, columns]))
}

fn parameter(drawn: &Drawn<'_>, columns: usize) -> Tensor<1> {
    drawn.tensor([columns])
}

/// Checks the fused GEMV against two launches, with and without a norm of the sum, and with and without a scalar
/// factor. `outputs` are the numbers of rows of the matrices. If `has_same_bits`, the results must have the same bits.
fn check_columns(drawn: &Drawn<'_>, columns: usize, outputs: [usize; 3], has_same_bits: bool) {
    let next = || {
        let scalar = || parameter(drawn, 1);
        let next = |scalar| Next {
            scalar,
            weight: parameter(drawn, columns),
        };
        [None, Some(next(None)), Some(next(Some(scalar())))]
    };
    let matrix = |rows| Matrix::from(surrounded(&drawn.tensor([rows, columns])));
    let through = drawn.tensor([1, 50]);
    let gate = || Factors::GateOf {
        gate: matrix(outputs[0]),
        through: through.clone(),
        start: 7,
    };
    let sides = || Factors::Concat(outputs.map(matrix).to_vec());
    for (next, factors) in next()
        .into_iter()
        .flat_map(|next| [(next.clone(), gate()), (next, sides())])
    {
        let added = ResidualAdd {
            stream: row(drawn, columns),
            added: row(drawn, columns),
            weight: parameter(drawn, columns),
            epsilon: 1e-6,
        };
        let what = format!(
            "{columns} columns in {:?}, with norm: {}",
            drawn.dtype,
            next.is_some()
        );
        let expected = apart(added.clone(), next.clone(), factors.clone());
        for origin in [Origin::Parameters, Origin::Computed, Origin::Parameters] {
            let (added, next) = (added.clone(), next.clone());
            let found = multiply_after_residual(added, next, factors.clone(), origin);
            for (found, expected) in [(found.0, &expected.0), (found.1, &expected.1)] {
                assert_eq!(found.dims(), expected.dims(), "{what}");
                if has_same_bits {
                    assert_eq!(values(&found), values(expected), "{what}");
                }
                let rounding = drawn.dtype.finfo().expect("the dtype is a float").epsilon;
                check(&found, &values(expected), 4.0 * rounding, &what);
            }
        }
    }
}

#[test]
fn multiply_after_residual_matches_separate_launches() {
    let device = Device::default();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        if !crate::op::serves(&device, dtype) {
            continue;
        }
        let drawn = Drawn {
            device: &device,
            dtype,
        };
        for (columns, has_same_bits) in [(1536, true), (512, true), (160, true), (9216, false)] {
            check_columns(&drawn, columns, [37, 5, 70], has_same_bits);
        }
        let has_same_bits = !crate::op::is_hopper(&device);
        check_columns(&drawn, 1536, [40, 8, 72], has_same_bits);
    }
}
