//! Cross entropy of rows of logits, and its gradient, in one launch.
//!
//! Burn's operators make some fifteen passes over the logits in f32. On an H100, Burn's cross entropy of 256 rows of 262,144
//! columns took 52 ms. The reductions took 36 ms of this time.

#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
#[cfg(all(test, feature = "cube"))]
mod tests;

use burn::tensor::{DType, Int, Tensor, activation::log_softmax};
#[cfg(feature = "cube")]
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, backend_extension,
        fusion::custom::TensorSpec,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::Shape,
};

/// Computes the cross entropy of `targets` under `logits`. If `with_gradient` is true, also computes the gradient. If
/// there is a `cap`, the logits are first soft-capped to `cap · tanh(logit / cap)`. Autodiff does not track the
/// results.
///
/// # Shapes
/// - `logits`: `[rows, words]`, where `words` is the size of the vocabulary.
/// - `targets`: `[rows]`. The loss and the gradient of a row with a negative target are 0. The function does not check
///   that targets are below `words`.
/// - losses: `[rows]` in f32, computed with natural logarithms.
/// - gradient: `[rows, words]` in the dtype of `logits`. The gradient is that of the sum of the losses with respect to
///   the logits before the soft cap. If no other handle shares the logits' buffer, the gradient overwrites the logits.
pub(crate) fn cross_entropy(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    cap: Option<f64>,
    with_gradient: bool,
) -> (Tensor<1>, Option<Tensor<2>>) {
    #[cfg(feature = "cube")]
    if super::serve(&logits) {
        let (logits, targets) = (logits.into_dispatch(), targets.into_dispatch());
        let cap = cap.map(|cap| cap as f32);
        if !with_gradient {
            let losses = Dispatch::cross_entropy_losses(logits, targets, cap);
            return (Tensor::from_dispatch(losses), None);
        }
        let CrossEntropy { losses, gradient } = Dispatch::cross_entropy(logits, targets, cap);
        return (
            Tensor::from_dispatch(losses),
            Some(Tensor::from_dispatch(gradient)),
        );
    }
    by_operators(logits, targets, cap, with_gradient)
}

/// Computes [`cross_entropy`] by Burn's operators.
fn by_operators(
    logits: Tensor<2>,
    targets: Tensor<1, Int>,
    cap: Option<f64>,
    with_gradient: bool,
) -> (Tensor<1>, Option<Tensor<2>>) {
    let (dtype, device) = (logits.dtype(), logits.device());
    let words = logits.dims()[1];
    let counts_nothing = targets.clone().lower_elem(0).unsqueeze_dim::<2>(1);
    let targets = targets.clamp_min(0).unsqueeze_dim::<2>(1);
    let logits = logits.cast(DType::F32);
    let (logits, bounded) = match cap {
        Some(cap) => {
            let bounded = (logits / cap).tanh();
            (bounded.clone() * cap, Some(bounded))
        }
        None => (logits, None),
    };
    let logarithms = log_softmax(logits, 1);
    let of_targets = logarithms.clone().gather(1, targets.clone());
    let losses = (-of_targets).mask_fill(counts_nothing.clone(), 0.0);
    let losses = losses.squeeze_dim(1);
    if !with_gradient {
        return (losses, None);
    }
    let numbers = Tensor::<1, Int>::arange(0..words as i64, &device).unsqueeze_dim::<2>(0);
    let is_target = numbers.equal(targets);
    let gradient = logarithms.exp() - is_target.float().cast(DType::F32);
    let gradient = match bounded {
        Some(bounded) => gradient * (1.0 - bounded.square()),
        None => gradient,
    };
    let counts_nothing = counts_nothing.expand(gradient.shape());
    let gradient = gradient.mask_fill(counts_nothing, 0.0);
    (losses, Some(gradient.cast(dtype)))
}

/// The losses, and the gradient of their sum with respect to the logits.
#[cfg(feature = "cube")]
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct CrossEntropy<B: Backend> {
    pub losses: FloatTensor<B>,
    pub gradient: FloatTensor<B>,
}

/// The backend operators that run the kernel.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Fusion)]
pub trait CrossEntropyBackend: Backend {
    /// Computes [`cross_entropy`] with the gradient.
    #[fusion(meta = |logits, _targets, _cap| CrossEntropyMetadata {
        losses: TensorSpec::new(Shape::new([logits.shape[0]]), DType::F32),
        gradient: logits.clone(),
    })]
    fn cross_entropy(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        cap: Option<f32>,
    ) -> CrossEntropy<Self>;

    /// Computes [`cross_entropy`] without the gradient.
    #[fusion(meta = |logits, _targets, _cap| TensorSpec::new(Shape::new([logits.shape[0]]), DType::F32))]
    fn cross_entropy_losses(
        logits: FloatTensor<Self>,
        targets: IntTensor<Self>,
        cap: Option<f32>,
    ) -> FloatTensor<Self>;
}
