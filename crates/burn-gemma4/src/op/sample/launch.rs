//! Launches the sampling kernels. A section is the consecutive range of a row's columns that one cube handles.

use super::{
    change::{self, change_logits, mark},
    device::{Draw, SampleBackend},
    draw::{COLUMN_BITS, SUMMARY, draw_pdl, keep_pdl},
    search::{Cuts, LimitsLaunch, RECORD, Step, count_pdl, largest_keys_pdl},
    section::{LogitsSizesLaunch, MOST_STRETCHES},
    wide::UNITS,
};
use burn::{
    backend::{
        CubeDevice,
        cubecl::dtype_to_storage_type,
        tensor::{FloatTensor, IntTensor},
    },
    tensor::{DType, Shape},
};
use burn_cubecl::{CubeBackend, cubecl, kernel::into_contiguous, tensor::CubeTensor};
use cube_kit::launch::{address_type, cube_count, empty};
use cube_kit::pdl::supports_pdl;
use cubecl::{
    ir::{Type, features::AtomicUsage},
    prelude::{CubeDim, Scalar},
};

/// The number of columns of a section, the range of a row that one cube handles. If a row would have more than
/// [`MOST_STRETCHES`] sections of this size, its sections are larger.
const STRETCH: usize = 32 * UNITS;

/// True if the device has the atomics that the kernels need, and every column index fits in [`COLUMN_BITS`] bits.
pub(super) fn serves(device: &CubeDevice, columns: usize) -> bool {
    let client = device.client();
    let atomics = client
        .properties()
        .atomic_type_usage(Type::atomic(u32::elem_type_native()));
    [AtomicUsage::Add, AtomicUsage::LoadStore]
        .into_iter()
        .all(|usage| atomics.contains(usage))
        && columns < 1 << COLUMN_BITS
}

impl SampleBackend for CubeBackend {
    fn draw(
        logits: FloatTensor<Self>,
        seeds: IntTensor<Self>,
        positions: IntTensor<Self>,
        options: Draw,
    ) -> IntTensor<Self> {
        let row = Rows::of(into_contiguous(logits), options);
        let cuts = Cuts {
            top_k: options.top_k.is_some(),
            top_p: options.top_p.is_some(),
        };
        let largest = row.largest();
        let mut records = None;
        for weighed in [false, true] {
            let is_asked = match weighed {
                false => cuts.top_k,
                true => cuts.top_p,
            };
            for digit in (0..4).filter(|_| is_asked) {
                records = Some(row.count(&largest, records, Step { digit, weighed }));
            }
        }
        let summaries = row.keep(&largest, records, cuts);
        row.draw(&largest, summaries, seeds, positions, cuts)
    }

    fn penalize(
        logits: FloatTensor<Self>,
        seen: IntTensor<Self>,
        penalty: f32,
    ) -> FloatTensor<Self> {
        changed(logits, Some(seen), None, penalty)
    }

    fn suppress(logits: FloatTensor<Self>, suppressed: IntTensor<Self>) -> FloatTensor<Self> {
        changed(logits, None, Some(suppressed), 1.0)
    }

    fn mark(seen: IntTensor<Self>, tokens: IntTensor<Self>) -> IntTensor<Self> {
        let client = seen.client.clone();
        let [rows] = [tokens.meta.shape()[0]];
        let words = seen.meta.shape()[0] / rows;
        integers([&seen, &tokens]);
        let units = 32;
        // SAFETY: unit `r` updates one word of row `r` of `seen` only if `r` is below `rows`. A row has one bit per
        // token of the vocabulary. Element `r` of `tokens` is within the vocabulary.
        unsafe {
            mark::launch_unchecked(
                &client,
                cube_count(&client, rows.div_ceil(units)),
                CubeDim::new_1d(units as u32),
                seen.clone().into_tensor_arg(),
                into_contiguous(tokens).into_tensor_arg(),
                words as u32,
                rows as u32,
            );
        }
        seen
    }
}

/// Checks that the index tensors have the kernels' dtype i32.
fn integers<'a>(tensors: impl IntoIterator<Item = &'a CubeTensor>) {
    for tensor in tensors {
        assert_eq!(tensor.dtype, DType::I32, "integers: expected i32");
    }
}

/// The logits of a draw. Each row is divided into sections of columns.
struct Rows {
    logits: CubeTensor,
    options: Draw,
    rows: usize,
    columns: usize,
    stretches: usize,
}

impl Rows {
    fn of(logits: CubeTensor, options: Draw) -> Self {
        let [rows, columns] = [logits.meta.shape()[0], logits.meta.shape()[1]];
        let stretches = columns.div_ceil(STRETCH).clamp(1, MOST_STRETCHES);
        Self {
            logits,
            options,
            rows,
            columns,
            stretches,
        }
    }

    fn limits(&self) -> LimitsLaunch {
        LimitsLaunch::new(
            self.options.temperature,
            self.options.top_k.unwrap_or(0),
            self.options.top_p.unwrap_or(0),
            self.options.least,
        )
    }

    fn sizes(&self) -> LogitsSizesLaunch {
        LogitsSizesLaunch::new(self.rows as u32, self.columns as u32, self.stretches as u32)
    }

    /// Allocates a tensor with `each` 32-bit words per section of each row.
    fn words(&self, each: usize) -> CubeTensor {
        let shape = [self.rows * self.stretches, each];
        empty(&self.logits, shape, DType::U32)
    }

    fn largest(&self) -> CubeTensor {
        let client = &self.logits.client;
        let largest = self.words(1);
        // SAFETY: each cube reads columns below `columns` of one of the `rows` rows of `logits`. The cube writes only
        // its own element of `largest`, which has one element per section.
        unsafe {
            largest_keys_pdl::launch_unchecked(
                client,
                cube_count(client, self.rows * self.stretches),
                CubeDim::new_1d(UNITS as u32),
                address_type([&self.logits]),
                self.logits.clone().into_tensor_arg(),
                largest.clone().into_tensor_arg(),
                self.sizes(),
                supports_pdl(client),
                dtype_to_storage_type(self.logits.dtype),
            );
        }
        largest
    }

    fn count(&self, largest: &CubeTensor, before: Option<CubeTensor>, step: Step) -> CubeTensor {
        let client = &self.logits.client;
        let records = self.words(RECORD);
        // SAFETY: each cube reads columns below `columns` of one of the `rows` rows of `logits`. `largest`, `before`
        // and `records` have one entry per section. A cube reads its row's entries, and writes only its own entry of
        // `records`.
        unsafe {
            count_pdl::launch_unchecked(
                client,
                cube_count(client, self.rows * self.stretches),
                CubeDim::new_1d(UNITS as u32),
                address_type([&self.logits, &records]),
                self.logits.clone().into_tensor_arg(),
                largest.clone().into_tensor_arg(),
                before.map(CubeTensor::into_tensor_arg).into(),
                records.clone().into_tensor_arg(),
                self.limits(),
                self.sizes(),
                step,
                supports_pdl(client),
                dtype_to_storage_type(self.logits.dtype),
            );
        }
        records
    }

    fn keep(&self, largest: &CubeTensor, before: Option<CubeTensor>, cuts: Cuts) -> CubeTensor {
        let client = &self.logits.client;
        let summaries = self.words(SUMMARY);
        let records = self.rows * self.stretches * RECORD;
        assert!(records < 1 << 31, "the offsets of records fit in 32 bits");
        // SAFETY: each cube reads columns below `columns` of one of the `rows` rows of `logits`, and the row's entries
        // of `largest` and `before`. The cube writes only its own entry of `summaries`, which has one entry per
        // section.
        unsafe {
            keep_pdl::launch_unchecked(
                client,
                cube_count(client, self.rows * self.stretches),
                CubeDim::new_1d(UNITS as u32),
                address_type([&self.logits, &summaries]),
                self.logits.clone().into_tensor_arg(),
                largest.clone().into_tensor_arg(),
                before.map(CubeTensor::into_tensor_arg).into(),
                summaries.clone().into_tensor_arg(),
                self.limits(),
                self.sizes(),
                cuts,
                supports_pdl(client),
                dtype_to_storage_type(self.logits.dtype),
            );
        }
        summaries
    }

    fn draw(
        &self,
        largest: &CubeTensor,
        summaries: CubeTensor,
        seeds: CubeTensor,
        positions: CubeTensor,
        cuts: Cuts,
    ) -> CubeTensor {
        let client = &self.logits.client;
        integers([&seeds, &positions]);
        let tokens = empty(&self.logits, [self.rows], DType::I32);
        // SAFETY: cube `r` works only if `r` is below `rows`. The cube reads row `r` of `logits`, the row's entries of
        // `largest` and `summaries`, elements `2r` and `2r + 1` of `seeds`, and `positions[r]`. The cube writes
        // `tokens[r]`.
        unsafe {
            draw_pdl::launch_unchecked(
                client,
                cube_count(client, self.rows),
                CubeDim::new_1d(UNITS as u32),
                address_type([&self.logits]),
                self.logits.clone().into_tensor_arg(),
                largest.clone().into_tensor_arg(),
                summaries.into_tensor_arg(),
                into_contiguous(seeds).into_tensor_arg(),
                into_contiguous(positions).into_tensor_arg(),
                tokens.clone().into_tensor_arg(),
                self.limits(),
                self.sizes(),
                cuts,
                supports_pdl(client),
                dtype_to_storage_type(self.logits.dtype),
            );
        }
        tokens
    }
}

fn changed(
    logits: CubeTensor,
    seen: Option<CubeTensor>,
    suppressed: Option<CubeTensor>,
    penalty: f32,
) -> CubeTensor {
    let client = logits.client.clone();
    let logits = into_contiguous(logits);
    let [rows, columns] = [logits.meta.shape()[0], logits.meta.shape()[1]];
    integers(seen.iter().chain(&suppressed));
    let changed = empty(&logits, Shape::new([rows, columns]), DType::F32);
    let element = dtype_to_storage_type(logits.dtype);
    let argument =
        |words: Option<CubeTensor>| words.map(|words| into_contiguous(words).into_tensor_arg());
    // SAFETY: unit `i` works only if `i` is below `rows · columns`, the length of `logits` and `changed`. The unit
    // reads element `i` of `logits`, and writes element `i` of `changed`. `seen` has one bit per row and column, and
    // `suppressed` one bit per column.
    unsafe {
        change_logits::launch_unchecked(
            &client,
            cube_count(&client, (rows * columns).div_ceil(change::UNITS)),
            CubeDim::new_1d(change::UNITS as u32),
            address_type([&logits, &changed]),
            logits.into_tensor_arg(),
            argument(seen).into(),
            argument(suppressed).into(),
            changed.clone().into_tensor_arg(),
            penalty,
            columns as u32,
            rows as u32,
            element,
        );
    }
    changed
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::{super::weight::KEY_OF_NOTHING, *};
    use burn::{
        backend::Cube,
        tensor::{Device, DeviceKind, Int, Tensor, TensorData},
    };

    fn integers_of(
        words: Vec<u32>,
        shape: [usize; 2],
        device: &Device,
        dtype: DType,
    ) -> CubeTensor {
        let data = TensorData::new(words, shape).convert_dtype(dtype);
        let tensor = Tensor::<2, Int>::from_data(data, (device, dtype));
        let tensor = tensor
            .try_into_primitive::<Cube>()
            .expect("the tensor is on a CubeCL device");
        let client = tensor.client.clone();
        client.resolve_tensor_int::<CubeBackend>(tensor)
    }

    /// Draws one token from each of 64 rows with the same `logits`. Only the second kernel runs. In place of the first
    /// kernel's results, it gets `weights`: the summed weight of each section of columns, in units of 2³².
    fn drawn(logits: &[f32], weights: &[u32]) -> Vec<i32> {
        const ROWS: usize = 64;
        let device = Device::wgpu(DeviceKind::DefaultDevice);
        let data = TensorData::new(logits.repeat(ROWS), [ROWS, logits.len()]);
        let tensor = Tensor::<2>::from_data(data, (&device, DType::F32));
        let tensor = tensor
            .try_into_primitive::<Cube>()
            .expect("the tensor is on a CubeCL device");
        let client = tensor.client.clone();
        let options = Draw {
            temperature: 1.0,
            top_k: None,
            top_p: None,
            least: f32::MIN,
        };
        let rows = Rows {
            stretches: weights.len(),
            ..Rows::of(client.resolve_tensor_float::<CubeBackend>(tensor), options)
        };
        let summary = |weight: &u32| [0, *weight, 0, KEY_OF_NOTHING + 1, 0, 0];
        let summaries: Vec<u32> = weights.iter().flat_map(summary).collect();
        let shape = [ROWS * weights.len(), SUMMARY];
        let summaries = integers_of(summaries.repeat(ROWS), shape, &device, DType::U32);
        let seeds: Vec<u32> = (0..2 * ROWS as u32).collect();
        let seeds = integers_of(seeds, [1, 2 * ROWS], &device, DType::I32);
        let positions = integers_of(vec![7; ROWS], [1, ROWS], &device, DType::I32);
        let cuts = Cuts {
            top_k: false,
            top_p: false,
        };
        let tokens = rows.draw(&rows.largest(), summaries, seeds, positions, cuts);
        let bytes = tokens
            .client
            .read_one(tokens.handle.clone())
            .expect("the tokens can be read");
        let (words, _) = bytes.as_chunks::<4>();
        words.iter().map(|word| i32::from_le_bytes(*word)).collect()
    }

    /// Checks that the last token is drawn if the random number exceeds the second kernel's sum of all weights. In
    /// practice the sums of the two kernels differ only by rounding. In this test the first kernel's sum is twice the
    /// second kernel's.
    #[test]
    fn draw_beyond_last_sum_gives_last_token() {
        // Each of the ten tokens has the weight 2⁴⁰. The summary holds twice their sum, in units of 2³².
        let tokens = drawn(&[0.0; 10], &[2 * 10 * 256]);
        assert!(
            tokens.iter().all(|token| (0..10).contains(token)),
            "{tokens:?}"
        );
        let last = tokens.iter().filter(|token| **token == 9).count();
        assert!(last > 16, "{tokens:?}");
    }

    #[test]
    fn draw_from_section_with_zero_weights_gives_argmax() {
        let mut logits = [-200.0; 10];
        logits[3] = -100.0;
        logits[5..].fill(0.0);
        let tokens = drawn(&logits, &[5 * 256, 5 * 256]);
        let of_first = tokens.iter().filter(|token| **token == 3).count();
        assert!((16..48).contains(&of_first), "{tokens:?}");
        let possible = |token: &i32| *token == 3 || (5..10).contains(token);
        assert!(tokens.iter().all(possible), "{tokens:?}");
    }
}
