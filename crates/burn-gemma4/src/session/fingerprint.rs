//! A fingerprint of a model's weights: a few elements of every weight tensor, and the static scales of activations.

use crate::error::Gemma4Error;
use crate::model::Gemma4Model;
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Device, Int, Tensor, TensorData},
};

/// The number of consecutive elements that are sampled from each weight. The first sampled element is in the middle of
/// the weight, because the ends of embedding tables hold padding and unused tokens.
const NUMBERS: usize = 16;

/// A fingerprint: a few elements of each weight of a model, and the path of each weight in the module tree. The static
/// scales of a projection count as another weight.
pub(super) struct Fingerprint {
    /// The path of each weight, and the number of sampled elements of the weight.
    weights: Vec<(String, usize)>,
    pub numbers: Vec<f32>,
}

impl Fingerprint {
    /// Samples the weights of a model. The per-layer embedding table may be on the device or in host memory.
    pub fn of(model: &Gemma4Model) -> Result<Self, Gemma4Error> {
        let mut sampled = Sampled::default();
        model.visit(&mut sampled);
        let token = model.config().vocab_size as u32 / 2;
        if let Some(row) = table_row(model, token, &model.device()) {
            let [_, columns] = row.dims();
            sampled.add(TABLE.to_owned(), row.reshape([columns]));
        }
        let numbers = Tensor::cat(sampled.numbers, 0).try_into_data();
        let numbers = numbers
            .map_err(|error| Gemma4Error::Device(format!("cannot read the weights: {error}")))?;
        let mut fingerprint = Self {
            weights: sampled.weights,
            numbers: numbers.iter::<f32>().collect(),
        };
        fingerprint.add_activation_scales(model);
        Ok(fingerprint)
    }

    /// Adds the static scales of all projections if at least one of them rounds its activations. Without scales, the
    /// fingerprint stays that of the weights alone, as in files of older versions.
    fn add_activation_scales(&mut self, model: &Gemma4Model) {
        let mut model = model.clone();
        let linears = model.linears_mut();
        if linears
            .iter()
            .all(|(_, linear)| linear.activation_scales.is_none())
        {
            return;
        }
        for (path, linear) in linears {
            let scales = linear.activation_scales;
            let scales = scales.map_or([0.0; 2], |scales| [scales.input, scales.output]);
            self.weights
                .push((format!("{path}.{SCALES}"), scales.len()));
            self.numbers.extend(scales);
        }
    }

    /// Compares the fingerprint with the samples `numbers` of another model, bit by bit. Returns the path of the first
    /// weight whose samples differ, or `None` if all are equal.
    pub fn differs(&self, numbers: &[f32]) -> Option<&str> {
        let mut first = 0;
        for (path, count) in &self.weights {
            let places = first..first + count;
            let bits = |numbers: &f32| numbers.to_bits();
            let own = self.numbers[places.clone()].iter().map(bits);
            match numbers.get(places) {
                Some(others) if own.eq(others.iter().map(bits)) => first += count,
                _ => return Some(path),
            }
        }
        // Only the static scales of activations may be missing.
        (numbers.len() > first).then_some(SCALES)
    }
}

/// The constants of the 64-bit FNV-1a hash (Fowler, Noll and Vo): the offset basis and the prime.
const FNV: [u64; 2] = [0xCBF2_9CE4_8422_2325, 0x0000_0100_0000_01B3];

impl Gemma4Model {
    /// Returns a hash of 16 elements of every weight and of the static scales of activations, to recognize the model's
    /// weights. The hash does not depend on the device. A quantized model has another hash than the unquantized model.
    ///
    /// # Errors
    /// Returns [`Gemma4Error::Device`] if the weights cannot be read.
    pub fn fingerprint(&self) -> Result<u64, Gemma4Error> {
        let numbers = Fingerprint::of(self)?.numbers;
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
        let [start, prime] = FNV;
        Ok(bytes.fold(start, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(prime)
        }))
    }
}

const TABLE: &str = "embed_tokens_per_layer";
/// The last part of the path of a projection's static scales.
const SCALES: &str = "activation_scales";

fn table_row(model: &Gemma4Model, token: u32, device: &Device) -> Option<Tensor<2>> {
    let ids = TensorData::new(vec![token as i32], [1, 1]);
    let from_host = model.host_rows(&[token], device);
    model.rows_of(&Tensor::from_data(ids, device), from_host)
}

#[derive(Default)]
struct Sampled {
    path: Vec<String>,
    weights: Vec<(String, usize)>,
    numbers: Vec<Tensor<1>>,
}

impl Sampled {
    fn add(&mut self, path: String, numbers: Tensor<1>) {
        let [all] = numbers.dims();
        let first = all / 2;
        let count = NUMBERS.min(all - first);
        self.weights.push((path, count));
        let numbers = numbers.narrow(0, first, count);
        self.numbers.push(numbers.cast(DType::F32));
    }

    /// True while the visitor is inside the per-layer embedding table. The visitor skips this table, and
    /// [`Fingerprint::of`] adds one row of the table to the fingerprint.
    fn is_table(&self) -> bool {
        let module = self.path.first().map(String::as_str);
        matches!(module, Some(TABLE | "split_table"))
    }
}

impl ModuleVisitor for Sampled {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let numbers = param.val();
        let count = numbers.shape().num_elements();
        if !self.is_table() {
            self.add(self.path.join("."), numbers.reshape([count]));
        }
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        let words = param.val();
        let count = words.shape().num_elements();
        if !self.is_table() {
            // Sample only the low 16 bits of each packed word. Samples are stored as f32, which represents 16-bit
            // integers exactly.
            let low = words.reshape([count]).remainder_scalar(1 << 16);
            self.add(self.path.join("."), low.float());
        }
    }
}
