//! The sum of several devices' gradients.
//!
//! Burn's data parallelism has a worker for each device, and averages gradients while the backward runs, through a server that
//! waits forever where one worker begins its next backward before another has reported the end of its last
//! (`DistributedSyncServer` of Burn 0.22.1 forgets what the first one announced). So the workers compute with parameters that
//! the server does not know, meet after a step's last backward, and add up their gradients here, all in the same order, in
//! buckets: one exchange a bucket, not one a parameter.

use burn::{
    module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{
        DType, Device, Tensor,
        distributed::{ReduceOperation, all_reduce},
    },
    train::Interrupter,
};
use burn_gemma4::Gemma4Model;
use std::{
    fmt,
    iter::Peekable,
    sync::{Arc, Condvar, Mutex, PoisonError},
    time::Duration,
};

/// How long a worker waits for the others before it looks whether the run was stopped.
const LOOK: Duration = Duration::from_millis(100);

/// Numbers that are exchanged at once, at least.
const BUCKET: usize = 1 << 25;

/// What the workers of a run have in common.
#[derive(Clone)]
pub struct Averaging {
    devices: Vec<Device>,
    meeting: Arc<Meeting>,
}

struct Meeting {
    state: Mutex<Arrivals>,
    complete: Condvar,
    interrupter: Interrupter,
}

#[derive(Default)]
struct Arrivals {
    waiting: usize,
    /// Meetings that were complete.
    number: usize,
}

impl fmt::Debug for Averaging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Averaging")
            .field("devices", &self.devices)
            .finish_non_exhaustive()
    }
}

impl Averaging {
    /// Among `devices`, each with a worker of its own, until the run is interrupted.
    pub fn new(devices: Vec<Device>, interrupter: Interrupter) -> Self {
        let meeting = Meeting {
            state: Mutex::default(),
            complete: Condvar::new(),
            interrupter,
        };
        Self {
            devices,
            meeting: Arc::new(meeting),
        }
    }

    /// The model to compute gradients with, whose parameters Burn does not average.
    pub fn unmarked(&self, model: &Gemma4Model) -> Gemma4Model {
        model.clone().map(&mut Unmarked)
    }

    /// The sums of all workers' losses `[1]` and gradients. Those of one where the run is interrupted before the others have
    /// theirs: its last step, which nobody keeps.
    pub fn sum(
        &self,
        loss: Tensor<1>,
        gradients: GradientsParams,
        model: &Gemma4Model,
    ) -> (Tensor<1>, GradientsParams) {
        if !self.meeting.is_complete(self.devices.len()) {
            return (loss, gradients);
        }
        let sum = |bucket: Tensor<1>| {
            all_reduce(bucket, ReduceOperation::Sum, self.devices.clone()).resolve()
        };
        exchange(loss, gradients, model, BUCKET, sum)
    }
}

/// The sums, by an exchange of at least so many numbers.
fn exchange(
    loss: Tensor<1>,
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
    pack.push(loss);
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
    let loss = parts.next().expect("the loss is the first");
    let mut unpack = Unpack {
        gradients: GradientsParams::new(),
        packed: parameters.into_iter().zip(parts).peekable(),
    };
    model.visit(&mut unpack);
    (loss, unpack.gradients)
}

/// Gradients in a row, of one dtype.
struct Bucket {
    parts: Vec<Tensor<1>>,
    dtype: DType,
    numbers: usize,
}

struct Pack<'a> {
    gradients: &'a mut GradientsParams,
    size: usize,
    buckets: Vec<Bucket>,
    /// Whose gradients are in the buckets, in their order.
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

impl Meeting {
    /// Waits for all workers, or for the end of the run.
    fn is_complete(&self, workers: usize) -> bool {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.waiting += 1;
        if state.waiting == workers {
            state.waiting = 0;
            state.number += 1;
            self.complete.notify_all();
            return true;
        }
        let number = state.number;
        while state.number == number {
            let waited = self.complete.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.number == number && self.interrupter.should_stop() {
                state.waiting -= 1;
                return false;
            }
        }
        true
    }
}

/// Takes the mark off parameters by which a backward averages gradients.
struct Unmarked;

impl ModuleMapper for Unmarked {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let (id, tensor, mapper) = param.consume();
        let strategy = tensor.gradient_checkpointing_strategy();
        let is_trained = tensor.is_require_grad();
        let tensor = tensor.inner().autodiff();
        let tensor = match strategy {
            Some(strategy) => tensor.with_gradient_checkpointing_strategy(strategy),
            None => tensor,
        };
        Param::from_mapped_value(id, tensor.set_require_grad(is_trained), mapper)
    }
}

/// Takes apart what [`Pack`] has put together.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        thread,
    };

    fn meeting() -> Meeting {
        Meeting {
            state: Mutex::default(),
            complete: Condvar::new(),
            interrupter: Interrupter::new(),
        }
    }

    #[test]
    fn nobody_is_two_steps_ahead() {
        let (meeting, steps) = (meeting(), [const { AtomicUsize::new(0) }; 3]);
        thread::scope(|scope| {
            for own in &steps {
                scope.spawn(|| {
                    for step in 0..1000 {
                        assert!(meeting.is_complete(steps.len()));
                        own.store(step, Ordering::SeqCst);
                        let all = steps.iter().map(|step| step.load(Ordering::SeqCst));
                        assert!(all.into_iter().all(|other| other + 1 >= step));
                    }
                });
            }
        });
    }

    #[cfg(feature = "flex")]
    #[test]
    fn buckets_give_every_gradient_back() {
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
            // One has no gradient.
            for param in [0, 2, 3].map(|index| &model[index]) {
                gradients.register(param.id, param.val());
            }
            let exchanges = AtomicUsize::new(0);
            let double = |bucket: Tensor<1>| {
                exchanges.fetch_add(1, Ordering::SeqCst);
                bucket.mul_scalar(2.0)
            };
            let loss = Tensor::<1>::from_data([0.5], (&device, DType::F32));
            let (loss, gradients) = exchange(loss, gradients, &model, size, double);
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

    #[test]
    fn who_is_left_alone_goes_on_when_the_run_is_stopped() {
        let meeting = meeting();
        thread::scope(|scope| {
            let left = scope.spawn(|| meeting.is_complete(2));
            meeting.interrupter.stop(None);
            assert!(!left.join().expect("no panic"));
        });
        let state = meeting.state.lock().expect("no panic");
        assert_eq!(state.waiting, 0);
    }
}
