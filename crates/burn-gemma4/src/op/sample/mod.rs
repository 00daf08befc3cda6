//! Draws of tokens where their logits are: what [`Sampler`](crate::Sampler) draws on the host, by the same random numbers.
//!
//! The host's is the definition. Here weights are whole numbers, whose sums are the same in any order; what they are rounded by is 2⁻⁴⁰ of the
//! likeliest token's weight.

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

    /// How tokens are drawn from logits that penalty and suppressed tokens have changed already.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Draw {
        /// Above 0.
        pub temperature: f32,
        /// Above 0.
        pub top_k: Option<u32>,
        /// In 2⁻³².
        pub top_p: Option<u32>,
        /// The least logarithm of a weight.
        pub least: f32,
    }

    /// Whether the kernels draw from logits of `dtype` for so many tokens.
    pub(crate) fn draws(device: &Device, dtype: DType, vocabulary: usize) -> bool {
        super::super::serves(device, dtype)
            && match device.as_dispatch() {
                DispatchDevice::Cube(device) => super::launch::serves(device, vocabulary),
                #[allow(
                    unreachable_patterns,
                    reason = "without other backends it is the only device"
                )]
                _ => false,
            }
    }

    /// The next token of each row of `[rows, vocabulary]`: `[rows]`, −1 for a row of which none can be drawn. `seeds`, `[2 · rows]`, are
    /// the lower and the upper words of each row's, and `positions`, `[rows]`, those of the tokens that were read last.
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

    /// `[rows, vocabulary]` in f32: logits of tokens that the text of their row has, divided by the penalty where they are positive, else
    /// multiplied. `seen` has a bit for each token, in words of 32, `[rows · words]`.
    pub(crate) fn penalize(logits: Tensor<2>, seen: Tensor<1, Int>, penalty: f32) -> Tensor<2> {
        Tensor::from_dispatch(Dispatch::penalize(
            logits.into_dispatch(),
            seen.into_dispatch(),
            penalty,
        ))
    }

    /// `[rows, vocabulary]` in f32, −∞ for tokens whose bits are set in `suppressed`, `[words]`.
    pub(crate) fn suppress(logits: Tensor<2>, suppressed: Tensor<1, Int>) -> Tensor<2> {
        Tensor::from_dispatch(Dispatch::suppress(
            logits.into_dispatch(),
            suppressed.into_dispatch(),
        ))
    }

    /// Sets the bit of one token a row, in place.
    pub(crate) fn mark(seen: Tensor<1, Int>, tokens: Tensor<1, Int>) -> Tensor<1, Int> {
        Tensor::from_dispatch(Dispatch::mark(seen.into_dispatch(), tokens.into_dispatch()))
    }

    /// The kernels as operators of a backend. The functions above say what they compute.
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
