//! Token sampling on the device. The kernels draw the same tokens as the
//! [`Sampler`](crate::generate::sampling::sampler::Sampler) on the host, from the same random numbers.
//!
//! On the device each token's weight is an integer, so that sums do not depend on the order of the additions. A weight
//! is rounded to a multiple of 2⁻⁴⁰ of the most likely token's weight.

#[cfg(feature = "cube")]
mod change;
#[cfg(feature = "cube")]
mod draw;
#[cfg(feature = "cube")]
mod launch;
pub(crate) mod random;
#[cfg(feature = "cube")]
mod search;
#[cfg(feature = "cube")]
mod section;
#[cfg(feature = "cube")]
mod weight;
#[cfg(feature = "cube")]
mod wide;

#[cfg(feature = "cube")]
pub(crate) use device::*;

#[cfg(feature = "cube")]
mod device {
    use burn::{
        backend::{
            Backend, Dispatch, DispatchDevice, backend_extension,
            fusion::custom::TensorSpec,
            tensor::{FloatTensor, IntTensor},
        },
        tensor::{DType, Device, Int, Shape, Tensor},
    };

    /// The sampling options. Penalties and suppressed tokens must already be applied to the logits.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Draw {
        /// The temperature, which is above 0.
        pub temperature: f32,
        /// The number of tokens that top-k keeps, which is above 0.
        pub top_k: Option<u32>,
        /// The total probability that top-p keeps, in units of 2⁻³².
        pub top_p: Option<u32>,
        /// The natural logarithm of min-p. A token is kept if its weight divided by the most likely token's weight is
        /// at least min-p.
        pub least: f32,
    }

    /// True if the kernels can draw from logits of `dtype` with this vocabulary size.
    pub(crate) fn draws(device: &Device, dtype: DType, vocabulary: usize) -> bool {
        super::super::serves(device, dtype)
            && match device.as_dispatch() {
                DispatchDevice::Cube(device) => super::launch::serves(device, vocabulary),
                #[allow(
                    unreachable_patterns,
                    reason = "with only the Cube backend, no other device exists"
                )]
                _ => false,
            }
    }

    /// Draws the next token of each row.
    ///
    /// # Shapes
    /// - `logits`: `[rows, vocabulary]`.
    /// - `seeds`: `[2 · rows]`, the lower and then the upper 32 bits of each row's seed.
    /// - `positions`: `[rows]`, the position of the last token in the text.
    /// - output: `[rows]`, with −1 for a row without a possible token.
    pub(crate) fn draw(
        logits: Tensor<2>,
        seeds: Tensor<1, Int>,
        positions: Tensor<1, Int>,
        options: Draw,
    ) -> Tensor<1, Int> {
        Tensor::from_dispatch(Dispatch::draw(
            logits.into_dispatch(),
            seeds.into_dispatch(),
            positions.into_dispatch(),
            options,
        ))
    }

    /// Applies the repetition penalty to the logits of tokens that the row's text contains. The output is
    /// `[rows, vocabulary]` in f32. `seen`, `[rows · words]`, holds a bit set for each row, with one bit per token of
    /// the vocabulary, in words of 32 bits.
    pub(crate) fn penalize(logits: Tensor<2>, seen: Tensor<1, Int>, penalty: f32) -> Tensor<2> {
        Tensor::from_dispatch(Dispatch::penalize(
            logits.into_dispatch(),
            seen.into_dispatch(),
            penalty,
        ))
    }

    /// Sets the logits of suppressed tokens to −∞. The output is `[rows, vocabulary]` in f32. `suppressed`, `[words]`,
    /// has one bit per token.
    pub(crate) fn suppress(logits: Tensor<2>, suppressed: Tensor<1, Int>) -> Tensor<2> {
        Tensor::from_dispatch(Dispatch::suppress(
            logits.into_dispatch(),
            suppressed.into_dispatch(),
        ))
    }

    /// Adds one token to each row's bit set, in place. `seen` is `[rows · words]`, and `tokens` is `[rows]`.
    pub(crate) fn mark(seen: Tensor<1, Int>, tokens: Tensor<1, Int>) -> Tensor<1, Int> {
        Tensor::from_dispatch(Dispatch::mark(seen.into_dispatch(), tokens.into_dispatch()))
    }

    /// The sampling kernels as operators of a backend. Each operator is documented at the function of this module that
    /// calls the operator.
    #[backend_extension(Cube, Fusion)]
    pub trait SampleBackend: Backend {
        #[fusion(meta = |logits, _seeds, _positions, _options| {
            TensorSpec::new(Shape::new([logits.shape[0]]), DType::I32)
        })]
        fn draw(
            logits: FloatTensor<Self>,
            seeds: IntTensor<Self>,
            positions: IntTensor<Self>,
            options: Draw,
        ) -> IntTensor<Self>;

        #[fusion(meta = |logits, _seen, _penalty| TensorSpec::new(logits.shape.clone(), DType::F32))]
        fn penalize(
            logits: FloatTensor<Self>,
            seen: IntTensor<Self>,
            penalty: f32,
        ) -> FloatTensor<Self>;

        #[fusion(meta = |logits, _suppressed| TensorSpec::new(logits.shape.clone(), DType::F32))]
        fn suppress(logits: FloatTensor<Self>, suppressed: IntTensor<Self>) -> FloatTensor<Self>;

        #[fusion(meta = |seen, _tokens| seen.clone())]
        fn mark(seen: IntTensor<Self>, tokens: IntTensor<Self>) -> IntTensor<Self>;
    }
}
