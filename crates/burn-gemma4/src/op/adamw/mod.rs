//! AdamW: the optimizer step of one parameter in one launch. Burn's operators need about twenty launches for each parameter.
//! The host takes longer to issue these launches than the device takes to run them.

mod formula;
#[cfg(feature = "cube")]
mod kernel;
#[cfg(feature = "cube")]
mod launch;
mod rounding;

pub use formula::AdamW;

use burn::tensor::{DType, Tensor, TensorData, bf16};
#[cfg(feature = "cube")]
use burn::{
    backend::{
        Backend, Dispatch, ExtensionType, TensorMetadata, backend_extension,
        fusion::custom::TensorSpec, tensor::FloatTensor,
    },
    tensor::Device,
};
use formula::Formula;
#[cfg(feature = "cube")]
use kernel::AT_ONCE;

/// The number of partial sums of squares, one per cube. 1,024 cubes keep any device busy.
#[cfg(feature = "cube")]
const PARTS: usize = 1024;

/// Computes the sum of squares over the elements of many tensors, in f32.
#[derive(Clone, Debug, Default)]
pub struct SumOfSquares {
    /// The partial sums, `[PARTS]`.
    #[cfg(feature = "cube")]
    parts: Option<Tensor<1>>,
    /// Tensors of one dtype whose squares are not yet in the partial sums. One launch adds up the squares of up to six
    /// tensors.
    #[cfg(feature = "cube")]
    waiting: Vec<FloatTensor<Dispatch>>,
    /// The sum of squares over tensors that the kernel does not support, `[1]`.
    rest: Option<Tensor<1>>,
}

impl SumOfSquares {
    /// Creates an empty sum.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the squares of a tensor's elements. Autodiff does not track the sum.
    pub fn with<const D: usize>(mut self, tensor: Tensor<D>) -> Self {
        let tensor = tensor.inner();
        #[cfg(feature = "cube")]
        if super::serve(&tensor) {
            let options = (&tensor.device(), DType::F32);
            self.parts
                .get_or_insert_with(|| Tensor::zeros([PARTS], options));
            let tensor = tensor.into_dispatch();
            let others = self.waiting.first().map(TensorMetadata::dtype);
            if others.is_some_and(|others| others != tensor.dtype()) {
                self.add_waiting();
            }
            self.waiting.push(tensor);
            if self.waiting.len() == AT_ONCE {
                self.add_waiting();
            }
            return self;
        }
        let squares = tensor.cast(DType::F32).square().sum();
        self.rest = Some(match self.rest.take() {
            Some(sum) => sum + squares,
            None => squares,
        });
        self
    }

    /// Launches a kernel that adds the squares of the tensors in `waiting` to the partial sums.
    #[cfg(feature = "cube")]
    fn add_waiting(&mut self) {
        let count = self.waiting.len();
        let (Some(first), Some(parts)) = (self.waiting.first().cloned(), self.parts.take()) else {
            return;
        };
        let mut waiting = self.waiting.drain(..);
        let mut next = || waiting.next().unwrap_or_else(|| first.clone());
        let gradients = SquaredGradients {
            first: next(),
            second: next(),
            third: next(),
            fourth: next(),
            fifth: next(),
            sixth: next(),
        };
        drop(waiting);
        let parts = Dispatch::add_squares(gradients, count, parts.into_dispatch());
        self.parts = Some(Tensor::from_dispatch(parts));
    }

    /// Returns the sum, `[1]`, or `None` if no tensor was added.
    pub fn sum(self) -> Option<Tensor<1>> {
        #[cfg(feature = "cube")]
        let (parts, rest) = {
            let mut all = self;
            all.add_waiting();
            (all.parts.map(Tensor::sum), all.rest)
        };
        #[cfg(not(feature = "cube"))]
        let (parts, rest) = (None::<Tensor<1>>, self.rest);
        match (parts, rest) {
            (Some(parts), Some(rest)) => Some(parts + rest),
            (parts, rest) => parts.or(rest),
        }
    }
}

/// Rounds f32 weights to a model's `dtype`. A bf16 weight is one of the two bf16 neighbors of the f32 weight. A fixed
/// pseudorandom threshold chooses the neighbor: see `rounding`. In other dtypes, weights round to nearest. Equal weights at
/// equal indices round equally on every device.
pub fn rounded<const D: usize>(weight: Tensor<D>, dtype: DType) -> Tensor<D> {
    if !drawn(dtype) {
        return weight.cast(dtype);
    }
    #[cfg(feature = "cube")]
    if serve(&weight.device(), [DType::F32, dtype]) {
        return Tensor::from_dispatch(Dispatch::round(weight.into_dispatch(), dtype));
    }
    let (shape, device) = (weight.dims(), weight.device());
    let data = weight.into_data();
    let weights = data.iter::<f32>().zip(0u32..);
    let shown = weights.map(|(weight, place)| bf16::from_f32(rounding::neighbour(weight, place)));
    let shown: Vec<bf16> = shown.collect();
    Tensor::from_data(TensorData::new(shown, shape), (&device, dtype))
}

/// True if weights of this dtype are rounded with pseudorandom thresholds: see [`rounding`].
fn drawn(dtype: DType) -> bool {
    dtype == DType::BF16
}

/// The optimizer state of a parameter, in f32.
#[derive(Clone, Debug)]
pub struct ParamUpdate<const D: usize> {
    /// The master weight.
    pub weight: Tensor<D>,
    /// The running mean of the gradients.
    pub mean: Tensor<D>,
    /// The running mean of the squared gradients.
    pub square: Tensor<D>,
}

impl AdamW {
    /// Updates a parameter by the step `number`, counted from 1. Returns the model's weight in `dtype`, rounded by
    /// [`rounded`], and the new state.
    ///
    /// If `factor` is 0, neither the weight nor the running means change, even if the gradient is NaN.
    ///
    /// # Shapes
    /// - `gradient`: the shape of the parameter, in any dtype.
    /// - `factor`: `[1]` in f32, which multiplies the gradient.
    ///
    /// All tensors are without autodiff.
    pub fn step<const D: usize>(
        &self,
        number: usize,
        rate: f64,
        gradient: Tensor<D>,
        factor: Tensor<1>,
        trained: ParamUpdate<D>,
        dtype: DType,
    ) -> (Tensor<D>, ParamUpdate<D>) {
        let formula = self.formula(number, rate);
        #[cfg(feature = "cube")]
        if serve(&gradient.device(), [gradient.dtype(), dtype]) {
            return by_kernel(gradient, factor, trained, formula, dtype);
        }
        // If the factor is 0, keep the old state. Multiplying the gradient by 0 would not skip the step, because 0 × NaN is
        // NaN.
        let trained = match factor.clone().into_scalar::<f32>() == 0.0 {
            true => trained,
            false => {
                let gradient = gradient.cast(DType::F32) * factor.reshape([1; D]);
                by_operators(gradient, trained, formula)
            }
        };
        (rounded(trained.weight.clone(), dtype), trained)
    }
}

/// Computes the step by Burn's operators, in the order of Burn's own AdamW.
fn by_operators<const D: usize>(
    gradient: Tensor<D>,
    trained: ParamUpdate<D>,
    by: Formula,
) -> ParamUpdate<D> {
    let mean = trained.mean * by.kept_mean + gradient.clone() * by.new_mean;
    let square = trained.square * by.kept_square + gradient.square() * by.new_square;
    let deviation = (square.clone() / by.of_square).sqrt() + by.epsilon;
    let step = mean.clone() / by.of_mean / deviation;
    ParamUpdate {
        weight: trained.weight * by.kept_weight - step * by.rate,
        mean,
        square,
    }
}

/// True if the device can run the kernels on two dtypes: the dtype of the kernel's input, and the dtype of the model's
/// weights.
#[cfg(feature = "cube")]
fn serve(device: &Device, dtypes: [DType; 2]) -> bool {
    dtypes.into_iter().all(|dtype| super::serves(device, dtype))
}

#[cfg(feature = "cube")]
fn by_kernel<const D: usize>(
    gradient: Tensor<D>,
    factor: Tensor<1>,
    trained: ParamUpdate<D>,
    formula: Formula,
    dtype: DType,
) -> (Tensor<D>, ParamUpdate<D>) {
    let ParamUpdate {
        weight,
        mean,
        square,
    } = trained;
    let [gradient, weight, mean, square] =
        [gradient, weight, mean, square].map(Tensor::into_dispatch);
    let factor = factor.into_dispatch();
    let tensor = Tensor::<D>::from_dispatch;
    if dtype == DType::F32 {
        let updated = Dispatch::adamw(gradient, factor, weight, mean, square, formula);
        let trained = ParamUpdate {
            weight: tensor(updated.weight),
            mean: tensor(updated.mean),
            square: tensor(updated.square),
        };
        return (trained.weight.clone(), trained);
    }
    let updated = Dispatch::adamw_rounded(gradient, factor, weight, mean, square, formula, dtype);
    let trained = ParamUpdate {
        weight: tensor(updated.weight),
        mean: tensor(updated.mean),
        square: tensor(updated.square),
    };
    (tensor(updated.rounded), trained)
}

/// The state of a parameter after a step, in f32.
#[cfg(feature = "cube")]
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Updated<B: Backend> {
    pub weight: FloatTensor<B>,
    pub mean: FloatTensor<B>,
    pub square: FloatTensor<B>,
}

/// The state of a parameter after a step, in f32, and the weight rounded to the model's dtype.
#[cfg(feature = "cube")]
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct Rounded<B: Backend> {
    pub rounded: FloatTensor<B>,
    pub weight: FloatTensor<B>,
    pub mean: FloatTensor<B>,
    pub square: FloatTensor<B>,
}

/// Gradients of one dtype. One launch adds up their squares.
#[cfg(feature = "cube")]
#[derive(ExtensionType, Debug)]
#[extension_type(fusion)]
pub struct SquaredGradients<B: Backend> {
    pub first: FloatTensor<B>,
    pub second: FloatTensor<B>,
    pub third: FloatTensor<B>,
    pub fourth: FloatTensor<B>,
    pub fifth: FloatTensor<B>,
    pub sixth: FloatTensor<B>,
}

/// The backend operators that run the kernels. An operator overwrites the state's buffers if no other handle shares
/// them.
#[cfg(feature = "cube")]
#[backend_extension(Cube, Fusion)]
pub trait UpdateBackend: Backend {
    /// Adds up the squares of the first `count` gradients: see [`SumOfSquares`].
    #[fusion(meta = |_gradients, _count, sums| sums.clone())]
    fn add_squares(
        #[extension_type] gradients: SquaredGradients<Self>,
        count: usize,
        sums: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// See [`rounded`].
    #[fusion(meta = |weight, dtype| TensorSpec::new(weight.shape.clone(), *dtype))]
    fn round(weight: FloatTensor<Self>, dtype: DType) -> FloatTensor<Self>;

    /// See [`AdamW::step`].
    #[fusion(meta = |_gradient, _factor, weight, mean, square, _formula| UpdatedMetadata {
        weight: weight.clone(),
        mean: mean.clone(),
        square: square.clone(),
    })]
    fn adamw(
        gradient: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        square: FloatTensor<Self>,
        formula: Formula,
    ) -> Updated<Self>;

    /// See [`AdamW::step`].
    #[fusion(meta = |_gradient, _factor, weight, mean, square, _formula, dtype| RoundedMetadata {
        rounded: TensorSpec::new(weight.shape.clone(), *dtype),
        weight: weight.clone(),
        mean: mean.clone(),
        square: square.clone(),
    })]
    fn adamw_rounded(
        gradient: FloatTensor<Self>,
        factor: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        mean: FloatTensor<Self>,
        square: FloatTensor<Self>,
        formula: Formula,
        dtype: DType,
    ) -> Rounded<Self>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::{Device, Distribution};

    fn devices() -> Vec<Device> {
        [
            #[cfg(feature = "flex")]
            Device::flex(),
            #[cfg(feature = "cube")]
            Device::default(),
        ]
        .into()
    }

    /// Returns each test device with each dtype that it supports.
    fn everywhere() -> Vec<(Device, DType)> {
        let dtypes = [DType::F32, DType::F16, DType::BF16];
        let of_device = |device: Device| dtypes.map(|dtype| (device.clone(), dtype));
        let all = devices().into_iter().flat_map(of_device);
        all.filter(|(device, dtype)| device.supports_dtype(*dtype))
            .collect()
    }

    const BY: AdamW = AdamW {
        betas: [0.9, 0.95],
        epsilon: 1e-8,
        decay: 0.1,
    };

    fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
        tensor.into_data().iter::<f64>().collect()
    }

    fn random(shape: [usize; 2], device: &Device) -> Tensor<2> {
        Tensor::random(shape, Distribution::Normal(0.0, 1.0), (device, DType::F32))
    }

    fn close(found: &[f64], expected: &[f64], tolerance: f64, what: &str) {
        assert_eq!(found.len(), expected.len(), "{what}");
        for (found, expected) in found.iter().zip(expected) {
            let error = (found - expected).abs();
            assert!(
                error <= tolerance * (1.0 + expected.abs()),
                "{what}: got {found}, expected {expected}"
            );
        }
    }

    /// A reference implementation of AdamW in f64, with the hyperparameters [`BY`].
    struct Reference {
        weight: Vec<f64>,
        mean: Vec<f64>,
        square: Vec<f64>,
    }

    impl Reference {
        fn step(&mut self, number: i32, rate: f64, gradient: &[f64]) {
            let [of_mean, of_square] = BY.betas.map(f64::from);
            for (index, g) in gradient.iter().enumerate() {
                let (m, v) = (&mut self.mean[index], &mut self.square[index]);
                *m = of_mean * *m + (1.0 - of_mean) * g;
                *v = of_square * *v + (1.0 - of_square) * g * g;
                let unbiased = *v / (1.0 - of_square.powi(number));
                let deviation = unbiased.sqrt() + f64::from(BY.epsilon);
                let step = *m / (1.0 - of_mean.powi(number)) / deviation;
                let w = &mut self.weight[index];
                *w -= rate * (f64::from(BY.decay) * *w + step);
            }
        }
    }

    /// Checks three AdamW steps against a reference in f64. The sizes require different vector widths. The gradients are
    /// not contiguous.
    #[test]
    fn step_matches_reference() {
        for (device, dtype) in everywhere() {
            for shape in [[3, 5], [1, 7], [70, 64]] {
                let [rows, columns] = shape;
                let mut weight = random(shape, &device).cast(dtype);
                let mut trained = ParamUpdate {
                    weight: weight.clone().cast(DType::F32),
                    mean: Tensor::zeros(shape, (&device, DType::F32)),
                    square: Tensor::zeros(shape, (&device, DType::F32)),
                };
                let zeros = vec![0.0; rows * columns];
                let mut reference = Reference {
                    weight: values(weight),
                    mean: zeros.clone(),
                    square: zeros,
                };
                for number in 1..4 {
                    let gradient = random([columns, rows], &device).cast(dtype).transpose();
                    let counted = values(gradient.clone()).into_iter().map(|g| g * 0.75);
                    reference.step(number as i32, 1e-2, &counted.collect::<Vec<_>>());
                    let factor = Tensor::from_data([0.75], (&device, DType::F32));
                    (weight, trained) = BY.step(number, 1e-2, gradient, factor, trained, dtype);
                    assert_eq!(weight.dtype(), dtype);
                    let what = format!("{dtype:?}, {shape:?}, step {number}");
                    let master = values(trained.weight.clone());
                    close(&master, &reference.weight, 1e-5, &what);
                    close(&values(trained.mean.clone()), &reference.mean, 1e-5, &what);
                    let square = values(trained.square.clone());
                    close(&square, &reference.square, 1e-5, &what);
                    let shown = rounded(trained.weight.clone(), dtype);
                    assert_eq!(values(weight.clone()), values(shown), "{what}");
                }
            }
        }
    }

    /// Checks that a step with a factor of 0 changes neither the weights nor the running means. The gradient contains NaN
    /// and infinities.
    #[test]
    fn step_with_factor_zero_is_skipped() {
        for (device, dtype) in everywhere() {
            let weight = random([70, 64], &device);
            let [mean, square] = [(); 2].map(|()| random([70, 64], &device).abs());
            let shown = values(rounded(weight.clone(), dtype));
            let before = [&weight, &mean, &square].map(|tensor| values(tensor.clone()));
            let trained = ParamUpdate {
                weight,
                mean,
                square,
            };
            let numbers = (0..70 * 64).map(|place| match place % 3 {
                0 => f32::NAN,
                1 => f32::INFINITY,
                _ => 1.0,
            });
            let gradient = TensorData::new(numbers.collect::<Vec<_>>(), [70, 64]);
            let gradient = Tensor::<2>::from_data(gradient, (&device, DType::F32)).cast(dtype);
            let factor = Tensor::from_data([0.0], (&device, DType::F32));
            let (found, trained) = BY.step(2, 1e-2, gradient, factor, trained, dtype);
            assert_eq!(values(found), shown, "{dtype:?}");
            let after = [trained.weight, trained.mean, trained.square].map(values);
            assert_eq!(after, before, "{dtype:?}");
        }
    }

    /// Checks that every device rounds f32 weights to bf16 with the same bits as the host, and to f16 to nearest.
    #[test]
    fn rounded_is_equal_on_all_devices() {
        for device in devices() {
            for dtype in [DType::F16, DType::BF16] {
                if !device.supports_dtype(dtype) {
                    continue;
                }
                for shape in [[3, 5], [70, 64]] {
                    let weight = random([shape[1], shape[0]], &device).transpose();
                    let of = values(weight.clone());
                    let expected: Vec<f64> = match dtype {
                        DType::BF16 => {
                            let of = of.iter().zip(0u32..);
                            of.map(|(weight, place)| {
                                f64::from(rounding::neighbour(*weight as f32, place))
                            })
                            .collect()
                        }
                        _ => values(weight.clone().cast(dtype)),
                    };
                    let found = rounded(weight, dtype);
                    assert_eq!(found.dtype(), dtype);
                    assert_eq!(values(found), expected, "{dtype:?}, {shape:?}");
                }
            }
        }
    }

    /// Checks that a step does not overwrite tensors that other handles share.
    #[test]
    fn step_keeps_shared_tensors() {
        for device in devices() {
            let [weight, gradient] = [(); 2].map(|()| random([4, 8], &device));
            let [mean, square] = [(); 2].map(|()| random([4, 8], &device).abs());
            let held = [&weight, &gradient, &mean, &square].map(|tensor| tensor.clone());
            let before = held.clone().map(values);
            let trained = ParamUpdate {
                weight,
                mean,
                square,
            };
            let factor = Tensor::from_data([1.0], (&device, DType::F32));
            let (stepped, _) = BY.step(1, 1e-2, gradient, factor, trained, DType::F32);
            assert_ne!(values(stepped), before[0]);
            assert_eq!(held.map(values), before);
        }
    }

    #[test]
    fn sum_of_squares_adds_all_tensors() {
        for device in devices() {
            let mut sum = SumOfSquares::new();
            assert!(sum.clone().sum().is_none());
            let mut expected = 0.0;
            // Use 27 tensors, so that several launches are needed: a launch takes at most six tensors, all of one
            // dtype. Tensors 10 to 19 are in f16 if the device supports f16.
            let shapes = [[1, 1], [3, 5], [300, 257], [1024, 640]].into_iter();
            for (index, shape) in shapes.cycle().take(27).enumerate() {
                let dtype = match index / 10 == 1 && device.supports_dtype(DType::F16) {
                    true => DType::F16,
                    false => DType::F32,
                };
                let tensor = random(shape, &device).cast(dtype);
                expected += values(tensor.clone()).iter().map(|x| x * x).sum::<f64>();
                sum = sum.with(tensor.transpose());
            }
            let found = values(sum.sum().expect("the sum has tensors"))[0];
            assert!(
                (found / expected - 1.0).abs() < 1e-5,
                "got {found}, expected {expected}"
            );
        }
    }
}
