//! The loss at the head, in chunks of positions: the logits of all positions are never there at once. With it the losses of the
//! positions one by one, for who asks what a text costs.
//!
//! Gemma's vocabulary has 262,144 words, so that the logits of 8,192 positions take 8.6 GB in f32, their gradients as much
//! again. Here a chunk's logits become its part of the loss and of both gradients, of the hidden states and of the head's
//! matrix, while they are there (Wijmans et al. 2024, arXiv:2411.09009; Hsu et al. 2024, arXiv:2410.10989). The gradients
//! are ready when the backward begins, which only scales them, so that no logits are computed twice.

use crate::{
    Gemma4Error, Gemma4Model,
    op::{
        attach::attach,
        cross_entropy::cross_entropy,
        linear::{Matrix, columns, product, rows},
    },
};
use burn::tensor::{DType, Int, Tensor};

impl Gemma4Model {
    /// The mean cross entropy of `targets` `[batch, positions]` where the model is in the states `hidden`
    /// `[batch, positions, hidden]`, as one number in f32; what [`forward`](Self::forward) and a cross entropy give, without
    /// the memory of the logits, forward and backward.
    ///
    /// Negative targets do not count: padding, ends of documents, a prompt. Where none counts, the loss is 0.
    ///
    /// ```
    /// # use burn::tensor::{Device, Int, Tensor};
    /// # use burn_gemma4::{Gemma4Model, LoadOptions, Logits};
    /// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
    /// let device = Device::flex().autodiff();
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/embedded");
    /// let model = Gemma4Model::load(folder, &device, LoadOptions::new())?;
    /// let tokens = Tensor::<2, Int>::from_data([[2, 17, 5, 44]], &device);
    /// let next = Tensor::<2, Int>::from_data([[17, 5, 44, -1]], &device);
    /// let loss = model.loss(model.hidden(tokens, Logits::All)?, next)?;
    /// assert!(loss.clone().into_scalar::<f32>() > 0.0);
    /// let gradients = loss.backward();
    /// assert!(model.embed_tokens.weight.val().grad(&gradients).is_some());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Where the targets' shape is not that of the states, and where the states are tracked, the model has
    /// [quantized weights](crate::layer::Weight), and others of it than a low-rank adapter are to be trained. Targets beyond the vocabulary are not looked for.
    pub fn loss(
        &self,
        hidden: Tensor<3>,
        targets: Tensor<2, Int>,
    ) -> Result<Tensor<1>, Gemma4Error> {
        let [batch, positions, columns] = check(&hidden, &targets)?;
        if hidden.is_tracked() {
            self.refuse_training_quantized()?;
        }
        Ok(mean_cross_entropy(
            hidden.reshape([batch * positions, columns]),
            self.head(),
            targets.reshape([batch * positions]),
            self.config().final_logit_softcapping,
        ))
    }

    /// The cross entropy of each of `targets` `[batch, positions]`, in nats, where the model is in the states `hidden`
    /// `[batch, positions, hidden]`: `[batch, positions]` in f32, of which [`loss`](Self::loss) is the mean. It is 0 where a
    /// target is negative, which does not count. A constant, whatever the states are.
    ///
    /// ```
    /// # use burn::tensor::{Device, Int, Tensor};
    /// # use burn_gemma4::{Gemma4Model, LoadOptions, Logits};
    /// # fn main() -> Result<(), burn_gemma4::Gemma4Error> {
    /// let device = Device::flex();
    /// # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/embedded");
    /// let model = Gemma4Model::load(folder, &device, LoadOptions::new())?;
    /// let tokens = Tensor::<2, Int>::from_data([[2, 17, 5, 44]], &device);
    /// let next = Tensor::<2, Int>::from_data([[17, 5, 44, -1]], &device);
    /// let losses = model.token_losses(model.hidden(tokens, Logits::All)?, next)?;
    /// assert_eq!(losses.dims(), [1, 4]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Where the targets' shape is not that of the states. Targets beyond the vocabulary are not looked for.
    pub fn token_losses(
        &self,
        hidden: Tensor<3>,
        targets: Tensor<2, Int>,
    ) -> Result<Tensor<2>, Gemma4Error> {
        let [batch, positions, columns] = check(&hidden, &targets)?;
        let rows = hidden.inner().reshape([batch * positions, columns]);
        let texts = Texts {
            head: &self.head().inner(),
            targets: targets.inner().reshape([batch * positions]),
            softcap: self.config().final_logit_softcapping,
        };
        let chunks = texts.chunks(&rows, LOGITS_AT_ONCE / texts.head.rows());
        let losses: Vec<Tensor<1>> = chunks.map(|chunk| chunk.loss(false).0).collect();
        Ok(Tensor::cat(losses, 0).reshape([batch, positions]))
    }
}

/// The sizes of states, and that targets are of the same.
fn check(hidden: &Tensor<3>, targets: &Tensor<2, Int>) -> Result<[usize; 3], Gemma4Error> {
    let [batch, positions, columns] = hidden.dims();
    match targets.dims() == [batch, positions] {
        true => Ok([batch, positions, columns]),
        false => Err(Gemma4Error::Argument {
            argument: "targets",
            reason: format!(
                "has the shape {:?}, but the states are of {:?}",
                targets.dims(),
                [batch, positions]
            ),
        }),
    }
}

/// Logits that are in memory at once: 128 MB in half precision, which become their gradient. Without kernels there are up to four such
/// tensors in f32.
const LOGITS_AT_ONCE: usize = 1 << 26;

/// Rows that are in memory at once in f16: each adds up to a hidden state to the head's gradient, whose sum over a chunk's rows has to be below 65,504.
const ROWS_IN_F16: usize = 256;

/// The mean cross entropy of `targets` `[rows]` under the logits `hidden · headᵀ`, softcapped, in f32. `hidden` is
/// `[rows, columns]`, `head` `[words, columns]`. Negative targets do not count; where none counts, the loss is 0.
fn mean_cross_entropy(
    hidden: Tensor<2>,
    head: Matrix,
    targets: Tensor<1, Int>,
    softcap: Option<f64>,
) -> Tensor<1> {
    let words = head.rows();
    in_chunks(hidden, head, targets, softcap, LOGITS_AT_ONCE / words)
}

/// [`mean_cross_entropy`], `at_once` rows at a time.
fn in_chunks(
    hidden: Tensor<2>,
    head: impl Into<Matrix>,
    targets: Tensor<1, Int>,
    softcap: Option<f64>,
    at_once: usize,
) -> Tensor<1> {
    let head = head.into();
    let at_once = match hidden.dtype() {
        DType::F16 => at_once.min(ROWS_IN_F16),
        _ => at_once,
    };
    let tracked_head = head.tracked();
    let targets = targets.inner();
    let counts = targets.clone().greater_equal_elem(0).float();
    let share = counts.cast(DType::F32).sum().clamp_min(1.0).recip();
    let texts = Texts {
        head: &head.inner(),
        targets,
        softcap,
    };
    let constants = hidden.clone().inner();
    let is_tracked = hidden.is_tracked() || tracked_head.is_some();

    let mut loss = Tensor::<1>::zeros([1], (&constants.device(), DType::F32));
    let mut of_hidden = Vec::new();
    let mut of_head: Option<Tensor<2>> = None;
    for chunk in texts.chunks(&constants, at_once) {
        let (parts, gradient) = chunk.loss(is_tracked);
        loss = loss + parts.sum();
        let Some(gradient) = gradient else {
            continue;
        };
        if hidden.is_tracked() {
            of_hidden.push(columns(gradient.clone(), texts.head));
        }
        if tracked_head.is_some() {
            // A sum of many chunks keeps its digits in f32.
            let part = product(gradient.transpose(), chunk.hidden).cast(DType::F32);
            of_head = Some(match of_head {
                Some(sum) => sum + part,
                None => part,
            });
        }
    }

    let mean = |gradient: Tensor<2>, dtype: DType| {
        let mean = gradient.cast(DType::F32) * share.clone().unsqueeze::<2>();
        match dtype {
            // Of thousands of positions, a share is nothing in f16 before the loss's scale.
            DType::F16 => mean,
            _ => mean.cast(dtype),
        }
    };
    let mut loss = loss * share.clone();
    if !of_hidden.is_empty() {
        let gradient = mean(Tensor::cat(of_hidden, 0), hidden.dtype());
        loss = attach(loss, hidden, gradient);
    }
    if let (Some(head), Some(gradient)) = (tracked_head, of_head) {
        let gradient = mean(gradient, head.dtype());
        loss = attach(loss, head, gradient);
    }
    loss
}

/// What all rows have in common, all of it constants.
struct Texts<'a> {
    /// `[words, columns]`.
    head: &'a Matrix,
    /// `[rows]`, of which negative ones do not count.
    targets: Tensor<1, Int>,
    softcap: Option<f64>,
}

impl Texts<'_> {
    /// The rows `hidden` `[rows, columns]`, some at a time.
    fn chunks<'a>(
        &'a self,
        hidden: &'a Tensor<2>,
        at_once: usize,
    ) -> impl Iterator<Item = Chunk<'a>> {
        let [rows, _] = hidden.dims();
        let at_once = at_once.max(1);
        (0..rows).step_by(at_once).map(move |start| {
            let length = at_once.min(rows - start);
            Chunk {
                hidden: hidden.clone().narrow(0, start, length),
                head: self.head,
                targets: self.targets.clone().narrow(0, start, length),
                softcap: self.softcap,
            }
        })
    }
}

/// Some of the positions, as constants.
struct Chunk<'a> {
    /// `[rows, columns]`.
    hidden: Tensor<2>,
    /// `[words, columns]`.
    head: &'a Matrix,
    /// `[rows]`.
    targets: Tensor<1, Int>,
    softcap: Option<f64>,
}

impl Chunk<'_> {
    /// The losses `[rows]` in f32, and where it is asked for the gradient of their sum by the logits before their softcap,
    /// `[rows, words]` in the dtype of the model.
    fn loss(&self, with_gradient: bool) -> (Tensor<1>, Option<Tensor<2>>) {
        let logits = rows(self.hidden.clone(), self.head.clone());
        let targets = self.targets.clone();
        cross_entropy(logits, targets, self.softcap, with_gradient)
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::{Device, TensorData, activation::log_softmax};

    const POSITIONS: usize = 11;
    const WORDS: usize = 23;
    const TARGETS: [i32; POSITIONS] = [3, -1, 22, 0, 7, 7, -100, 1, 19, -1, 5];

    fn leaves(device: &Device) -> [Tensor<2>; 2] {
        [[POSITIONS, 6], [WORDS, 6]].map(|shape| {
            let values =
                (0..shape[0] * shape[1]).map(|index| ((7 * index * index) as f32).sin() * 1.5);
            let data = TensorData::new(values.collect(), shape);
            Tensor::from_data(data, device).require_grad()
        })
    }

    fn targets(device: &Device) -> Tensor<1, Int> {
        Tensor::from_data(TARGETS, device)
    }

    /// By Burn's own operations, with all logits at once.
    fn plain(hidden: Tensor<2>, head: Tensor<2>, softcap: Option<f64>) -> Tensor<1> {
        let device = hidden.device();
        let logits = hidden.matmul(head.transpose());
        let logits = match softcap {
            Some(cap) => (logits / cap).tanh() * cap,
            None => logits,
        };
        let counted: Vec<i32> = (0..POSITIONS as i32)
            .filter(|position| TARGETS[*position as usize] >= 0)
            .collect();
        let counted = Tensor::<1, Int>::from_data(&counted[..], &device);
        let targets = targets(&device).select(0, counted.clone()).unsqueeze_dim(1);
        -log_softmax(logits, 1)
            .select(0, counted)
            .gather(1, targets)
            .mean()
    }

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
        tensor.into_data().iter::<f32>().collect()
    }

    fn assert_close(found: Vec<f32>, expected: Vec<f32>, what: &str) {
        assert_eq!(found.len(), expected.len(), "{what}");
        for (found, expected) in found.into_iter().zip(expected) {
            let error = (found - expected).abs();
            assert!(error < 1e-5, "{what}: {found} instead of {expected}");
        }
    }

    #[test]
    fn is_the_loss_of_all_logits_with_its_gradients() {
        let device = Device::flex().autodiff();
        for device in [device.clone(), device.gradient_checkpointing()] {
            for softcap in [None, Some(2.0)] {
                // What comes after the loss scales the gradients.
                let [hidden, head] = leaves(&device);
                let expected = plain(hidden.clone(), head.clone(), softcap) * 3.0;
                let gradients = expected.backward();
                let of_leaves = [hidden, head].map(|leaf| leaf.grad(&gradients).expect("one"));
                let expected_gradients = of_leaves.map(values);
                for at_once in [1, 4, POSITIONS, 100] {
                    let what = format!("{softcap:?}, {at_once} at once");
                    let [hidden, head] = leaves(&device);
                    let targets = targets(&device);
                    let found =
                        in_chunks(hidden.clone(), head.clone(), targets, softcap, at_once) * 3.0;
                    let gradients = found.backward();
                    assert_close(values(found), values(expected.clone()), &what);
                    for (leaf, expected) in [hidden, head].into_iter().zip(&expected_gradients) {
                        let gradient = leaf.grad(&gradients).expect("a gradient");
                        assert_close(values(gradient), expected.clone(), &what);
                    }
                }
            }
        }
    }

    #[test]
    fn small_shares_outlive_f16() {
        let gradients = |dtype| {
            let device = Device::flex().autodiff();
            // The head's numbers are what a position's gradient is made of.
            let [hidden, head] = leaves(&device).map(|leaf| leaf.inner());
            let [hidden, head] = [hidden, head / 256].map(|leaf| leaf.cast(dtype));
            let times = 1 << 10;
            let [hidden, head] =
                [hidden.repeat_dim(0, times), head].map(|leaf| leaf.autodiff().require_grad());
            let targets = targets(&device).repeat_dim(0, times);
            let loss = in_chunks(hidden.clone(), head.clone(), targets, Some(30.0), 1 << 12);
            let gradients = (loss * 65536.0).backward();
            [hidden, head].map(|leaf| values(leaf.grad(&gradients).expect("a gradient")))
        };
        let (found, expected) = (gradients(DType::F16), gradients(DType::F32));
        for (found, expected) in found.into_iter().zip(expected) {
            let largest = expected
                .iter()
                .fold(0.0f32, |most, value| most.max(value.abs()));
            for (found, expected) in found.into_iter().zip(expected) {
                let error = (found - expected).abs();
                assert!(error < 4e-3 * largest, "{found} instead of {expected}");
            }
        }
    }

    /// Thousands of rows that all add up.
    #[test]
    fn large_sums_of_the_head_stay_finite_in_f16() {
        let device = Device::flex().autodiff();
        let rows = 1 << 14;
        let hidden = Tensor::<2>::full([rows, 4], 8.0, (&device, DType::F16));
        let head = Tensor::<2>::zeros([64, 4], (&device, DType::F16)).require_grad();
        let targets = Tensor::<1, Int>::zeros([rows], &device);
        let loss = in_chunks(hidden, head.clone(), targets, None, rows);
        let gradient = values(head.grad(&loss.backward()).expect("a gradient"));
        for (place, found) in gradient.into_iter().enumerate() {
            let expected = if place < 4 { -8.0 * 63.0 / 64.0 } else { 0.125 };
            assert!((found - expected).abs() < 1e-2, "{found}");
        }
    }

    /// As the tied table of embeddings is, which is in the hidden states, too.
    #[test]
    fn a_matrix_may_come_in_by_both_ways() {
        let device = Device::flex().autodiff();
        let gradient = |chunked: bool| {
            let [_, head] = leaves(&device);
            let hidden = head.clone().narrow(0, 2, POSITIONS).tanh();
            let loss = match chunked {
                true => in_chunks(hidden, head.clone(), targets(&device), Some(3.0), 4),
                false => plain(hidden, head.clone(), Some(3.0)),
            };
            let gradients = loss.backward();
            values(head.grad(&gradients).expect("a gradient"))
        };
        assert_close(gradient(true), gradient(false), "tied");
    }

    #[test]
    fn what_is_not_trained_gets_no_gradient() {
        let device = Device::flex().autodiff();
        let [hidden, head] = leaves(&device);
        let loss = in_chunks(hidden.clone(), head.detach(), targets(&device), None, 4);
        let gradients = loss.backward();
        assert!(hidden.grad(&gradients).is_some());

        let [hidden, head] = leaves(&device);
        let plain = in_chunks(hidden.inner(), head.inner(), targets(&device), None, 4);
        assert!(!plain.is_autodiff());
    }

    #[test]
    fn without_targets_that_count_it_is_0() {
        let device = Device::flex().autodiff();
        let [hidden, head] = leaves(&device);
        let none = Tensor::<1, Int>::from_data([-1; POSITIONS], &device);
        let loss = in_chunks(hidden.clone(), head, none, Some(30.0), 4);
        let gradients = loss.backward();
        assert_eq!(values(loss), [0.0]);
        let gradient = values(hidden.grad(&gradients).expect("a gradient"));
        assert!(gradient.iter().all(|value| *value == 0.0));
    }
}
