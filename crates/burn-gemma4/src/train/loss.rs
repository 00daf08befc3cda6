//! The cross entropy at the head, computed in chunks of positions. This module also computes the loss of each position,
//! for evaluation.
//!
//! Gemma's vocabulary has 262,144 tokens. The logits of 8,192 positions take 8.6 GB in f32, and their gradients another
//! 8.6 GB. The forward therefore computes the logits in chunks of positions. As soon as a chunk's loss and gradients
//! are computed, the forward drops the chunk's logits.
//!
//! The gradients are complete before the backward begins. The backward only scales the gradients. The method follows
//! Wijmans et al. 2024, arXiv:2411.09009, and Hsu et al. 2024, arXiv:2410.10989.
//!
//! In shapes, `rows` counts positions and `columns` is the hidden size.

use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use crate::model::layer::ActivationScales;
use crate::op::attach::attach;
use crate::op::cross_entropy::cross_entropy;
use crate::op::linear::{Matrix, columns, product, rows};
use burn::tensor::{DType, Int, Tensor};

impl Gemma4Model {
    /// Computes the mean cross entropy between `targets` and the logits of the hidden states `hidden`, in f32.
    ///
    /// The logits of all positions are never in memory at once. Negative targets do not count: they mark padding, ends
    /// of documents or a prompt. The loss is 0 if no target counts.
    ///
    /// # Shapes
    /// - `hidden`: `[batch, positions, hidden]`
    /// - `targets`: `[batch, positions]`
    /// - loss: `[1]`, in nats
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
    /// Returns an error if the shape of the targets does not match the hidden states. Returns an error if autodiff
    /// tracks the model, the model has [quantized weights](crate::model::layer::Weight), and parameters outside a LoRA
    /// adapter are trained. Targets beyond the vocabulary are not detected.
    pub fn loss(
        &self,
        hidden: Tensor<3>,
        targets: Tensor<2, Int>,
    ) -> Result<Tensor<1>, Gemma4Error> {
        let [batch, positions, columns] = check(&hidden, &targets)?;
        if hidden.is_tracked() {
            self.check_trainable()?;
        }
        if self.is_mobile {
            let counts = targets.clone().inner().greater_equal_elem(0).float();
            let counts = counts.cast(DType::F32).sum().clamp_min(1.0);
            return Ok(self.token_losses(hidden, targets)?.sum() / counts);
        }
        Ok(mean_cross_entropy(
            hidden.reshape([batch * positions, columns]),
            self.head(),
            targets.reshape([batch * positions]),
            self.config().final_logit_softcapping,
        ))
    }

    /// Computes the cross entropy of each target given the hidden states `hidden`, in nats.
    ///
    /// The loss of a negative target is 0. [`loss`](Self::loss) returns the mean over all other targets. The result is
    /// never tracked by autodiff.
    ///
    /// # Shapes
    /// - `hidden`: `[batch, positions, hidden]`
    /// - `targets`: `[batch, positions]`
    /// - losses: `[batch, positions]`, f32
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
    /// Returns an error if the shape of the targets does not match the hidden states. Targets beyond the vocabulary are
    /// not detected.
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
            scales: self
                .lm_head
                .as_ref()
                .and_then(|head| head.activation_scales),
        };
        let chunks = texts.chunks(&rows, LOGITS_AT_ONCE / texts.head.rows());
        let losses: Vec<Tensor<1>> = chunks.map(|chunk| chunk.loss(false).0).collect();
        Ok(Tensor::cat(losses, 0).reshape([batch, positions]))
    }
}

/// Checks that the shape of the targets matches the hidden states. Returns the sizes of the hidden states.
fn check(hidden: &Tensor<3>, targets: &Tensor<2, Int>) -> Result<[usize; 3], Gemma4Error> {
    let [batch, positions, columns] = hidden.dims();
    match targets.dims() == [batch, positions] {
        true => Ok([batch, positions, columns]),
        false => Err(Gemma4Error::Argument {
            argument: "targets",
            reason: format!(
                "has the shape {:?}, but the states have {:?}",
                targets.dims(),
                [batch, positions]
            ),
        }),
    }
}

/// The maximum number of logits in memory at once: 128 MB in half precision. With fused kernels, the gradient
/// overwrites the logits. Without fused kernels, up to four f32 tensors of this size exist at once.
const LOGITS_AT_ONCE: usize = 1 << 26;

/// The maximum number of positions per chunk if the logits are f16. A row of the head's gradient is a sum over
/// positions. Each position adds at most its hidden state to this sum. The sum over 256 positions stays below f16's
/// maximum, 65,504, if all hidden states are below 255.
const ROWS_IN_F16: usize = 256;

/// Computes the mean cross entropy between `targets`, `[rows]`, and the softcapped logits `hidden · headᵀ`, in f32.
/// `hidden` is `[rows, columns]`, and `head` is `[vocabulary, columns]`. Negative targets do not count. The loss is 0
/// if no target counts.
fn mean_cross_entropy(
    hidden: Tensor<2>,
    head: Matrix,
    targets: Tensor<1, Int>,
    softcap: Option<f64>,
) -> Tensor<1> {
    let words = head.rows();
    in_chunks(hidden, head, targets, softcap, LOGITS_AT_ONCE / words)
}

/// Computes the same loss as [`mean_cross_entropy`], in chunks of `at_once` rows.
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
        scales: None,
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
            // The head's gradient is the sum of the gradients of all chunks of positions. Compute this sum in f32, to
            // keep precision over many chunks.
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
            // In an f16 model, keep the gradient in f32. The mean divides the gradient by the number of positions, and
            // the quotient would underflow in f16.
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

/// The inputs that all chunks of positions have in common. The tensors are constants without autodiff.
struct Texts<'a> {
    /// The head's weight matrix, `[vocabulary, columns]`.
    head: &'a Matrix,
    /// The targets, `[rows]`. Negative targets do not count.
    targets: Tensor<1, Int>,
    softcap: Option<f64>,
    /// The static scales of the head's input and output, or `None` if nothing is rounded.
    scales: Option<ActivationScales>,
}

impl Texts<'_> {
    /// Splits `hidden`, `[rows, columns]`, and the targets into chunks of `at_once` rows.
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
                scales: self.scales,
            }
        })
    }
}

/// The hidden states and targets of one chunk of positions. The tensors are constants without autodiff.
struct Chunk<'a> {
    /// The hidden states, `[rows, columns]`.
    hidden: Tensor<2>,
    /// The head's weight matrix, `[vocabulary, columns]`.
    head: &'a Matrix,
    /// The targets, `[rows]`.
    targets: Tensor<1, Int>,
    softcap: Option<f64>,
    scales: Option<ActivationScales>,
}

impl Chunk<'_> {
    /// Returns the losses `[rows]` in f32. If requested, also returns the gradient of the summed losses with respect to
    /// the logits before the softcap, `[rows, vocabulary]` in the model's dtype.
    fn loss(&self, with_gradient: bool) -> (Tensor<1>, Option<Tensor<2>>) {
        let project = |hidden| rows(hidden, self.head.clone());
        let logits = ActivationScales::rounded(self.scales, self.hidden.clone(), project);
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

    /// Computes the expected loss with Burn's own operations, from all logits at once.
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
    fn in_chunks_equals_loss_and_gradients_of_all_logits() {
        let device = Device::flex().autodiff();
        for device in [device.clone(), device.gradient_checkpointing()] {
            for softcap in [None, Some(2.0)] {
                // Multiply the loss by 3, to check that the backward scales the finished gradients by 3.
                let [hidden, head] = leaves(&device);
                let expected = plain(hidden.clone(), head.clone(), softcap) * 3.0;
                let gradients = expected.backward();
                let of_leaves = [hidden, head]
                    .map(|leaf| leaf.grad(&gradients).expect("the leaf has a gradient"));
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
                        let gradient = leaf.grad(&gradients).expect("the leaf has a gradient");
                        assert_close(values(gradient), expected.clone(), &what);
                    }
                }
            }
        }
    }

    #[test]
    fn in_chunks_with_small_shares_keeps_gradients_in_f16() {
        let gradients = |dtype| {
            let device = Device::flex().autodiff();
            // Divide the head by 256 to make the gradients of the hidden states small. These gradients are linear
            // combinations of the head's rows.
            let [hidden, head] = leaves(&device).map(|leaf| leaf.inner());
            let [hidden, head] = [hidden, head / 256].map(|leaf| leaf.cast(dtype));
            let times = 1 << 10;
            let [hidden, head] =
                [hidden.repeat_dim(0, times), head].map(|leaf| leaf.autodiff().require_grad());
            let targets = targets(&device).repeat_dim(0, times);
            let loss = in_chunks(hidden.clone(), head.clone(), targets, Some(30.0), 1 << 12);
            let gradients = (loss * 65536.0).backward();
            [hidden, head]
                .map(|leaf| values(leaf.grad(&gradients).expect("the leaf has a gradient")))
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

    /// Checks that the head's gradient does not overflow in f16. The gradients of 16,384 equal rows have the same sign,
    /// so their sum before the mean exceeds the largest f16.
    #[test]
    fn in_chunks_with_large_head_gradient_stays_finite_in_f16() {
        let device = Device::flex().autodiff();
        let rows = 1 << 14;
        let hidden = Tensor::<2>::full([rows, 4], 8.0, (&device, DType::F16));
        let head = Tensor::<2>::zeros([64, 4], (&device, DType::F16)).require_grad();
        let targets = Tensor::<1, Int>::zeros([rows], &device);
        let loss = in_chunks(hidden, head.clone(), targets, None, rows);
        let gradient = values(
            head.grad(&loss.backward())
                .expect("the leaf has a gradient"),
        );
        for (place, found) in gradient.into_iter().enumerate() {
            let expected = if place < 4 { -8.0 * 63.0 / 64.0 } else { 0.125 };
            assert!((found - expected).abs() < 1e-2, "{found}");
        }
    }

    /// Checks the gradient of an embedding table that is also the head. The gradients through the head and through the
    /// hidden states add up.
    #[test]
    fn in_chunks_with_head_inside_hidden_adds_both_gradients() {
        let device = Device::flex().autodiff();
        let gradient = |chunked: bool| {
            let [_, head] = leaves(&device);
            let hidden = head.clone().narrow(0, 2, POSITIONS).tanh();
            let loss = match chunked {
                true => in_chunks(hidden, head.clone(), targets(&device), Some(3.0), 4),
                false => plain(hidden, head.clone(), Some(3.0)),
            };
            let gradients = loss.backward();
            values(head.grad(&gradients).expect("the leaf has a gradient"))
        };
        assert_close(gradient(true), gradient(false), "tied");
    }

    #[test]
    fn in_chunks_with_frozen_tensors_gives_no_gradient() {
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
    fn in_chunks_without_counted_targets_gives_zero() {
        let device = Device::flex().autodiff();
        let [hidden, head] = leaves(&device);
        let none = Tensor::<1, Int>::from_data([-1; POSITIONS], &device);
        let loss = in_chunks(hidden.clone(), head, none, Some(30.0), 4);
        let gradients = loss.backward();
        assert_eq!(values(loss), [0.0]);
        let gradient = values(hidden.grad(&gradients).expect("the leaf has a gradient"));
        assert!(gradient.iter().all(|value| *value == 0.0));
    }
}
