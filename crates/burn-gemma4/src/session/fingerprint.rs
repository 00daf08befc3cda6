//! What tells one model's weights from another's: a few numbers of every one of them.

use crate::{Gemma4Error, Gemma4Model};
use burn::{
    module::{Module, ModuleVisitor, Param},
    tensor::{DType, Device, Int, Tensor, TensorData},
};

/// Numbers of each weight, from its middle on: paddings and unused tokens are at tables' ends.
const NUMBERS: usize = 16;

/// Numbers of a model's weights, with their paths.
pub(super) struct Fingerprint {
    /// Of each weight its path, and how many numbers are of it.
    weights: Vec<(String, usize)>,
    pub numbers: Vec<f32>,
}

impl Fingerprint {
    /// Of a model, wherever its table of per-layer embeddings is.
    pub fn of(model: &Gemma4Model) -> Result<Self, Gemma4Error> {
        let mut sampled = Sampled::default();
        model.visit(&mut sampled);
        let token = model.config().vocab_size as u32 / 2;
        if let Some(row) = table_row(model, token, &model.device()) {
            let [_, columns] = row.dims();
            sampled.add(TABLE.to_owned(), row.reshape([columns]));
        }
        let numbers = Tensor::cat(sampled.numbers, 0).try_into_data();
        let numbers = numbers.map_err(|error| {
            Gemma4Error::Device(format!("the weights could not be read: {error}"))
        })?;
        Ok(Self {
            weights: sampled.weights,
            numbers: numbers.iter::<f32>().collect(),
        })
    }

    /// The first weight whose numbers are others, to the bit; nothing where there is none.
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
        None
    }
}

/// Of FNV-1a (Fowler, Noll and Vo), in 64 bits: where it begins, and its prime.
const FNV: [u64; 2] = [0xCBF2_9CE4_8422_2325, 0x0000_0100_0000_01B3];

impl Gemma4Model {
    /// What tells this model's weights from another's: a hash of 16 numbers of every one of them, wherever they are. It is the same on every device,
    /// and another where weights are quantized.
    ///
    /// # Errors
    /// [`Gemma4Error::Device`] where the weights cannot be read.
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

    /// Whether this is the table, which is asked for its rows.
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
            // Of so few bits f32 has all, and words differ in any of them.
            let low = words.reshape([count]).remainder_scalar(1 << 16);
            self.add(self.path.join("."), low.float());
        }
    }
}
