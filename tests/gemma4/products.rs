//! Tests the GEMMs of linear layers and the gradients of these GEMMs, for any matrix size. The error of a result may be
//! at most twice the error of the exact result after one rounding. If a matrix is a slice, a GEMM must not read the
//! memory around the slice.

use crate::{devices::devices, fixture::values};
use burn::{
    module::Param,
    tensor::{DType, Device, Distribution, Tensor},
};
use burn_gemma4::layer::{Linear, Weight};

/// The shapes `[rows, inner, columns]` of the GEMMs. Some consist of whole tiles, some are smaller or larger than a
/// tile, and some have sizes that are no multiples of the tile size.
const SHAPES: [[usize; 3]; 5] = [
    [128, 64, 256],
    [2, 8, 8],
    [130, 72, 200],
    [260, 136, 520],
    [64, 1544, 72],
];

/// Returns a matrix whose elements `dtype` represents exactly. If `sliced` is true, the matrix is a slice of a larger matrix,
/// whose other elements are NaN.
fn matrix(shape: [usize; 2], sliced: bool, dtype: DType, device: &Device) -> Tensor<2> {
    let [rows, columns] = shape;
    let numbers = Tensor::<2>::random(shape, Distribution::Default, device) - 0.5;
    let numbers = numbers.cast(dtype);
    if !sliced {
        return numbers;
    }
    let around = Tensor::<2>::full([rows + 3, columns + 8], f32::NAN, (device, dtype));
    around
        .slice_assign([0..rows, 0..columns], numbers)
        .slice([0..rows, 0..columns])
}

/// Returns the output of a linear layer, and the gradients of the layer's input and weight.
fn outcome(input: Tensor<2>, weight: Tensor<2>, gradient: Tensor<2>) -> [Tensor<2>; 3] {
    let (input, weight) = (input.require_grad(), weight.require_grad());
    let linear = Linear::from(Weight::Whole(Param::from_tensor(weight)));
    let output = linear.forward(input.clone().unsqueeze()).squeeze_dim(0);
    let gradients = (output.clone() * gradient).sum().backward();
    let of_weight = linear.weight.val().grad(&gradients);
    [
        output.inner(),
        input.grad(&gradients).expect("of the input"),
        of_weight.expect("of the weight"),
    ]
}

#[test]
fn linear_output_and_gradients_are_rounded_once() {
    for device in devices() {
        for dtype in [DType::BF16, DType::F16] {
            if !device.computes_in(dtype) {
                continue;
            }
            device.device.seed(1);
            for [rows, inner, columns] in SHAPES {
                for sliced in [false, true] {
                    let tracked = device.device.clone().autodiff();
                    let exact = Device::flex().autodiff();
                    let operands = [[rows, inner], [columns, inner], [rows, columns]]
                        .map(|shape| matrix(shape, sliced, dtype, &device.device));
                    let [input, weight, gradient] = operands.each_ref().map(|operand| {
                        Tensor::<2>::from_data(operand.clone().into_data(), (&exact, DType::F32))
                    });
                    let expected = outcome(input, weight, gradient);
                    let [input, weight, gradient] =
                        operands.map(|operand| Tensor::from_inner(operand).to_device(&tracked));
                    let found = outcome(input, weight, gradient);
                    for (which, (found, expected)) in found.into_iter().zip(expected).enumerate() {
                        let rounded = values(expected.clone().cast(dtype).cast(DType::F32));
                        let (found, expected) = (values(found), values(expected));
                        let of = |values: &[f32]| {
                            let pairs = values.iter().zip(&expected);
                            let squares: f64 = pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum();
                            (squares / values.len() as f64).sqrt()
                        };
                        assert!(
                            of(&found) <= 2.0 * of(&rounded),
                            "{}, {dtype:?}, {:?}, sliced {sliced}, result {which}: error {:.2e}, error of rounding {:.2e}",
                            device.name,
                            [rows, inner, columns],
                            of(&found),
                            of(&rounded),
                        );
                    }
                }
            }
        }
    }
}
