//! Small four-dimensional arrays on the host, and the memory layouts of tensors.

use burn::tensor::{DType, Device, Tensor, TensorData};
use rand::{Rng, rngs::StdRng};

/// A row-major array in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Dense {
    /// The sizes of the dimensions.
    pub shape: [usize; 4],
    /// The elements, row by row.
    pub values: Vec<f64>,
}

impl Dense {
    /// Creates an array whose element at each index is `value(index)`.
    pub fn from_fn(shape: [usize; 4], mut value: impl FnMut([usize; 4]) -> f64) -> Self {
        let [a, b, c, d] = shape;
        let mut values = Vec::with_capacity(a * b * c * d);
        for i in 0..a {
            for j in 0..b {
                for k in 0..c {
                    values.extend((0..d).map(|l| value([i, j, k, l])));
                }
            }
        }
        Self { shape, values }
    }

    /// Creates an array of normally distributed random elements, rounded to `dtype`.
    pub fn normal(shape: [usize; 4], dtype: DType, rng: &mut StdRng) -> Self {
        let drawn = Self::from_fn(shape, |_| {
            // The Box-Muller transform makes a normally distributed number from two uniform numbers.
            let radius = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt();
            radius * (std::f64::consts::TAU * rng.random::<f64>()).cos()
        });
        drawn.rounded(dtype)
    }

    /// Returns the array with each element rounded to `dtype`.
    pub fn rounded(&self, dtype: DType) -> Self {
        Self {
            shape: self.shape,
            values: host(self.data(dtype)),
        }
    }

    /// Returns the array with every element multiplied by `factor`.
    pub fn scaled(&self, factor: f64) -> Self {
        let values = self.values.iter().map(|value| value * factor).collect();
        Self {
            shape: self.shape,
            values,
        }
    }

    fn index(&self, at: [usize; 4]) -> usize {
        at.iter()
            .zip(self.shape)
            .fold(0, |index, (at, size)| index * size + at)
    }

    /// Returns the element at `at`. The index is ignored in dimensions of size 1, which are broadcast.
    pub fn at(&self, at: [usize; 4]) -> f64 {
        let at = [0, 1, 2, 3].map(|dim| if self.shape[dim] == 1 { 0 } else { at[dim] });
        self.values[self.index(at)]
    }

    /// Sets all elements of some rows to `value`. A row lies along the last dimension. The function `matches` gets the
    /// row's index `[a, b, c]` in the first three dimensions, and returns true if the row is to be overwritten.
    pub fn fill_rows(&mut self, value: f64, matches: impl Fn([usize; 3]) -> bool) {
        let columns = self.shape[3];
        let [_, b, c, _] = self.shape;
        for (row, values) in self.values.chunks_mut(columns).enumerate() {
            if matches([row / c / b, row / c % b, row % c]) {
                values.fill(value);
            }
        }
    }

    /// Returns the subarray of the shape `shape` whose first element is at `start`.
    pub fn part(&self, start: [usize; 4], shape: [usize; 4]) -> Self {
        Self::from_fn(shape, |at| {
            self.at([0, 1, 2, 3].map(|dim| start[dim] + at[dim]))
        })
    }

    /// Returns the elements in `dtype`.
    pub fn data(&self, dtype: DType) -> TensorData {
        TensorData::new(self.values.clone(), self.shape).convert_dtype(dtype)
    }

    /// Creates a tensor of the elements in `dtype`.
    pub fn tensor(&self, device: &Device, dtype: DType) -> Tensor<4> {
        Tensor::from_data(self.data(dtype), (device, dtype))
    }
}

/// Returns the root mean square, or 0 for an empty slice.
pub fn rms(values: &[f64]) -> f64 {
    let squares: f64 = values.iter().map(|value| value * value).sum();
    (squares / values.len().max(1) as f64).sqrt()
}

/// Converts the elements of `data` to f64.
///
/// # Panics
/// Panics if the data cannot be converted to f64.
pub fn host(data: TensorData) -> Vec<f64> {
    data.convert::<f64>()
        .try_to_vec::<f64>()
        .expect("the data were converted to f64")
}

/// Reads a tensor from its device and converts the elements to f64.
///
/// # Panics
/// Panics if the device cannot return the elements.
pub fn read<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    host(tensor.into_data())
}

/// The memory layout of a tensor `[batch, heads, length, columns]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Layout {
    /// Stored in the order of the dimensions, `[batch, heads, length, columns]`.
    #[default]
    Contiguous,
    /// Stored in the order `[batch, length, heads, columns]`, in which a projection writes its output.
    HeadsLast,
    /// Stored in the order `[batch, heads, columns, length]`, so the tensor's last dimension, `columns`, is not
    /// contiguous.
    Transposed,
    /// A slice of a larger stored tensor. The larger tensor has more rows and more columns on both sides of the slice.
    /// All elements outside the slice are NaN.
    Sliced {
        /// The number of columns before the slice.
        before: usize,
        /// The number of columns after the slice.
        after: usize,
    },
    /// A slice of the columns that a joint projection of queries, keys and values writes. The projection's output is
    /// stored in the order `[batch, length, heads, columns]`. All elements outside the slice are NaN.
    Projection {
        /// The number of columns before the slice.
        before: usize,
        /// The number of columns after the slice.
        after: usize,
    },
    /// Only one sequence is stored. The tensor repeats it for all sequences with the stride 0.
    SharedBatch,
    /// Only one head is stored. The tensor repeats it for all heads with the stride 0.
    SharedHeads,
}

impl Layout {
    /// All layouts. The layouts [`Sliced`](Self::Sliced) and [`Projection`](Self::Projection) occur several times, with
    /// different numbers of columns before and after the slice.
    pub const ALL: [Self; 10] = [
        Self::Contiguous,
        Self::HeadsLast,
        Self::Transposed,
        Self::Sliced {
            before: 4,
            after: 8,
        },
        Self::Sliced {
            before: 3,
            after: 2,
        },
        Self::Sliced {
            before: 1,
            after: 3,
        },
        Self::Projection {
            before: 8,
            after: 4,
        },
        Self::Projection {
            before: 1,
            after: 0,
        },
        Self::SharedBatch,
        Self::SharedHeads,
    ];

    /// Returns the array that must be stored in memory so that its [`view`](Self::view) in this layout equals `dense`.
    pub fn store(self, dense: &Dense) -> Dense {
        let [b, h, s, d] = dense.shape;
        match self {
            Self::Contiguous => dense.clone(),
            Self::HeadsLast => Dense::from_fn([b, s, h, d], |[i, k, j, l]| dense.at([i, j, k, l])),
            Self::Transposed => Dense::from_fn([b, h, d, s], |[i, j, l, k]| dense.at([i, j, k, l])),
            Self::Sliced { before, after } => {
                Dense::from_fn([b, h, s + 3, before + d + after], |[i, j, k, l]| {
                    let inside = (1..=s).contains(&k) && (before..before + d).contains(&l);
                    if inside {
                        dense.at([i, j, k - 1, l - before])
                    } else {
                        f64::NAN
                    }
                })
            }
            Self::Projection { before, after } => {
                Dense::from_fn([b, s, h, before + d + after], |[i, k, j, l]| {
                    let inside = (before..before + d).contains(&l);
                    if inside {
                        dense.at([i, j, k, l - before])
                    } else {
                        f64::NAN
                    }
                })
            }
            Self::SharedBatch => dense.part([0; 4], [b.min(1), h, s, d]),
            Self::SharedHeads => dense.part([0; 4], [b, h.min(1), s, d]),
        }
    }

    /// Returns a view of the tensor `stored`. The view has the shape `shape`. The function [`store`](Self::store) has
    /// arranged the elements of `stored` for this layout.
    pub fn view(self, stored: Tensor<4>, shape: [usize; 4]) -> Tensor<4> {
        let [b, h, s, d] = shape;
        match self {
            Self::Contiguous => stored,
            Self::HeadsLast => stored.swap_dims(1, 2),
            Self::Transposed => stored.swap_dims(2, 3),
            Self::Sliced { before, .. } => stored.slice([0..b, 0..h, 1..s + 1, before..before + d]),
            Self::Projection { before, .. } => stored
                .slice([0..b, 0..s, 0..h, before..before + d])
                .swap_dims(1, 2),
            Self::SharedBatch | Self::SharedHeads => stored.expand(shape),
        }
    }

    /// Computes the loss `Σ output ∘ weights`, so that the output's gradient is `weights`. Autodiff passes this gradient to
    /// the operator in the memory layout `self`.
    ///
    /// # Panics
    /// Panics for slices, because a gradient is never a slice.
    pub fn weigh(self, output: Tensor<4>, weights: &Dense, device: &Device) -> Tensor<1> {
        let dtype = output.dtype();
        let stored = self.store(weights).tensor(device, dtype);
        let output = match self {
            Self::Contiguous => output,
            Self::HeadsLast => output.swap_dims(1, 2),
            Self::Transposed => output.swap_dims(2, 3),
            Self::SharedBatch => output.sum_dim(0),
            Self::SharedHeads => output.sum_dim(1),
            Self::Sliced { .. } | Self::Projection { .. } => {
                unreachable!("a gradient is not a slice of a larger tensor")
            }
        };
        (output * stored).sum()
    }
}
