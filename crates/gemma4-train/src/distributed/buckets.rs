//! Packs gradients into buckets, so that one all-reduce call covers many parameters.

use burn::{
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{DType, Tensor},
};
use std::iter::Peekable;

/// The smallest number of elements per bucket. A bucket may have fewer if it is the last one, or if the next gradient
/// has another dtype.
pub const BUCKET: usize = 1 << 25;

/// Returns the sums of `losses`, `[count]`, and of the gradients over all participants. The function `sum` sums one
/// bucket over all participants, and is called once per bucket. A bucket is full when it has at least `size` elements,
/// or when the next gradient has another dtype.
pub fn sum_in_buckets(
    losses: Tensor<1>,
    mut gradients: GradientsParams,
    model: &impl Module,
    size: usize,
    sum: impl Fn(Tensor<1>) -> Tensor<1>,
) -> (Tensor<1>, GradientsParams) {
    let mut pack = Pack {
        gradients: &mut gradients,
        size,
        buckets: Vec::new(),
        parameters: Vec::new(),
    };
    pack.push(losses);
    model.visit(&mut pack);
    let Pack {
        buckets,
        parameters,
        ..
    } = pack;
    let mut parts = Vec::new();
    for bucket in buckets {
        let lengths: Vec<usize> = bucket.parts.iter().map(|part| part.dims()[0]).collect();
        let summed = sum(Tensor::cat(bucket.parts, 0));
        let mut start = 0;
        for length in lengths {
            parts.push(summed.clone().narrow(0, start, length));
            start += length;
        }
    }
    let mut parts = parts.into_iter();
    let losses = parts.next().expect("the losses are the first part");
    let mut unpack = Unpack {
        gradients: GradientsParams::new(),
        packed: parameters.into_iter().zip(parts).peekable(),
    };
    model.visit(&mut unpack);
    (losses, unpack.gradients)
}

/// A bucket: flattened gradients of one dtype, which are summed in one call.
struct Bucket {
    parts: Vec<Tensor<1>>,
    dtype: DType,
    numbers: usize,
}

struct Pack<'a> {
    gradients: &'a mut GradientsParams,
    size: usize,
    buckets: Vec<Bucket>,
    /// The identifiers of the parameters whose gradients are in the buckets, in the order of the buckets.
    parameters: Vec<ParamId>,
}

impl Pack<'_> {
    fn push(&mut self, part: Tensor<1>) {
        let (dtype, numbers) = (part.dtype(), part.dims()[0]);
        let open = |bucket: &&mut Bucket| bucket.dtype == dtype && bucket.numbers < self.size;
        match self.buckets.last_mut().filter(open) {
            Some(bucket) => {
                bucket.parts.push(part);
                bucket.numbers += numbers;
            }
            None => self.buckets.push(Bucket {
                parts: vec![part],
                dtype,
                numbers,
            }),
        }
    }
}

impl ModuleVisitor for Pack<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.gradients.remove::<D>(param.id) {
            let numbers = gradient.dims().iter().product::<usize>();
            self.push(gradient.reshape([numbers]));
            self.parameters.push(param.id);
        }
    }
}

/// A module visitor that splits the summed buckets into gradients again, in the order in which [`Pack`] packed them.
struct Unpack<P: Iterator<Item = (ParamId, Tensor<1>)>> {
    gradients: GradientsParams,
    packed: Peekable<P>,
}

impl<P: Iterator<Item = (ParamId, Tensor<1>)>> ModuleVisitor for Unpack<P> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some((id, gradient)) = self.packed.next_if(|(id, _)| *id == param.id) {
            let shape: [usize; D] = param.lazy_shape().dims();
            self.gradients.register(id, gradient.reshape(shape));
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::Device;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn sum_in_buckets_returns_every_gradient() {
        let device = Device::flex();
        let weight = |values: [[f32; 2]; 2], dtype| {
            Param::from_tensor(Tensor::<2>::from_data(values, (&device, DType::F32)).cast(dtype))
        };
        let model = vec![
            weight([[1.0, 2.0], [3.0, 4.0]], DType::F32),
            weight([[0.0; 2]; 2], DType::F32),
            weight([[5.0, 6.0], [7.0, 8.0]], DType::F32),
            weight([[9.0, 10.0], [11.0, 12.0]], DType::BF16),
        ];
        for size in [1, 5, 1000] {
            let mut gradients = GradientsParams::new();
            // No gradient is registered for the second parameter, so the buckets must skip this parameter.
            for param in [0, 2, 3].map(|index| &model[index]) {
                gradients.register(param.id, param.val());
            }
            let exchanges = AtomicUsize::new(0);
            let double = |bucket: Tensor<1>| {
                exchanges.fetch_add(1, Ordering::SeqCst);
                bucket.mul_scalar(2.0)
            };
            let loss = Tensor::<1>::from_data([0.5], (&device, DType::F32));
            let (loss, gradients) = sum_in_buckets(loss, gradients, &model, size, double);
            let expected = if size == 1 {
                4
            } else {
                2 + usize::from(size == 5)
            };
            assert_eq!(exchanges.into_inner(), expected, "{size}");
            assert_eq!(loss.into_scalar::<f32>(), 1.0);
            assert!(gradients.get::<2>(model[1].id).is_none());
            for param in [0, 2, 3].map(|index| &model[index]) {
                let found = gradients.get::<2>(param.id).expect("a gradient");
                assert_eq!(found.dtype(), param.val().dtype());
                let expected = param.val().mul_scalar(2.0).into_data();
                assert_eq!(found.into_data(), expected);
            }
        }
    }
}
