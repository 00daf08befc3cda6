//! Tests that every run of a call gives the same bits, whatever data other kernels left in memory.

use super::hopper_devices;
use crate::case::{Case, FULL};
use crate::compare::Named;
use crate::dense::Dense;
use crate::run::Operator;
use attention_cube::{CausalAlignment, attention_with_lse};
use burn::tensor::{DType, Int, Tensor};

/// Checks tiles that several heads of a GQA group share and that these heads do not fill. The unused rows of such a
/// tile hold data that other kernels left in memory. These data must not change the results.
#[test]
fn wgmma_shared_tiles_repeat_after_other_work() {
    let cases = [
        Case::new([1, 16, 4, 1, 5000, 256, 256]),
        Case {
            window: (Some(425), Some(88)),
            ..Case::new([1, 4, 2, 3, 799, 64, 64])
        },
        Case::new([1, 16, 2, 3, 799, 512, 512]),
        Case::new([2, 8, 1, 1, 3000, 128, 128]),
        Case::new([1, 128, 1, 1, 3000, 576, 512]),
        // A GQA group has ten heads in this case, so the last tile of a group holds fewer heads than the other tiles.
        Case::new([1, 10, 1, 30, 900, 320, 320]),
    ];
    for device in hopper_devices() {
        for case in &cases {
            let case = Case {
                dtype: DType::BF16,
                ..case.clone()
            };
            let inputs = case.inputs();
            let mut first: Option<Vec<Named>> = None;
            for round in 0..12 {
                // The call `other` has more queries than `case`, so the data of `other` also fill the rows that `case`
                // leaves unused. With an amplitude of 1e18, the QK products of `other` are infinite.
                let width = [case.head_dim, case.value_dim].map(|width| width.min(512));
                let other = Case {
                    dtype: DType::BF16,
                    lse_gradient: false,
                    amplitude: [1.0, 30.0, 1e18][round % 3],
                    ..Case::new([1, 150, 1, 200 + round, 300, width[0], width[1]])
                };
                let tracked = &device.device;
                let drawn = other.inputs();
                let [query, key, value] = [&drawn.query, &drawn.key, &drawn.value]
                    .map(|dense| dense.tensor(tracked, DType::BF16));
                let options = other.options(drawn.extras(tracked, DType::BF16));
                attention_with_lse(query, key, value, options)
                    .unwrap_or_else(|error| panic!("{other:?}: {error}"));
                let again = case.run(&inputs, &device.device, case.dtype, Operator::Fused);
                match &first {
                    None => first = Some(again),
                    Some(first) => {
                        for (first, again) in first.iter().zip(&again) {
                            let differ = first.values.iter().zip(&again.values);
                            let differ = differ.filter(|(a, b)| a.to_bits() != b.to_bits());
                            let (count, name) = (differ.count(), first.name);
                            assert_eq!(count, 0, "{name} in round {round} of {case:?}");
                        }
                    }
                }
            }
        }
    }
}

fn cases_to_repeat() -> Vec<Case> {
    let causal = Some(CausalAlignment::BottomRight);
    let documents = |tokens: i64| (0..tokens).map(|token| token / 70).collect::<Vec<_>>();
    let cases = [
        Case {
            causal,
            ..Case::new([3, 24, 8, 200, 200, 64, 64])
        },
        Case::new([3, 24, 8, 300, 300, 128, 128]),
        // The pipeline of this case has only one stage for biases. TMA must refill this stage only after the warps have
        // read the biases of a block.
        Case {
            bias: Some(FULL),
            ..Case::new([1, 2, 1, 140, 272, 128, 128])
        },
        // This case computes dV in a separate kernel. The kernel frees the pipeline stage of a block's biases as soon as it
        // has computed the block's probabilities.
        Case {
            bias: Some(FULL),
            ..Case::new([1, 4, 2, 300, 1000, 192, 192])
        },
        Case {
            bias: Some([false, true, true, true]),
            ..Case::new([1, 4, 2, 300, 1000, 192, 128])
        },
        Case {
            mask: Some([false, false, true, true]),
            bias: Some([false, true, true, true]),
            ..Case::new([1, 4, 2, 300, 504, 256, 256])
        },
        Case {
            causal,
            kv_lengths: Some(vec![150, 97, 140]),
            ..Case::new([3, 24, 8, 140, 150, 512, 512])
        },
        // Segments make some tiles take longer than others. The persistent CTAs fetch their next tile dynamically, so the
        // tiles of a CTA may differ from run to run.
        Case {
            causal,
            segments: Some((documents(3 * 300), documents(3 * 300))),
            ..Case::new([3, 24, 8, 300, 300, 128, 128])
        },
        Case {
            causal,
            segments: Some((documents(3 * 300), documents(3 * 300))),
            ..Case::new([3, 24, 8, 300, 300, 512, 512])
        },
        Case {
            causal,
            ..Case::new([2, 8, 1, 1, 3000, 512, 512])
        },
        Case {
            causal,
            ..Case::new([2, 8, 1, 2, 3000, 512, 512])
        },
    ];
    let in_half = |case| Case {
        dtype: DType::BF16,
        ..case
    };
    cases.map(in_half).into()
}

/// Runs each case once, and then `repeats` more times. Checks that each repetition gives the same bits as the first
/// run. If `of_gradients` is true, the check compares the gradients of a loss that depends on the output. Otherwise the
/// check compares the output and the logsumexp.
fn check_repeats(repeats: usize, of_gradients: bool, cases: Vec<Case>) {
    for device in hopper_devices() {
        for case in &cases {
            let inputs = case.inputs();
            let tracked = device.device.clone().autodiff();
            let tensor = |dense: &Dense| dense.tensor(&tracked, case.dtype);
            let operands = [&inputs.query, &inputs.key, &inputs.value].map(tensor);
            let output_gradient = tensor(&inputs.output_gradient);
            let run = || {
                let operands = operands.clone().map(Tensor::require_grad);
                let [query, key, value] = operands.clone();
                let extras = inputs.extras(&tracked, case.extras_dtype());
                let options = case.options(extras);
                let (output, logsumexp) = attention_with_lse(query, key, value, options)
                    .unwrap_or_else(|error| panic!("{case:?}: {error}"));
                if !of_gradients {
                    let logsumexp = logsumexp.unsqueeze_dim::<4>(3);
                    return vec![output.inner(), logsumexp.inner()];
                }
                let loss = (output * output_gradient.clone()).sum();
                let gradients = loss.backward();
                let gradient = |operand: &Tensor<4>| {
                    operand
                        .grad(&gradients)
                        .unwrap_or_else(|| panic!("{case:?}: no gradient"))
                };
                operands.iter().map(gradient).collect()
            };
            let first = run();
            let mut different = Tensor::<1, Int>::zeros([1], &device.device);
            for _ in 0..repeats {
                for (again, first) in run().into_iter().zip(&first) {
                    different = different + again.not_equal(first.clone()).int().sum();
                }
            }
            let different: i64 = different.into_scalar();
            assert_eq!(different, 0, "{case:?}");
        }
    }
}

/// Checks that a thousand runs of each forward give the same bits.
#[test]
fn wgmma_forward_repeats_are_identical() {
    check_repeats(1000, false, cases_to_repeat());
    // The pipeline of the next case has seven stages for eight chunks of values, so the last chunk reuses the first chunk's
    // stage.
    let case = Case {
        dtype: DType::BF16,
        ..Case::new([1, 128, 1, 3, 2000, 576, 512])
    };
    check_repeats(300, false, vec![case]);
}

/// Checks that two hundred runs of each case give the same gradients, bit by bit.
#[test]
fn wgmma_gradient_repeats_are_identical() {
    check_repeats(200, true, cases_to_repeat());
}
